"""Batches of JAX's arrays are never fetched to the host."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl
from jax.sharding import NamedSharding, PartitionSpec
from toys import Mlp, rows

from jaxdp import FSDP, Arrays, Bitwise, Callback, Sharded, SingleDevice, Trainer, Whole

X, Y = rows(22)  # the last batch is short


@contextlib.contextmanager
def unread(*trees):
    """Fails if a value of these arrays is fetched."""
    arrays = {id(leaf) for leaf in jax.tree.leaves(trees)}
    on_host = ArrayImpl._value

    def value(array):
        assert id(array) not in arrays, "an array of the loader came to the host"
        return on_host.fget(array)

    ArrayImpl._value = property(value)
    try:
        yield
    finally:
        ArrayImpl._value = on_host


class Batches:
    """Yields the batches in each epoch."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def batches(*arrays, size=4, place=lambda array: array):
    """Returns batches of rows in their order."""
    return [
        tuple(place(array[start : start + size]) for array in arrays)
        for start in range(0, len(arrays[0]), size)
    ]


def trained(loader, strategy, **options):
    trainer = Trainer(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        strategy=strategy,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(Batches(loader), Batches(loader), max_epochs=2)
    return trainer


def same(one, other):
    for ours, theirs in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def split(array):
    """Shards an array over four devices, if they divide it."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data" if len(array) % 4 == 0 else None)
    return jax.device_put(array, NamedSharding(mesh, spec))


CASES = {
    "one device": (SingleDevice, jnp.asarray, {}),
    "another device": (SingleDevice, lambda x: jax.device_put(x, jax.devices()[1]), {}),
    "split by JAX": (lambda: Sharded(4), jnp.asarray, {}),
    "split already": (lambda: Sharded(4), split, {}),
    "half of a batch": (lambda: FSDP(2), lambda x: x if x.ndim > 1 else split(x), {}),
    "several batches": (
        lambda: Sharded(2),
        jnp.asarray,
        {"accumulate_grad_batches": 4},
    ),
    "several steps": (SingleDevice, jnp.asarray, {"steps_per_execution": 3}),
    "bitwise": (lambda: Bitwise(Sharded(2)), jnp.asarray, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_device_batches_have_the_bits_of_host_batches_and_are_not_fetched(case):
    strategy, place, options = CASES[case]
    on_host = trained(batches(X, Y), strategy(), **options)
    there = batches(X, Y, place=place)
    arrays = [leaf for leaf in jax.tree.leaves(there) if isinstance(leaf, jax.Array)]
    with unread(arrays):
        on_devices = trained(there, strategy(), **options)
        predicted = on_devices.predict(Batches(there))
    same(on_devices.state, on_host.state)
    same(on_devices.history, on_host.history)
    same(predicted, on_host.predict(Batches(batches(X, Y))))
    assert all(not array.is_deleted() for array in arrays)


def test_hooks_get_device_batches_and_weak_types_become_strong():
    seen = []

    class Sees(Callback):
        def on_train_batch_start(self, trainer, batch, batch_idx):
            seen.append(batch)

    def step(batch):
        model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
        trainer = Trainer(
            model,
            loss_fn=lambda m, x, t: jax.vmap(m)(x).sum(1) * t.astype(jnp.float16),
            callbacks=[Sees()],
        )
        trainer.fit([batch])
        return trainer.state

    x, time = np.full((2, 2), 0.5, np.float32), np.float32(2.0)
    weak = jnp.full((2, 2), 0.5), Whole(jnp.asarray(2.0))
    assert weak[0].weak_type and weak[1].array.weak_type
    with unread(weak):
        state = step(weak)
    same(state, step((x, Whole(time))))
    assert seen[0][0] is weak[0]


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_rows_of_arrays_on_a_mesh_are_selected_there(kind):
    axes = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((8,), ("data",), axis_types=axes)
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    loader = Arrays(split, x[:, 0], batch_size=8, shuffle=False)
    np.testing.assert_array_equal(np.concatenate([b[0] for b in loader]), x)
