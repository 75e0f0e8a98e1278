"""Python that a compiled step calls, as `eqx.error_if` does, and what it raises.

An error that leaves such a call ends the program on one device and strands the others:
with several faked devices jax 0.10.2 waits 40 s for them, and aborts the process. So
nothing may leave a call. What it raised is kept for whoever waits for the step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from .jaxprs import equations_in, opened, programs_in

_PRIMITIVE: Final = "pure_callback"


class CallsPython(Exception):
    """A step was traced whose calls of Python may raise."""


@dataclasses.dataclass(eq=False)  # JAX wants parameters of operations to be hashable
class _Catching:
    """A call of Python inside a program that keeps what it raises.

    After one has raised, no other is made: the step's results are of no use.
    """

    call: Callable[..., Any]
    results: Any
    """Their shapes and dtypes."""
    faults: list[Exception]

    def __call__(self, *arguments: Any) -> Any:
        if not self.faults:
            try:
                return self.call(*arguments)
            except Exception as error:
                self.faults.append(error)
        return [np.zeros(each.shape, each.dtype) for each in self.results]


def calls_python(jaxpr: Any) -> bool:
    """Whether a traced program calls Python that may raise."""
    return any(map(_may_raise, equations_in(jaxpr)))


def catching(step: Callable[..., Any], faults: list[Exception]) -> Callable[..., Any]:
    """`step(collectives, *arguments)`, its calls of Python putting errors aside."""

    def caught(collectives: Any, *arguments: Any) -> Any:
        traced = jax.make_jaxpr(functools.partial(step, collectives), return_shape=True)
        program, shapes = traced(*arguments)
        found = jaxpr_as_fun(_rewritten(program, faults))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return caught


def as_raised(error: BaseException) -> BaseException:
    """An error as its author knows it: of `eqx.error_if`, `eqx.EquinoxRuntimeError`.

    Equinox itself gives it that type in `eqx.filter_jit` alone.
    """
    if type(error).__name__ not in ("_EquinoxRuntimeError", "EquinoxTracetimeError"):
        return error
    text = str(error).split("\n\n\n-----")[0]
    return eqx.EquinoxRuntimeError(text).with_traceback(error.__traceback__)


def _may_raise(equation: Any) -> bool:
    if equation.primitive.name != _PRIMITIVE:
        return False
    return not isinstance(equation.params["callback"], _Catching)


def _rewritten(program: Any, faults: list[Exception]) -> Any:
    """A program, open or closed, with `_Catching` calls."""
    if hasattr(program, "consts"):
        return program.replace(jaxpr=_rewritten(program.jaxpr, faults))
    equations = [_caught(equation, faults) for equation in program.eqns]
    return program.replace(eqns=equations)


def _caught(equation: Any, faults: list[Exception]) -> Any:
    params = equation.params
    if _may_raise(equation):
        call = _Catching(params["callback"], params["result_avals"], faults)
        return equation.replace(params={**params, "callback": call})
    if not any(map(calls_python, programs_in(equation))):
        return equation

    def rewritten(value: Any) -> Any:
        is_program = hasattr(opened(value), "eqns")
        return _rewritten(value, faults) if is_program else value

    new = jax.tree.map(rewritten, params, is_leaf=lambda leaf: hasattr(leaf, "eqns"))
    return equation.replace(params=new)
