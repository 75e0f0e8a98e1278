"""What XLA is told so that a CPU is fast: what to copy, and how to convolve."""

import functools
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import jax

from ..basics.console import note
from ..step import has_convolutions, has_own_loop
from .compiler_options import refusal

_EIGEN_SWITCH: Final = "JAXDP_EIGEN_CONVOLUTIONS"
_PRODUCTS_ALONE: Final = (
    "xla_cpu_experimental_ynn_fusion_type",
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
)
"""What YNNPACK is left with: by default (jaxlib 0.10 to 0.12) it has convolutions and
reductions, too, and a reduction takes the convolution before it along."""

_FEWER_COPIES: Final = "xla_cpu_copy_insertion_use_region_analysis", True
_DISABLED: Final = "xla_disable_hlo_passes"
_HOISTING: Final = "while-loop-invariant-code-motion"


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
    as long as Eigen's (docs/speed_inside.md). They go to Eigen here, noted once,
    because sums are then taken in another order.

    Elsewhere it copies weights before a step overwrites them, for whatever may still
    read them. A closer look at who reads what when spares most copies: 0.83 to 1.04 of
    the time, and the same bits. (With convolutions it gained nothing.)
    """
    if not _are_on_cpu(arguments):
        return {}
    convolves = has_convolutions(jaxpr)
    option, value = _PRODUCTS_ALONE if convolves else _FEWER_COPIES
    is_off = convolves and os.environ.get(_EIGEN_SWITCH) == "0"
    if is_off or option in os.environ.get("XLA_FLAGS", ""):
        return {}
    if _refusal(option, value) is not None:
        return {}
    if convolves:
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
    note(
        "convolutions on the CPU are left to Eigen, which is faster than XLA's own"
        f" choice ({_EIGEN_SWITCH}=0 switches this off)"
    )
