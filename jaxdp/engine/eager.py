"""Steps for debugging: one at a time, on one device, each waited for.

`jax.disable_jit()` is for printing values and stopping in one's own code: a step then
runs operation by operation. `jax_debug_nans`, `jax_debug_infs` and calls of Python that
may raise, as `eqx.error_if` makes, leave it compiled. What such a call raises is raised
by the same step without jit, and so from the user's own line.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax

from ..basics.console import say
from ..step import Collectives, RowsInteract, TrainState, values_mix_rows
from ..strategies import DataParallel, SingleDevice


class Debugging(NamedTuple):
    """Why steps run for debugging, if any of these is true."""

    without_jit: bool
    finds_nonfinite: bool
    calls_python: bool = False


def debugging(calls_python: bool = False) -> Debugging:
    """JAX's present settings, and whether steps were seen to call Python."""
    config: Any = jax.config
    nonfinite = config.jax_debug_nans or config.jax_debug_infs
    return Debugging(config.jax_disable_jit, nonfinite, calls_python)


class Debugged(DataParallel):
    """What a strategy computes, on the first of its devices, step by step."""

    def __init__(self, strategy: DataParallel, mode: Debugging):
        if jax.process_count() > 1:
            raise RuntimeError(
                "jax_disable_jit, jax_debug_nans or jax_debug_infs is set, and there"
                f" are {jax.process_count()} processes, which can only compute"
                " together in compiled steps. Debug in a single process."
            )
        self.strategy, self.mode = strategy, mode

    def place(self, state: TrainState) -> TrainState:
        mesh = getattr(self.strategy, "mesh", None)
        devices = jax.devices()[:1] if mesh is None else mesh.devices.flat
        self._device = min(devices, key=lambda device: device.id)
        why, how = "jax_debug_nans or jax_debug_infs is set", "each waited for"
        if self.mode.without_jit:
            why, how = "jit is disabled", "operation by operation"
        elif self.mode.calls_python:
            why = "a step calls Python that may raise, as eqx.error_if does"
            how += "; with EQX_ON_ERROR=nan set, Equinox makes NaN instead of errors"
        say(f"{why}: single steps run, all rows on {self._device}, {how}")
        return SingleDevice(self._device).place(state)

    def compile(self, step: Callable[..., Any], arguments: Any, *_: Any, **__: Any):
        program = jax.jit(functools.partial(step, Collectives()))
        given = jax.device_put(arguments, self._device)
        if not self.mode.without_jit:
            if values_mix_rows(program.trace(*given).jaxpr):
                raise RowsInteract
        # It runs once at once, for what it has to tell. Its author should not meet it
        # twice for that.
        known = [(given, self._run(program, given))]

        def watched(*given: Any) -> Any:
            given = jax.device_put(given, self._device)
            first, results = known.pop() if known else (None, None)
            return (
                results if eqx.tree_equal(first, given) else self._run(program, given)
            )

        return watched

    def _run(self, program: Callable[..., Any], given: Any) -> Any:
        failed = None
        if not self.mode.without_jit:
            try:
                return jax.block_until_ready(program(*given))  # waits for the device
            except FloatingPointError:  # JAX has found its line
                raise
            except Exception as error:
                failed = error
        try:
            with jax.disable_jit():
                results = program(*given)
        except RuntimeError as error:
            if "Equinox" not in type(error).__name__:
                raise
            found = eqx.EquinoxRuntimeError(str(error).split("\n\n\n-----")[0])
            raise found.with_traceback(error.__traceback__) from None
        if failed is not None:
            raise failed
        return results
