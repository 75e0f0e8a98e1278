"""Leaves of a batch without rows, and stand-ins for leaves that NumPy can't hold."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree


class Whole(eqx.Module):
    """An array without a batch dimension, which all rows of a batch share.

        batch = (y0, Whole(times)), y

    Use it for the times of a neural ODE, class weights or a graph. Each device gets all
    of it, unpadded. The loss gets the array itself, and so does the model, beside one
    row of each other array. A batch of nothing else counts as one row.

    An array may have any shape, including `()`. Each new shape means one more
    compilation.
    """

    array: PyTree
    """An array, or a tree of arrays, which are converted like the rest of a batch."""


class KeyData(eqx.Module):
    """The data of typed PRNG keys in a batch: NumPy has no arrays of keys."""

    data: Any
    """uint32, with one axis more than the keys."""
    impl: Any = eqx.field(static=True)


class SingleRowBatch(eqx.Module):
    """A batch of one row: it has only `Whole`s, or nothing."""

    batch: PyTree
    row: Any
    """`(1,)`, the row that is counted."""


NOTHING = SingleRowBatch((), np.zeros(1, bool))
"""The batch of a loss that takes no batch."""


def to_user_batch(batch: PyTree) -> PyTree:
    """Returns a batch as the loader yielded it; steps and callbacks see this form."""

    def is_ours(node: Any) -> bool:
        return isinstance(node, KeyData | SingleRowBatch)

    def unwrap(node: Any) -> Any:
        if isinstance(node, SingleRowBatch):
            return to_user_batch(node.batch)
        if isinstance(node, KeyData):
            return jax.random.wrap_key_data(node.data, impl=node.impl)
        return node

    return jax.tree.map(unwrap, batch, is_leaf=is_ours)


def is_whole(node: Any) -> bool:
    """Returns True if a node of a batch is a `Whole`."""
    return isinstance(node, Whole)


def unwrap_whole(tree: PyTree) -> PyTree:
    """Returns a batch, or part of one, with the array in the place of each `Whole`."""
    return jax.tree.map(
        lambda node: node.array if is_whole(node) else node, tree, is_leaf=is_whole
    )


def map_row_leaves(function: Callable[[Any], Any], batch: PyTree) -> PyTree:
    """Applies `function` to each leaf that has rows; each `Whole` stays as it is."""
    return jax.tree.map(
        lambda node: node if is_whole(node) else function(node), batch, is_leaf=is_whole
    )


@functools.lru_cache
def find_batched_leaves(treedef: Any) -> tuple[bool, ...]:
    """Returns for each leaf of a batch structure whether it has rows."""
    places = treedef.unflatten(range(treedef.num_leaves))
    without = {*jax.tree.leaves(map_row_leaves(lambda _: None, places))}
    return tuple([place not in without for place in range(treedef.num_leaves)])


def merge_leaves(batch: PyTree, whole: PyTree) -> PyTree:
    """Merges the leaves with rows and those without, which a `Group` keeps apart.

    Args:
        batch: has None in the place of the leaves in `whole`.
        whole: has None in the place of all other leaves; None if it has no leaves.
    """
    return batch if whole is None else eqx.combine(batch, whole)
