"""A batch on the host, whole or one process's portion of it, and what is asked of it.

Of one process a batch is a pytree of arrays shaped `(rows, ...)`, but for those in a
`Whole`, which have no rows and come to each process as they are. Of several each has a
`Portion`: a batch's rows are cut into equal blocks, in order, and which of them a
process loads, its devices decide (`RowBlocks`). A block has real rows first, then its
padding.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..distributed import RowBlocks
from ..step import Batch, SingleRowBatch, find_batched_leaves, to_user_batch

Key = tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]]
"""A form as it is compared: the structure, and each leaf's shape without its rows, and
dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Portion:
    """What one process has of a batch."""

    own: Batch
    """The rows of its own blocks. If it has none, one row to fill them with."""
    counts: tuple[int, ...]
    """How many real rows each block has, of all processes."""


def rows_of(batch: Batch) -> int:
    """How many rows a host batch has, of all processes."""
    return sum(counts_of(batch))


def counts_of(batch: Batch) -> tuple[int, ...]:
    """How many real rows each block of a batch has; there is one of a whole batch."""
    if isinstance(batch, Portion):
        return batch.counts
    leaves, treedef = jax.tree.flatten(batch)
    return (len(leaves[find_batched_leaves(treedef).index(True)]),)


def own_of(batch: Batch) -> Batch:
    """What of a batch is here."""
    return batch.own if isinstance(batch, Portion) else batch


def inputs_of(batch: Batch) -> Any:
    """What is predicted from: `x` of an `(x, y)` batch."""
    if isinstance(batch, Portion):
        return Portion(inputs_of(batch.own), batch.counts)
    if isinstance(batch, SingleRowBatch):
        batch = batch.batch
    x = batch[0] if isinstance(batch, tuple) else batch
    has_rows = find_batched_leaves(jax.tree.structure(x))
    if has_rows and not any(has_rows):
        raise ValueError(
            f"predictions are made of {leaf_name(batch, 0)} of a tuple, which is a"
            " jaxdp.Whole, and there is one for each row. Put it with what has rows:"
            " ((x, Whole(array)), y), and the model is given both."
        )
    return x


def read_only(batch: Batch) -> Batch:
    """A host batch as its loader gave it, over memory that can't be written to."""
    leaves, treedef = jax.tree.flatten(batch)
    views = [leaf if isinstance(leaf, jax.Array) else leaf.view() for leaf in leaves]
    for view in views:
        if isinstance(view, np.ndarray):
            view.flags.writeable = False
    return to_user_batch(jax.tree.unflatten(treedef, views))


def key_of(batch: Batch) -> Key:
    """The form of a batch, as it is compared."""
    leaves, treedef = jax.tree.flatten(batch)
    # A bool is the number of axes that rows have.
    pairs = zip(leaves, find_batched_leaves(treedef), strict=True)
    return treedef, tuple([(leaf.shape[rows:], leaf.dtype) for leaf, rows in pairs])


def shapes_of(batch: Batch) -> list[list[int]]:
    """The shape of each leaf without its rows; JSON."""
    return [list(shape) for shape, _ in key_of(batch)[1]]


def leaf_name(batch: Any, index: int) -> str:
    """How a user would write the leaf number `index`: `batch[0]['image']`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(batch)
    return "batch" + jax.tree_util.keystr(paths[index][0])


def taken(iterator: Iterator[Any], most: int) -> tuple[list[Any], Exception | None]:
    """The next so many, or those before the one that raises, and what it raises."""
    items: list[Any] = []
    try:
        items.extend(itertools.islice(iterator, most))
    except Exception as error:
        return items, error
    return items, None


# Rows of arrays, worked on where they are: NumPy's on the host, JAX's on the devices.
# What is done to JAX's arrays is compiled, and nothing waits for the device.


def is_there(batch: Batch) -> bool:
    """Whether any array of a batch is on the devices already."""
    return any([isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)])


def rows_at(leaf: Any, index: np.ndarray) -> Any:
    """The rows of these numbers."""
    return take_there([leaf], index)[0] if isinstance(leaf, jax.Array) else leaf[index]


def stacked(leaves: Sequence[Any]) -> Any:
    """Arrays of one shape as one, along a new first axis."""
    if all([type(leaf) is np.ndarray for leaf in leaves]):
        return np.stack(leaves)
    first = next(leaf for leaf in leaves if isinstance(leaf, jax.Array))
    return _stacked([_beside(leaf, first) for leaf in leaves])


def _beside(leaf: Any, other: jax.Array) -> Any:
    """An array, moved from device to device if it is elsewhere than another one."""
    is_array = isinstance(leaf, jax.Array)
    if is_array and leaf.sharding.device_set != other.sharding.device_set:
        return jax.device_put(leaf, other.sharding)
    return leaf


@jax.jit
def take_there(leaves: list[Any], index: Any) -> list[Any]:
    """The rows of these numbers of arrays on a device, on which they are taken."""
    return [_strong(leaf).at[index].get(mode="promise_in_bounds") for leaf in leaves]


@jax.jit
def _stacked(leaves: list[Any]) -> Any:
    return jnp.stack([_strong(leaf) for leaf in leaves])


def _strong(leaf: Any) -> Any:
    """A leaf of a strong type, as NumPy's are: others have results of other dtypes."""
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def real_rows(leaf: Any, batch: Batch, blocks: RowBlocks, own: bool) -> np.ndarray:
    """Values of the rows of a padded `batch` that are no padding, on the host.

    Args:
        leaf: the values, which several processes may share.
        own: whether those of this process's blocks are enough.
    """
    if not isinstance(batch, Portion):
        return np.asarray(leaf)[: counts_of(batch)[0]]
    per_block = len(leaf) // blocks.count
    if own and not leaf.is_fully_replicated:
        shards = {s.index[0].start or 0: s.data for s in leaf.addressable_shards}
        whole = np.concatenate([np.asarray(shards[at]) for at in sorted(shards)])
        places = zip(range(0, len(whole), per_block), blocks.local, strict=True)
    else:
        whole = np.asarray(leaf)
        numbers = blocks.local if own else range(blocks.count)
        places = [(block * per_block, block) for block in numbers]
    return np.concatenate([whole[at : at + batch.counts[n]] for at, n in places])
