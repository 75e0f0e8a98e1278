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


def distances(model, x, y, others):
    u, v = jax.vmap(model)(x), jax.vmap(model)(y)
    return jax.nn.relu(((u - v) ** 2).sum(1) - ((u - others(v)) ** 2).sum(1) + 0.5)


def fixed_order(x):
    return np.random.default_rng(5).permutation(len(x))


MOVED = {
    "rolled": lambda v: jnp.roll(v, 1, axis=0),
    "turned": lambda v: v[::-1],
    "the first behind": lambda v: jnp.concatenate([v[1:], v[:1]]),
    "permuted": lambda v: v[fixed_order(v)],
    "by a fixed key": lambda v: v[jax.random.permutation(KEY, len(v))],
    "shuffled": lambda v: jax.random.permutation(KEY, v),
    "by halves": lambda v: (v + v[jnp.arange(len(v)) // 2]) / 2,
    "the first": lambda v: jnp.ones_like(v) * v[0, 0],
    "so far": lambda v: jnp.cumsum(v, axis=0),
    "by order": lambda v: v[jnp.argsort(v[:, 0])],
    "row after row": lambda v: jax.lax.scan(
        lambda last, row: (row, last), jnp.zeros(WIDTH), v
    )[1],
    "weighted by number": lambda v: v * jnp.arange(len(v))[:, None],
    "mean of the picked": lambda v: jax.lax.fori_loop(
        0, len(v), lambda i, total: total + v[i][None] / len(v), jnp.zeros((1, WIDTH))
    ),
}
FREE = {
    "itself": lambda v: v,
    "there and back": lambda v: jnp.roll(jnp.roll(v, 1, axis=0), -1, axis=0),
    "in order": lambda v: v[jnp.arange(len(v))],
    "parts": lambda v: jax.lax.map(jnp.sin, v, batch_size=2),
    "features": lambda v: v[:, ::-1] + jnp.roll(v, 1, axis=1),
}


@pytest.mark.slow_but("rolled")
@pytest.mark.parametrize("form", [*MOVED, *FREE])
def test_rows_that_are_moved(form, caplog):
    """In training and validation, of a batch that the devices do not divide, too."""
    others = {**MOVED, **FREE}[form]

    def loss_fn(model, x, y):
        return distances(model, x, y, others)

    def mean(model, x, y):
        return loss_fn(model, x, y).mean()

    data = batches(16, 11)
    whole = trainer_of(SingleDevice(), loss_fn=mean).fit(data, data, max_epochs=2)
    for strategy in (SingleDevice(), Sharded()):
        caplog.clear()
        history = trainer_of(strategy, loss_fn=loss_fn).fit(data, data, max_epochs=2)
        for name in "loss", "val_loss":
            np.testing.assert_allclose(history[name], whole[name], 1e-6, 1e-6)
        assert caplog.text.count("depend on other rows") == (form in MOVED)


@pytest.mark.slow_but("permuted")
@pytest.mark.parametrize("form", ["permuted", "noise"])
def test_the_key_of_one_row_is_not_for_others(form):
    def loss_fn(model, x, y, keys):
        if form == "permuted":
            other = jax.random.permutation(keys[0], len(x))
            return distances(model, x, y, lambda v: v[other])
        noise = jax.random.normal(keys[-1], x.shape)
        return distances(model, x, y, lambda v: v + noise)

    def mean(model, x, y, keys):
        return loss_fn(model, x, y, keys).mean()

    data = batches(16, 11)
    expected, _ = run(mean, SingleDevice(), data)
    for strategy in (SingleDevice(), Sharded()):
        losses, _ = run(loss_fn, strategy, data)
        np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    carried: eqx.nn.StateIndex

    def __init__(self, rows, key):
        self.cell = eqx.nn.GRUCell(1, WIDTH, key=key)
        self.carried = eqx.nn.StateIndex(jnp.zeros((rows, WIDTH)))


def recurrent(model, x, y, state):
    def step(h, value):
        return jax.vmap(model.cell)(value[:, None], h), h.mean(axis=1)

    h, guesses = jax.lax.scan(step, state.get(model.carried), x.T)
    return ((guesses.T - y) ** 2).mean(axis=1), state.set(model.carried, h)


@pytest.mark.slow_but("Sharded({'data': 8})")
@pytest.mark.parametrize("strategy", [Sharded(), FSDP(), Pmap()], ids=repr)
def test_a_state_of_rows_is_carried_over_batches(strategy):
    """Validation starts with it, as it does on one device, and leaves it alone."""
    losses = []
    for each in (SingleDevice(), strategy):
        model, state = eqx.nn.make_with_state(Recurrent)(16, KEY)
        trainer = Trainer(
            model, loss_fn=recurrent, state=state, strategy=each,
            enable_progress_bar=False,
        )  # fmt: skip
        history = trainer.fit(batches(16, 16), batches(16), max_epochs=2)
        before = trainer.model_state.get(trainer.model.carried)
        again = trainer.validate(batches(16))["val_loss"]
        losses.append([*history["loss"], *history["val_loss"], again])
        after = trainer.model_state.get(trainer.model.carried)
        np.testing.assert_array_equal(before, after)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


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
