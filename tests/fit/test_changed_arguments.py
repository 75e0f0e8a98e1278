"""A resume names the arguments that were changed since the save."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from toys import Mlp, batches, cross_entropy

from jaxdp import LocalSGD, Part, Sharded, SingleDevice, Trainer
from jaxdp.callbacks import LearningRateMonitor, WeightAveraging

DATA = batches(16, 16)
INJECTED = optax.inject_hyperparams(optax.adam)


def model(**changes):
    changed = Mlp(jax.random.key(0))
    for name, value in changes.items():
        changed = eqx.tree_at(
            lambda m, name=name: getattr(m, name), changed, replace=value
        )
    return changed


def make(**changes):
    given = {
        "model": model(),
        "optimizer": optax.adamw(1e-3),
        "loss": "cross_entropy",
        "strategy": SingleDevice(),
        "enable_progress_bar": False,
    }
    return Trainer(**given | changes)


def mean_loss(model, x, y):
    return cross_entropy(model, x, y)


def clipped(model):
    return model


def frozen(leaf):
    return eqx.is_inexact_array(leaf) and leaf.ndim == 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("saved"), {}

    def saved(name, **arguments):
        if name not in paths:
            trainer = make(**arguments)
            trainer.fit(DATA)
            paths[name] = trainer.save(folder / name)
        return paths[name]

    return saved


@pytest.mark.parametrize("changes, names", [
    ({"callbacks": [WeightAveraging(0.9)]},
     r"`callbacks` was none that adds state, and is WeightAveraging\(decay=0.9\)"),
    ({"gradient_clip_val": 1.0}, "`gradient_clip_val` was None, and is 1.0"),
    ({"precision": "16-mixed"}, "`precision` was 32-true, and is 16-mixed"),
    ({"precision": "bf16-true"}, "`precision` was 32-true, and is bf16-true"),
    ({"filter_spec": frozen},
     "`filter_spec` was one that freezes nothing, and is one that freezes first.bias"),
    ({"optimizer": optax.sgd(0.1, momentum=0.9)},
     r"`optimizer` was scale_by_adam.*, and is trace\(decay=0.9"),
    ({"optimizer": [Part(["first", "last"], mean_loss, optax.adam(1e-3), name="both")],
      "loss": None}, "`optimizer` was scale_by_adam.*, and is .*scale_by_adam"),
    ({"strategy": LocalSGD(2)}, r"`strategy` was one that .*, and is LocalSGD\("),
])  # fmt: skip
def test_what_does_not_fit_is_named_as_an_argument(saved, changes, names):
    with pytest.raises(ValueError, match="does not fit this trainer") as caught:
        make(**changes).load(saved("plain"))
    assert re.search(names, str(caught.value), re.DOTALL)
    assert "jaxdp.load_model(path, like=model)" in str(caught.value)


def test_what_was_left_out_is_named_too(saved):
    arguments = {"callbacks": [WeightAveraging(0.9)], "gradient_clip_val": 1.0}
    path = saved("averaged", precision="16-mixed", **arguments)
    with pytest.raises(
        ValueError, match="`callbacks` was Weight.*and is none that adds state"
    ) as e:
        make().load(path)
    assert "`gradient_clip_val` was 1.0, and is None" in str(e.value)
    assert "`precision` was 16-mixed, and is 32-true" in str(e.value)


@pytest.mark.parametrize("changes, names", [
    ({"model": model(activation=jax.nn.relu)},
     ["`model` was activation=<", "gelu>, and is activation=<", "relu>"]),
    ({"model": model(dropout=eqx.nn.Dropout(0.5))},
     ["`model` was dropout=Dropout(p=0.3", "and is dropout=Dropout(p=0.5"]),
    ({"optimizer": optax.adamw(1e-3, weight_decay=0.1)},
     ["add_decayed_weights(weight_decay=0.0001)", "(weight_decay=0.1)"]),
    ({"optimizer": optax.adamw(1e-2)},
     ["`optimizer` was scale(step_size=-0.001), and is scale(step_size=-0.01)"]),
    ({"precision": "bf16-mixed"}, ["`precision` was 32-true, and is bf16-mixed"]),
    ({"accumulate_grad_batches": 2}, ["`accumulate_grad_batches` was 1, and is 2"]),
    ({"seed": 3}, ["`seed` was 0, and is 3"]),
    ({"after_update": clipped}, ["`after_update` was None, and is clipped"]),
    ({"loss": None, "loss_fn": mean_loss},
     ["`loss` was cross_entropy, and is None", "`loss_fn` was None, and is mean_loss"]),
])  # fmt: skip
def test_what_fits_and_was_changed_is_said(saved, changes, names, caplog):
    path = saved("plain")
    make(**changes).load(path)
    assert f"{path} was saved with other arguments than this trainer's" in caplog.text
    for name in names:
        assert name in caplog.text


@pytest.mark.parametrize("schedule", [
    lambda: optax.cosine_decay_schedule(1e-3, 50),
    lambda: optax.piecewise_constant_schedule(1e-3, {20: 0.1}),
    lambda: optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 60),
    lambda: optax.warmup_exponential_decay_schedule(0.0, 1e-3, 10, 50, 0.5),
])  # fmt: skip
def test_a_schedule_that_has_run_is_no_other_one(schedule, tmp_path, caplog):
    fresh, used = schedule(), schedule()
    used(3)  # optax's cosine keeps its steps as a float from then on
    path = make(optimizer=optax.adam(used)).save(tmp_path / "used")
    make(optimizer=optax.adam(fresh)).load(path)
    assert "other arguments" not in caplog.text


@pytest.mark.parametrize("then, now, is_same", [
    ("Config(names={'a', 'b'}, p=0.5)", "Config(names={'b', 'a'}, p=0.5)", True),
    ("Config(names={'a', 'b'}, p=0.5)", "Config(names={'a', 'b'}, p=0.2)", False),
    ("{'ab', 'c'}", "{'ba', 'c'}", False),
])  # fmt: skip
def test_a_set_has_no_order(then, now, is_same, tmp_path, caplog):
    class Shows(eqx.Module):
        text: str = eqx.field(static=True)

        def __call__(self, x):
            return jax.nn.gelu(x)

        def __repr__(self):
            return self.text

    path = make(model=model(activation=Shows(then))).save(tmp_path / "then")
    make(model=model(activation=Shows(now))).load(path)
    assert ("other arguments" not in caplog.text) == is_same


@pytest.mark.parametrize("before, after, names", [
    ({"optimizer": optax.sgd(jnp.array(0.1))}, {"optimizer": optax.sgd(jnp.array(0.2))},
     ["step_size=-0.1", "step_size=-0.2"]),
    ({"optimizer": optax.chain(optax.clip(1.0), INJECTED(learning_rate=0.01))},
     {"optimizer": optax.chain(optax.clip(1.0), INJECTED(learning_rate=0.02))},
     ["learning_rate=0.01", "learning_rate=0.02", "`trainer.set_hyperparams` sets"]),
])  # fmt: skip
def test_numbers_that_only_the_state_has_are_said(
    tmp_path, before, after, names, caplog
):
    trainer = make(**before)
    trainer.fit(DATA)
    path = trainer.save(tmp_path / "saved")
    make(**before).load(path)
    assert "other arguments" not in caplog.text
    make(**after).load(path)
    for name in names:
        assert name in caplog.text


def test_nothing_is_said_of_what_is_the_same_or_changes_no_number(saved, caplog):
    monitor = LearningRateMonitor()
    make(callbacks=[monitor], steps_per_execution=2, strategy=Sharded(2)).load(
        saved("plain")
    )
    assert "other arguments" not in caplog.text


def test_a_description_has_no_addresses():
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    run = make(model=model(activation=gelu)).run.config
    assert "approximate=False" in run.describe(())["model"]
    run = make(
        model=model(activation=lambda x: x), loss=lambda p, y: p[:, 0]
    ).run.config
    assert "0x" not in str(run.describe(()))
