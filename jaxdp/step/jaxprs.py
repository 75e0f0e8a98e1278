"""Operations of traced programs, which decide how a step is compiled."""

from collections.abc import Iterator
from typing import Any, Final

import jax

OWN_LOOP: Final = "own_loop"
"""Names the `jax.named_scope` of loops over optimizer steps and micro-batches."""

_DEFAULT: Final = jax.lax.Precision.DEFAULT


def has_convolutions(jaxpr: Any) -> bool:
    """Returns True if a traced program contains a convolution."""
    return _has_operation(jaxpr, "conv_general_dilated")


def has_default_products(jaxpr: Any) -> bool:
    """Returns True if a program has products of float32 arrays in JAX's default
    precision.
    """
    return any(
        each.primitive.name in ("dot_general", "conv_general_dilated")
        and {str(argument.aval.dtype) for argument in each.invars[:2]} == {"float32"}
        and each.params["precision"] in (None, _DEFAULT, (_DEFAULT, _DEFAULT))
        for each in equations_in(jaxpr)
    )


def calls_python(jaxpr: Any) -> bool:
    """Returns True if a traced program calls Python, which may raise.

    `eqx.error_if` does, and so does every diffrax solver.
    """
    return _has_operation(jaxpr, "pure_callback")


def _has_operation(jaxpr: Any, name: str) -> bool:
    return any(each.primitive.name == name for each in equations_in(jaxpr))


def gathers_in_branches(jaxpr: Any) -> bool:
    """Returns True if devices gather parameters in a `cond` or a `while` of their own.

    Devices may take different branches or numbers of iterations, and then wait forever.
    """

    def gathers(equation: Any) -> bool:
        scopes = str(equation.source_info.name_stack)
        return equation.primitive.name == "all_gather" and "parameters" in scopes

    return any(
        any(map(gathers, equations_in(program)))
        for device in equations_in(jaxpr)
        if device.primitive.name == "shard_map"
        for inside in programs_in(device)
        for branching in equations_in(inside)
        if branching.primitive.name in ("cond", "while")
        for program in programs_in(branching)
    )


def has_own_loop(jaxpr: Any) -> bool:
    """Returns True if a traced program has a loop in the scope `OWN_LOOP`."""
    return any(
        equation.primitive.name == "scan"
        and OWN_LOOP in str(equation.source_info.name_stack).split("/")
        for equation in equations_in(jaxpr)
    )


def strip_constants(jaxpr: Any) -> Any:
    """Returns a program without its constants, or itself if it has none."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """Yields the operations of a program, and of the programs in them."""
    for equation in strip_constants(jaxpr).eqns:
        yield equation
        for inside in programs_in(equation):
            yield from equations_in(inside)


def programs_in(equation: Any) -> list[Any]:
    """Returns the programs that are arguments of an operation."""
    programs = []
    for value in equation.params.values():
        values = value if isinstance(value, tuple | list) else (value,)
        programs += [one for one in values if hasattr(strip_constants(one), "eqns")]
    return programs
