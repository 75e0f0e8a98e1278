"""Rows of weight 0 do not count, whatever is in them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, batches

from jaxdp import (
    FSDP,
    Bitwise,
    Ensemble,
    LocalSGD,
    Part,
    Pmap,
    Sharded,
    SingleDevice,
    Trainer,
)
from jaxdp.callbacks import NanGuard

softmax = optax.softmax_cross_entropy_with_integer_labels


def linear():
    return eqx.nn.Linear(4, 3, key=jax.random.key(0))


class Rooted(eqx.Module):
    """Gives NaN, and NaN gradients, for rows that are negative."""

    linear: eqx.nn.Linear

    def __call__(self, x):
        return self.linear(jnp.log(jnp.abs(x) + 0.1)) * jnp.sqrt(1 + x[0])


def marked(weight_dtype, *, x_is=0.5, y_is=0, classes=True):
    """Batches of which rows have weight 0, and there other values in x and y."""
    found = []
    for x, y in batches(16, 11, 8):
        x = np.abs(x)
        y = y if classes else x[:, :3] / 2
        weight = np.arange(len(x)) % 3
        x, y = x.copy(), y.copy()
        x[weight == 0], y[weight == 0] = x_is, y_is
        found.append((x, y, weight.astype(weight_dtype)))
    return found


WRONG = {
    "y": {"y_is": np.nan},
    "x": {"x_is": np.nan},
    "infinite": {"x_is": np.inf, "y_is": -np.inf},
    "model": {"x_is": -5},
}
LOSSES = {
    "mse": {"loss": "mse", "metrics": ["mae", "huber"]},
    "entropy": {"loss": "cross_entropy", "metrics": ["accuracy"]},
    "own": {
        "loss": lambda p, t: (p - t) ** 2,
        "metrics": {"m": lambda p, t: ((p - t) ** 2)[:, 0]},
    },
}
LAYOUTS = {
    "one": lambda: {"strategy": SingleDevice()},
    "jit": lambda: {"strategy": Sharded(), "steps_per_execution": 2},
    "pmap": lambda: {"strategy": Pmap(), "accumulate_grad_batches": 2},
    "fsdp": lambda: {"strategy": FSDP(min_size=1)},
    "local": lambda: {"strategy": LocalSGD(every=1, outer=optax.sgd(1.0))},
    "bits": lambda: {"strategy": Bitwise(Sharded())},
    "remat": lambda: {"strategy": Sharded(), "remat": "linear"},
}
CASES = [(layout, "mse", "x") for layout in LAYOUTS]
CASES += [("jit", loss, wrong) for loss in LOSSES for wrong in WRONG if loss != "own"]


def trained(data, options, model=None, val=None):
    model = Rooted(linear()) if model is None else model
    trainer = Trainer(model, optax.adam(0.05), enable_progress_bar=False, **options)
    trainer.fit(data, data if val is None else val, max_epochs=2)
    return trainer


def compare(found, expected):
    for name in expected.history:
        np.testing.assert_allclose(
            found.history[name], expected.history[name], rtol=1e-5, err_msg=name
        )
    leaves = jax.tree.leaves(eqx.filter(expected.model, eqx.is_array))
    for a, b in zip(
        jax.tree.leaves(eqx.filter(found.model, eqx.is_array)), leaves, strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow_cases(
    "remat-mse-x",
    "one-mse-x",
    "jit-entropy-infinite",
    "jit-entropy-model",
)
@pytest.mark.parametrize("layout, loss, wrong", CASES)
def test_what_is_in_rows_of_weight_0_changes_nothing(layout, loss, wrong):
    options = {**LAYOUTS[layout](), **LOSSES[loss]}
    found = trained(marked(np.float32, **WRONG[wrong], classes=False), options)
    compare(found, trained_on_right_rows(layout, loss))


@functools.cache
def trained_on_right_rows(layout, loss):
    options = {**LAYOUTS[layout](), **LOSSES[loss]}
    return trained(marked(np.float32, classes=False), options)


@pytest.mark.parametrize("dtype", [np.int32, np.float64, bool])
def test_their_labels_may_be_no_classes(dtype):
    options = {"loss": "cross_entropy", "metrics": ["accuracy"]}
    found = trained(marked(dtype, x_is=np.nan, y_is=-100), options)
    compare(found, trained(marked(dtype), options))


def test_of_ensembles_and_criteria_of_labels():
    many = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 3, key=key))(
        jax.random.split(jax.random.key(0), 3)
    )
    options = {"loss": softmax, "ensemble": Ensemble(3)}
    wrong = {"x_is": np.nan, "y_is": 99}
    found = trained(marked(np.float32, **wrong), options, many)
    compare(found, trained(marked(np.float32), options, many))


@pytest.mark.slow_but("Sharded")
@pytest.mark.parametrize("strategy", [Sharded, SingleDevice])
def test_a_batch_of_nothing_else_has_a_finite_gradient(strategy):
    full = [(np.abs(x), y, np.ones(len(x))) for x, y in batches(8)]
    empty = [(x * np.nan, x[:, :3] * np.nan, np.zeros(8)) for x, _ in batches(8)]
    full = [(x, x[:, :3], w) for x, _, w in full]
    options = {"loss": "mse", "strategy": strategy()}
    found, expected = trained(empty + full, options), trained(full, options, val=full)
    assert np.isfinite([*found.history["loss"], *found.history["val_loss"]]).all()
    # The first step changes nothing; later ones move by the optimizer's momentum.
    first = expected.history["loss"][0]
    assert found.history["loss"][0] == pytest.approx(first, rel=1e-5)


@pytest.mark.slow_but("Sharded")
@pytest.mark.parametrize("strategy", [Sharded, Pmap, SingleDevice])
def test_what_is_written_for_a_batch_needs_finite_rows(strategy):
    def fit(data, **options):
        model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
        trainer = Trainer(
            model, optax.sgd(0.1), state=state, strategy=strategy(),
            enable_progress_bar=False, **options,
        )  # fmt: skip
        trainer.fit(data, data, max_epochs=1)
        return trainer

    clean = marked(np.float32, classes=False)
    expected = fit(clean, loss="mse")
    for loss in "mse", LOSSES["own"]["loss"]:
        wrong = marked(np.float32, y_is=np.nan, classes=False)
        if loss == "mse":
            compare(fit(wrong, loss=loss), expected)
        else:
            with pytest.raises(ValueError, match=r"batch\[1\] has NaN.*the whole"):
                fit(wrong, loss=loss)
        with pytest.raises(ValueError, match=r"batch\[0\] has NaN.*the whole"):
            fit(marked(np.float32, x_is=np.nan, classes=False), loss=loss)


def of_pairs(values_of):
    """A loss over batches of x and a mask, in which other rows are infinite."""

    def loss_fn(model, x, real):
        values = values_of(model, x, real)
        return (values, real), {"same": (values, real)}

    return loss_fn


def unsafe(model, x, real):
    return jnp.log(jnp.maximum(x[:, 0], 0)) ** 2 * jax.vmap(model)(x)[:, 0] ** 2


def safe(model, x, real):
    return unsafe(model, jnp.where(real[:, None], x, 1), real)


@pytest.mark.slow_but("options0")
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": Sharded(), "steps_per_execution": 2},
        {"strategy": Pmap()},
        {"strategy": SingleDevice(), "accumulate_grad_batches": 2},
    ],
)
def test_a_pair_shows_its_loss_where_values_of_weight_0_are_infinite(options):
    def trainer(values_of, *parts, **more):
        of_all = {} if parts else {"loss_fn": of_pairs(values_of)}
        optimizer = list(parts) or optax.adam(0.05)
        quiet = {"enable_progress_bar": False, **options, **more}
        return Trainer(linear(), optimizer, **of_all, **quiet)

    data = [(x, x[:, 0] > 0) for x, _ in batches(16, 11, 8)]
    assert trainer(unsafe).validate(data) == trainer(safe).validate(data)
    (first,), (expected,) = (trainer(f).steps(data[:1]) for f in (unsafe, safe))
    assert float(first["loss"]) == pytest.approx(float(expected["loss"]))

    trainer(safe).fit(data, max_epochs=1)
    # The gradient of what is infinite is NaN: the loss shows it a step later.
    with pytest.warns(UserWarning, match="the loss of epoch 0 is nan: .*NanGuard"):
        trainer(unsafe).fit(data, max_epochs=1)
    part = Part("weight", of_pairs(unsafe), optax.sgd(0.1), every=2)
    for wrong in (
        trainer(unsafe, callbacks=[NanGuard()]),
        trainer(unsafe, part, callbacks=[NanGuard()]),
    ):
        with pytest.raises(FloatingPointError, match="NaN or infinity in the grad"):
            wrong.fit(data, max_epochs=1)


def test_metrics_over_a_pass_see_all_rows():
    from jaxdp import PassMetric

    data = marked(np.float32, classes=False)
    options = {"loss": "mse", "metrics": {"rows": PassMetric(lambda p, t: len(p))}}
    assert trained(data, options).history["val_rows"] == [35, 35]
