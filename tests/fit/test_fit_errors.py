"""Each refusal of a trainer or a fit is an error that says what to change."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_logged import Logs
from toys import NormNet, batches, linear, mlp, mlp_trainer
from toys import make_small as make

from jaxdp import (
    Arrays,
    Callback,
    Ensemble,
    LocalSGD,
    Members,
    PassMetric,
    Pipeline,
    Sharded,
    Whole,
)
from jaxdp.callbacks import NanGuard


class OfTokens(eqx.Module):
    """Has two predictions for a row."""

    inner: eqx.nn.MLP

    def __call__(self, x):
        return jnp.stack([self.inner(x)] * 2)


class Needs(eqx.nn.Linear):
    """Does not run without another word for `training`."""

    def __call__(self, x, *, is_training):
        return super().__call__(x)


class Trains(eqx.nn.Linear):
    """Has another word for `training`."""

    def __call__(self, x, key=None, train=True):
        return super().__call__(x)


def of_other_library(name, module, **members):
    """An object that is called so there."""
    return type(name, (), {"__module__": module, **members})()


def tied():
    """A model with one array in two places."""
    model = eqx.tree_at(lambda m: m.layers[1].bias, mlp(), jnp.ones(8))
    return eqx.tree_at(lambda m: m.layers[0].bias, model, model.layers[1].bias)


def named_by_shape(model, x):
    """Returns a metric for wide batches alone."""
    loss = model.layers[0].bias.sum() + x.sum(axis=1)
    return (loss, {"wide": loss}) if x.shape[1] == 4 else loss


def x_y(x, y):
    return [(np.asarray(x), np.asarray(y))]


NORM, STATE = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
X = np.ones((8, 4), np.float32)
Y = np.zeros(8, np.int32)
FOUR = jax.tree.map(
    lambda leaf: jnp.stack([leaf] * 4) if eqx.is_array(leaf) else leaf, mlp()
)
RATES = Ensemble(4, learning_rate=[1e-3, 3e-3, 1e-2, 3e-2])
GUARD = NanGuard()
ENDS = {
    "softmax": eqx.nn.Sequential([mlp(), eqx.nn.Lambda(jax.nn.softmax)]),
    "sigmoid": eqx.nn.Sequential([
        eqx.nn.MLP(4, 3, 8, 1, final_activation=jax.nn.sigmoid, key=jax.random.key(0))
    ]),
}  # fmt: skip
"""Models that end in what a cross-entropy applies."""
INJECTED = optax.inject_hyperparams(optax.adam)(1e-3)


@pytest.mark.parametrize("arguments, error, message", [
    ({"model": eqx.nn.MLP}, TypeError, "`model` is the class MLP, not an instance"),
    ({"model": {"w": jnp.ones(3)}}, TypeError, "`model` is a dict, which can't be"),
    ({"model": Arrays(X)}, TypeError, "`model` is an Arrays, .*A loader goes to `fit`"),
    ({"model": lambda x: x}, ValueError, "`model` has no trainable parameters: 0 "),
    ({"model": jax.vmap(mlp())}, ValueError, r"has no arrays: pass the model itself"),
    ({"optimizer": 0.001}, TypeError, r"got 0\.001\. .* pass optax\.adam\(0\.001\)"),
    ({"optimizer": optax.linear_schedule(0.1, 0.0, 10)}, TypeError,
     r"For a schedule, pass optax\.adam\(schedule\)"),
    ({"model": Trains(4, 3, key=jax.random.key(0))}, TypeError,
     "`train`, which is not passed, so that its default.* Call it `training`"),
    ({"model": Needs(4, 3, key=jax.random.key(0))}, TypeError,
     "`is_training`, which is not passed"),
    ({"optimizer": optax.adam}, TypeError, "`optimizer` must be an optax.Gradient"),
    ({"optimizer": optax.MultiSteps(optax.sgd(1), 2)}, TypeError, "and `gradient_tr"),
    ({"optimizer": "adam"}, TypeError, "`optimizer` must be an optax.Gradient"),
    ({"model": of_other_library("Linear", "torch.nn")}, TypeError,
     r"`model` is a torch module \(Linear\)"),
    ({"optimizer": type(of_other_library("Adam", "torch.optim"))}, TypeError,
     r"`optimizer` must be an optax.*got <class .*Adam'>"),
    ({"optimizer": of_other_library("SGD", "torch.optim")}, TypeError,
     r"or a list of jaxdp.Part; got an instance of <class .*SGD'>"),
    ({"loss": of_other_library("CrossEntropyLoss", "torch.nn", __call__=x_y)},
     TypeError, "`loss` is torch's CrossEntropyLoss"),
    ({"metrics": {"f1": of_other_library("f1_score", "sklearn.m", __call__=x_y)}},
     TypeError, r"sklearn's f1_score.*PassMetric\(fn\)"),
    ({"strategy": Sharded}, TypeError, r"`strategy` must be an instance .*Sharded'>"),
    ({"strategy": "ddp"}, ValueError, r"for 'ddp' write Sharded\(\)"),
    ({"strategy": "FSDP"}, ValueError, r"for 'FSDP' write FSDP\(\)"),
    ({"strategy": "deepspeed_stage_2"}, ValueError, r"write ZeRO\(\)"),
    ({"strategy": "dppp"}, TypeError, r"got 'dppp'\.$"),
    ({"loss": "l3"}, ValueError, "got 'l3' of type str; pass a known name .bin"),
    ({"metrics": ["auc"]}, ValueError, "for 'auc' write {name: jaxdp.PassMetric"),
    ({"metrics": {"loss": "mse"}}, ValueError, "metric name 'loss' is taken"),
    ({"metrics": [lambda p, t: p]}, TypeError, "has no name; pass"),
    ({"metrics": [x_y, PassMetric(x_y)]}, ValueError, "two are named 'x_y'; pass"),
    ({"loss": "accuracy"}, ValueError, "got 'accuracy' .*; pass a known name"),
    ({"loss": "mse", "loss_fn": lambda m: m}, ValueError, "`loss` and `loss_fn`"),
    ({"metrics": ["mse"], "loss_fn": lambda m: m}, ValueError, "return them from "),
    ({"loss_fn": "mse"}, TypeError, "For a loss by name use `loss`"),
    ({"loss": lambda model, x, y: 0}, TypeError, "for a function of .model, .batc"),
    ({"metrics": {1: "mse"}}, TypeError, "metric names must be str; got 1"),
    ({"metrics": {"val_x": "mse"}}, ValueError, "metric name 'val_x' is taken"),
    ({"callbacks": [Callback]}, TypeError, "must be an instance .*as CSVLogger"),
    ({"callbacks": [GUARD, GUARD]}, ValueError, "the same NanGuard twice"),
    ({"accumulate_grad_batches": 0}, ValueError, "must be 1 or more; got 0"),
    ({"gradient_clip_val": 0}, ValueError, "`gradient_clip_val` must be more th"),
    ({"seed": -1}, ValueError, "`seed` must be 0 or more .*; got -1"),
    ({"seed": 2**70}, ValueError, "`seed` must be .* 9223372036854775807 or less"),
    ({"remat": "body"}, ValueError, "`remat`: 'body' matches no submodule"),
    *(({"remat": each}, ValueError,
       r"has none.*Stack\(.*there are layers\[0\], layers\[1\]")
      for each in (True, jax.checkpoint_policies.dots_saveable)),
    ({"filter_spec": {"a": True}}, ValueError, "`filter_spec` must be path patterns"),
    ({"filter_spec": lambda _: False}, ValueError, "0 selected by `filter_spec`"),
    ({"filter_spec": lambda model: model.layers[1]}, ValueError,
     "given array by array, and not the model; got AttributeError"),
    ({"model": of_other_library("Module", "flax.linen.module")}, TypeError,
     "`model` is a flax module"),
    ({"model": tied()}, ValueError, r"layers\[0\].bias and as layers\[1\].bias"),
    ({"model": NORM}, ValueError, "`state` is None; make both together"),
    ({"model": NORM, "state": {}}, TypeError, "`state` must be the eqx.nn.State"),
    ({"state": STATE}, ValueError, "`model` has no stateful layers; leave it out"),
    ({"model": NORM, "state": STATE, "loss_fn": lambda model, x, y: 0}, ValueError,
     "`loss_fn` has no parameter named `state`"),
    ({"metrics": {"area": of_other_library("AUROC", "torchmetrics.x", __call__=x_y)}},
     TypeError, r"torchmetrics's AUROC.*PassMetric\(fn\)"),
    *(({"model": model, "loss": loss}, ValueError, f"`model` ends in jax.nn.{name}, ")
      for name, model in ENDS.items()
      for loss in ("cross_entropy", optax.sigmoid_binary_cross_entropy)),
    ({"ensemble": 4}, ValueError, r"layers\[0\]\.weight.*\(8, 4\).*filter_vmap"),
    ({"model": [mlp(), mlp()], "ensemble": 2}, TypeError,
     "a list, which can't .*docs/ensembles.md"),
    ({"strategy": Members()}, ValueError, "`ensemble` was not given"),
    ({"model": FOUR, "ensemble": 4, "strategy": 3}, TypeError,
     "`strategy` must be an instance"),
    *(({"model": FOUR, "ensemble": 4, **options}, ValueError, message)
      for options, message in [
        ({"strategy": Pipeline(2, 2)}, "Pipeline splits the first axis"),
        ({"ensemble": RATES, "optimizer": optax.adam(1e-3)},
         r"\['learning_rate'\].*inject_hyperparams"),
        ({"ensemble": Ensemble(4, lr=[1, 2, 3, 4]), "optimizer": INJECTED},
         r"\['lr'\].* holds b1, .*, learning_rate"),
        ({"strategy": Members()}, "4 members can't be split over the 8 devices"),
        ({"strategy": LocalSGD(2)}, "LocalSGD keeps its replicas in"),
    ]),
])  # fmt: skip
def test_constructor_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


@pytest.mark.parametrize("settings, loader, error, message", [
    ({}, [], ValueError, "`train_loader` gave no batches. Is the dataset empty"),
    ({"loss": optax.softmax_cross_entropy_with_integer_labels}, x_y(X, Y + 3),
     ValueError, "labels must be 0 to 2, .* from 3 to 3"),
    ({"model": linear(4, 1),
      "loss": optax.softmax_cross_entropy_with_integer_labels}, x_y(X, Y + 1),
     ValueError, "Yes/no targets are 0 and 1, for loss='binary_cross_entropy'"),
    ({}, x_y(X, Y[:7]), ValueError, "must share a leading axis"),
    ({}, [(X, ["a"] * 8)], TypeError, r"batch\[1\]\[0\] is a str"),
    ({"model": linear(4, 1), "loss": "binary_cross_entropy"},
     x_y(X, Y[:, None] - 1.0), ValueError, r"0 to 1; .* from -1.* \(y \+ 1\) / 2"),
    ({"model": linear(4, 1), "loss": optax.sigmoid_binary_cross_entropy},
     [(X, Y[:, None] + 1.5, Y + 1.0)], ValueError, "0 to 1; .* from 1.5 to 1.5"),
    *(({"model": linear(4, 1), "loss": loss, "metrics": ["mae", "accuracy"]},
       x_y(X, y), ValueError, "'accuracy' takes a logit above 0 for yes, but .* 'mae'")
      for loss in ("mse", optax.huber_loss) for y in (X[:, 0], X[:, :1])),
    ({"model": ENDS["softmax"]}, x_y(X, Y), ValueError, "ends in jax.nn.softmax"),
    ({}, x_y(X, Y - 1), ValueError, "labels must be 0 to 2, .* from -1 to -1"),
    ({}, x_y(X, Y - 100), ValueError, r"Rows to be ignored .*\(x, y, weight\)"),
    ({"model": OfTokens(mlp())}, x_y(X, Y[:, None] - [0, 100]), ValueError,
     r"from -100 to 0. .* ignore some labels of a row, return \(values, weights\)"),
    ({}, [X], TypeError, "`loss` and `metrics` need batches .x, y.,.* an array"),
    ({}, [Whole(X)], TypeError, "`loss` and `metrics` need batches .x, y.,.* a Whole"),
    ({}, [{"x": X, "y": Y}], TypeError,
     r"a dict with keys \['x', 'y'\].*pass.* \[\(b\['x'\], b\['y'\]\) for b in loader"),
    ({}, x_y(X, Y > 0), ValueError, "can't be inferred from targets of dtype bool"),
    ({"loss": "mse"}, x_y(X, X[:, :1]), ValueError, r"\(8, 3\) and targets of sha"),
    ({"loss": "cross_entropy"}, x_y(X, X[:, :2]), ValueError, "Labels of 3 classes"),
    ({"loss": "cross_entropy"}, x_y(X, X[:, 0]), ValueError, r"y.astype\(np.int32\)"),
    ({"loss": lambda p, t: p[:2]}, x_y(X, Y), ValueError, r"\(8,\), or a scalar"),
    ({"loss": lambda p, t: p.argmax(1)}, x_y(X, Y), TypeError, "int32 and can't b"),
    ({"loss": lambda p, t: (p.argmax(1) == t).astype(float)}, x_y(X, Y), ValueError,
     "does not depend on any trained parameter"),
    ({"loss_fn": lambda m, x: jnp.ones(8)}, [X], ValueError, "does not depend on "),
    ({"loss_fn": lambda m, x: jax.vmap(m)(x)}, [X], ValueError, r"shape \(8, 3\)"),
    ({"model": eqx.tree_at(lambda m: m.layers[0].bias, mlp(), np.full(8, 2**31))},
     [X], ValueError, r"`model`: layers\[0\].bias is int64 .* fit into int32"),
    ({"loss_fn": lambda m, x: "no"}, [X], TypeError, "the loss is a str for a bat"),
    ({"loss_fn": lambda m, state, x: 0}, [X], TypeError, "`state` is the State f"),
    ({"loss_fn": lambda m, x: (0, {}, 1)}, [X], TypeError, "must return the loss "),
    ({"loss_fn": named_by_shape}, [X, X[:, :2]], ValueError, "not depend on shapes"),
    ({"loss_fn": eqx.filter_grad(lambda m, x: jax.vmap(m)(x).sum())}, [X],
     TypeError, "unwrapped"),
    ({"metrics": {"each": lambda p, t: jnp.square(p)}}, x_y(X, Y), ValueError,
     r"'each' is an array of shape \(8, 3\) .* 8 rows.*mean\(axis=1\)"),
    ({"loss_fn": lambda m, x: (jax.vmap(m)(x).sum(1), {"each": x})}, [X],
     ValueError, r"metric .each. is an array of shape \(8, 4\) .* value per row"),
    ({"loss": lambda p, t: None}, x_y(X, Y), TypeError, "`loss` is a NoneType"),
    ({"loss_fn": lambda m, x: (jax.vmap(m)(x).sum(), 3)}, [X], TypeError, "a dict"),
    ({"loss_fn": lambda m, x, y: 0}, [X], TypeError, r"has 1 element\(s\)"),
    ({"loss_fn": eqx.filter_value_and_grad(lambda m, x: jax.vmap(m)(x).sum())}, [X],
     TypeError, "unwrapped"),
    ({"loss_fn": lambda m, x: (jax.vmap(m)(x).sum(), {"loss": 1.0})}, [X],
     ValueError, "the metric name 'loss' is taken"),
])  # fmt: skip
def test_fit_refuses_on_the_first_batch(settings, loader, error, message):
    trainer = make(**settings)
    with pytest.raises(error, match=message):
        trainer.fit(loader)
    trainer.model(jnp.ones(4))


def test_a_loss_fn_that_takes_the_state_returns_it():
    trainer = make(NORM, state=STATE, loss_fn=lambda m, state, x: 0.0)
    with pytest.raises(TypeError, match=r"must return \(loss, state\) or .* a float"):
        trainer.fit([X])


WRONG = ValueError, TypeError


@pytest.mark.parametrize("settings, error, message", [
    ({"ckpt_path": "last"}, WRONG, "looks where a ModelCheckpoint saves"),
    ({"max_time": "soon"}, WRONG, "`max_time` must be .* 'DD:HH:MM:SS'; got 'soon'"),
    ({"val_check_interval": 0.0}, WRONG, "`val_check_interval` must be 1 or more"),
    ({"fast_dev_run": -1}, WRONG, "`fast_dev_run` must be 0 or more"),
    ({"max_epochs": -2}, WRONG, "`max_epochs` must be 0 or more, or -1 for no limit"),
    ({"limit_train_batches": 1.5}, WRONG, "from 0.0 to 1.0 .*; got 1.5. For a num"),
    ({"limit_train_batches": -1}, WRONG, "must be 0 or more .* batches; got -1"),
    ({"limit_val_batches": 0.1}, WRONG, "`limit_val_batches`=0.1 of 1 batches is les"),
    ({"val_check_interval": 0.4}, WRONG, "of 2 batches is less than one batch"),
    ({"val_check_interval": 9}, WRONG, "more than the 2 batches"),
    ({"check_val_every_n_epoch": 0}, WRONG, "must be 1 or more"),
    ({"limit_train_batches": 0}, WRONG, "no batches.*or `limit_train_batches` 0"),
    ({"val_loader": 10}, TypeError, r"an int, .*\(For 10 epochs: max_epochs=10"),
    ({"min_epochs": 3}, ValueError, "`min_epochs`=3 is more than `max_epochs`=1"),
    ({"min_steps": 3, "max_steps": 2}, ValueError,
     "`min_steps`=3 is more than `max_steps`=2"),
    ({"min_steps": -1}, ValueError, "`min_steps` must be 0 or more"),
    ({"ckpt_path": "lats"}, FileNotFoundError, "`ckpt_path`"),
    ({"val_loader": []}, ValueError, "`val_loader` gave no batches"),
    ({"train_loader": iter(batches(8)), "limit_train_batches": 0.5}, ValueError,
     "length of the loader is not known"),
    ({"train_loader": iter(batches(8)), "val_check_interval": 0.5}, ValueError,
     "length of the loader is not known; pass a number"),
])  # fmt: skip
def test_fit_refuses_arguments(settings, error, message):
    loaders = {"train_loader": batches(8, 8), "val_loader": batches(8)}
    with pytest.raises(error, match=message):
        make().fit(**loaders | settings)


@pytest.mark.parametrize("hook, value, error, match", [
    ("on_train_batch_end__loss", 1.0, ValueError, "name 'loss' is taken"),
    ("on_validation_end__val_loss", 1.0, ValueError, "name 'val_loss' is taken"),
    ("on_train_epoch_end__step", 1.0, ValueError, "name 'step' is taken"),
    ("on_train_epoch_end__area", [1.0], TypeError, r"one number; got \[1.0\]"),
    ("on_train_epoch_end__area", "1", TypeError, "of type str"),
    ("on_train_epoch_end__area", np.ones((1, 2)), TypeError, "must be one number"),
])  # fmt: skip
def test_what_can_not_be_logged_is_refused(hook, value, error, match):
    with pytest.raises(error, match=match):
        make(callbacks=[Logs(**{hook: lambda t: value})]).fit(batches(8), batches(8))


@pytest.mark.parametrize("provoke, error, match", [
    (lambda: Ensemble(4, learning_rate=[0.1, 0.2]), ValueError,
     r"`learning_rate`.*each of the 4.*\(2,\)"),
    (lambda: Ensemble(2, learning_rate=["fast", "slow"]), TypeError,
     r"`learning_rate` must be numbers.*'fast'"),
    (lambda: make().member(0), ValueError, "`member` needs a Trainer with `ensemble`"),
    (lambda: make(FOUR, ensemble=4).member("a"), TypeError,
     "number of a member; got 'a'"),
    (lambda: make(FOUR, ensemble=4).member(4), IndexError, "there are 4 members"),
    (lambda: PassMetric(of_other_library("AUROC", "torchmetrics.x", __call__=x_y)),
     TypeError, "torchmetrics's AUROC"),
    (lambda: PassMetric("f1"), TypeError, "must be a callable"),
])  # fmt: skip
def test_what_can_not_be_made_or_asked_for_is_refused(provoke, error, match):
    with pytest.raises(error, match=match):
        provoke()


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
@pytest.mark.parametrize("loader, limit, match", [
    (batches(8), -1, "`limit_batches` must be 0 or more"),
    (iter(batches(8)), 0.5, "share of an epoch"),
    (batches(8), 0, "gave no batches.*or `limit_batches` 0"),
])  # fmt: skip
def test_limits_that_can_not_be_are_errors(method, loader, limit, match):
    with pytest.raises(ValueError, match=match):
        getattr(mlp_trainer(), method)(loader, limit_batches=limit)


class Tells(Callback):
    """Gives a checkpoint, or a step, what can't be kept of it."""

    def __init__(self, state=None, inside=None):
        self.state, self.inside = state, {} if inside is None else inside

    def state_dict(self):
        return {"state": self.state}

    def inside_step(self, grads, updates, state):
        return self.inside


