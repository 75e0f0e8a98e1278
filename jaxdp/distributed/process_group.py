"""Where the processes of a job meet, each telling what it is about to do, and agree.

Meeting is a barrier of JAX's coordination service whose name says what this process is
about to do, so that only those pass who are about to do the same. Whoever does not get
past soon leaves a card there and reads those of the others. The values that they agree
on go the same way, from host to host: no device waits for them.
"""

import builtins
import functools
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ..basics import coordination
from ..basics.console import join_numbers, join_some, log_info

_FAST_BARRIER_SECONDS: Final = 2.0
"""Seconds at a barrier after which a process asks where the others are."""

_MISMATCH_READ_SECONDS: Final = 1.0
"""Seconds that process 0 stays when they differ: the cards go when it does."""

_MAX_REPORTED_DIFFERENCES: Final = 5

_ARRIVED_DIR: Final = "jaxdp.meet/come"
_LATE_DIR: Final = "jaxdp.meet/late"
_EXITED_DIR: Final = "jaxdp.meet/departed"
"""Where processes leave their cards, who wait for others, for whom others do, and who
end, by an error or without one."""

_HOSTS_DIR: Final = "jaxdp.meet/hosts"

_EXIT_SECONDS: Final = 10.0
"""In which a process that has given up must have ended: what it does then, such as to
write its last log, may wait for a step in flight, and that for the other process."""

DELAY_REPORT_SECONDS: Final = 2.0
"""Seconds after which a process that is late and alive begins to leave such a card."""

_RANK_ZERO_TIMEOUT: Final = 3600.0
"""Seconds to wait for what process 0 does alone, such as reading a large checkpoint.
If it has died, that ends the others long before."""

_PAUSE_PER_EXCHANGE: Final = 200
_MIN_PAUSE_SECONDS: Final = 0.2
_MAX_PAUSE_SECONDS: Final = 5.0
"""A `PeriodicVote` takes about one part in so many of the time, but comes after so many
seconds at least and at most."""

Entry = tuple[str, Mapping[str, str]]
"""What a process is about to do, and with what."""


class PeerLost(RuntimeError):
    """Another process has failed, left or died, and can't be waited for."""


def _make_peer_lost(text: str) -> PeerLost:
    """Returns the error. The process ends soon after it, whatever it then waits for."""

    def exit_process() -> None:
        log_info(f"{text}. This process ends.", all_processes=True)
        os._exit(1)

    timer = threading.Timer(_EXIT_SECONDS, exit_process)
    timer.daemon = True
    timer.start()
    return PeerLost(text)


