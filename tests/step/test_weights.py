"""Weights of rows: batches `(x, y, weight)`, pairs `(values, weights)`, and zeros."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, assert_close, batches, linear, quiet

from jaxdp import FSDP, Bitwise, LocalSGD, Part, Pmap, Sharded, SingleDevice
from jaxdp.callbacks import NanGuard

softmax = optax.softmax_cross_entropy_with_integer_labels
ENTROPY = {"loss": "cross_entropy", "metrics": ["accuracy"]}
LAYOUTS = {
    "one": lambda: {"strategy": SingleDevice()},
    "jit": lambda: {"strategy": Sharded(), "steps_per_execution": 2},
    "pmap": lambda: {"strategy": Pmap(), "accumulate_grad_batches": 3},
    "fsdp": lambda: {"strategy": FSDP(min_size=1), "accumulate_grad_batches": 2},
    "bits": lambda: {"strategy": Bitwise(Sharded())},
    "local": lambda: {"strategy": LocalSGD(every=1, outer=optax.sgd(1.0))},
    "remat": lambda: {"strategy": Sharded(), "remat": "layers[0]"},
}


def trained(data, model=None, epochs=1, **options):
    model = linear() if model is None else model
    trainer = quiet(model, optax.adam(0.05), **options)
    trainer.fit(data, data, max_epochs=epochs)
    return trainer


def test_a_third_element_is_said_once_and_is_not_for_the_model(caplog):
    data = [(x, y, np.ones(len(x), np.float32)) for x, y in batches(16, 11)]
    trainer = trained(data, **ENTROPY)
    assert len(trainer.predict(data)) == 27  # from x alone
    assert caplog.text.count("batches are (x, y, weight): the loss and metrics") == 1


def test_weights_of_a_criterion_and_of_the_batch_are_multiplied():
    def masked(prediction, target):
        return (prediction - target) ** 2, jnp.abs(target)

    x = batches(9)[0][0]
    weight, y = np.arange(9, dtype=np.int64), x[:, :3]
    trainer = quiet(linear(), loss=masked, metrics={"same": masked})
    found = trainer.validate([(x[:5], y[:5], weight[:5]), (x[5:], y[5:], weight[5:])])
    error = np.square(jax.vmap(linear())(x) - y)
    expected = pytest.approx(np.average(error, weights=np.abs(y) * weight[:, None]))
    assert found == {"val_loss": expected, "val_same": expected}


def test_a_step_without_any_weight_changes_nothing_and_counts_for_nothing():
    data = [(x, y, np.ones(len(x), bool)) for x, y in batches(16, 16)]
    empty = [(x, y, np.zeros(len(x), bool)) for x, y in batches(16)]
    trainer, other = (quiet(linear(), optax.sgd(0.1), **ENTROPY) for _ in range(2))
    losses = [float(m["loss"]) for m in trainer.steps(data[:1] + empty + data[1:])]
    assert losses.pop(1) == 0
    assert losses == [float(m["loss"]) for m in other.steps(data)]
    np.testing.assert_array_equal(trainer.model.weight, other.model.weight)
    assert trainer.validate(data + empty) == trainer.validate(data)
    assert np.isnan(trainer.validate(empty)["val_loss"])


# A pair is a loss and its weights, not a loss and a metric.


def stopped(model, x, y):
    logits = jax.vmap(model)(x)
    return softmax(logits, y), jax.lax.stop_gradient(jnp.abs(logits[:, 0]) + 1)


def scanned(model, x, y):
    """The losses are of the model, and the weights come through the same loop."""

    def body(seen, row):
        x, y = row
        loss = softmax(model(x), y)
        return seen + loss, (loss, x[0] > 0)

    return jax.lax.scan(body, 0.0, (x, y))[1]


@pytest.mark.parametrize("loss_fn", [stopped, scanned])
def test_constant_weights_are_taken_and_said_once(loss_fn, caplog):
    data = batches(16, 11)
    loss = quiet(linear(), optax.sgd(0.0), loss_fn=loss_fn).fit(data)["loss"]
    note = "the loss is a pair (values, weights): the second is the weight"
    assert caplog.text.count(note) == 1
    pairs = [loss_fn(linear(), *batch) for batch in data]
    values, weights = (np.concatenate(each) for each in zip(*pairs, strict=True))
    assert loss == pytest.approx([np.average(values, weights=weights)], rel=1e-5)


def test_metrics_may_have_weights_of_parameters(caplog):
    def loss_fn(model, x, y):
        logits = jax.vmap(model)(x)
        metrics = {"precision": (logits.argmax(-1) == y, jnp.abs(logits[:, 0]))}
        return softmax(logits, y), metrics

    trainer = trained(batches(16, 11), loss_fn=loss_fn)
    assert {*trainer.history.history} > {"val_precision"}
    assert caplog.text.count("metric 'precision' is a pair") == 1
    assert "the loss is a pair" not in caplog.text


# Rows of weight 0 do not count, whatever their targets are.


def marked(dtype=np.float32, *, x_is=0.5, y_is=0, classes=False):
    """Batches of which rows have weight 0, and there other values in x and y."""
    found = []
    for x, y in batches(16, 11, 8):
        x = np.abs(x)
        y = y.copy() if classes else x[:, :3] / 2
        weight = np.arange(len(x)) % 3
        x[weight == 0], y[weight == 0] = x_is, y_is
        found.append((x, y, weight.astype(dtype)))
    return found


WRONG = {"y": {"y_is": np.nan}, "x": {"x_is": 9}, "infinite": {"y_is": -np.inf}}
LOSSES = {"mse": {"loss": "mse", "metrics": ["mae", "huber"]}, "entropy": ENTROPY}
CASES = [(layout, "mse", "y") for layout in LAYOUTS]
CASES += [("jit", loss, wrong) for loss in LOSSES for wrong in WRONG]


def assert_same(found, expected):
    for name, values in expected.history.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-5)
    assert_close(found.model, expected.model)


def wrapped(data, **options):
    return trained(data, eqx.nn.Sequential([linear()]), epochs=2, **options)


@functools.cache
def wrapped_by_right_rows(layout, loss):
    return wrapped(marked(), **LAYOUTS[layout](), **LOSSES[loss])


@pytest.mark.slow_cases("remat-mse-y", "one-mse-y", "jit-entropy-infinite")
@pytest.mark.parametrize("layout, loss, wrong", CASES)
def test_what_is_in_rows_of_weight_0_changes_nothing(layout, loss, wrong):
    found = wrapped(marked(**WRONG[wrong]), **LAYOUTS[layout](), **LOSSES[loss])
    assert_same(found, wrapped_by_right_rows(layout, loss))


def test_their_labels_may_be_no_classes():
    right, wrong = (
        marked(np.float64, classes=True),
        marked(np.int32, y_is=-100, classes=True),
    )
    assert_same(wrapped(wrong, **ENTROPY), wrapped(right, **ENTROPY))


def test_targets_of_weight_0_may_be_nan_beside_running_statistics():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    options = {"loss": "mse", "state": state, "strategy": Sharded()}
    pair = (trained(marked(y_is=y), model, **options) for y in (np.nan, 0))
    assert_same(*pair)


def of_pairs(values_of):
    """A loss over batches of x and a mask, in which other rows are infinite."""

    def loss_fn(model, x, real):
        pair = values_of(model, x, real), jnp.where(real, 2.0, 0.0)
        return pair, {"same": pair}

    return loss_fn


def unsafe(model, x, real):
    return jnp.log(jnp.maximum(x[:, 0], 0)) ** 2 * jax.vmap(model)(x)[:, 0] ** 2


def safe(model, x, real):
    return unsafe(model, jnp.where(real[:, None], x, 1), real)


@pytest.mark.slow_but("jit")
@pytest.mark.parametrize("layout", ["jit", "pmap", "one"])
def test_a_pair_shows_its_loss_where_values_of_weight_0_are_infinite(layout):
    def trainer(values_of, **options):
        options = {
            "loss_fn": of_pairs(values_of),
            "optimizer": optax.adam(0.05),
        } | options
        options = LAYOUTS[layout]() | {"accumulate_grad_batches": 1} | options
        return quiet(linear(), **options)

    data = [(x, x[:, 0] > 0) for x, _ in batches(16, 11, 8)]
    assert trainer(unsafe).validate(data) == trainer(safe).validate(data)
    first, expected = (next(trainer(f).steps(data)) for f in (unsafe, safe))
    assert float(first["loss"]) == pytest.approx(float(expected["loss"]))

    trainer(safe).fit(data)
    # The gradient of what is infinite is NaN: the loss shows it a step later.
    with pytest.warns(UserWarning, match="the loss of epoch 0 is nan: .*NanGuard"):
        trainer(unsafe).fit(data)
    part = Part("weight", of_pairs(unsafe), optax.sgd(0.1), every=2)
    for options in ({}, {"loss_fn": None, "optimizer": [part]}):
        wrong = trainer(unsafe, callbacks=[NanGuard()], **options)
        with pytest.raises(FloatingPointError, match="NaN or infinity in the grad"):
            wrong.fit(data)
