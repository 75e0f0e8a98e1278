"""Counts the matrix products of a traced step, and what they are computed in."""

import collections
import math
import re
from typing import Any, Final

from ...step import get_inner_jaxprs, strip_constants

Products = collections.Counter[str]
"""Operations of products by what they are computed in: a dtype, or `BY_DEFAULT`."""

BY_DEFAULT: Final = "float32 by default"
"""Products of float32 arrays for which no precision is set: TF32, say."""


def count_products(jaxpr: Any) -> Products:
    """Counts operations of matrix products and convolutions, a multiply-add as two.

    The count is of the jaxpr, and so the same on every backend. The body of a scan
    counts as often as it runs. A `cond` counts as its costlier branch. A `while_loop`
    counts one iteration, unless its scope says how many it has; see `make_loop_scope`.
    """
    total: Products = collections.Counter()
    for equation in strip_constants(jaxpr).eqns:
        total.update(_count_equation(equation))
    return total


def make_loop_scope(times: int) -> str:
    """Returns the `jax.named_scope` of a loop that runs `times` times.

    It is for a `jax.lax.while_loop`, because the program does not contain its length.
    """
    return f"runs_{times}_times"


def read_num_runs(path: str) -> int | None:
    """Returns how often a loop runs, if `make_loop_scope` named its innermost scope."""
    match = re.search(r"\bruns_(\d+)_times\)*(?:/while)?$", path)
    return int(match[1]) if match else None


def _count_equation(equation: Any) -> Products:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs_shape = equation.invars[0].aval.shape
        depth = math.prod(lhs_shape[axis] for axis in contracted)
        count = 2 * depth * math.prod(equation.outvars[0].aval.shape)
        return collections.Counter({_find_compute_dtype(equation): count})
    if name == "conv_general_dilated":
        return collections.Counter(
            {_find_compute_dtype(equation): _count_convolution(equation)}
        )
    if name == "cond":
        return max(
            map(count_products, params["branches"]), key=lambda counts: counts.total()
        )

    # Count the inner programs, as often as they run.
    times = 1
    if name == "scan":
        times = params["length"]
    elif name == "while":
        times = read_num_runs(str(equation.source_info.name_stack)) or 1
    elif name == "shard_map":
        # The body is the work of one device along these axes, and of all devices along
        # the other axes. A KeyError says that JAX has renamed them, as after 0.10.0; no
        # other reading would be right.
        old = "manual_axes" in params
        axes = params["manual_axes" if old else "newly_manual_axes"]
        times = math.prod(params["mesh"].shape[axis] for axis in axes)
    inside: Products = collections.Counter()
    for program in get_inner_jaxprs(equation):
        inside.update(count_products(program))
    return collections.Counter({key: times * count for key, count in inside.items()})


def _find_compute_dtype(equation: Any) -> str:
    """Returns the dtype of a product's arithmetic, from its arguments and precision."""
    dtypes = [argument.aval.dtype for argument in equation.invars[:2]]
    dtype = str(max(dtypes, key=lambda dtype: dtype.itemsize))
    precision = equation.params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    asked = {getattr(one, "name", str(one or "DEFAULT")) for one in precisions}
    if dtype != "float32":
        return dtype
    if asked <= {"DEFAULT"} or any(name.startswith("TF32_TF32") for name in asked):
        return BY_DEFAULT
    narrow = {"BF16_BF16_F32": "bfloat16", "F16_F16_F32": "float16"}
    return next((narrow[name] for name in asked & {*narrow}), dtype)


def _count_convolution(equation: Any) -> int:
    """Counts the operations of a convolution, a multiply-add as two.

    Products with the zeros of padding count. Those with the zeros that dilation puts
    between the elements of the input do not.
    """
    numbers = equation.params["dimension_numbers"]
    kernel = equation.invars[1].aval.shape
    # The kernel's axes: out, in (of one group), then space.
    taps = math.prod(kernel[axis] for axis in numbers.rhs_spec[1:])
    taps //= math.prod(equation.params["lhs_dilation"])
    return 2 * taps * math.prod(equation.outvars[0].aval.shape)
