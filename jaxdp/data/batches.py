"""A batch on the host, of one process or of several, and its properties.

The batch of one process is a pytree of arrays shaped `(rows, ...)`. Arrays in a `Whole`
have no rows and come to each process unchanged. With several processes, each has a
`LocalBatch`. The rows of the global batch are cut into equal blocks, in order. The
devices of a process decide which blocks it loads (`RowBlocks`). A block has real rows
first, then padding.
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

SpecKey = tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]]
"""A batch spec to compare: the structure, and each leaf's shape without rows and its
dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocalBatch:
    """The part of a global batch in one process, if there are several processes."""

    batch: Batch
    """The rows of its own blocks. If it has none, one row to fill them with."""
    counts: tuple[int, ...]
    """The number of real rows in each block, of all processes."""


def count_rows(batch: Batch) -> int:
    """Returns the number of rows in the global batch."""
    return sum(count_rows_by_block(batch))


def count_rows_by_block(batch: Batch) -> tuple[int, ...]:
    """Returns the number of real rows in each block; one process has one block."""
    if isinstance(batch, LocalBatch):
        return batch.counts
    leaves, treedef = jax.tree.flatten(batch)
    return (len(leaves[find_batched_leaves(treedef).index(True)]),)


def get_local(batch: Batch) -> Batch:
    """Returns the rows of a batch that this process has."""
    return batch.batch if isinstance(batch, LocalBatch) else batch


def get_inputs(batch: Batch) -> Any:
    """Returns the inputs of a prediction: `x` of an `(x, y)` batch."""
    if isinstance(batch, LocalBatch):
        return LocalBatch(get_inputs(batch.batch), batch.counts)
    if isinstance(batch, SingleRowBatch):
        batch = batch.batch
    x = batch[0] if isinstance(batch, tuple) else batch
    has_rows = find_batched_leaves(jax.tree.structure(x))
    if has_rows and not any(has_rows):
        raise ValueError(
            f"predictions are made of {leaf_name(batch, 0)}, which is a jaxdp.Whole and"
            " has no rows. Put it beside the inputs: ((x, Whole(array)), y)."
        )
    return x


def make_read_only(batch: Batch) -> Batch:
    """Returns a host batch as its loader yielded it, in read-only memory."""
    leaves, treedef = jax.tree.flatten(batch)
    views = [leaf if isinstance(leaf, jax.Array) else leaf.view() for leaf in leaves]
    for view in views:
        if isinstance(view, np.ndarray):
            view.flags.writeable = False
    return to_user_batch(jax.tree.unflatten(treedef, views))


def make_spec_key(batch: Batch) -> SpecKey:
    """Returns the spec of a batch, for comparisons."""
    leaves, treedef = jax.tree.flatten(batch)
    # Each leaf has a flag: the number of axes of rows.
    pairs = zip(leaves, find_batched_leaves(treedef), strict=True)
    return treedef, tuple([(leaf.shape[rows:], leaf.dtype) for leaf, rows in pairs])


def format_key(key: SpecKey) -> str:
    """Returns a batch spec as the text that names it in checkpoints."""
    return " ".join(f"{dtype}{list(shape)}" for shape, dtype in key[1])


def leaf_name(batch: Any, index: int) -> str:
    """Returns a leaf as a user writes it: `batch[0]['image']`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(batch)
    return "batch" + jax.tree_util.keystr(paths[index][0])


def take_until_error(
    iterator: Iterator[Any], count: int
) -> tuple[list[Any], Exception | None]:
    """Returns the next `count` items, or those before an error, and the error."""
    items: list[Any] = []
    try:
        items.extend(itertools.islice(iterator, count))
    except Exception as error:
        return items, error
    return items, None


# Operations on rows run where the arrays are. NumPy's run on the host. JAX's are
# compiled, and run on their devices. They do not wait for the device.


def select_rows(leaf: Any, index: np.ndarray) -> Any:
    """Returns the rows with these numbers."""
    if isinstance(leaf, jax.Array):
        return select_on_device([leaf], index)[0]
    return leaf[index]


@jax.jit
def select_on_device(leaves: list[Any], index: Any) -> list[Any]:
    """Returns the rows with these numbers of arrays on a device."""
    return [
        _strengthen(leaf).at[index].get(mode="promise_in_bounds") for leaf in leaves
    ]


def stack_leaves(leaves: Sequence[Any]) -> Any:
    """Returns arrays of one shape as one, along a new first axis."""
    if all([type(leaf) is np.ndarray for leaf in leaves]):
        return np.stack(leaves)
    first = next(leaf for leaf in leaves if isinstance(leaf, jax.Array))
    devices = first.sharding.device_set
    moved = [
        jax.device_put(leaf, first.sharding)
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set != devices
        else leaf
        for leaf in leaves
    ]
    return _stack_on_device(moved)


@jax.jit
def _stack_on_device(leaves: list[Any]) -> Any:
    return jnp.stack([_strengthen(leaf) for leaf in leaves])


def _strengthen(leaf: Any) -> Any:
    """Returns a strongly typed leaf, like NumPy's; weak types lead to other dtypes."""
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def fetch_real_rows(
    leaf: Any, batch: Batch, blocks: RowBlocks, *, local: bool
) -> np.ndarray:
    """Returns the values of the real rows of a padded `batch`, on the host.

    Args:
        leaf: the values of all rows, which may be sharded over processes.
        local: whether the rows of this process's blocks are enough.
    """
    if not isinstance(batch, LocalBatch):
        return np.asarray(leaf)[: count_rows_by_block(batch)[0]]
    size, counts = len(leaf) // blocks.count, batch.counts
    numbers = blocks.local if local else range(blocks.count)
    if local and not leaf.is_fully_replicated:
        shards = {s.index[0].start or 0: s.data for s in leaf.addressable_shards}
        rows = np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
        starts: Any = range(0, len(rows), size)
    else:
        rows = np.asarray(leaf)
        # The rows of a batch that is computed in full have no padding between them.
        is_full = len(leaf) == sum(counts)
        stops = [0, *itertools.accumulate(counts)] if is_full else None
        starts = [stops[n] if stops else n * size for n in numbers]
    pairs = zip(starts, numbers, strict=True)
    return np.concatenate([rows[start : start + counts[n]] for start, n in pairs])
