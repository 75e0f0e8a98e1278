"""Rematerialisation: recompute activations in the backward pass to save memory."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..basics.tree import find_matches, get_node, leaf_path
from .call_override import get_call_override, override_call

Remat = bool | Callable[..., Any] | str | Sequence[str]
"""The argument of users: True, for each block of every `Stack`; a policy of
`jax.checkpoint_policies`, for the same blocks; or path patterns of submodules, such as
`"layers[*]"`."""


class RematSpec(NamedTuple):
    """The submodules that recompute their activations in the backward pass."""

    patterns: tuple[str, ...] = ()
    policy: Callable[..., Any] | None = None
    """Decides what is saved inside of them; None saves only their inputs."""

    def apply(self, model: PyTree) -> PyTree:
        """Returns the model; calls of the outermost submodules that match recompute
        activations.
        """
        if not self.patterns:
            return model
        paths = find_outermost_modules(model, self.patterns, "remat").values()
        return eqx.tree_at(
            lambda tree: [get_node(tree, path) for path in paths],
            model,
            replace_fn=lambda module: override_call(module, _Recompute(self.policy)),
        )


def resolve_remat(remat: Any, model: PyTree, blocks: Sequence[str]) -> RematSpec:
    """Resolves `Trainer(remat=...)` for a model.

    Args:
        remat: the argument as passed.
        model: the model to train.
        blocks: the paths of the blocks that its stacks repeat.

    Raises:
        TypeError: for a value that is no `Remat`.
        ValueError: for a pattern without a match, and for True without a `Stack`: one
            checkpoint around the whole model would save nothing.
    """
    if remat is False:
        return RematSpec()
    if isinstance(remat, str):
        remat = [remat]
    if remat is True or callable(remat):
        if not blocks:
            raise ValueError(
                f"`remat`={remat!r} recomputes each block of every jaxdp.Stack, and the"
                " model has none. (To recompute the whole model at once saves nothing.)"
                " Make its equal blocks one, Stack([Block(key) for key in keys]), or"
                " name submodules, remat='blocks[*]'; there are"
                f" {', '.join(_modules_in(model)) or 'none'}."
            )
        return RematSpec(tuple(blocks), None if remat is True else remat)
    if isinstance(remat, Sequence) and all(isinstance(part, str) for part in remat):
        names = find_outermost_modules(model, remat, "remat")
        # Recomputing a Stack as one unit would save nothing, so its name means its
        # blocks.
        inside = ((f"{name}.stacked", name) for name in names)
        return RematSpec(tuple(a if a in blocks else name for a, name in inside))
    raise TypeError(
        "`remat` must be a bool, a policy of jax.checkpoint_policies, or path patterns"
        f" of submodules; got {remat!r} of type {type(remat).__name__}."
    )


def find_outermost_modules(
    model: PyTree, patterns: Iterable[str], argument: str
) -> dict[str, tuple[Any, ...]]:
    """Finds the submodules that match a pattern, but not those inside of others.

    Returns:
        Their paths, by name.

    Raises:
        ValueError: if a pattern matches nothing; the message lists the submodules.
    """
    modules = _modules_in(model)
    names = find_matches(f"`{argument}`", patterns, modules, "submodule")
    matching = {name: modules[name] for name in names}
    paths = set(matching.values())
    return {
        name: path
        for name, path in matching.items()
        if not any(path[:length] in paths for length in range(1, len(path)))
    }


def _modules_in(model: PyTree) -> dict[str, tuple[Any, ...]]:
    """Returns the paths of all submodules that can be called, by name."""
    modules: dict[str, tuple[Any, ...]] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(model):
        for length in range(1, len(path)):
            if isinstance(path[length - 1], jax.tree_util.FlattenedIndexKey):
                break  # inside a node whose parts have no names
            node = get_node(model, path[:length])
            if isinstance(node, eqx.Module) and callable(node):
                modules[leaf_path(path[:length])] = path[:length]
    return modules


class _Recompute(NamedTuple):
    """A call of a module that recomputes; see `override_call`."""

    policy: Callable[..., Any] | None

    def __call__(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        call = eqx.filter_checkpoint(module, policy=self.policy)
        return call(*arguments, **keywords)


def get_remat_call(module: Any) -> _Recompute | None:
    """Returns the call that `RematSpec.apply` gave a module, or None."""
    call = get_call_override(module)
    return call if isinstance(call, _Recompute) else None
