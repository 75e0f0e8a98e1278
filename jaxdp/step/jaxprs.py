"""The operations of jaxprs, the traced steps, which decide how a step is compiled."""

from collections.abc import Iterator
from typing import Any, Final

import jax

OWN_LOOP: Final = "own_loop"
"""Names the `jax.named_scope` of loops over optimizer steps and micro-batches."""

_DEFAULT: Final = jax.lax.Precision.DEFAULT


def has_convolutions(jaxpr: Any) -> bool:
    """Returns True if a jaxpr contains a convolution."""
    return _has_operation(jaxpr, "conv_general_dilated")


def has_default_products(jaxpr: Any) -> bool:
    """Returns True if a jaxpr has products of float32 arrays in JAX's default
    precision.
    """
    return any(
        each.primitive.name in ("dot_general", "conv_general_dilated")
        and {str(argument.aval.dtype) for argument in each.invars[:2]} == {"float32"}
        and each.params["precision"] in (None, _DEFAULT, (_DEFAULT, _DEFAULT))
        for each in iterate_equations(jaxpr)
    )


def calls_python(jaxpr: Any) -> bool:
    """Returns True if a jaxpr calls Python, which may raise.

    `eqx.error_if` does, and so does every diffrax solver.
    """
    return _has_operation(jaxpr, "pure_callback")


def _has_operation(jaxpr: Any, name: str) -> bool:
    return any(each.primitive.name == name for each in iterate_equations(jaxpr))


def gathers_in_branches(jaxpr: Any) -> bool:
    """Returns True if devices gather parameters in a `cond` or a `while` of their own.

    Devices may take different branches or numbers of iterations, and then wait forever.
    """

    def gathers(equation: Any) -> bool:
        scopes = str(equation.source_info.name_stack)
        return equation.primitive.name == "all_gather" and "parameters" in scopes

    return any(
        any(map(gathers, iterate_equations(branch)))
        for device in iterate_equations(jaxpr)
        if device.primitive.name == "shard_map"
        for inside in get_inner_jaxprs(device)
        for branching in iterate_equations(inside)
        if branching.primitive.name in ("cond", "while")
        for branch in get_inner_jaxprs(branching)
    )


def has_own_loop(jaxpr: Any) -> bool:
    """Returns True if a jaxpr has a loop in the scope `OWN_LOOP`."""
    return any(
        equation.primitive.name == "scan"
        and OWN_LOOP in str(equation.source_info.name_stack).split("/")
        for equation in iterate_equations(jaxpr)
    )


def strip_constants(jaxpr: Any) -> Any:
    """Returns a jaxpr without its constants, or itself if it has none."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def iterate_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the operations of a jaxpr, and of the jaxprs in them."""
    for equation in strip_constants(jaxpr).eqns:
        yield equation
        for inside in get_inner_jaxprs(equation):
            yield from iterate_equations(inside)


def get_inner_jaxprs(equation: Any) -> list[Any]:
    """Returns the jaxprs that are arguments of an operation."""
    jaxprs = []
    for value in equation.params.values():
        values = value if isinstance(value, tuple | list) else (value,)
        jaxprs += [one for one in values if hasattr(strip_constants(one), "eqns")]
    return jaxprs
