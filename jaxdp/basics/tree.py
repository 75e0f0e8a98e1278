"""Names and sizes of the leaves of a pytree, and its nodes of a class."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

_ROOT: Final = re.compile(r"^\['([A-Za-z_]\w*)'\]")


def leaf_path(path: Sequence[Any]) -> str:
    """Formats a JAX key path as users write it: `layers[0].weight`.

    Models in a dict have paths such as `generator.weight`.
    """
    return plain_path(stored_path(path))


def stored_path(path: Sequence[Any]) -> str:
    """Formats a JAX key path as in checkpoints: `layers[0].weight`, `['a'].weight`."""
    return jax.tree_util.keystr(tuple(path)).removeprefix(".")


def plain_path(name: str) -> str:
    """Turns a `stored_path` into a `leaf_path`."""
    return _ROOT.sub(r"\1", name)


def to_dotted(name: str) -> str:
    """Rewrites a path or pattern with dots alone: `layers[0].w` as `layers.0.w`."""
    name = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", plain_path(name))
    return name.lstrip(".")


@functools.lru_cache(maxsize=2**16)
def matches(name: str, pattern: str) -> bool:
    """Returns True if a pattern matches a path such as `layers[0].weight`.

    `*` stands for anything, in brackets for anything without dots, and `?` for one
    character. `layers[0]` and `layers.0` are the same, and `stacked`, which the blocks
    of a `Stack` are in, may be left out.
    """
    # A star in brackets becomes "\0", as it means less than other stars.
    pieces = re.split(r"([*?\x00])", to_dotted(pattern.replace("[*]", "[\0]")))
    means = {"*": ".*", "?": ".", "\0": "[^.]+"}
    regex = "".join(means.get(piece) or re.escape(piece) for piece in pieces)
    full = to_dotted(name)
    short = re.sub(r"(^|\.)stacked(?=\.|$)", "", full).lstrip(".")
    return any(re.fullmatch(regex, each) for each in (full, short))


def get_node(tree: PyTree, path: Sequence[Any]) -> Any:
    """Returns the node of `tree` at a JAX key path."""
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            tree = getattr(tree, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            tree = tree[key.idx]
        else:
            tree = tree[key.key]
    return tree


def is_key(leaf: Any) -> bool:
    """Returns True for an array, or its shape, of typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def nbytes(leaf: Any, shape: Sequence[int] | None = None) -> int:
    """Returns the bytes of an array, or of one of its dtype and another shape."""
    size = math.prod(leaf.shape if shape is None else shape)
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return size * data.dtype.itemsize * math.prod(data.shape[leaf.ndim :])
    return size * np.dtype(leaf.dtype).itemsize


def describe_difference(old: PyTree, new: PyTree) -> str:
    """Returns how the structure of `new` differs from that of `old`, in a clause."""
    names, others = (
        [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (old, new)
    )
    missing = [name or "the only leaf" for name in names if name not in {*others}]
    added = [name or "the only leaf" for name in others if name not in {*names}]
    parts = [f"{', '.join(missing[:3])} is missing"] if missing else []
    parts += [f"{', '.join(added[:3])} is new"] if added else []
    if not parts:
        parts = [f"a {type(old).__name__} or something in it is of another class"]
    return " and ".join(parts)


def find_nodes(kind: type, tree: PyTree) -> list[Any]:
    """Returns the outermost nodes of a class, in order."""
    is_kind = lambda node: isinstance(node, kind)  # noqa: E731
    return [*filter(is_kind, jax.tree.leaves(tree, is_leaf=is_kind))]


def map_nodes(
    kind: type,
    function: Callable[[Any], Any],
    tree: PyTree,
    others: Callable[[Any], Any] = lambda leaf: leaf,
) -> PyTree:
    """Applies `function` to the outermost nodes of a class, `others` to the rest."""
    return jax.tree.map(
        lambda node: function(node) if isinstance(node, kind) else others(node),
        tree,
        is_leaf=lambda node: isinstance(node, kind),
    )
