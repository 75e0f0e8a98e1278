"""Names of the leaves of a pytree."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import PyTree


def leaf_path(path: Sequence[Any]) -> str:
    """A JAX key path as a user writes it: `layers[0].weight`."""
    return jax.tree_util.keystr(tuple(path)).removeprefix(".")


def at_path(tree: PyTree, path: Sequence[Any]) -> Any:
    """The node of `tree` that a JAX key path leads to."""
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            tree = getattr(tree, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            tree = tree[key.idx]
        else:
            tree = tree[key.key]
    return tree
