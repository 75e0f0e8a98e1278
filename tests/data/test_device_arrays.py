"""Batches of JAX's arrays are never fetched to the host."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl
from jax.sharding import NamedSharding, PartitionSpec
from toys import On, assert_equal_leaves, linear, on_one_device, quiet, rows

from jaxdp import FSDP, Arrays, Bitwise, Sharded, SingleDevice, Whole

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


def batches(*arrays, size=4, place=lambda array: array):
    """Returns batches of rows in their order."""
    return [
        tuple(place(array[start : start + size]) for array in arrays)
        for start in range(0, len(arrays[0]), size)
    ]


def trained(loader, strategy, **options):
    trainer = on_one_device(strategy=strategy, **options)
    trainer.fit(loader, loader, max_epochs=2)
    return trainer


def split(array):
    """Shards an array over four devices, if they divide it."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data" if len(array) % 4 == 0 else None)
    return jax.device_put(array, NamedSharding(mesh, spec))


ACCUMULATES = {"accumulate_grad_batches": 4}
CASES = {
    "one device": (SingleDevice, jnp.asarray, {}),
    "another device": (SingleDevice, lambda x: jax.device_put(x, jax.devices()[1]), {}),
    "split by JAX": (lambda: Sharded(4), jnp.asarray, {}),
    "split already": (lambda: Sharded(4), split, {}),
    "half of a batch": (lambda: FSDP(2), lambda x: x if x.ndim > 1 else split(x), {}),
    "several batches": (lambda: Sharded(2), jnp.asarray, ACCUMULATES),
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
        predicted = on_devices.predict(there)
    assert_equal_leaves(on_devices.state, on_host.state)
    assert_equal_leaves(on_devices.history, on_host.history)
    assert_equal_leaves(predicted, on_host.predict(batches(X, Y)))
    assert all(not array.is_deleted() for array in arrays)


def test_hooks_get_device_batches_and_weak_types_become_strong():
    seen = []
    sees = On(on_train_batch_start=lambda trainer, batch, _: seen.append(batch))

    def loss_fn(model, x, time):
        return jax.vmap(model)(x).sum(1) * time.astype(jnp.float16)

    def step(batch):
        trainer = quiet(linear(2, 2), loss_fn=loss_fn, callbacks=[sees])
        trainer.fit([batch])
        return trainer.state

    x, time = np.full((2, 2), 0.5, np.float32), np.float32(2.0)
    weak = jnp.full((2, 2), 0.5), Whole(jnp.asarray(2.0))
    assert weak[0].weak_type and weak[1].array.weak_type
    with unread(weak):
        state = step(weak)
    assert_equal_leaves(state, step((x, Whole(time))))
    assert seen[0][0] is weak[0]


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_rows_of_arrays_on_a_mesh_are_selected_there(kind):
    axes = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((8,), ("data",), axis_types=axes)
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    loader = Arrays(split, x[:, 0], batch_size=8, shuffle=False)
    np.testing.assert_array_equal(np.concatenate([b[0] for b in loader]), x)
