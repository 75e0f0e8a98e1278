"""XLA's compiler options: the user's options, and options that make a CPU fast."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import jax
import jaxlib.version

from ..step import has_convolutions, has_own_loop

CompilerOptions = Mapping[str, Any] | str | None
"""Options of XLA by name, as in `jax.jit`, or an effort level."""

DETERMINISTIC: Final = {"xla_gpu_deterministic_ops": True}
"""On GPUs, no atomic sums, and no kernels chosen by their time. No effect elsewhere."""

_LEVELS: Final = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""XLA's numbers for effort levels, which jaxlib has taken by name since 0.12. From
`"O1"` on, GPUs have the latency-hiding scheduler, pipelined collectives, and loops that
are unrolled twice."""

_PRODUCTS_ONLY: Final[dict[str, Any]] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}
"""Limits YNNPACK to products. By default (jaxlib 0.10 to 0.12) it also has convolutions
and reductions, and a reduction includes the convolution before it."""

_DISABLED: Final = "xla_disable_hlo_passes"
_HOISTING: Final = "while-loop-invariant-code-motion"


def check_options(options: CompilerOptions) -> dict[str, Any]:
    """Returns the options by name. XLA checks them when it compiles a step.

    Raises:
        ValueError: for an unknown level.
    """
    if not isinstance(options, str):
        return dict(options or {})
    if options not in _LEVELS:
        raise ValueError(
            f"`compiler_options` must be one of {', '.join(map(repr, _LEVELS))}, or"
            f" a dict of XLA's options; got {options!r}."
        )
    is_named = jaxlib.version.__version_info__ >= (0, 12)
    return {"optimization_level": options if is_named else _LEVELS[options]}


def options_for(jaxpr: Any, arguments: Any, users: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options for compiling a traced program.

    The sharding of the state, the first of `arguments`, decides the platform. The
    user's options override those for speed.
    """
    device, *_ = jax.tree.leaves(arguments)[0].sharding.device_set
    is_on_cpu = device.platform == "cpu"
    convolves = is_on_cpu and has_convolutions(jaxpr)
    options = {**(_find_convolution_options() if convolves else {}), **users}
    if not is_on_cpu or not has_own_loop(jaxpr):
        return options
    # XLA would compute loop invariants (a mask's row numbers, constants) before the
    # loop. It fuses the rest differently, and sums have another order: with some
    # shapes, losses had other last bits than those of single steps. So loops over
    # micro-batches have these options with and without a loop over steps.
    passes = filter(None, [options.get(_DISABLED), _HOISTING])
    return {**options, _DISABLED: ",".join(passes)}


@functools.cache
def _find_convolution_options() -> dict[str, Any]:
    """Returns the options for convolutions on the CPU, if this version of XLA has them.

    By default XLA gives convolutions to YNNPACK, whose gradients take up to seven times
    as long as Eigen's (docs/speed.md). The option gives them to Eigen.

    (`xla_cpu_copy_insertion_use_region_analysis` would save copies of weights, but
    jaxlib 0.10.2 compiles loops inside loops wrongly with it.)
    """
    try:
        jax.jit(lambda: 0).lower().compile(_PRODUCTS_ONLY)
    except jax.errors.JaxRuntimeError:
        return {}
    return _PRODUCTS_ONLY