@pytest.mark.parametrize("tells, metrics, error, match", [
    (Tells(state=np.ones(2)), (), TypeError, "`state_dict` of the callback Tells"),
    (Tells(inside=1.0), (), TypeError, "must return a dict of named arrays"),
    (Tells(inside=jnp.ones(2)), (), TypeError, "inside_step returned an array; it"),
    (None, {f"m{n}": "mse" for n in range(63)}, ValueError, "at most 63 can be kept"),
])  # fmt: skip
def test_what_can_not_be_kept_is_refused(tells, metrics, error, match, tmp_path):
    trainer = make(loss="mse", metrics=metrics, callbacks=tells)
    with pytest.raises(error, match=match):
        trainer.fit([(X, np.ones((8, 3), np.float32))])
        trainer.save(tmp_path / "saved")


def test_a_pass_without_the_loss_refuses_flags_that_it_would_not_set():
    def loss_fn(model, x, y):
        return ((jax.vmap(lambda row: model(row, train=True))(x) - y) ** 2).mean()

    model = Trains(4, 3, key=jax.random.key(0))
    trainer = make(model, loss_fn=loss_fn)
    trainer.fit([(X, jnp.zeros((8, 3)))])
    with pytest.raises(TypeError, match="Call it `training`"):
        trainer.predict([X])
