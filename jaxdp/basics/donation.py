"""The inputs that a compiled program overwrites."""

import re
from collections.abc import Collection
from typing import Any

import jax


def parse_aliases(header: str) -> dict[int, str]:
    """Maps the inputs that a program overwrites to the results that overwrite them.

    Args:
        header: the first line of its text, which may have
            `input_output_alias={ {0}: (1, {}, may-alias), ... }`.
    """
    _, _, text = header.partition("input_output_alias=")
    pairs = re.findall(r"\{([\d, ]*)\}:\s*\((\d+),", text)
    return {int(parameter): out.replace(" ", "") for out, parameter in pairs}


def find_donated(compiled: Any, aliased: Collection[int]) -> set[int]:
    """Returns the numbers of the flat arguments that a compiled step overwrites.

    Args:
        compiled: the step.
        aliased: the numbers of the inputs that its program overwrites.
    """
    # The program drops the arguments that nothing depends on, and numbers the rest.
    every = range(len(jax.tree.leaves(compiled.args_info)))
    executable = getattr(compiled, "_executable", None)
    numbers = sorted(getattr(executable, "_kept_var_idx", every))
    return {numbers[number] for number in aliased}