class ProcessBarrier:
    """The meetings of one process, in the order in which all processes have them."""

    def __init__(self) -> None:
        self.num_passed = 0  # of meetings so far
        self.location = ""  # what this process is about to do, or does
        self.is_stop_pending = False  # by a signal that waits for all to come
        self.location_time = time.monotonic()  # when it came to that
        self.is_waiting = False  # for others
        self.wait_seconds = 0.0  # seconds, so far
        self.timeout = 600.0  # seconds to wait for them
        self.warn_after = 30.0  # seconds after which it is said for whom
        self.every_n_steps = 1  # steps of loops with one meeting
        self._steps = 0
        self._entries: list[Entry] = []

    def add_entry(self, where: str, facts: Mapping[str, str] | None = None) -> None:
        """Tells it at the next meeting."""
        self.location, self.location_time = where, time.monotonic()
        self._entries.append((where, facts or {}))

    def sync_step(self) -> None:
        """Meets the others if it is the turn of this step of a loop."""
        self._steps += 1
        if self._steps >= self.every_n_steps:
            self.wait_for_all()

    def wait_for_all(self, what: str = "", patience: float = 0.0) -> None:
        """Waits for all others to come, having noted the same since the last time.

        `what` they meet for, where it is nothing noted. Raises a RuntimeError if they
        have not, or somebody does not come in `timeout` or `patience` seconds.
        """
        entries, self._entries, self._steps = self._entries, [], 0
        if what:
            entries.append((what, {}))
        self.num_passed += 1
        digest = hashlib.blake2b(repr(entries).encode(), digest_size=8).hexdigest()
        started, self.is_waiting = time.monotonic(), True
        name = f"jaxdp.meet/{self.num_passed}/{digest}"
        if not coordination.wait_at_barrier(
            name, _FAST_BARRIER_SECONDS, gives_up=lambda: bool(self._read_exited())
        ):
            self._wait_for_missing(
                digest, entries, started, max(patience, self.timeout)
            )
        self.location_time, self.is_waiting = time.monotonic(), False
        self.wait_seconds += self.location_time - started

    def report_delay(self, place: str) -> None:
        """Lets the others know where this process is, since it has not come yet."""
        seconds = time.monotonic() - self.location_time
        text = f"{self.location}, for {seconds:.0f} s, at {place}"
        card = {"number": self.num_passed, "text": text}
        coordination.put_value(_LATE_DIR, card)

    def report_exit(self, how: str) -> None:
        """Publishes that this process ends, and how; waits a second at most."""
        passed = self.num_passed - self.is_waiting
        card = {
            "number": passed,
            "text": f"{how}; it was at {self.location or 'no fit'}",
        }
        put = threading.Thread(target=coordination.put_value, args=(_EXITED_DIR, card))
        put.daemon = True
        try:
            put.start()
        except RuntimeError:  # Python 3.12 starts no threads in `atexit`
            coordination.put_value(_EXITED_DIR, card)
        else:
            put.join(1.0)

    def _read_exited(self) -> dict[int, str]:
        """Returns how processes have ended that will not come to this meeting."""
        cards = coordination.read_values(_EXITED_DIR).items()
        return {
            p: card["text"] for p, card in cards if card["number"] < self.num_passed
        }

    def _wait_for_missing(
        self, digest: str, entries: Sequence[Entry], started: float, timeout: float
    ) -> None:
        mine = {"number": self.num_passed, "digest": digest, "entries": entries}
        coordination.put_value(_ARRIVED_DIR, mine)
        everyone = set(range(coordination.process_count()))
        pause, warned = 0.02, False

        while True:
            cards = coordination.read_values(_ARRIVED_DIR)
            here = {p: c for p, c in cards.items() if c["number"] == self.num_passed}
            differing = {p: c for p, c in here.items() if c["digest"] != digest}
            if differing and pause > 0.1:  # by then most have come
                if coordination.process_index() == 0:
                    time.sleep(_MISMATCH_READ_SECONDS)
                raise RuntimeError(_describe_mismatch(here))

            # Whoever has left for the next one has met us here.
            missing = {
                p for p in everyone if cards.get(p, mine)["number"] < self.num_passed
            } | (everyone - set(cards))
            if not missing and not differing:
                return

            # Somebody is late, or gone. A launcher that sees one die tells the rest to
            # end; of those that are alive it would soon be heard why they are late.
            for process, how in self._read_exited().items():
                raise _make_peer_lost(f"{_format_processes([process])} {how}")
            waited = time.monotonic() - started
            is_silent = waited > 2 * DELAY_REPORT_SECONDS and not _join_delay_reports(
                missing, self.num_passed
            )
            if self.is_stop_pending and is_silent:
                raise _make_peer_lost(
                    f"process {coordination.process_index()} ({self.location}) was told"
                    f" to end, and {_format_processes(missing)} did not come and said"
                    " nothing"
                )
            is_late = waited > timeout
            if is_late or waited > self.warn_after and not warned:
                excuses = _join_delay_reports(missing, self.num_passed)
                text = (
                    f"process {coordination.process_index()} ({self.location}) has"
                    f" waited for {waited:.0f} s for {_format_processes(missing)}"
                    + (f" ({excuses})" if excuses else "")
                )
                if is_late:
                    raise _make_peer_lost(f"{text} (`Lockstep(timeout=...)`)")
                log_info(text, all_processes=True)
                warned = True

            time.sleep(pause)
            pause = min(2 * pause, 0.5)


