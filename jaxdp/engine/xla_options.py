"""XLA's options: those of the user, and those that make a CPU fast."""

import functools
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import jax
from jaxlib.version import __version__ as jaxlib_version

from ..basics.console import log_debug
from ..step import has_convolutions, has_own_loop

CompilerOptions = Mapping[str, Any] | str | None
"""Options of XLA by name, as `jax.jit` takes them, or an effort level."""

DETERMINISTIC: Final = {"xla_gpu_deterministic_ops": True}
"""On GPUs no atomic sums, and no kernels that are chosen by timing them; elsewhere no
change."""

_LEVELS: Final = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""Effort levels, as XLA numbers them. From `"O1"` on it has on GPUs the latency-hiding
scheduler, pipelined collectives, and loops of which two turns are one."""

_EIGEN_SWITCH: Final = "JAXDP_EIGEN_CONVOLUTIONS"
_PRODUCTS_ALONE: Final = (
    "xla_cpu_experimental_ynn_fusion_type",
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
)
"""What YNNPACK is left with: by default (jaxlib 0.10 to 0.12) it has convolutions and
reductions, too, and a reduction takes the convolution before it along."""

_DISABLED: Final = "xla_disable_hlo_passes"
_HOISTING: Final = "while-loop-invariant-code-motion"


def check_options(options: CompilerOptions) -> dict[str, Any]:
    """Returns the options by name, as this version of XLA takes them.

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
    options = {name.removeprefix("--"): options[name] for name in options}
    level = options.get("optimization_level")
    if level in _LEVELS and refusal("optimization_level", level):
        options["optimization_level"] = _LEVELS[level]  # before jaxlib 0.12
    for name, value in options.items():
        if name.startswith("xla_tpu_"):  # known to the compiler for TPUs alone
            continue
        if (fault := refusal(name, value)) is not None:
            raise ValueError(
                f"`compiler_options`: jaxlib {jaxlib_version} does not take"
                f" {name!r}={value!r}: {fault}."
            )
    return options


def refusal(name: str, value: Any) -> str | None:
    """Why XLA does not take an option; a program of one number is compiled with it."""
    try:
        jax.jit(lambda: 0).lower().compile({name: value})
    except jax.errors.JaxRuntimeError as error:
        return str(error).removeprefix("INVALID_ARGUMENT: ").rstrip(".")
    except (TypeError, ValueError):
        return f"{value!r} is no value of it"
    return None


def options_for(
    jaxpr: Any,
    arguments: Any,
    own: dict[str, Any] | None = None,
    users: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The options of XLA that a traced program is compiled with for `arguments`.

    Their shardings tell the platform. `own` are instead of those for speed; those of
    the user come before both.
    """
    options = _options_for_speed(jaxpr, arguments) if own is None else own
    options = {**options, **users}
    if not _are_on_cpu(arguments) or not has_own_loop(jaxpr):
        return options
    # What does not change from turn to turn (a mask's row numbers, constants) XLA would
    # compute before the loop. What is left is fused otherwise, and sums take another
    # order: losses had other last bits than those of single steps, with some shapes.
    # So a loop over micro-batches is treated alike, in a loop over steps and alone.
    flag = re.search(rf"--{_DISABLED}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    passes = [flag and flag[1], options.get(_DISABLED), _HOISTING]
    return {**options, _DISABLED: ",".join(filter(None, passes))}


def _options_for_speed(jaxpr: Any, arguments: Any) -> dict[str, Any]:
    """What XLA is told of a program on the CPU, unless the user has told it so.

    By default it gives convolutions to YNNPACK, whose gradients take up to seven times
    as long as Eigen's (docs/speed.md). They go to Eigen here, noted once,
    because sums are then taken in another order.

    (`xla_cpu_copy_insertion_use_region_analysis` would spare copies of weights, and
    makes wrong programs of loops inside loops: jaxlib 0.10.2.)
    """
    if not _are_on_cpu(arguments) or not has_convolutions(jaxpr):
        return {}
    option, value = _PRODUCTS_ALONE
    is_off = os.environ.get(_EIGEN_SWITCH) == "0"
    if is_off or option in os.environ.get("XLA_FLAGS", ""):
        return {}
    if _refusal(option, value) is not None:
        return {}
    _note_it()
    return {option: value}


def _are_on_cpu(arguments: Any) -> bool:
    for leaf in jax.tree.leaves(arguments):
        for device in getattr(getattr(leaf, "sharding", None), "device_set", ()):
            return device.platform == "cpu"
    return jax.default_backend() == "cpu"


_refusal = functools.cache(refusal)


@functools.cache
def _note_it() -> None:
    log_debug(
        "convolutions on the CPU are left to Eigen, which is faster than XLA's own"
        f" choice ({_EIGEN_SWITCH}=0 switches this off)"
    )
