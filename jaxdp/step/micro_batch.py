"""The batches of a step: groups of stacked micro-batches, and one of these.

`_accumulate_gradients` in `step_functions.py` sums over them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from .whole import merge_leaves, to_user_batch

Batch = PyTree
"""Leaves on the host shaped `(rows, ...)`, except those in a `Whole`."""


class Group(NamedTuple):
    """Micro-batches of one shape, stacked."""

    batch: PyTree
    """Leaves `(micro_batches, rows, ...)`."""
    counts: Any
    """int32 `(micro_batches, row_blocks)`: real rows in each equal block of a
    micro-batch's rows. One process loads a block: its real rows come first, then its
    padding."""
    whole: PyTree = None
    """Leaves without rows, `(micro_batches, ...)`; they are None in `batch`.
    See `whole.merge_leaves`."""


class MicroBatch(NamedTuple):
    """One micro-batch inside the step, and the number of real rows before it."""

    batch: PyTree
    counts: Int[Array, " row_blocks"]
    whole: PyTree
    rows_before: Int[Array, ""]

    def to_user_batch(self) -> PyTree:
        """Returns the batch as the loader yielded it, with its padding."""
        return to_user_batch(merge_leaves(self.batch, self.whole))


def get_only_micro_batch(group: Group) -> MicroBatch:
    """Returns the micro-batch of a group that consists of one."""
    only = jax.tree.map(lambda x: x[0], group)
    return MicroBatch(only.batch, only.counts, only.whole, jnp.int32(0))