@functools.cache
def get_barrier() -> ProcessBarrier:
    """The meetings of this process."""
    return ProcessBarrier()


def _format_processes(processes: Iterable[int]) -> str:
    """process 1 on node7, process 2 on node8."""
    hosts = coordination.read_values(_HOSTS_DIR)
    return join_some(f"process {p} on {hosts.get(p, '?')}" for p in sorted(processes))


def _join_delay_reports(missing: set[int], number: int) -> str:
    """What those have told who are missing at that meeting."""
    return "; ".join(
        f"process {process}: {card['text']}"
        for process, card in sorted(coordination.read_values(_LATE_DIR).items())
        if process in missing and card["number"] == number - 1
    )


def _describe_mismatch(cards: Mapping[int, Mapping[str, Any]]) -> str:
    """What the first thing is that processes are not about to do alike."""
    longest = max(len(card["entries"]) for card in cards.values())
    for place in range(longest):
        entries = {
            process: card["entries"][place] if place < len(card["entries"]) else None
            for process, card in sorted(cards.items())
        }
        wheres = _group_by_value({p: e and e[0] for p, e in entries.items()})
        if len(wheres) > 1:
            differences = [
                f"{who}: {where or 'nothing'}" for where, who in wheres.items()
            ]
            return (
                "the processes of this job are about to do different things, and their"
                f" numbers would be wrong: {'; '.join(differences)}."
            )
        facts = {p: dict(e[1]) for p, e in entries.items() if e}
        names = dict.fromkeys(name for noted in facts.values() for name in noted)
        differences = []
        for name in names:
            values = _group_by_value({p: noted.get(name) for p, noted in facts.items()})
            if len(values) > 1:
                listed_values = ", ".join(f"{v} ({who})" for v, who in values.items())
                differences.append(f"{name}: {listed_values}")
        if differences:
            more = len(differences) - _MAX_REPORTED_DIFFERENCES
            rest = f"; and {more} more" if more > 0 else ""
            return (
                f"the processes of this job do not agree, at {next(iter(wheres))}:"
                f" {'; '.join(differences[:_MAX_REPORTED_DIFFERENCES])}{rest}. Their"
                " numbers would be wrong. All must run the same program with the same"
                " settings."
            )
    raise AssertionError("digests differ, and nothing that was noted does")


def _group_by_value(values: Mapping[int, Any]) -> dict[Any, str]:
    """Who has each value."""
    processes: dict[Any, list[int]] = {}
    for process, value in values.items():
        processes.setdefault(value, []).append(process)
    return {value: join_numbers("process", who) for value, who in processes.items()}


