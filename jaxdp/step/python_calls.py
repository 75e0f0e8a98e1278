"""Python that a compiled step calls, as `eqx.error_if` does, and what it raises.

An error that leaves such a call ends the program on one device and strands the others:
with several faked devices jax 0.10.2 waits 40 s for them, and aborts the process. So
nothing may leave a call. What it raised is kept for whoever waits for the step.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from .jaxprs import equations_in, opened, programs_in

_PRIMITIVE: Final = "pure_callback"


class CallsPython(Exception):
    """A step was traced whose calls of Python may raise."""


class Calls:
    """What a program calls of Python: functions that are handed to it for each call.

    So it may be shared by steps that differ in these functions alone.
    """

    def __init__(self) -> None:
        self.functions: Sequence[Callable[..., Any]] = ()
        self.faults: list[Exception] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def made_to(
        self, functions: Sequence[Callable[..., Any]]
    ) -> Iterator[list[Exception]]:
        """Around a call of the program, which is waited for; collects what is raised.

        Args:
            functions: by their numbers.
        """
        with self._lock:
            self.functions, self.faults = functions, []
            try:
                yield self.faults
            finally:
                self.functions = ()


@dataclasses.dataclass(eq=False)  # JAX wants parameters of operations to be hashable
class _Call:
    """A call of Python inside a program that keeps what it raises.

    After one has raised, no other is made: the step's results are of no use.
    """

    calls: Calls
    number: int
    results: Any
    """Their shapes and dtypes."""

    def __call__(self, *arguments: Any) -> Any:
        if not self.calls.faults:
            try:
                return self.calls.functions[self.number](*arguments)
            except Exception as error:
                self.calls.faults.append(error)
        return [np.zeros(each.shape, each.dtype) for each in self.results]


def calls_python(jaxpr: Any) -> bool:
    """Whether a traced program calls Python that may raise."""
    return any(map(_may_raise, equations_in(jaxpr)))


def calls_of(jaxpr: Any) -> Calls | None:
    """Who makes the calls of a program that `catching` has made, if it has some."""
    for equation in equations_in(jaxpr):
        if isinstance(call := equation.params.get("callback"), _Call):
            return call.calls
    return None


def catching(step: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    """`step(collectives, *arguments)`, whose calls of Python `calls` makes.

    Tracing it tells `calls` its functions.
    """

    def caught(collectives: Any, *arguments: Any) -> Any:
        traced = jax.make_jaxpr(functools.partial(step, collectives), return_shape=True)
        program, shapes = traced(*arguments)
        calls.functions = functions = []
        program = _rewritten(program, calls, functions)
        leaves = jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

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
    return not isinstance(equation.params["callback"], _Call)


def _rewritten(program: Any, calls: Calls, functions: list[Any]) -> Any:
    """A program, open or closed, with a `_Call` instead of each function."""
    if hasattr(program, "consts"):
        return program.replace(jaxpr=_rewritten(program.jaxpr, calls, functions))
    equations = [_caught(equation, calls, functions) for equation in program.eqns]
    return program.replace(eqns=equations)


def _caught(equation: Any, calls: Calls, functions: list[Any]) -> Any:
    params = equation.params
    if _may_raise(equation):
        call = _Call(calls, len(functions), params["result_avals"])
        functions.append(params["callback"])
        return equation.replace(params={**params, "callback": call})
    if not any(map(calls_python, programs_in(equation))):
        return equation

    def rewritten(value: Any) -> Any:
        is_program = hasattr(opened(value), "eqns")
        return _rewritten(value, calls, functions) if is_program else value

    new = jax.tree.map(rewritten, params, is_leaf=lambda leaf: hasattr(leaf, "eqns"))
    return equation.replace(params=new)
