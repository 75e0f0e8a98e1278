"""Rematerialisation: recompute activations in the backward pass to save memory."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..basics.tree import at_path, leaf_path
from .own_call import own_call, with_call

Remat = bool | Callable[..., Any] | str | Sequence[str]
"""True: recompute everything. A policy of `jax.checkpoint_policies`: what it says. Path
patterns such as `"layers*"`: the calls of the submodules whose path they match."""


def check_remat(remat: Any) -> None:
    """Raises for what is no `Remat`."""
    if isinstance(remat, bool | str) or callable(remat):
        return
    if isinstance(remat, Iterable) and all(isinstance(part, str) for part in remat):
        return
    raise TypeError(
        "`remat` must be a bool, a policy of jax.checkpoint_policies, or path patterns"
        f" of submodules; got {remat!r} of type {type(remat).__name__}."
    )


def remat_function(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`function` that keeps for the backward pass only what `remat` lets it."""
    if remat is True:
        return jax.checkpoint(function)
    return jax.checkpoint(function, policy=remat) if callable(remat) else function


def remat_submodules(model: PyTree, remat: Remat) -> PyTree:
    """`model` with the outermost submodules that match patterns recomputed."""
    if isinstance(remat, bool) or callable(remat):
        return model
    patterns = [remat] if isinstance(remat, str) else list(remat)
    paths = outermost_matching(model, patterns, "remat").values()
    return eqx.tree_at(
        lambda tree: [at_path(tree, path) for path in paths],
        model,
        replace_fn=lambda module: with_call(module, _recompute),
    )


def outermost_matching(
    model: PyTree, patterns: Iterable[str], argument: str
) -> dict[str, tuple[Any, ...]]:
    """The submodules that match a pattern, and are in no other that does.

    Returns:
        Their paths, by name.

    Raises:
        ValueError: if a pattern matches nothing; it lists the submodules there are.
    """
    modules: dict[str, tuple[Any, ...]] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(model):
        for length in range(1, len(path)):
            if isinstance(path[length - 1], jax.tree_util.FlattenedIndexKey):
                break  # inside something that says nothing of its parts
            node = at_path(model, path[:length])
            if isinstance(node, eqx.Module) and callable(node):
                modules[leaf_path(path[:length])] = path[:length]

    matching: dict[str, tuple[Any, ...]] = {}
    for pattern in patterns:
        named = {n: p for n, p in modules.items() if matches(n, pattern)}
        if not named:
            raise ValueError(
                f"`{argument}`: {pattern!r} matches no submodule; there are"
                f" {', '.join(modules) or 'none'}."
            )
        matching |= named

    paths = set(matching.values())
    return {
        name: path
        for name, path in matching.items()
        if not any(path[:length] in paths for length in range(1, len(path)))
    }


def matches(name: str, pattern: str) -> bool:
    """Whether a path such as `layers[0].weight` is one that a pattern means."""
    # A bracket is one, as in `layers[0]`, and begins no set of characters.
    literal = pattern.replace("[[]", "[").replace("[", "[[]")
    return fnmatch.fnmatchcase(name, literal)


def is_recomputed(module: Any) -> bool:
    """Whether `remat_submodules` has made calls of the module recompute."""
    return own_call(module) is _recompute


def _recompute(module: Any, *arguments: Any, **keywords: Any) -> Any:
    return eqx.filter_checkpoint(module)(*arguments, **keywords)
