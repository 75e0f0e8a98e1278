"""What a compiled program takes and overwrites."""

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from .tree import is_key


def aliased_in(header: str) -> dict[int, str]:
    """The inputs that a program overwrites, with the places of the results there.

    Args:
        header: the first line of its text, which may have
            `input_output_alias={ {0}: (1, {}, may-alias), ... }`.
    """
    _, _, text = header.partition("input_output_alias=")
    pairs = re.findall(r"\{([\d, ]*)\}:\s*\((\d+),", text)
    return {int(parameter): out.replace(" ", "") for out, parameter in pairs}


def overwritten_by(compiled: Any, aliased: Collection[int]) -> set[int]:
    """Places, among all flat arguments of a step, of those that it overwrites.

    Args:
        compiled: the step.
        aliased: which of the program's inputs it overwrites.
    """
    # The program lacks the arguments that nothing depends on, and numbers the rest.
    every = range(len(jax.tree.leaves(compiled.args_info)))
    executable = getattr(compiled, "_executable", None)
    kept = sorted(getattr(executable, "_kept_var_idx", every))
    return {kept[number] for number in aliased}


def nbytes(leaf: Any, shape: Sequence[int] | None = None) -> int:
    """Bytes of an array of this type, of its own shape or another."""
    size = math.prod(leaf.shape if shape is None else shape)
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return size * data.dtype.itemsize * math.prod(data.shape[leaf.ndim :])
    return size * np.dtype(leaf.dtype).itemsize
