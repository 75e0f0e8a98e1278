"""`per_example`: a loss of one example, which is vmapped, padded and split for it."""

import functools

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

RAGGED = 16, 12, 16, 5
softmax = optax.softmax_cross_entropy_with_integer_labels


def make(loss_fn, strategy=None, model=None, **options):
    model = linear() if model is None else model
    options |= {"loss_fn": loss_fn, "strategy": strategy or SingleDevice()}
    return quiet(model, options.pop("optimizer", optax.sgd(0.1)), **options)


def train(loss_fn, strategy=None, model=None, data=None, **options):
    """Losses of every step, the history and the parameters, of two epochs."""
    recorder = Recorder()
    trainer = make(loss_fn, strategy, model, callbacks=[recorder], **options)
    data = batches(*RAGGED) if data is None else data
    history = trainer.fit(data, data[-2:], max_epochs=2)
    return recorder.losses, history.history, arrays(trainer.model)


def assert_same_numbers(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        if not name.endswith("time"):
            np.testing.assert_allclose(found[1][name], values, rtol=1e-5, err_msg=name)
    assert_close(found[2], expected[2], rtol=1e-4)


# Each is a function of one example, and what it is for a batch.


def plain(model, x, y):
    return softmax(model(x), y)


def weighted_metrics(model, x, y):
    loss = softmax(model(x), y)
    return (loss, y + 1), {"hits": (model(x).argmax() == y, y > 0), "loss0": loss}


def keyed(model, x, y, *, key, training):
    return eqx.nn.Dropout(0.4)(model(x), key=key, inference=not training)[y]


def keyed_batch(model, x, y, keys, training):
    return jax.vmap(lambda x, y, key: keyed(model, x, y, key=key, training=training))(
        x, y, keys
    )


def over_rows(function):
    def of_batch(model, x, y):
        return jax.vmap(functools.partial(function, model))(x, y)

    return of_batch


@pytest.mark.parametrize("kind", [Sharded, Pmap, FSDP])
def test_ragged_batches_are_padded_to_one_program(kind):
    shapes = set()

    def loss(model, x, y):
        shapes.add((x.shape, y.shape))
        return plain(model, x, y)

    strategy = counting(kind)
    train(per_example(loss), strategy, data=batches(16, 16, 11, 5))
    assert strategy.count == 1
    assert shapes == {((4,), ())}


OPTAX = {
    loss.__name__: loss
    for loss in (
        optax.squared_error, optax.l2_loss, optax.huber_loss, optax.log_cosh,
        optax.sigmoid_binary_cross_entropy, optax.softmax_cross_entropy, softmax,
    )
}  # fmt: skip


@pytest.mark.slow_but("squared_error", "softmax_cross_entropy_with_integer_labels")
@pytest.mark.parametrize("name", OPTAX)
def test_losses_of_optax_are_of_one_example_and_others_are_not(name):
    loss, data = OPTAX[name], batches(16, 5)
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
        return jnp.log(jnp.abs(x).sum()) * plain(model, x, y), {"one": 1.0, "y": y}

    data = batches(16, 5)
    _, history, params = train(per_example(loss), kind(), data=data)
    assert "is a scalar" not in caplog.text  # it is no mean of a batch
    assert all(np.isfinite(leaf).all() for leaf in params)
    assert history["one"] == [1.0, 1.0] and history["val_one"] == [1.0, 1.0]
    labels = np.concatenate([y for _, y in data])
    assert history["y"] == pytest.approx([labels.mean()] * 2)


@pytest.mark.parametrize("number", [2, True])
def test_a_weight_may_be_a_constant(number):
    """All rows have the same weight, so the mean is that without weights."""

    def loss(model, x, y):
        return plain(model, x, y), {"m": (x[0], number), "n": number}

    def of_batch(model, x, y):
        return over_rows(plain)(model, x, y), {
            "m": x[:, 0], "n": jnp.full(len(x), number * 1.0)
        }  # fmt: skip

    data = batches(16, 5)
    found = train(per_example(loss), Sharded(), data=data)
    assert_same_numbers(found, train(of_batch, data=data))


def test_a_whole_comes_as_the_array_itself():
    table = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    shapes = set()

    def of_tuple(model, x, table, y):
        shapes.add((x.shape, table.shape, y.shape))
        return softmax(model(x) + table @ x, y)

    def of_dict(model, batch):
        return of_tuple(model, batch["in"]["x"], batch["in"]["table"], batch["y"])

    def by_hand(model, x, y):
        return softmax(jax.vmap(model)(x) + x @ table.T, y)

    data = batches(16, 11, 4)
    expected = train(by_hand, data=data)
    tuples = [(x, Whole(table), y) for x, y in data]
    dicts = [{"in": {"x": x, "table": Whole(table)}, "y": y} for x, y in data]
    for strategy in (SingleDevice(), Sharded(), FSDP()):
        for loss, each in ((of_tuple, tuples), (of_dict, dicts)):
            found = train(per_example(loss), strategy, data=each)
            assert_same_numbers(found, expected)
    assert shapes == {((4,), (3, 4), ())}


def test_a_batch_that_is_no_tuple_is_one_argument():
    """Lists are what loaders of torch make of tuples."""
    data = batches(16, 5)

    def of_dict(model, batch):
        assert {*batch} == {"x", "y"}
        return plain(model, batch["x"], batch["y"])

    def of_nested(model, x, rest):
        return plain(model, x, rest[0]["y"])

    forms = [
        (of_dict, [{"x": x, "y": y} for x, y in data]),
        (plain, [[x, y] for x, y in data]),
        (of_nested, [(x, [{"y": y}]) for x, y in data]),
    ]
    expected = train(over_rows(plain), data=data)
    for loss, each in forms:
        assert_same_numbers(train(per_example(loss), Sharded(), data=each), expected)

    of_array = per_example(lambda model, x: jnp.square(model(x)).sum())
    assert train(of_array, Sharded(), data=[x for x, _ in data])[0][0] > 0


def test_it_may_be_called_by_hand():
    model, (x, y) = linear(), batches(6)[0]
    keys = jax.random.split(jax.random.key(2), 6)

    for training in (True, False):
        found = per_example(keyed)(model, x, y, keys=keys, training=training)
        expected = keyed_batch(model, x, y, keys, training)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    (loss, weight), metrics = per_example(weighted_metrics)(model, x, y)
    assert loss.shape == weight.shape == metrics["loss0"].shape == (6,)
    assert [each.shape for each in metrics["hits"]] == [(6,), (6,)]

    table = np.ones((3, 4), np.float32)
    products = per_example(lambda model, x, table: (table @ x).sum())
    found = products(model, x, Whole(table))
    np.testing.assert_allclose(found, (x @ table.T).sum(axis=1), rtol=1e-5)


def test_predictions_and_targets_may_be_kept():
    """They have the shapes that the model gives them."""

    def loss(model, x, y):
        logits = model(x)
        return softmax(logits, y), {"predictions": logits, "targets": y}

    def accuracy(predictions, targets):
        assert predictions.shape == (21, 3) and targets.shape == (21,)
        return (predictions.argmax(axis=1) == targets).mean()

    data = batches(16, 5)
    trainer = make(
        per_example(loss), Sharded(), metrics={"accuracy": PassMetric(accuracy)}
    )
    x, y = (np.concatenate(each) for each in zip(*data, strict=True))
    expected = (np.argmax(jax.vmap(linear())(x), axis=1) == y).mean()
    assert trainer.validate(data)["val_accuracy"] == pytest.approx(expected)
