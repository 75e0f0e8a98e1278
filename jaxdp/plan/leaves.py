"""The arrays that a compiled step takes: what they are, where they lie, how large."""

import math
from collections.abc import Collection
from typing import Any, Final

import jax

from ..basics.compiled import nbytes, overwritten_by
from ..basics.host_memory import HOST
from ..basics.tree import leaf_path
from .parts import Leaf

_GROUPS: Final = {
    "params": "parameters",
    "buffers": "frozen leaves",
    "model_state": "model state",
    "opt_state": "optimizer state",
}


def leaves_of(
    state: Any, compiled: Any, aliased: Collection[int]
) -> tuple[list[Leaf], list[Leaf]]:
    """The leaves of the state, and those of the batch.

    Args:
        state: of shapes.
        compiled: the step.
        aliased: which of the program's inputs it overwrites.
    """
    named = [
        (_GROUPS.get(field, "other"), leaf_path(path) or field, leaf)
        for field, tree in state._asdict().items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    (_, groups), _ = compiled.args_info
    paths = jax.tree_util.tree_leaves_with_path(groups)
    batch = [
        ("batch", leaf_path(path[1:] if len(groups) == 1 else path), leaf)
        for path, leaf in paths
    ]

    # Of a leaf that nothing depends on JAX does not say how it is split: as others.
    (_, split), _ = compiled.input_shardings
    usual = [*jax.tree.leaves(split), named[0][2].sharding][0]
    of_batch = [
        sharding or (split[0].counts if path[1].name == "whole" else usual)
        for sharding, (path, _) in zip(
            jax.tree.structure(groups).flatten_up_to(split), paths, strict=True
        )
    ]

    overwritten = overwritten_by(compiled, aliased)
    of_state = [
        _leaf(*entry, entry[2].sharding, place in overwritten)
        for place, entry in enumerate(named)
    ]
    return of_state, [
        _leaf(*entry, sharding, place in overwritten)
        for place, (entry, sharding) in enumerate(
            zip(batch, of_batch, strict=True), len(named)
        )
    ]


def _leaf(group: str, path: str, leaf: Any, sharding: Any, overwritten: bool) -> Leaf:
    shard = tuple(sharding.shard_shape(leaf.shape))
    spec = getattr(sharding, "spec", ())
    split = any(part is not None and part != () for part in spec)
    parts = math.prod(
        math.ceil(whole / part) if part else 1
        for whole, part in zip(leaf.shape, shard, strict=True)
    )
    return Leaf(
        group,
        path,
        tuple(leaf.shape),
        str(leaf.dtype),
        str(tuple(spec)) if split else "replicated",
        parts,
        shard,
        nbytes(leaf),
        nbytes(leaf, shard),
        overwritten,
        sharding.memory_kind == HOST,
    )
