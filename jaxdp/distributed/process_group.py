"""The processes of a job: barriers that compare what they do, and exchanges of values.

Each barrier is a barrier of JAX's coordination service. Its name contains a digest of
what this process is about to do, so processes that differ wait at different ones. A
process that waits longer than 2 s publishes a message, and reads the messages of the
others to find out which process is missing or differs. Values are exchanged through the
key-value store of the same service: no device waits for them.
"""

import builtins
import functools
import hashlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ..basics import coordination
from ..basics.console import join_numbers, join_some, log_info

_FAST_BARRIER_SECONDS: Final = 2.0
"""Seconds at a barrier after which a process looks for the missing ones."""

_MISMATCH_READ_SECONDS: Final = 1.0
"""Seconds that process 0 waits before it raises a mismatch. It hosts the service: when
it ends, the messages are gone, and the others must read them first."""

_ARRIVED_DIR: Final = "jaxdp.meet/come"
_EXITED_DIR: Final = "jaxdp.meet/departed"
_HOSTS_DIR: Final = "jaxdp.meet/hosts"
"""Directories of the key-value store: messages of processes that wait at a barrier,
messages of processes that exit, and the host name of each process."""

_EXIT_SECONDS: Final = 10.0
"""Seconds until a process that has lost a peer exits. The last row of its log may wait
for a step in flight, and the step for the lost process."""

_VOTE_SECONDS: Final = 1.0
"""The approximate time between two exchanges of a `PeriodicVote`, of milliseconds."""


class PeerLost(RuntimeError):
    """Another process has failed, exited or died, so this one can't wait for it."""


def _make_peer_lost(text: str) -> PeerLost:
    """Returns the error; a timer then ends this process, even if it hangs."""

    def exit_process() -> None:
        log_info(f"{text}. This process ends.", all_processes=True)
        os._exit(1)

    timer = threading.Timer(_EXIT_SECONDS, exit_process)
    timer.daemon = True
    timer.start()
    return PeerLost(text)


