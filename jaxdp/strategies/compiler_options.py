"""XLA's options as a user gives them, in the spelling of the version that is here."""

from collections.abc import Mapping
from typing import Any, Final

import jax
from jaxlib.version import __version__ as jaxlib_version

CompilerOptions = Mapping[str, Any] | str | None
"""Options of XLA by name, as `jax.jit` takes them, or an effort level."""

DETERMINISTIC: Final = {"xla_gpu_deterministic_ops": True}
"""On GPUs no atomic sums, and no kernels that are chosen by timing them; elsewhere no
change."""

_LEVELS: Final = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""Effort levels, as XLA numbers them. From `"O1"` on it has on GPUs the latency-hiding
scheduler, pipelined collectives, and loops of which two turns are one."""


def spelled_here(options: CompilerOptions) -> dict[str, Any]:
    """The options that this version of XLA takes.

    Raises:
        TypeError: if they are neither a dict nor a level.
        ValueError: if XLA does not know one, or not with that value.
    """
    if options is None:
        return {}
    if isinstance(options, str):
        if options not in _LEVELS:
            raise ValueError(
                f"`compiler_options` must be one of {', '.join(map(repr, _LEVELS))}, or"
                f" a dict of XLA's options; got {options!r}."
            )
        options = {"optimization_level": options}
    is_dict = isinstance(options, Mapping)
    if not is_dict or not all(isinstance(name, str) for name in options):
        raise TypeError(
            "`compiler_options` must be a dict of XLA's options by name, an effort"
            f" level such as 'O1', or None; got {options!r} of type"
            f" {type(options).__name__}."
        )
    return dict(_taken(name.removeprefix("--"), options[name]) for name in options)


def _taken(name: str, value: Any) -> tuple[str, Any]:
    """An option as this version has it: before jaxlib 0.12 levels were numbers."""
    is_level = name == "optimization_level" and isinstance(value, str)
    values = [value, *([_LEVELS[value]] if is_level and value in _LEVELS else [])]
    faults = [refusal(name, each) for each in values]
    if None in faults:
        return name, values[faults.index(None)]
    if name.startswith("xla_tpu_"):
        return name, value  # known to the compiler for TPUs alone
    raise ValueError(
        f"`compiler_options`: jaxlib {jaxlib_version} does not take"
        f" {name!r}={value!r}: {faults[0]}."
    )


def refusal(name: str, value: Any) -> str | None:
    """Why XLA does not take an option; a program of one number is compiled with it."""
    try:
        jax.jit(lambda: 0).lower().compile({name: value})
    except jax.errors.JaxRuntimeError as error:
        return str(error).removeprefix("INVALID_ARGUMENT: ").rstrip(".")
    except (TypeError, ValueError):
        return f"{value!r} is no value of it"
    return None
