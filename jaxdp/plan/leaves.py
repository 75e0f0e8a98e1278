"""The arrays that a compiled step takes: what they are, where they lie, how large."""

import math
from collections.abc import Collection, Sequence
from typing import Any, Final

import jax
import numpy as np

from ..basics.tree import leaf_path
from .parts import Leaf

_GROUPS: Final = {
    "params": "parameters",
    "buffers": "frozen leaves",
    "model_state": "model state",
    "opt_state": "optimizer state",
}


def leaves_of(
    state: Any, places: Sequence[int], compiled: Any, aliased: Collection[int]
) -> tuple[list[Leaf], list[Leaf]]:
    """The leaves of the state, and those of the batch.

    Args:
        state: of shapes.
        places: in which argument each leaf of the state crosses into the step; small
            ones may share one.
        compiled: the step.
        aliased: which of the program's inputs it overwrites.
    """
    named = [
        (_GROUPS.get(field, "other"), leaf_path(path) or field, leaf)
        for field, tree in state._asdict().items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    (_, groups), _ = compiled.args_info
    batch = [
        ("batch", leaf_path(path[1:] if len(groups) == 1 else path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(groups)
    ]

    # Of a leaf that nothing depends on JAX does not say how it is split: as others.
    (_, split), _ = compiled.input_shardings
    of_state = [leaf.sharding for _, _, leaf in named]
    usual = [*jax.tree.leaves(split), of_state[0]][0]
    of_batch = jax.tree.leaves(split, is_leaf=lambda each: each is None)
    of_batch = [usual if each is None else each for each in of_batch]

    # The program lacks the arguments that nothing depends on, and numbers the rest.
    first = max(places) + 1  # of the batch
    arguments = range(first + len(batch))
    executable = getattr(compiled, "_executable", None)
    kept = sorted(getattr(executable, "_kept_var_idx", arguments))
    overwritten = {kept[number] for number in aliased}

    def leaves(found: Any, shardings: Any, places: Any) -> list[Leaf]:
        return [
            _leaf(group, path, leaf, sharding, place in overwritten)
            for (group, path, leaf), sharding, place in zip(
                found, shardings, places, strict=True
            )
        ]

    return (
        leaves(named, of_state, places),
        leaves(batch, of_batch, arguments[first:]),
    )


def nbytes(leaf: Any) -> int:
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return (
            math.prod(data.shape) * data.dtype.itemsize // max(1, math.prod(leaf.shape))
        )
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _leaf(group: str, path: str, leaf: Any, sharding: Any, overwritten: bool) -> Leaf:
    shard = tuple(sharding.shard_shape(leaf.shape))
    spec = getattr(sharding, "spec", ())
    split = any(part is not None and part != () for part in spec)
    size = np.dtype(leaf.dtype).itemsize if not _is_key(leaf) else nbytes(leaf)
    parts = math.prod(
        math.ceil(whole / part) if part else 1
        for whole, part in zip(leaf.shape, shard, strict=True)
    )
    return Leaf(
        group,
        path,
        tuple(leaf.shape),
        str(leaf.dtype),
        str(tuple(spec)) if split else "whole",
        parts,
        shard,
        math.prod(leaf.shape) * size,
        math.prod(shard) * size,
        overwritten,
    )
