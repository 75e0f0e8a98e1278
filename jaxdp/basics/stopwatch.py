"""Where the time of a loop goes: seconds by phase, each counted once."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal

Phase = Literal["data", "device", "callbacks", "checkpoints", "validation", "loop"]

PHASES: Final[dict[Phase, tuple[str, str]]] = {
    "data": ("waiting for data", "input-bound"),
    "device": ("waiting for the device", "device-bound"),
    "callbacks": ("callbacks", "callback-bound"),
    "checkpoints": ("checkpoints", "checkpoint-bound"),
    "validation": ("validation", "validating"),
    "loop": ("the host: packing batches, calling the step", "host-bound"),
}
"""What each of them is, and what a fit is that spends its time there."""
_NOTHING: Final = nullcontext()
_WHOLE: Final = ("validation", "checkpoints")
"""What happens inside of these counts as theirs."""


class Stopwatch:
    """Accounts for the time of the main thread, phase by phase.

    A phase inside another one takes the time from it, so that the seconds add up to
    the time that has passed. A callback that calls `trainer.record.measure_phases` in
    its `setup` has the fit measured; without one nothing is wrapped, and nothing is
    paid.

    Args:
        is_on: False for one that measures nothing, and wraps nothing.

    Attributes:
        seconds: so far, by phase; `read` brings them up to date.
    """

    def __init__(self, *, is_on: bool = True):
        self.is_on = is_on
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._stack: list[Phase] = ["loop"]
        self._last = time.perf_counter()

    def read(self) -> dict[Phase, float]:
        """Seconds by phase until now, as a copy."""
        self._charge()
        return dict(self.seconds)

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """What happens inside is of that phase."""
        return self._timed(phase) if self.is_on else _NOTHING

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[None]:
        self._enter(phase)
        try:
            yield
        finally:
            self._leave()

    def iterator(self, phase: Phase, items: Iterator[Any]) -> Iterator[Any]:
        """`items`, where waiting for the next one is of that phase."""
        if not self.is_on:
            return items
        # Calls it without arguments, until it raises StopIteration.
        timed = self.function(phase, items.__next__)
        return itertools.starmap(timed, itertools.repeat(()))

    def function(self, phase: Phase, function: Callable[..., Any]) -> Any:
        """`function`, whose calls are of that phase."""
        if not self.is_on:
            return function

        def timed(*arguments: Any, **options: Any) -> Any:
            self._enter(phase)
            try:
                return function(*arguments, **options)
            finally:
                self._leave()

        return timed

    def methods(self, phase: Phase, owner: Any, names: tuple[str, ...]) -> Any:
        """A copy of `owner` whose named methods are of that phase."""
        if not self.is_on:
            return owner
        timed = copy.copy(owner)
        for name in names:
            setattr(timed, name, self.function(phase, getattr(owner, name)))
        return timed

    def _enter(self, phase: Phase) -> None:
        self._charge()
        current = self._stack[-1]
        self._stack.append(current if current in _WHOLE else phase)

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._last
        self._last = now


NO_STOPWATCH: Final = Stopwatch(is_on=False)
"""Where no callback has asked for one."""
