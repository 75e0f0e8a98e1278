"""XLA's compiler options: those of the user, and those that make a CPU fast."""

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
"""Options of XLA by name, as in `jax.jit`, or an effort level."""

DETERMINISTIC: Final = {"xla_gpu_deterministic_ops": True}
"""On GPUs, no atomic sums, and no kernels chosen by their time. Others: no change."""

_LEVELS: Final = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""XLA's numbers for effort levels. From `"O1"` on, GPUs have the latency-hiding
scheduler, pipelined collectives, and loops that are unrolled twice."""

_EIGEN_SWITCH: Final = "JAXDP_EIGEN_CONVOLUTIONS"
_PRODUCTS_ONLY: Final = (
    "xla_cpu_experimental_ynn_fusion_type",
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
)
"""Limits YNNPACK to products. By default (jaxlib 0.10 to 0.12) it also has convolutions
and reductions, and a reduction includes the convolution before it."""

_DISABLED: Final = "xla_disable_hlo_passes"
_HOISTING: Final = "while-loop-invariant-code-motion"


def check_options(options: CompilerOptions) -> dict[str, Any]:
    """Returns the options by name, for this version of XLA.

    Raises:
        TypeError: if they are neither a dict nor a level.
        ValueError: if XLA does not know one, or refuses its value.
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
    if level in _LEVELS and find_option_error("optimization_level", level):
        options["optimization_level"] = _LEVELS[level]  # before jaxlib 0.12
    for name, value in options.items():
        if name.startswith("xla_tpu_"):  # known to the compiler for TPUs alone
            continue
        if (error := find_option_error(name, value)) is not None:
            raise ValueError(
                f"`compiler_options`: jaxlib {jaxlib_version} does not take"
                f" {name!r}={value!r}: {error}."
            )
    return options


def find_option_error(name: str, value: Any) -> str | None:
    """Returns XLA's error for an option; compiles a program of one number with it."""
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
    replacement: dict[str, Any] | None = None,
    users: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the options for compiling a traced program.

    The shardings of `arguments` decide the platform. A strategy's `replacement` is
    used instead of the options for speed; those of the user override both.
    """
    options = replacement
    if options is None:
        options = _select_fast_options(jaxpr, arguments)
    options = {**options, **users}
    if not _are_on_cpu(arguments) or not has_own_loop(jaxpr):
        return options
    # XLA would compute loop invariants (a mask's row numbers, constants) before the
    # loop. It fuses the rest differently, and sums have another order: with some
    # shapes, losses had other last bits than those of single steps. So loops over
    # micro-batches have these options with and without a loop over steps.
    flag = re.search(rf"--{_DISABLED}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    passes = [flag and flag[1], options.get(_DISABLED), _HOISTING]
    return {**options, _DISABLED: ",".join(filter(None, passes))}


def _select_fast_options(jaxpr: Any, arguments: Any) -> dict[str, Any]:
    """Returns the options for a program on the CPU; none if the user has set them.

    By default XLA gives convolutions to YNNPACK, whose gradients take up to seven times
    as long as Eigen's (docs/speed.md). These options give them to Eigen. That is
    logged once, because sums then have another order.

    (`xla_cpu_copy_insertion_use_region_analysis` would save copies of weights, but
    jaxlib 0.10.2 compiles loops inside loops wrongly with it.)
    """
    if not _are_on_cpu(arguments) or not has_convolutions(jaxpr):
        return {}
    option, value = _PRODUCTS_ONLY
    is_off = os.environ.get(_EIGEN_SWITCH) == "0"
    if is_off or option in os.environ.get("XLA_FLAGS", ""):
        return {}
    if _find_option_error(option, value) is not None:
        return {}
    _log_eigen()
    return {option: value}


def _are_on_cpu(arguments: Any) -> bool:
    for leaf in jax.tree.leaves(arguments):
        for device in getattr(getattr(leaf, "sharding", None), "device_set", ()):
            return device.platform == "cpu"
    return jax.default_backend() == "cpu"


_find_option_error = functools.cache(find_option_error)


@functools.cache
def _log_eigen() -> None:
    log_debug(
        "convolutions on the CPU are left to Eigen, which is faster than XLA's own"
        f" choice ({_EIGEN_SWITCH}=0 switches this off)"
    )
