"""Names and sizes of the leaves of a pytree, and its nodes of a class."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
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


_IN_PATTERNS: Final = {
    ".": r"\.(?:stacked\.)?",
    "?": "[^.]",
    "*": "([^.]*)",
    "**": "(.*)",
    "**.": r"(?:(.*)\.)?",
}
"""The regular expression of each piece of a pattern that is no text."""


@functools.lru_cache(maxsize=2**12)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern for paths `to_dotted`. Each star is a group.

    As in file names, `*` and `?` stand for any text and any character of one part of a
    path, and `**` for any number of parts. `layers[0]` and `layers.0` are the same, and
    `stacked`, which the blocks of a `Stack` are in, may be left out.
    """
    pieces = re.split(r"(\*\*\.?|[*?.])", to_dotted(pattern))
    regex = "".join(_IN_PATTERNS.get(piece) or re.escape(piece) for piece in pieces)
    return re.compile(rf"(?:stacked\.)?{regex}(?:\.stacked)?")


def matches(name: str, pattern: str) -> bool:
    """Returns True if a pattern matches a path such as `layers[0].weight`."""
    return compile_pattern(pattern).fullmatch(to_dotted(name)) is not None


def find_matches(
    argument: str,
    patterns: Iterable[str],
    names: Iterable[str],
    kind: str,
    *,
    anywhere: bool = False,
) -> list[str]:
    """Returns the paths that match a pattern, in the order of the patterns.

    With `anywhere`, a pattern without dots and brackets is for the last part of a path.

    Raises:
        ValueError: for a pattern that matches none of the `names`, each a `kind`.
    """
    names, matched = [*names], dict[str, None]()
    for pattern in patterns:
        prefix = "**." if anywhere and not {*".["} & {*pattern} else ""
        matching = [name for name in names if matches(name, prefix + pattern)]
        if not matching:
            raise ValueError(
                f"{argument}: {pattern!r} matches no {kind}; there are"
                f" {format_paths(names)}. `*` is one part of a path, `**` any number."
            )
        matched |= dict.fromkeys(matching)
    return [*matched]


def format_paths(names: Iterable[str]) -> str:
    """Lists up to 20 paths; those that differ only in numbers become one."""
    rows = [row[0] or "the model" for row, _ in group_rows((name,) for name in names)]
    return ", ".join([*rows[:20], *["..."] * (len(rows) > 20)]) or "none"


_NUMBER: Final = re.compile(r"(?<=[.\[])\d+(?=[.\]\s]|$)")


def group_rows(rows: Iterable[Sequence[str]]) -> list[tuple[tuple[str, ...], int]]:
    """Joins rows of texts that differ only in numbers, which become `*`.

    Returns:
        The rows, each with the number of rows that it stands for.
    """
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        starred = tuple(_NUMBER.sub("*", text) for text in row)
        groups.setdefault(starred, []).append(tuple(row))
    return [
        (starred if len(rows) > 1 else rows[0], len(rows))
        for starred, rows in groups.items()
    ]


def mark_leaves(argument: str, patterns: Iterable[str], tree: PyTree) -> PyTree:
    """Returns bools in the structure of `tree`: True for leaves that patterns name.

    The path of a submodule names all leaves in it.

    Raises:
        ValueError: for a pattern that matches no leaf and no submodule.
    """

    def list_names(path: Sequence[Any]) -> list[str]:
        return [leaf_path(path[: end + 1]) for end in range(len(path))]

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    names = dict.fromkeys(name for path in paths for name in list_names(path))
    matched = {*find_matches(argument, patterns, names, "submodule and no leaf")}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not matched.isdisjoint(list_names(path)), tree
    )


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
    """Returns the bytes of an array, or of another `shape` with its dtype."""
    size = math.prod(leaf.shape if shape is None else shape)
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return size * data.dtype.itemsize * math.prod(data.shape[leaf.ndim :])
    return size * np.dtype(leaf.dtype).itemsize


def describe_difference(old: PyTree, new: PyTree) -> str:
    """Returns a clause about how the structure of `new` differs from that of `old`."""
    names, others = (
        [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (old, new)
    )
    missing = [name or "the only leaf" for name in names if name not in {*others}]
    added = [name or "the only leaf" for name in others if name not in {*names}]
    parts = [f"{', '.join(missing[:3])} is missing"] if missing else []
    parts += [f"{', '.join(added[:3])} is new"] if added else []
    if not parts:
        kind = type(old).__name__
        parts = [f"a {kind} or something in it has another class or static field"]
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