class ProcessGroup:
    """The processes that train together. Here: this one, which agrees with itself.

    All must come to the same calls in the same order; one that is elsewhere in the
    program is an error that says so.
    """

    index: int = 0  # which of them this is
    count: int = 1

    def sync_step(self, where: str) -> None:
        """Raises on all unless they are about to do the same step of a loop."""

    def all_gather(self, what: str, value: Any, patience: float = 0.0) -> list[Any]:
        """Every process's `value`, a JSON value, in their order.

        `what` is exchanged, for the error of a process that is elsewhere. They are
        waited for so many seconds at least.
        """
        return [value]

    def run_on_rank_zero(
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
        kind, value = self.all_gather(
            what, outcome, 0.0 if self.index == 0 else _RANK_ZERO_TIMEOUT
        )[0]
        if raised is not None:
            raise raised
        if kind:
            raise _make_error(kind, f"{value} (said process 0)", errors)
        return value

    def check_equal(self, what: str, values: Mapping[str, Any]) -> None:
        """Raises a RuntimeError on all unless all have the same `values`, by name."""
        if self.count > 1:
            meeting = get_barrier()
            meeting.add_entry(
                what, {name: repr(value) for name, value in values.items()}
            )
            meeting.wait_for_all()

    def gather_errors(self, what: str, error: BaseException | None) -> str | None:
        """What is wrong in any process, by its number and host; None if all is well."""
        if self.count == 1:
            return None if error is None else str(error)
        own = None if error is None else f"{type(error).__name__}: {error}"
        wrong = [
            f"{_format_processes([process])}: {text}"
            for process, text in enumerate(self.all_gather(what, own))
            if text is not None
        ]
        return "; ".join(wrong) or None


class _MultiProcessGroup(ProcessGroup):
    """The processes that `jax.distributed.initialize` has brought together."""

    def __init__(self) -> None:
        self.index = coordination.process_index()
        self.count = coordination.process_count()
        self._folder: str | None = None
        coordination.put_value(_HOSTS_DIR, socket.gethostname())

    def sync_step(self, where: str) -> None:
        meeting = get_barrier()
        meeting.add_entry(where)
        meeting.sync_step()

    def all_gather(self, what: str, value: Any, patience: float = 0.0) -> list[Any]:
        meeting, old = get_barrier(), self._folder
        self._folder = folder = f"jaxdp/all/{meeting.num_passed}"
        coordination.put_value(folder, value)
        meeting.wait_for_all(what, patience)
        values = coordination.read_values(folder)
        if old is not None:  # whoever has come here has read it
            coordination.delete_value(old)
        return [values[index] for index in range(self.count)]


def get_process_group() -> ProcessGroup:
    """All that train together: those of the job, or this one alone."""
    return _get_multi_process_group() if coordination.has_peers() else _SINGLE_PROCESS


_SINGLE_PROCESS: Final = ProcessGroup()


_get_multi_process_group = functools.cache(_MultiProcessGroup)
"""One for all trainers, since the calls of all are counted together."""


class PeriodicVote:
    """Wishes of single processes, heard by all of them at the same moment.

    To ask costs milliseconds, so it is not done at every `poll`, but several times a
    second: how many beats to leave out, process 0 says each time.
    """

    def __init__(self, processes: ProcessGroup, what: str):
        self._processes = processes
        self._what = what
        self._left = 0
        self._beats = 1
        self._asked: float | None = None
        self._took = float("inf")  # the fastest: others also waited for a slow process

    def poll(self, wish: Any, *, force: bool = False) -> list[Any]:
        """The wishes that processes have, None left out; `[]` if nobody was asked.

        With `now` all ask, at this very call. A wish is JSON.
        """
        if self._processes.count == 1:
            return [] if wish is None else [wish]
        self._left -= 1
        if self._left > 0 and not force:
            return []
        start = time.monotonic()
        done = self._beats - max(self._left, 0)
        beats = self._choose_calls(start, done)
        answers = self._processes.all_gather(self._what, [wish, beats])
        self._asked = time.monotonic()
        self._took = min(self._took, self._asked - start)
        self._left = self._beats = answers[0][1]
        return [wish for wish, _ in answers if wish is not None]

    def _choose_calls(self, now: float, done: int) -> int:
        """How many beats are to come before the next time, by the last ones' pace."""
        if self._asked is None:
            return 1
        pause = max(_MIN_PAUSE_SECONDS, self._took * _PAUSE_PER_EXCHANGE)
        pause = min(pause, _MAX_PAUSE_SECONDS)
        per_beat = max(now - self._asked, 1e-6) / max(done, 1)
        return max(1, min(int(pause / per_beat), 4 * self._beats))


def _make_error(kind: str, text: str, errors: Sequence[type[Exception]]) -> Exception:
    """One of `errors`, or of Python's own, by its name; else a RuntimeError."""
    known = vars(builtins) | {error.__name__: error for error in errors}
    try:
        return known[kind](text)
    except (KeyError, TypeError):  # there is none, or it needs more than a text
        return RuntimeError(text)