class ProcessBarrier:
    """The barriers of this process. All processes pass them in the same order.

    Attributes:
        num_entered: barriers so far.
        location: the current activity of this process, for messages.
        is_waiting: whether this process is at a barrier.
        timeout: seconds after which a barrier raises.
        warn_after: seconds after which the missing processes are logged.
        every_n_steps: steps of a loop per barrier.
    """

    def __init__(self) -> None:
        self.num_entered = self._steps_since_barrier = 0
        self.location, self.is_waiting = "", False
        self.timeout, self.warn_after, self.every_n_steps = 600.0, 30.0, 1
        self._entries: list[tuple[str, Mapping[str, str]]] = []

    def add_entry(self, location: str, facts: Mapping[str, str] | None = None) -> None:
        """Adds an entry, what this process is about to do, to the next comparison."""
        self.location = location
        self._entries.append((location, facts or {}))

    def sync_step(self) -> None:
        """Counts a step of a loop, and enters a barrier at every `every_n_steps`-th."""
        self._steps_since_barrier += 1
        if self._steps_since_barrier >= self.every_n_steps:
            self.wait_for_all()

    def wait_for_all(self, what: str = "") -> None:
        """Blocks until all processes have arrived with the same entries.

        Args:
            what: an entry to add first; "" adds none.

        Raises:
            RuntimeError: if the entries differ.
            PeerLost: if a process has failed or exited, or is not there in time.
        """
        entries, self._entries, self._steps_since_barrier = self._entries, [], 0
        if what:
            entries.append((what, {}))
        self.num_entered += 1
        digest = hashlib.blake2b(repr(entries).encode(), digest_size=8).hexdigest()
        start, self.is_waiting = time.monotonic(), True
        if not coordination.wait_at_barrier(
            f"jaxdp.meet/{self.num_entered}/{digest}",
            _FAST_BARRIER_SECONDS,
            gives_up=lambda: bool(self._read_exited()),
        ):
            message = {"digest": digest, "entries": entries}
            self._wait_for_missing(message, start)
        self.is_waiting = False

    def report_exit(self, how: str) -> None:
        """Publishes how this process exits; blocks for at most a second."""
        text = f"{how}; it was at {self.location or 'no fit'}"
        message = {"number": self.num_entered - self.is_waiting, "text": text}
        publish = functools.partial(coordination.put_value, _EXITED_DIR, message)
        thread = threading.Thread(target=publish, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts no threads in `atexit`
            publish()
        else:
            thread.join(1.0)

    def _read_exited(self) -> dict[int, str]:
        """Maps the processes that have exited before this barrier to how they did."""
        messages = coordination.read_values(_EXITED_DIR).items()
        return {p: m["text"] for p, m in messages if m["number"] < self.num_entered}

    def _wait_for_missing(self, message: Mapping[str, Any], start: float) -> None:
        """Waits by polling messages; raises if processes differ or are lost."""
        number, digest = self.num_entered, message["digest"]
        coordination.put_value(_ARRIVED_DIR, {**message, "number": number})
        pause, has_warned = 0.02, False
        while True:
            messages = coordination.read_values(_ARRIVED_DIR)
            arrived = {p: m for p, m in messages.items() if m["number"] == number}
            differs = any(m["digest"] != digest for m in arrived.values())
            if differs and pause > 0.1:  # most processes have arrived by then
                if coordination.process_index() == 0:
                    time.sleep(_MISMATCH_READ_SECONDS)
                raise RuntimeError(_describe_mismatch(arrived))

            # A process at a later barrier has passed this one.
            passed = {p for p, m in messages.items() if m["number"] >= number}
            missing = {*range(coordination.process_count())} - passed
            if not missing and not differs:
                return

            for process, how in self._read_exited().items():
                raise _make_peer_lost(f"{_format_processes([process])} {how}")
            waited = time.monotonic() - start
            text = (
                f"process {coordination.process_index()} ({self.location}) has"
                f" waited for {waited:.0f} s for {_format_processes(missing)}"
            )
            if waited > self.timeout:
                raise _make_peer_lost(f"{text} (`Lockstep(timeout=...)`)")
            if waited > self.warn_after and not has_warned:
                log_info(text, all_processes=True)
                has_warned = True
            time.sleep(pause)
            pause = min(2 * pause, 0.5)


@functools.cache
def get_barrier() -> ProcessBarrier:
    """Returns the barriers of this process, which all trainers share."""
    return ProcessBarrier()


def _format_processes(processes: Iterable[int]) -> str:
    """process 1 on node7, process 2 on node8."""
    hosts = coordination.read_values(_HOSTS_DIR)
    return join_some(f"process {p} on {hosts.get(p, '?')}" for p in sorted(processes))


def _describe_mismatch(messages: Mapping[int, Mapping[str, Any]]) -> str:
    """Describes the first entry in which processes differ, for an error."""
    processes = sorted(messages)
    columns = [messages[process]["entries"] for process in processes]
    for entries in itertools.zip_longest(*columns, fillvalue=("nothing", {})):
        by_location = _group(processes, [location for location, _ in entries])
        if len(by_location) > 1:
            listed = "; ".join(f"{who}: {where}" for where, who in by_location.items())
            return (
                "the processes of this job are about to do different things, and their"
                f" numbers would be wrong: {listed}."
            )
        differences = []
        for name in dict.fromkeys(name for _, facts in entries for name in facts):
            values = _group(processes, [facts.get(name) for _, facts in entries])
            if len(values) > 1:
                listed = ", ".join(f"{value} ({who})" for value, who in values.items())
                differences.append(f"{name}: {listed}")
        if differences:
            return (
                f"the processes of this job do not agree, at {next(iter(by_location))}:"
                f" {join_some(differences, '; ')}. Their numbers would be wrong. All"
                " must run the same program with the same settings."
            )
    raise AssertionError("digests differ, but no entry does")


def _group(processes: Iterable[int], values: Iterable[Any]) -> dict[Any, str]:
    """Maps each value to the processes that have it, as text."""
    groups: dict[Any, list[int]] = {}
    for process, value in zip(processes, values, strict=True):
        groups.setdefault(value, []).append(process)
    return {value: join_numbers("process", group) for value, group in groups.items()}


class ProcessGroup:
    """The processes that train together; this one alone if `count` is 1.

    All processes must call the same methods in the same order. If one does not, all of
    them raise an error that says where each process is.

    Attributes:
        index: the rank of this process.
        count: the number of processes.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count
        self._previous_dir: str | None = None
        if count > 1:
            coordination.put_value(_HOSTS_DIR, socket.gethostname())

    def sync_step(self, location: str) -> None:
        """Raises on all processes unless all are at the same step of a loop."""
        if self.count > 1:
            get_barrier().add_entry(location)
            get_barrier().sync_step()

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Returns the JSON values of all processes, in the order of their ranks.

        Args:
            what: the purpose, which is compared, and named in errors.
            value: the value of this process.
        """
        if self.count == 1:
            return [value]
        barrier, previous_dir = get_barrier(), self._previous_dir
        self._previous_dir = value_dir = f"jaxdp/all/{barrier.num_entered}"
        coordination.put_value(value_dir, value)
        barrier.wait_for_all(what)
        values = coordination.read_values(value_dir)
        if previous_dir is not None:  # all that arrived at this barrier have read it
            coordination.delete_value(previous_dir)
        return [values[index] for index in range(self.count)]

    def run_on_rank_zero(
        self, what: str, function: Callable[[], Any], *errors: type[Exception]
    ) -> Any:
        """Calls `function` on process 0 alone; returns its JSON result on all.

        If it raises, all processes raise: Python's own exceptions and those in `errors`
        with their type, others as a RuntimeError.
        """
        outcome, exception = None, None
        if self.index == 0:
            try:
                outcome = ["", function()]
            except Exception as error:
                outcome, exception = [type(error).__name__, str(error)], error
        type_name, result = self.all_gather(what, outcome)[0]
        if exception is not None:
            raise exception
        if not type_name:
            return result
        types = vars(builtins) | {error.__name__: error for error in errors}
        text = f"{result} (said process 0)"
        try:
            error = types[type_name](text)
        except (KeyError, TypeError):  # an unknown type, or one with other arguments
            error = RuntimeError(text)
        raise error

    def check_equal(self, what: str, values: Mapping[str, Any]) -> None:
        """Raises a RuntimeError on all processes unless their `values` are equal."""
        if self.count > 1:
            get_barrier().add_entry(what, {n: repr(v) for n, v in values.items()})
            get_barrier().wait_for_all()

    def gather_errors(self, what: str, error: BaseException | None) -> str | None:
        """Returns the errors of all processes as one text; None if there are none."""
        if self.count == 1:
            return None if error is None else str(error)
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts = enumerate(self.all_gather(what, text))
        failures = [f"{_format_processes([p])}: {t}" for p, t in texts if t is not None]
        return "; ".join(failures) or None


# One for all trainers, because the number of a barrier counts the calls of all.
_get_group = functools.cache(ProcessGroup)


def get_process_group() -> ProcessGroup:
    """Returns the processes of this job; this one alone outside of a job."""
    if not coordination.has_peers():
        return _get_group()
    return _get_group(coordination.process_index(), coordination.process_count())


class PeriodicVote:
    """Gathers an optional value from every process, a few times a second.

    All processes get the result at the same call, so that all can act on a request of
    one. An exchange takes milliseconds, so most calls skip it: each time process 0
    decides how many calls follow before the next exchange.
    """

    def __init__(self, processes: ProcessGroup, what: str):
        self._processes, self._what = processes, what
        self._calls_left, self._calls_per_exchange = 0, 1
        self._exchange_time = time.monotonic()

    def poll(self, value: Any, *, force: bool = False) -> list[Any]:
        """Returns the values of all processes that have one; [] if it skips.

        Args:
            value: that of this process, JSON, or None.
            force: whether to exchange at this call. All processes must pass the same.
        """
        if self._processes.count == 1:
            return [] if value is None else [value]
        self._calls_left -= 1
        if self._calls_left > 0 and not force:
            return []
        num_calls = max(self._calls_per_exchange - max(self._calls_left, 0), 1)
        seconds = max(time.monotonic() - self._exchange_time, 1e-6)
        # Not many more than before, as the next ones may take longer.
        next_calls = min(
            _VOTE_SECONDS * num_calls / seconds, 4 * self._calls_per_exchange
        )
        message = [value, max(1, int(next_calls))]
        answers = self._processes.all_gather(self._what, message)
        self._exchange_time = time.monotonic()
        self._calls_left = self._calls_per_exchange = answers[0][1]
        return [value for value, _ in answers if value is not None]
