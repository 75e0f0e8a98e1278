"""`per_example`: a loss of one example, which is vmapped, padded and split for it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Recorder, arrays, assert_close, batches, counting, linear, quiet

from jaxdp import (
    FSDP,
    PassMetric,
    Pmap,
    Sharded,
    SingleDevice,
    Whole,
    per_example,
)

softmax = optax.softmax_cross_entropy_with_integer_labels
DATA = batches(16, 5)


def make(loss_fn, strategy=None, **options):
    options |= {"loss_fn": loss_fn, "strategy": strategy or SingleDevice()}
    return quiet(linear(), optax.sgd(0.1), **options)


def train(loss_fn, strategy=None, data=DATA):
    """Losses of every step, the history and the parameters, of two epochs."""
    recorder = Recorder()
    trainer = make(loss_fn, strategy, callbacks=[recorder])
    history = trainer.fit(data, data[-2:], max_epochs=2)
    return recorder.losses, history.history, arrays(trainer.model)


def assert_same_numbers(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        if not name.endswith("time"):
            np.testing.assert_allclose(found[1][name], values, rtol=1e-5, err_msg=name)
    assert_close(found[2], expected[2], rtol=1e-4)


def plain(model, x, y):
    return softmax(model(x), y)


@pytest.mark.parametrize("kind", [Sharded, Pmap, FSDP])
def test_ragged_batches_are_padded_to_one_program(kind):
    shapes = set()

    def loss(model, x, y):
        shapes.add((x.shape, y.shape))
        return plain(model, x, y)

    strategy = counting(kind)
    train(per_example(loss), strategy, batches(16, 16, 11, 5))
    assert strategy.count == 1
    assert shapes == {((4,), ())}


OPTAX = [
    optax.squared_error, optax.l2_loss, optax.huber_loss, optax.log_cosh,
    optax.sigmoid_binary_cross_entropy, optax.softmax_cross_entropy, softmax,
]  # fmt: skip


@pytest.mark.slow_but("squared_error", "softmax_cross_entropy_with_integer_labels")
@pytest.mark.parametrize("loss", OPTAX, ids=lambda loss: loss.__name__)
def test_losses_of_optax_are_of_one_example_and_others_are_not(loss):
    data = DATA
    if loss is not softmax:  # which takes labels
        data = [(x, np.eye(3, dtype=np.float32)[y]) for x, y in data]
    runs = []
    for criterion in (loss, lambda prediction, target: loss(prediction, target)):
        strategy, recorder = counting(Sharded), Recorder()
        make(None, strategy, loss=criterion, callbacks=[recorder]).fit(data)
        runs.append((strategy.count, recorder.losses))
    assert [count for count, _ in runs] == [1, 2]
    np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-5)


@pytest.mark.parametrize("kind", [SingleDevice, Sharded])
def test_padding_is_copies_of_rows_that_do_not_count(kind, caplog):
    """A logarithm of zeros would spoil the gradients."""

    def loss(model, x, y):
        metrics = {"one": 1.0, "y": y, "pair": (y, 2)}
        return jnp.log(jnp.abs(x).sum()) * plain(model, x, y), metrics

    _, history, params = train(per_example(loss), kind())
    assert "is a scalar" not in caplog.text  # it is no mean of a batch
    assert all(np.isfinite(leaf).all() for leaf in params)
    assert history["one"] == [1.0, 1.0] and history["val_one"] == [1.0, 1.0]
    labels = np.concatenate([y for _, y in DATA])
    assert history["y"] == history["pair"] == pytest.approx([labels.mean()] * 2)


TABLE = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def with_table(model, x, table, y):
    assert (x.shape, table.shape, y.shape) == ((4,), (3, 4), ())
    return softmax(model(x) + table @ x, y)


FORMS = {
    "a Whole": (with_table, lambda x, y: (x, Whole(TABLE), y)),
    "a Whole in a dict": (
        lambda model, batch: with_table(model, *batch["in"], batch["y"]),
        lambda x, y: {"in": (x, Whole(TABLE)), "y": y},
    ),
    "a dict": (
        lambda model, batch: with_table(model, batch["x"], TABLE, batch["y"]),
        lambda x, y: {"x": x, "y": y},
    ),
    "a list": (lambda model, x, y: with_table(model, x, TABLE, y), lambda *xy: [*xy]),
    "nested": (
        lambda model, x, rest: with_table(model, x, TABLE, rest[0]["y"]),
        lambda x, y: (x, [{"y": y}]),
    ),
}
"""A loss of one example, and a batch of `(x, y)` in another form. Lists are what
loaders of torch make of tuples."""


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, FSDP])
def test_an_example_has_the_structure_of_the_batch(strategy):
    def by_hand(model, x, y):
        return softmax(jax.vmap(model)(x) + x @ TABLE.T, y)

    data = batches(16, 11, 4)
    expected = train(by_hand, data=data)
    for loss, form in FORMS.values():
        found = train(per_example(loss), strategy(), [form(*each) for each in data])
        assert_same_numbers(found, expected)
    of_array = per_example(lambda model, x: jnp.square(model(x)).sum())
    assert train(of_array, strategy(), [x for x, _ in data])[0][0] > 0


def test_it_may_be_called_by_hand():
    model, (x, y) = linear(), batches(6)[0]
    keys = jax.random.split(jax.random.key(2), 6)

    def loss(model, x, y, *, key, training):
        value = eqx.nn.Dropout(0.4)(model(x), key=key, inference=not training)[y]
        return (value, y + 1), {"hits": (model(x).argmax() == y, y > 0), "x0": x[0]}

    for training in (True, False):
        (value, weight), metrics = per_example(loss)(
            model, x, y, keys=keys, training=training
        )
        expected = [
            loss(model, *row, key=key, training=training)[0][0]
            for *row, key in zip(x, y, keys, strict=True)
        ]
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        assert weight.shape == metrics["x0"].shape == (6,)
        assert [each.shape for each in metrics["hits"]] == [(6,), (6,)]

    products = per_example(lambda model, x, table: (table @ x).sum())
    found = products(model, x, Whole(TABLE))
    np.testing.assert_allclose(found, (x @ TABLE.T).sum(axis=1), rtol=1e-5)


def test_predictions_and_targets_may_be_kept():
    """They have the shapes that the model gives them."""

    def loss(model, x, y):
        logits = model(x)
        return softmax(logits, y), {"predictions": logits, "targets": y}

    def accuracy(predictions, targets):
        assert predictions.shape == (21, 3) and targets.shape == (21,)
        return (predictions.argmax(axis=1) == targets).mean()

    metrics = {"accuracy": PassMetric(accuracy)}
    trainer = make(per_example(loss), Sharded(), metrics=metrics)
    x, y = (np.concatenate(each) for each in zip(*DATA, strict=True))
    expected = (np.argmax(jax.vmap(linear())(x), axis=1) == y).mean()
    assert trainer.validate(DATA)["val_accuracy"] == pytest.approx(expected)
