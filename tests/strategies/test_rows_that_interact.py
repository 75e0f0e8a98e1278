"""Training where values of rows depend on other rows: the numbers of one device."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxdp import (
    FSDP,
    Bitwise,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    Trainer,
    ZeRO,
)
from jaxdp.step import DATA
from jaxdp.strategies import Collectives, DataParallel

WIDTH = 4
KEY = jax.random.key(0)

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(*rows):
    x = np.random.default_rng(0).normal(size=(40, WIDTH)).astype(np.float32)
    return [(each, np.sin(each)) for each in np.split(x, np.cumsum(rows))[:-1]]


def contrastive(model, x, y):
    return cross_entropy(jax.vmap(model)(x) @ y.T, jnp.arange(len(x)))


def mean_of_contrastive(model, x, y):
    return contrastive(model, x, y).mean()


def trainer_of(strategy, **keywords):
    return Trainer(
        eqx.nn.MLP(WIDTH, WIDTH, 8, 1, key=KEY),
        optax.adam(1e-2),
        strategy=strategy,
        enable_progress_bar=False,
        **keywords,
    )


def run(loss_fn, strategy, data=None, **keywords):
    """The losses of two epochs, and the parameters after them."""
    trainer = trainer_of(strategy, loss_fn=loss_fn, **keywords)
    losses = trainer.fit(data or batches(16, 16), max_epochs=2)["loss"]
    return losses, jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))


@functools.cache
def by_hand(accumulated):
    """`run` of a contrastive loss in plain JAX."""

    def mean_loss(model, *arrays):
        pairs = zip(arrays[::2], arrays[1::2], strict=True)
        losses = [mean_of_contrastive(model, x, y) for x, y in pairs]
        return sum(losses) / len(losses)

    model, optimizer = eqx.nn.MLP(WIDTH, WIDTH, 8, 1, key=KEY), optax.adam(1e-2)
    state, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
    data = batches(16, 16)
    for step in range(4 // accumulated):
        window = (data + data)[step * accumulated : (step + 1) * accumulated]
        arrays = [leaf for batch in window for leaf in batch]
        loss, grads = eqx.filter_value_and_grad(mean_loss)(model, *arrays)
        updates, state = optimizer.update(grads, state, model)
        model = eqx.apply_updates(model, updates)
        losses.append(float(loss))
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return np.reshape(losses, (2, -1)).mean(axis=1), leaves


HALVES = [("layers[0].weight", PartitionSpec("model"))]


class Bare(DataParallel):
    """A strategy that shares nothing with ours but what it must."""

    num_shards = 1

    def place(self, state):
        return jax.device_put(state, jax.devices()[0])

    def compile(self, step, arguments, roles, results, *, donate=(), rows="apart"):
        return jax.jit(lambda *arguments: step(Collectives(), *arguments))


@pytest.mark.slow_but(
    "Sharded-{}", "Pmap-{}", "Bare-{}", "<lambda>-{'steps_per_execution': 2}"
)
@pytest.mark.parametrize(
    ("strategy", "keywords"),
    [
        (SingleDevice, {}),
        (Sharded, {}),
        (FSDP, {}),
        (ZeRO, {}),
        (lambda: TensorParallel({"data": 4, "model": 2}, HALVES), {}),
        (Pmap, {}),
        (lambda: Pmap(4), {"accumulate_grad_batches": 2}),
        (lambda: Bitwise(Pmap()), {"steps_per_execution": 1}),
        (Bare, {}),
        (SingleDevice, {"steps_per_execution": 2}),
        (SingleDevice, {"accumulate_grad_batches": 2}),
        (Sharded, {"remat": True}),
        (lambda: Bitwise(Sharded()), {"steps_per_execution": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_values_of_rows_that_interact_train_as_their_mean(strategy, keywords):
    losses, params = run(contrastive, strategy(), **keywords)
    expected, expected_params = by_hand(keywords.get("accumulate_grad_batches", 1))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for ours, theirs in zip(params, expected_params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow_but("Sharded-a mean", "Pmap-a mean", "Pmap-a criterion")
@pytest.mark.parametrize("name", ["a mean", "a sum", "over devices", "a criterion"])
@pytest.mark.parametrize("strategy", [Sharded, Pmap])
def test_scalars_are_of_all_rows(strategy, name):
    """In training and in validation, of batches that the devices do not divide, too."""

    def summed(model, x, y):
        return contrastive(model, x, y).sum() / 16

    def over_devices(model, x, y):
        return jax.lax.pmean(mean_of_contrastive(model, x, y), DATA)

    def criterion(prediction, target):
        return cross_entropy(prediction @ target.T, jnp.arange(len(target))).mean()

    loss = {
        "a mean": {"loss_fn": mean_of_contrastive},
        "a sum": {"loss_fn": summed},
        "over devices": {"loss_fn": over_devices},
        "a criterion": {"loss": criterion},
    }[name]
    trainer = trainer_of(strategy(), **loss)
    losses = trainer.fit(batches(16, 16), max_epochs=2)["loss"]
    np.testing.assert_allclose(losses, by_hand(1)[0], rtol=1e-5)
    for rows in (16, 11) if name != "a sum" else (16,):
        ((x, y),) = batches(rows)
        found = trainer.validate([(x, y)])["val_loss"]
        expected = mean_of_contrastive(trainer.model, x, y)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_short_batches_are_not_padded():
    short = batches(16, 12)
    losses, _ = run(contrastive, SingleDevice(), short)
    expected, _ = run(mean_of_contrastive, SingleDevice(), short)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def mixup(model, x, y, key):
    """Each row beside another one of the batch."""
    other = jax.random.permutation(key, len(x))
    return ((jax.vmap(model)((x + x[other]) / 2) - y) ** 2).sum(axis=1)


@pytest.mark.slow
def test_what_is_drawn_for_a_batch_is_drawn_over_its_rows():
    short = batches(10, 7)
    losses, _ = run(mixup, SingleDevice(), short)
    for strategy in (Sharded(jax.devices()[:4]), FSDP(), Pmap(4)):
        found, _ = run(mixup, strategy, short)
        np.testing.assert_allclose(found, losses, rtol=1e-5)

    def scalar(model, x, y, key):
        return mixup(model, x, y, key).mean()

    np.testing.assert_allclose(run(scalar, SingleDevice(), short)[0], losses, rtol=1e-6)


def test_validation_alone_finds_out(caplog):
    short = batches(16, 12)
    found, expected = (
        trainer_of(SingleDevice(), loss_fn=loss_fn).validate(short)["val_loss"]
        for loss_fn in (contrastive, mean_of_contrastive)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert caplog.text.count("depend on other rows") == 1


@pytest.mark.slow_cases("Bitwise(Sharded({'data': 8}))")
@pytest.mark.parametrize("strategy", [Sharded(), Bitwise(Sharded())], ids=repr)
def test_one_row_for_each_device(strategy):
    losses, _ = run(contrastive, strategy, batches(8))
    expected, _ = run(mean_of_contrastive, SingleDevice(), batches(8))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_criterion_may_mix_rows():
    def criterion(prediction, target):
        return cross_entropy(prediction @ target.T, jnp.arange(len(target)))

    losses = trainer_of(Sharded(), loss=criterion).fit(batches(16), max_epochs=1)
    expected, _ = run(mean_of_contrastive, SingleDevice(), batches(16))
    np.testing.assert_allclose(losses["loss"][0], expected[0], rtol=1e-6)


def test_the_user_is_told_once(caplog):
    run(contrastive, SingleDevice())
    assert caplog.text.count("depend on other rows") == 1
