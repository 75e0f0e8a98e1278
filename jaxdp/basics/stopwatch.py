"""The time of a loop by phase: each second counts once."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

Phase = Literal["data", "device", "callbacks", "checkpoints", "validation", "loop"]

PHASES: Final[dict[Phase, str]] = {
    "data": "waiting for data",
    "device": "waiting for the device",
    "callbacks": "callbacks",
    "checkpoints": "checkpoints",
    "validation": "validation",
    "loop": "the host: packing batches, calling the step",
}
"""A description of each phase."""
_COVERING_PHASES: Final = ("validation", "checkpoints")


class Stopwatch:
    """Accounts for the time of the main thread, phase by phase.

    The time of a phase inside another one counts only for the inner phase, so that the
    seconds add up to the elapsed time. A validation or a checkpoint counts all phases
    inside of it as its own.

    Attributes:
        is_on: whether a callback reads it; if none does, no function is wrapped.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._stack: list[Phase] = ["loop"]
        self._last = time.perf_counter()

    def read(self) -> dict[Phase, float]:
        """Returns the seconds by phase until now."""
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._last
        self._last = now
        return dict(self._seconds)

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Counts the time inside as that of `phase`."""
        self.read()
        outer = self._stack[-1]
        self._stack.append(outer if outer in _COVERING_PHASES else phase)
        try:
            yield
        finally:
            self.read()
            self._stack.pop()

    def time_function(self, phase: Phase, function: Callable[..., Any]) -> Any:
        """Returns `function`, with its calls counted as `phase`."""

        def call_timed(*arguments: Any, **options: Any) -> Any:
            with self.measure(phase):
                return function(*arguments, **options)

        return call_timed if self.is_on else function

    def time_iterator(self, phase: Phase, iterator: Iterator[Any]) -> Iterator[Any]:
        """Returns `iterator`, with the time until each value counted as `phase`."""
        return self._iterate_timed(phase, iterator) if self.is_on else iterator

    def _iterate_timed(self, phase: Phase, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.measure(phase):
                try:
                    value = next(iterator)
                except StopIteration:
                    return
            yield value
