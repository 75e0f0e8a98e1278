"""Weights of rows: batches `(x, y, weight)`, pairs `(values, weights)`, and zeros."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, Recorder, assert_close, batches, linear, quiet

from jaxdp import (
    FSDP,
    Bitwise,
    LocalSGD,
    Part,
    Pmap,
    Sharded,
    SingleDevice,
)
from jaxdp.callbacks import NanGuard

softmax = optax.softmax_cross_entropy_with_integer_labels
SIZES = 16, 11, 16, 3
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


def weighted():
    """Ragged batches with weights of all sizes, some of them 0."""
    generator = np.random.default_rng(1)
    weights = [generator.gamma(0.5, size=n).astype(np.float32) for n in SIZES]
    for each in weights:
        each[::5] = 0
    pairs = zip(batches(*SIZES), weights, strict=True)
    return [(x, y, weight) for (x, y), weight in pairs]


def trained(data, model=None, epochs=1, **options):
    """The trainer, and the loss of each step."""
    recorder = Recorder()
    model = linear() if model is None else model
    trainer = quiet(model, optax.adam(0.05), callbacks=[recorder], **options)
    trainer.fit(data, data, max_epochs=epochs)
    return trainer, recorder.losses


def test_a_third_element_is_said_once_and_is_not_for_the_model(caplog):
    trainer, _ = trained(weighted(), **ENTROPY)
    assert len(trainer.predict(weighted())) == sum(SIZES)  # from x alone
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
    trainer, other = (
        quiet(linear(), optax.sgd(0.1), loss="cross_entropy") for _ in range(2)
    )
    losses = [float(m["loss"]) for m in trainer.steps(data[:1] + empty + data[1:])]
    assert losses.pop(1) == 0
    assert losses == [float(m["loss"]) for m in other.steps(data)]
    np.testing.assert_array_equal(trainer.model.weight, other.model.weight)
    assert trainer.validate(data + empty) == trainer.validate(data)
    assert np.isnan(trainer.validate(empty)["val_loss"])


# A pair is a loss and its weights, not a loss and a metric.


def results(model, x, y):
    logits = jax.vmap(model)(x)
    return softmax(logits, y), logits


def stopped(model, x, y):
    loss, logits = results(model, x, y)
    return loss, jax.lax.stop_gradient((logits.argmax(-1) == y).astype(float) + 1)


def scanned_mask(model, x, y):
    """The losses are of the model, and the weights come through the same loop."""

    def body(seen, row):
        x, y = row
        loss = softmax(model(x), y)
        return seen + loss, (loss, x[0] > 0)

    return jax.lax.scan(body, 0.0, (x, y))[1]


def of_data(model, x, y):
    return results(model, x, y)[0], (y != 1)


@pytest.mark.parametrize("loss_fn", [stopped, scanned_mask, of_data])
def test_constant_weights_are_taken_and_said_once(loss_fn, caplog):
    data = batches(16, 11)
    loss = quiet(linear(), optax.sgd(0.0), loss_fn=loss_fn).fit(data)["loss"]
    note = "the loss is a pair (values, weights): the second is the weight"
    assert caplog.text.count(note) == 1
    pairs = [loss_fn(linear(), *batch) for batch in data]
    total = np.sum([np.sum(loss * weight) for loss, weight in pairs])
    weight = np.sum([np.sum(weight) for _, weight in pairs])
    assert loss == pytest.approx([total / weight], rel=1e-5)


def test_metrics_may_have_weights_of_parameters(caplog):
    def loss_fn(model, x, y):
        loss, logits = results(model, x, y)
        return loss, {"precision": (logits.argmax(-1) == y, jnp.abs(logits[:, 0]))}

    assert {*trained(batches(16, 11), loss_fn=loss_fn)[0].history} > {"val_precision"}
    assert caplog.text.count("metric 'precision' is a pair") == 1
    assert "the loss is a pair" not in caplog.text


# Rows of weight 0 do not count, whatever their targets are.


def marked(dtype=np.float32, *, x_is=0.5, y_is=0, classes=True):
    """Batches of which rows have weight 0, and there other values in x and y."""
    found = []
    for x, y in batches(16, 11, 8):
        x = np.abs(x)
        y = y if classes else x[:, :3] / 2
        weight = np.arange(len(x)) % 3
        x, y = x.copy(), y.copy()
        x[weight == 0], y[weight == 0] = x_is, y_is
        found.append((x, y, weight.astype(dtype)))
    return found


WRONG = {"y": {"y_is": np.nan}, "x": {"x_is": 9}, "infinite": {"y_is": -np.inf}}
LOSSES = {"mse": {"loss": "mse", "metrics": ["mae", "huber"]}, "entropy": ENTROPY}
CASES = [(layout, "mse", "y") for layout in LAYOUTS]
CASES += [("jit", loss, wrong) for loss in LOSSES for wrong in WRONG]


def compare(found, expected):
    for name in expected.history:
        np.testing.assert_allclose(
            found.history[name], expected.history[name], rtol=1e-5, err_msg=name
        )
    assert_close(found.model, expected.model)


def wrapped(data, model=None, **options):
    model = eqx.nn.Sequential([linear()]) if model is None else model
    return trained(data, model, epochs=2, **options)[0]


@functools.cache
def wrapped_by_right_rows(layout, loss):
    return wrapped(marked(classes=False), **LAYOUTS[layout](), **LOSSES[loss])


@pytest.mark.slow_cases("remat-mse-y", "one-mse-y", "jit-entropy-infinite")
@pytest.mark.parametrize("layout, loss, wrong", CASES)
def test_what_is_in_rows_of_weight_0_changes_nothing(layout, loss, wrong):
    data = marked(**WRONG[wrong], classes=False)
    found = wrapped(data, **LAYOUTS[layout](), **LOSSES[loss])
    compare(found, wrapped_by_right_rows(layout, loss))


def test_their_labels_may_be_no_classes():
    found = wrapped(marked(np.int32, y_is=-100), **ENTROPY)
    compare(found, wrapped(marked(np.float64), **ENTROPY))


def test_targets_of_weight_0_may_be_nan_beside_running_statistics():
    def fit(**wrong):
        model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
        data = marked(**wrong, classes=False)
        return trained(data, model, loss="mse", state=state, strategy=Sharded())[0]

    compare(fit(y_is=np.nan), fit())


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
    def trainer(values_of, *parts, **more):
        of_all = {} if parts else {"loss_fn": of_pairs(values_of)}
        optimizer = list(parts) or optax.adam(0.05)
        layouts = LAYOUTS[layout]() | {"accumulate_grad_batches": 1}
        return quiet(linear(), optimizer, **of_all, **layouts, **more)

    data = [(x, x[:, 0] > 0) for x, _ in batches(16, 11, 8)]
    assert trainer(unsafe).validate(data) == trainer(safe).validate(data)
    first, expected = (next(trainer(f).steps(data)) for f in (unsafe, safe))
    assert float(first["loss"]) == pytest.approx(float(expected["loss"]))

    trainer(safe).fit(data, max_epochs=1)
    # The gradient of what is infinite is NaN: the loss shows it a step later.
    with pytest.warns(UserWarning, match="the loss of epoch 0 is nan: .*NanGuard"):
        trainer(unsafe).fit(data, max_epochs=1)
    part = Part("weight", of_pairs(unsafe), optax.sgd(0.1), every=2)
    for parts in ((), (part,)):
        wrong = trainer(unsafe, *parts, callbacks=[NanGuard()])
        with pytest.raises(FloatingPointError, match="NaN or infinity in the grad"):
            wrong.fit(data, max_epochs=1)
