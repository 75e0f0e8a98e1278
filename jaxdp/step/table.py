"""Batches as the numbers of rows of arrays that are kept on the devices."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .state import Group
from .whole import with_rows

TABLE: Final = "table"
"""What the path of a leaf of a table begins with, in what is without rows."""


@jax.tree_util.register_pytree_with_keys_class
class Table:
    """Arrays of equally many rows, a tree as batches are; a `Whole` in it has none.

    What a step is given beside `Picked` rows, in the place of what has no rows.
    """

    def __init__(self, tree: PyTree):
        self.tree = tree
        self.placed: dict[Any, Any] = {}
        """Leaves on devices, by what the engine knows them by."""

    @functools.cached_property
    def key(self) -> Hashable:
        """A `Key` of its batches, and its number of rows."""
        leaves, treedef = jax.tree.flatten(self.tree)
        rows = with_rows(treedef)
        pairs = list(zip(leaves, rows, strict=True))
        forms = tuple([(leaf.shape[axes:], leaf.dtype) for leaf, axes in pairs])
        return treedef, forms, len(leaves[rows.index(True)])

    @functools.cached_property
    def row_bytes(self) -> int:
        leaves = jax.tree.leaves(self.tree)
        return sum(leaf.nbytes for leaf in leaves) // self.key[2]  # pyright: ignore

    @functools.cached_property
    def first(self) -> "Table":
        """What of it predictions are made from."""
        return Table(self.tree[0]) if isinstance(self.tree, tuple) else self

    def rows(self, index: np.ndarray, tree: PyTree = None) -> PyTree:
        """Rows on the host, of all of it or of a part."""
        leaves, treedef = jax.tree.flatten(self.tree if tree is None else tree)
        pairs = zip(leaves, with_rows(treedef), strict=True)
        return treedef.unflatten(leaf[index] if rows else leaf for leaf, rows in pairs)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any], None]:
        return ((jax.tree_util.GetAttrKey(TABLE), self.tree),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[PyTree]) -> "Table":
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Picked:
    """Rows of a table, by their numbers: what travels in their place.

    To JAX it is the numbers alone.
    """

    def __init__(self, index: Any, table: Any = None):
        self.index, self.table = index, table

    def rows(self) -> PyTree:
        """The batch on the host."""
        return self.table.rows(self.index)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any], None]:
        return ((jax.tree_util.GetAttrKey("rows"), self.index),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "Picked":
        return cls(*children)


def opening(function: Callable[..., Any], groups: Sequence[Group]) -> Callable:
    """A step that first takes the rows that its `groups`, the last argument, name."""
    if not any(isinstance(group.batch, Picked) for group in groups):
        return function

    def opened(*given: Any) -> Any:
        return function(*given[:-1], list(map(_opened, given[-1])))

    return opened


def shapes_of_rows(group: Group) -> Group:
    """A group, or the shapes of what it names rows of."""
    return jax.eval_shape(_opened, group) if isinstance(group.batch, Picked) else group


def _opened(group: Group) -> Group:
    """The same with its rows, and with what has none for each micro-batch."""
    if not isinstance(group.batch, Picked):
        return group
    index, micros = group.batch.index, len(group.counts)
    leaves, treedef = jax.tree.flatten(group.whole.tree)
    rows = with_rows(treedef)
    batch, whole = [], []
    with jax.named_scope("rows"):
        for leaf, has_rows in zip(map(jnp.asarray, leaves), rows, strict=True):
            taken = leaf.at[index].get(mode="promise_in_bounds") if has_rows else None
            batch.append(taken)
            shape = (micros, *leaf.shape)
            whole.append(None if has_rows else jnp.broadcast_to(leaf, shape))
    without_rows = None if all(rows) else treedef.unflatten(whole)
    return Group(treedef.unflatten(batch), group.counts, without_rows)
