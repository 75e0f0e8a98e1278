"""Placement of arrays on devices, and their way back to the host.

`DataParallel` (`base.py`) decides which device gets what.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..basics.host_memory import HOST, move_to_device
from ..basics.tree import is_key
from ..distributed import RowBlocks, make_global_array
from ..step import Group


def place_copy(tree: PyTree, shardings: PyTree) -> PyTree:
    """Copies every leaf of `tree` to new buffers, laid out by `shardings`.

    `jax.device_put` alone may hand back the caller's own buffer, which donation would
    then delete, or one that is in the caller's NumPy array.
    """
    leaves, treedef = jax.tree.flatten(tree)
    layouts = treedef.flatten_up_to(shardings)
    direct = [i for i, layout in enumerate(layouts) if layout.memory_kind != HOST]
    copied = _copy_to_devices([leaves[i] for i in direct], [layouts[i] for i in direct])

    placed = dict(zip(direct, copied, strict=True))
    for i, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
        if i not in placed:  # one by one: all of them may not fit on the devices
            moved = make_global_array(
                move_to_device(leaf), layout.with_memory_kind("device")
            )
            placed[i] = _identity(layout)(moved)
    return treedef.unflatten(placed[i] for i in range(len(leaves)))


def _copy_to_devices(leaves: list[Any], layouts: list[Any]) -> list[Any]:
    if all(layout.is_fully_addressable for layout in layouts):
        # This needs no program: compiling one for hundreds of leaves takes long. JAX
        # obeys `may_alias=False` only for an array that already has the layout.
        moved = jax.device_put(leaves, layouts)
        return jax.device_put(moved, layouts, may_alias=False)
    moved = jax.tree.map(make_global_array, leaves, layouts)
    # JAX caches the program of a module-level function for the next trainer.
    return jax.jit(_copy_leaves, out_shardings=layouts)(moved)


def _copy_leaves(leaves: list[Any]) -> list[Any]:
    return [jnp.copy(leaf) for leaf in leaves]


def put_rows(
    groups: Sequence[Group],
    blocks: RowBlocks,
    shardings: Callable[[Group], Group],
    *,
    split: bool,
) -> list[Group]:
    """Makes global arrays from batches; each process has the rows of its blocks.

    Without `split`, every process has all rows. `shardings` maps the shapes of the
    global group to its shardings.
    """
    blocks = blocks if split else RowBlocks()

    def put_leaf(own: Any, shape: Any, sharding: Any) -> Any:
        size = shape.shape[1] // blocks.count

        def get_block(index: Any) -> Any:
            micros, rows, *others = index
            start, stop, _ = rows.indices(shape.shape[1])
            if blocks.count > 1:
                local_start = blocks.local.index(start // size) * size + start % size
                start, stop = local_start, local_start + stop - start
            return own[(micros, slice(start, stop), *others)]

        return jax.make_array_from_callback(shape.shape, sharding, get_block)

    placed = []
    for group in groups:
        shapes = blocks.make_global_shapes(group) if split else group
        layouts = shardings(shapes).batch
        batch = jax.tree.map(put_leaf, group.batch, shapes.batch, layouts)
        placed.append(group._replace(batch=batch))
    return placed


def replicate(tree: PyTree) -> PyTree:
    """Replicates arrays that are split between processes over all their devices.

    All processes must call it. Other arrays are returned unchanged.
    """

    def replicate_leaf(leaf: Any) -> Any:
        is_addressable = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        if is_addressable or leaf.is_fully_replicated:
            return leaf
        sharding: Any = leaf.sharding
        return _identity(NamedSharding(sharding.mesh, PartitionSpec()))(leaf)

    return jax.tree.map(replicate_leaf, tree)


@functools.lru_cache
def _identity(sharding: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x, out_shardings=sharding)


def gather_arrays(tree: PyTree) -> PyTree:
    """Gathers placed arrays into new full arrays on the default device.

    If anything is split between processes, all of them must call it.
    """
    return jax.tree.map(jnp.asarray, fetch(tree))


def fetch(tree: PyTree) -> PyTree:
    """Gathers placed arrays into full NumPy arrays; returns typed PRNG keys unchanged.

    If anything is split between processes, all of them must call it.
    """

    def fetch_leaf(leaf: Any) -> Any:
        if is_key(leaf):
            data = fetch_leaf(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        # np.array waits for the device, and copies: later steps overwrite the buffer.
        return np.array(replicate(leaf))

    return jax.tree.map(fetch_leaf, tree)
