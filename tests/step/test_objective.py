"""`loss_fn` in every form, and how models are called."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, batches

from jaxdp import Callback, Pmap, Sharded, SingleDevice, Trainer
from jaxdp.step.per_example import Arguments

X = np.ones((2, 4), np.float32)
cross_entropies = optax.softmax_cross_entropy_with_integer_labels
OFFERED = {"keys": "keys", "key": "key", "mask": "mask", "state": "state"}


@pytest.mark.parametrize(
    "loss_fn, batch",
    [
        (lambda model, x, y: (x, y), ("x", "y")),
        (lambda model, x, y, keys, mask: (x, y, keys, mask), ("x", "y")),
        (lambda model, x, y, *, keys, mask: (x, y, keys, mask), ("x", "y")),
        (lambda model, keys, mask, x, y: (x, y, keys, mask), ("x", "y")),
        (lambda model, state, x, y: (x, y, state), ("x", "y")),
        (lambda model, *batch: batch, ("x", "y")),
        (lambda model, *batch, key: (*batch, key), ("x", "y")),
        (lambda model, x, y=None: (x,), ("x",)),
        (lambda model, x, y=None, *rest: (x, *rest), ("x",)),
        (functools.partial(lambda model, w, x, key: (x, key), w=1), ("x",)),
        (functools.partial(lambda model, w, x, t1, key: (x, key), w=1, t1=2), ("x",)),
        (functools.partial(lambda w, model, x: (x,), 1), ("x",)),
    ],
)
def test_arguments_are_bound_by_place_and_ours_by_name(loss_fn, batch):
    arguments, keywords = Arguments(loss_fn).bind(batch, OFFERED)
    result = loss_fn("model", *arguments, **keywords)
    for value in result:
        assert value in {*batch, *OFFERED}
    assert result[: len(batch)] == batch


@pytest.mark.parametrize("loss_fn", [
    lambda model, x, mask: x, lambda model, x: x, lambda model, x, y, z: x,
    lambda model, x, *, weight=1: x,
])  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused(loss_fn):
    """An element never takes the place of a name of ours, or of an option."""
    with pytest.raises(TypeError, match="has 2 element.*keys, key, mask.* Rename"):
        Arguments(loss_fn).bind(("x", "y"), OFFERED)


def fit(loss_fn, data, model=None, strategy=None, **options):
    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)) if model is None else model
    trainer = Trainer(
        model, optax.adam(1e-2), loss_fn=loss_fn, strategy=strategy,
        enable_progress_bar=False, **options,
    )  # fmt: skip
    trainer.fit(data, data, max_epochs=2)
    return trainer


def log_of(p, y):
    return -jax.nn.log_softmax(p)[y]


def hard(z, y):  # pairs of rows, and as many features
    return (jnp.abs(z[:, None] - z[None]).sum(-1) * (y[:, None] == y[None])).mean(1)


OF_BATCHES = {
    "vmapped": jax.vmap(log_of),
    "a loss per row": lambda p, y: -jax.nn.log_softmax(p)[jnp.arange(len(y)), y],
    "a Brier score": lambda p, y: ((p - jax.nn.one_hot(y, 4)) ** 2).mean(1),
    "pairs": hard,
    "a mean": lambda p, y: cross_entropies(p, y).mean(),
    "weights of classes": lambda p, y: cross_entropies(p, y) * jnp.arange(4.0)[y],
}
OF_ONE = {
    "log-probability": log_of,
    "probability": lambda p, y: 1 - jax.nn.softmax(p)[y],
    "taken": lambda p, y: -jnp.take(p, y, axis=0),
}


@pytest.mark.parametrize("name", [*OF_BATCHES, *OF_ONE])
def test_a_loss_that_is_written_for_one_example_is_refused(name):
    data = [(np.ones((4, 4), np.float32), np.arange(4))]
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    loss = {**OF_BATCHES, **OF_ONE}[name]
    trainer = Trainer(
        model, loss=loss, strategy=SingleDevice(), enable_progress_bar=False
    )
    if name in OF_BATCHES:
        assert np.isfinite(trainer.fit(data, max_epochs=1)["loss"][-1])
    else:
        with pytest.raises(ValueError, match=r"\(4, 4\) for a batch .* in jax.vmap"):
            trainer.fit(data)


def cross_entropy(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": SingleDevice()},
        {"strategy": Sharded(), "steps_per_execution": 2},
        {"strategy": Pmap(), "accumulate_grad_batches": 2},
    ],
)
def test_a_loss_may_name_the_step_and_whether_it_trains(options):
    seen = []

    class See(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            seen.append((metrics["step_no"], metrics["trains"]))

    def loss_fn(model, x, y, step, *, training):
        assert isinstance(training, bool) and step.dtype == jnp.int32
        here = {"step_no": jnp.full(len(x), step), "trains": jnp.full(len(x), training)}
        return cross_entropy(model, x, y) * (1 + step), here

    history = fit(loss_fn, batches(16, 16, 16, 16), callbacks=[See()], **options)
    steps = 8 // options.get("accumulate_grad_batches", 1)
    assert seen == [(step, 1) for step in range(steps)]
    assert history.history["val_step_no"] == [steps // 2, steps]
    assert history.history["val_trains"] == [0, 0]


def test_what_a_partial_has_filled_is_not_overwritten():
    def loss_fn(model, x, y, step, training):
        assert not training and step == 3
        return cross_entropy(model, x, y)

    fit(functools.partial(loss_fn, step=3, training=False), batches(16, 16))


def test_per_row_scalar_masked_and_dict_forms_give_the_same_run():
    data = batches(16, 16, 5)
    as_dicts = [{"x": x, "label": {"y": y}} for x, y in data]

    def masked(model, x, y, mask):
        losses = jnp.where(mask, cross_entropy(model, x, y), 0)
        return losses.sum() / mask.sum().astype(jnp.float32)

    def of_dict(model, batch):
        return cross_entropy(model, batch["x"], batch["label"]["y"])

    forms = [
        (cross_entropy, data),
        (lambda *args: cross_entropy(*args).mean(), data),
        (masked, data),
        (of_dict, as_dicts),
        (eqx.filter_jit(cross_entropy), data),
    ]
    histories = [fit(loss_fn, batches).history for loss_fn, batches in forms]
    for history in histories[1:]:
        np.testing.assert_allclose(history["loss"], histories[0]["loss"], rtol=1e-5)
        np.testing.assert_allclose(
            history["val_loss"], histories[0]["val_loss"], rtol=1e-5
        )


def test_extra_metrics_are_exact_means_in_the_order_given():
    data = batches(16, 16, 5)

    def loss_fn(model, x, y):
        right = jnp.argmax(jax.vmap(model)(x), axis=1) == y
        return cross_entropy(model, x, y), {"right": right, "always": jnp.ones(len(x))}

    trainer = fit(loss_fn, data)
    assert trainer.record.names[:3] == ("loss", "right", "always")
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    predicted = np.argmax(jax.vmap(trainer.model)(x), axis=1)
    found = trainer.validate(data)
    assert found["val_right"] == pytest.approx((predicted == y).mean())
    assert found["val_always"] == pytest.approx(1.0)


def test_a_key_per_batch_differs_from_step_to_step_and_repeats_with_the_seed():
    def loss_fn(model, x, y, key):
        return cross_entropy(model, x, y), {"noise": jax.random.uniform(key)}

    found = [
        [float(m["noise"]) for m in Trainer(
            eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)), loss_fn=loss_fn,
            seed=seed, enable_progress_bar=False,
        ).steps(batches(8, 8, 8))]
        for seed in (0, 0, 1)
    ]  # fmt: skip
    assert found[0] == found[1]
    assert len({*found[0], *found[2]}) == 6


@pytest.mark.slow_but("batch-Pmap")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap])
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_loss_fn_with_state_in_equinox_order(strategy, mode):
    class Net(NormNet):
        def __init__(self, key):
            super().__init__(key)
            self.norm = eqx.nn.BatchNorm(8, axis_name="batch", mode=mode)

    def compute_loss(model, state, xs, ys):
        batch_model = jax.vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        logits, state = batch_model(xs, state)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ys)
        return losses.mean(), state

    runs = []
    for loss_fn in (compute_loss, None):
        model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
        trainer = fit(
            loss_fn, batches(16, 16, 5), model, strategy(), state=state,
            **({} if loss_fn else {"loss": "cross_entropy"}),
        )  # fmt: skip
        runs.append(trainer.history["loss"])
    np.testing.assert_allclose(*runs, rtol=1e-6)


def test_a_model_may_give_and_take_pytrees():
    class Two(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return {"a": self.linear(x["left"]), "b": x["right"].sum()}

    def loss(prediction, target):
        return ((prediction["a"] - target["a"]) ** 2).mean(axis=1)

    x = {"left": np.ones((9, 4), np.float32), "right": np.ones((9, 2), np.float32)}
    data = [(x, {"a": np.zeros((9, 3), np.float32)})]
    trainer = fit(
        None, data, Two(eqx.nn.Linear(4, 3, key=jax.random.key(0))), loss=loss
    )
    predicted = trainer.predict([x])
    assert predicted["a"].shape == (9, 3)
    np.testing.assert_array_equal(predicted["b"], np.full(9, 2.0))


def test_of_a_scalar_metric_it_is_said_once_that_it_is_a_mean_of_batches(caplog):
    def spread(prediction, y):
        return jnp.std(prediction)

    def narrow(prediction, y):
        return jnp.abs(prediction).mean(axis=1)

    def told(name):
        return sum(f"{name!r} is a scalar" in each for each in caplog.messages)

    trainer = Trainer(
        eqx.nn.Linear(4, 3, key=jax.random.key(0)), loss="cross_entropy",
        metrics={"spread": spread, "narrow": narrow}, enable_progress_bar=False,
    )  # fmt: skip
    data = batches(16, 5)
    trainer.plan(data)
    assert told("spread") == 0
    trainer.fit(data, data, max_epochs=2)
    found = trainer.validate(data)
    assert told("spread") == 1
    assert told("narrow") == told("loss") == 0
    of_batches = [jnp.std(jax.vmap(trainer.model)(x)) for x, _ in data]
    expected = np.average(of_batches, weights=[16, 5])
    assert found["val_spread"] == pytest.approx(expected)


def test_a_loss_of_several_values_per_row_is_their_mean():
    x, y = batches(16)[0][0], batches(16)[0][0] + 1
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    trainer = Trainer(model, loss=optax.squared_error, enable_progress_bar=False)
    loss = trainer.fit([(x, y), (x[:5], y[:5])], max_epochs=1)["loss"]
    first = jnp.square(jax.vmap(model)(x) - y).mean()
    assert loss[0] == pytest.approx(float(first), rel=0.1)


@pytest.mark.parametrize(
    "returned, there",
    [
        (lambda loss, state: (loss, (state, {})), "an array of .*, a tuple of 2"),
        (lambda loss, state: (loss, state, {}), "an array of .*, a State, a dict"),
        (lambda loss, state: loss, "an array of shape ()"),
    ],
)
def test_the_new_state_comes_last(returned, there):
    def loss_fn(model, x, y, state):
        logits, state = jax.vmap(
            model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )(x, state)
        return returned(cross_entropies(logits, y).mean(), state)

    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    trainer = Trainer(model, state=state, loss_fn=loss_fn, enable_progress_bar=False)
    match = rf"\(loss, metrics, state\), with .*; got {there}"
    with pytest.raises(TypeError, match=match):
        trainer.fit(batches(16))


def test_a_state_that_changes_its_structure_is_told_by_the_leaf():
    def init(params):
        return {"a": jnp.zeros(()), "b": jnp.zeros(())}

    optimizer = optax.GradientTransformation(
        init, lambda updates, state, params=None: (updates, {"a": state["a"]})
    )
    model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    trainer = Trainer(model, optimizer, enable_progress_bar=False)
    with pytest.raises(TypeError, match="after a step: b is missing"):
        trainer.fit(batches(16))
