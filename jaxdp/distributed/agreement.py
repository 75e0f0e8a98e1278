"""What several processes have to agree on.

Values go through JAX's coordination service, from host to host: no device waits for
them, and a process that is somewhere else in the program is an error that says so.
Every process must come to the same calls in the same order.
"""

import builtins
import functools
import hashlib
import itertools
import json
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
    """The processes that train together. Here: this one, which agrees with itself.

    Attributes:
        index: which of them this is.
        count: how many there are.
    """

    index: int = 0
    count: int = 1

    def step(self, where: str) -> None:
        """Raises on all unless they are about to do the same step of a loop."""

    def all(self, what: str, value: Any) -> list[Any]:
        """Every process's `value`, a JSON value, in their order.

        Args:
            what: what is exchanged, for the error of a process that is elsewhere.
            value: this process's.
        """
        return [value]

    def first(
        self, what: str, function: Callable[[], Any], *errors: type[Exception]
    ) -> Any:
        """What `function` gives on process 0, a JSON value; it is called there only.

        Where process 0 raises, all do: errors that Python knows by name, and those of
        `errors`, as they are, others as a RuntimeError.
        """
        return function()

    def same(self, what: str, values: Mapping[str, Any]) -> None:
        """Raises a ValueError on all unless all have the same `values`, by name."""

    def any(self, what: str, error: BaseException | None) -> str | None:
        """What is wrong in any process, by its number; None if all is well."""
        return None if error is None else str(error)


class _Several(Processes):
    """The processes that `jax.distributed.initialize` has brought together."""

    def __init__(self) -> None:
        self.index = coordination.index()
        self.count = coordination.count()
        self._calls = itertools.count()
        self._keys: list[str] = []

    def step(self, where: str) -> None:
        meetings.here().step(where)

    def all(self, what: str, value: Any) -> list[Any]:
        here, old = meetings.here(), self._keys
        self._keys, folder = [], f"all/{here.number}"
        self._set(f"{folder}/{self.index}", value)
        here.meet(what)
        texts = coordination.read_all(f"jaxdp/{folder}")
        for key in old:  # whoever has come here has read them
            coordination.remove(key)
        return [json.loads(texts[str(index)]) for index in range(self.count)]

    def first(
        self, what: str, function: Callable[[], Any], *errors: type[Exception]
    ) -> Any:
        key = f"first/{next(self._calls)}"
        if self.index == 0:
            try:
                value = function()
            except Exception as error:
                self._set(key, [what, type(error).__name__, str(error)])
                raise
            self._set(key, [what, "", value])
            return value
        text = coordination.get(f"jaxdp/{key}", _LIMIT)
        where, kind, value = json.loads(text)
        if where != what:
            raise RuntimeError(
                "the processes are in different places of the program: process 0 at"
                f" {where!r}, process {self.index} at {what!r}. All must call the same"
                " methods of the trainer in the same order, also those that only one"
                " of them needs."
            )
        if not kind:
            return value
        raise _error_of(kind, errors)(f"{value} (said process 0)")

    def same(self, what: str, values: Mapping[str, Any]) -> None:
        texts = {name: repr(value) for name, value in values.items()}
        digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        if len(set(self.all(what, digest))) == 1:
            return
        by_process = self.all(what, texts)
        for name in by_process[0] | by_process[-1]:
            found = [each.get(name, "nothing") for each in by_process]
            other = next((i for i, x in enumerate(found) if x != found[0]), None)
            if other is not None:
                raise ValueError(
                    f"the processes do not have the same {what}: {name} is {found[0]}"
                    f" in process 0, and {found[other]} in process {other}. Every"
                    " process must run the same program with the same settings."
                )

    def any(self, what: str, error: BaseException | None) -> str | None:
        text = None if error is None else f"{type(error).__name__}: {error}"
        found = enumerate(self.all(what, text))
        wrong = [f"process {i}: {text}" for i, text in found if text is not None]
        return "; ".join(wrong) or None

    def _set(self, key: str, value: Any) -> None:
        coordination.put(f"jaxdp/{key}", json.dumps(value))
        self._keys.append(f"jaxdp/{key}")


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

    To ask the others costs milliseconds, so they are not asked at every `beat`, but
    several times a second: how many beats to leave out, process 0 says each time.
    """

    def __init__(self, processes: Processes, what: str):
        self._processes = processes
        self._what = what
        self._left = 0
        self._beats = 1
        self._asked: float | None = None
        self._took = 0.0

    def beat(self, wish: Any, *, now: bool = False) -> list[Any]:
        """The wishes that processes have, None left out; `[]` if nobody was asked.

        Args:
            wish: this process's, JSON, or None.
            now: ask, all processes doing so.
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
        self._asked, self._took = time.monotonic(), time.monotonic() - start
        self._left = self._beats = answers[0][1]
        return [wish for wish, _ in answers if wish is not None]

    def _next_beats(self, now: float, done: int) -> int:
        """How many beats are to come before the next time, by the last ones' pace."""
        if self._asked is None:
            return 1
        pause = max(_LEAST_SECONDS, self._took * _SHARE_OF_TIME)
        pause = min(pause, _MOST_SECONDS)
        each = max(now - self._asked, 1e-6) / max(done, 1)
        return max(1, min(int(pause / each), 4 * self._beats))


def _error_of(kind: str, errors: Sequence[type[Exception]]) -> type[Exception]:
    known = {error.__name__: error for error in errors}
    found = known.get(kind) or getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found if found is not UnicodeDecodeError else RuntimeError
    return RuntimeError
