"""What several processes have to agree on.

Values go through JAX's coordination service, from host to host: no device waits for
them, and a process that is somewhere else in the program is an error that says so.
Every process must come to the same calls in the same order.
"""

import builtins
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..basics import coordination
from . import meetings

_LIMIT: Final = 3600.0
"""Seconds to wait for what process 0 does alone, such as reading a large checkpoint.
If it has died, that ends the others long before."""

_SHARE_OF_TIME: Final = 200
_LEAST_SECONDS: Final = 0.2
_MOST_SECONDS: Final = 5.0
"""A `Pulse` takes about one part in so many of the time, but comes after so many
seconds at least and at most."""


class Processes:
    """The processes that train together. Here: this one, which agrees with itself."""

    index: int = 0  # which of them this is
    count: int = 1

    def step(self, where: str) -> None:
        """Raises on all unless they are about to do the same step of a loop."""

    def all(self, what: str, value: Any, patience: float = 0.0) -> list[Any]:
        """Every process's `value`, a JSON value, in their order.

        `what` is exchanged, for the error of a process that is elsewhere. They are
        waited for so many seconds at least.
        """
        return [value]

    def first(
        self, what: str, function: Callable[[], Any], *errors: type[Exception]
    ) -> Any:
        """What `function` gives on process 0, a JSON value; it is called there only.

        Where process 0 raises, all do: errors that Python knows by name, and those of
        `errors`, as they are, others as a RuntimeError.
        """
        outcome, raised = None, None
        if self.index == 0:
            try:
                outcome = ["", function()]
            except Exception as error:
                outcome, raised = [type(error).__name__, str(error)], error
        kind, value = self.all(what, outcome, 0.0 if self.index == 0 else _LIMIT)[0]
        if raised is not None:
            raise raised
        if kind:
            raise _error(kind, f"{value} (said process 0)", errors)
        return value

    def same(self, what: str, values: Mapping[str, Any]) -> None:
        """Raises a RuntimeError on all unless all have the same `values`, by name."""
        if self.count > 1:
            here = meetings.here()
            here.note(what, {name: repr(value) for name, value in values.items()})
            here.meet()

    def any(self, what: str, error: BaseException | None) -> str | None:
        """What is wrong in any process, by its number; None if all is well."""
        if self.count == 1:
            return None if error is None else str(error)
        text = None if error is None else f"{type(error).__name__}: {error}"
        answers = enumerate(self.all(what, text))
        wrong = [f"process {i}: {text}" for i, text in answers if text is not None]
        return "; ".join(wrong) or None


class _Several(Processes):
    """The processes that `jax.distributed.initialize` has brought together."""

    def __init__(self) -> None:
        self.index = coordination.index()
        self.count = coordination.count()
        self._folder: str | None = None

    def step(self, where: str) -> None:
        here = meetings.here()
        here.note(where)
        here.step()

    def all(self, what: str, value: Any, patience: float = 0.0) -> list[Any]:
        here, old = meetings.here(), self._folder
        self._folder = folder = f"jaxdp/all/{here.number}"
        coordination.put(folder, value)
        here.meet(what, patience)
        values = coordination.read_all(folder)
        if old is not None:  # whoever has come here has read it
            coordination.remove(old)
        return [values[index] for index in range(self.count)]


def find_processes() -> Processes:
    """All that train together: those of the job, or this one alone."""
    return _several() if coordination.is_there() else _ALONE


_ALONE: Final = Processes()


@functools.lru_cache(maxsize=1)
def _several() -> Processes:
    """One for all trainers, since the calls of all are counted together."""
    return _Several()


class Pulse:
    """Wishes of single processes, heard by all of them at the same moment.

    To ask costs milliseconds, so it is not done at every `beat`, but several times a
    second: how many beats to leave out, process 0 says each time.
    """

    def __init__(self, processes: Processes, what: str):
        self._processes = processes
        self._what = what
        self._left = 0
        self._beats = 1
        self._asked: float | None = None
        self._took = float("inf")  # the fastest: others also waited for a slow process

    def beat(self, wish: Any, *, now: bool = False) -> list[Any]:
        """The wishes that processes have, None left out; `[]` if nobody was asked.

        With `now` all ask, at this very call. A wish is JSON.
        """
        if self._processes.count == 1:
            return [] if wish is None else [wish]
        self._left -= 1
        if self._left > 0 and not now:
            return []
        start = time.monotonic()
        done = self._beats - max(self._left, 0)
        beats = self._next_beats(start, done)
        answers = self._processes.all(self._what, [wish, beats])
        self._asked = time.monotonic()
        self._took = min(self._took, self._asked - start)
        self._left = self._beats = answers[0][1]
        return [wish for wish, _ in answers if wish is not None]

    def _next_beats(self, now: float, done: int) -> int:
        """How many beats are to come before the next time, by the last ones' pace."""
        if self._asked is None:
            return 1
        pause = max(_LEAST_SECONDS, self._took * _SHARE_OF_TIME)
        pause = min(pause, _MOST_SECONDS)
        per_beat = max(now - self._asked, 1e-6) / max(done, 1)
        return max(1, min(int(pause / per_beat), 4 * self._beats))


def _error(kind: str, text: str, errors: Sequence[type[Exception]]) -> Exception:
    """One of `errors`, or of Python's own, by its name; else a RuntimeError."""
    known = vars(builtins) | {error.__name__: error for error in errors}
    try:
        return known[kind](text)
    except (KeyError, TypeError):  # there is none, or it needs more than a text
        return RuntimeError(text)
