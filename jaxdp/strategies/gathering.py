"""Parameters that stay split, and are gathered where they are used.

Each device is given its shard of such a parameter. A block of a `Stack`, or another
submodule, gathers its own when it is called, and once more in its backward pass, where
the gradient is summed straight into shards: what `jax.grad` makes of `all_gather`.
"""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ..basics.tree import at_path, leaf_path
from ..step import is_recomputed, opened, programs_in, with_call

_SHARD: Final = "jaxdp_shard"
_TAKEN: Final = "jaxdp_shard_taken"

_MADE_ANEW: Final = {
    "all_gather",
    "name",
    "convert_element_type",
    "transpose",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
}
"""What is not kept for a backward pass: gathered parameters, and views of arrays."""


class Gatherers(NamedTuple):
    """The modules of a model that gather their arrays when they are called."""

    paths: Mapping[str, Any] = MappingProxyType({})
    """Where they are in the model, by name; none is inside another."""
    stacked: Mapping[str, int] = MappingProxyType({})
    """How many axes of blocks their arrays have, of which a call sees one block."""

    def owner(self, name: str) -> str | None:
        """The one that the array of that name is in."""
        return next((each for each in self.paths if name.startswith(f"{each}.")), None)

    def gather(self, name: str, spec: PartitionSpec) -> bool:
        """Whether one of them gathers the array of that name, split like this."""
        owner = self.owner(name)
        return owner is not None and any(spec) and not any(spec[: self.stacked[owner]])

    def arranged(self, model: PyTree, specs: Mapping[str, PartitionSpec]) -> PyTree:
        """The model, with calls of them that gather.

        Args:
            model: with one device's shards.
            specs: how its arrays are split that they gather, by name.
        """

        def marked(path: Any, leaf: Any) -> Any:
            return checkpoint_name(leaf, _SHARD) if leaf_path(path) in specs else leaf

        # Marked, so that other uses of them are found; see `check_shards_are_gathered`.
        model = jax.tree_util.tree_map_with_path(marked, model)
        for name, path in self.paths.items():
            own = {
                leaf.removeprefix(f"{name}."): PartitionSpec(
                    *spec[self.stacked[name] :]
                )
                for leaf, spec in specs.items()
                if self.owner(leaf) == name
            }
            gathered = _Gathered(tuple(own.items()), in_loop=self.stacked[name] > 0)
            model = eqx.tree_at(
                lambda tree, path=path: at_path(tree, path),
                model,
                replace_fn=lambda module, call=gathered: with_call(module, call),
            )
        return model


class _Gathered(NamedTuple):
    """The call of a module that gathers its arrays first; see `with_call`."""

    specs: tuple[tuple[str, PartitionSpec], ...]
    """How they are split, by their names in the module."""
    in_loop: bool

    def __call__(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        def call(module: Any, *arguments: Any, **keywords: Any) -> Any:
            return self._whole(module)(*arguments, **keywords)

        recomputed = eqx.filter_checkpoint(
            call,
            # A policy here would hold for what is recomputed in the module, too.
            policy=None if is_recomputed(module) else _is_kept,
            # A turn of a loop has nothing in it that XLA could compute once for both.
            prevent_cse=not self.in_loop,
        )
        return recomputed(module, *arguments, **keywords)

    def _whole(self, module: PyTree) -> PyTree:
        specs = dict(self.specs)

        def gather(path: Any, leaf: Any) -> Any:
            spec = specs.get(leaf_path(path))
            if spec is None:
                return leaf
            leaf = checkpoint_name(leaf, _TAKEN)
            for axis, names in enumerate(spec):
                if names is not None:
                    leaf = jax.lax.all_gather(leaf, names, axis=axis, tiled=True)
            return leaf

        with jax.named_scope("parameters"):
            return jax.tree_util.tree_map_with_path(gather, module)


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _MADE_ANEW


# Shards that a loss uses by itself, in a penalty on all weights say, are not what it
# takes them for. So a traced step is searched for such uses.

_CARRIERS: Final = {"convert_element_type", "name", "reduce_precision", "copy"}
"""Operations that make of a shard the shard of what they make of the whole."""


class ShardsEscape(Exception):
    """A shard is used, and not by the module that gathers it."""


def check_shards_are_gathered(jaxpr: Any) -> None:
    """Raises `ShardsEscape` unless a traced step uses shards only to gather them."""
    program = opened(jaxpr)
    if any(_follow(program, [False] * len(program.invars))):
        raise ShardsEscape


def _follow(jaxpr: Any, of_inputs: Sequence[bool]) -> list[bool]:
    """Which results of a program are shards, given which of its inputs are."""
    shards = {v for v, is_one in zip(jaxpr.invars, of_inputs, strict=True) if is_one}

    def is_shard(atom: Any) -> bool:
        return not hasattr(atom, "val") and atom in shards

    for equation in jaxpr.eqns:
        given = list(map(is_shard, equation.invars))
        found = zip(equation.outvars, _results(equation, given), strict=True)
        shards |= {variable for variable, is_one in found if is_one}
    return list(map(is_shard, jaxpr.outvars))


def _results(equation: Any, given: list[bool]) -> list[bool]:
    """Which results of an operation are shards."""
    name, number = equation.primitive.name, len(equation.outvars)
    label = equation.params["name"] if name == "name" else None
    if label in (_SHARD, _TAKEN):
        return [label == _SHARD]
    if name in _CARRIERS:
        return given

    programs = [opened(program) for program in programs_in(equation)]
    if not any(given):
        found = [_follow(each, [False] * len(each.invars)) for each in programs]
    elif name == "cond" and not given[0]:
        found = [_follow(branch, given[1:]) for branch in programs]
    elif programs and all(len(each.invars) == len(given) for each in programs):
        found = [_follow(each, given) for each in programs]
    else:
        raise ShardsEscape

    results = [any(each) for each in itertools.zip_longest(*found)]
    if not any(results):
        return [False] * number
    if name in ("scan", "while") or len(results) != number:
        raise ShardsEscape  # what comes of them in the next turn is not followed
    return results
