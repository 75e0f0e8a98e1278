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
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Directories of the key-value store: the entries of processes that wait at a barrier,
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


class ProcessGroup:
    """The processes that train together; this one alone if `count` is 1.

    All processes must call the same methods with the same names and facts, in the same
    order. If one does not, all of them raise an error that says where each process is.

    Attributes:
        index: the rank of this process.
        count: the number of processes.
        timeout: seconds after which a barrier raises a `PeerLost`.
        warn_after: seconds after which the missing processes are logged.
        every_n_steps: steps of a loop per barrier.
    """

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count
        self.timeout, self.warn_after, self.every_n_steps = 600.0, 30.0, 1
        self._entries: list[tuple[str, Mapping[str, str]]] = []
        self._location = ""  # for messages
        self._num_entered = self._num_passed = 0  # barriers
        self._read_dirs: list[str] = []  # to be deleted after the next barrier
        if count > 1:
            coordination.put_value(_HOSTS_DIR, socket.gethostname())

    def check_equal(self, location: str, facts: Mapping[str, Any]) -> None:
        """Raises a RuntimeError on all processes unless their facts are equal.

        Args:
            location: what this process is about to do.
            facts: values by name, which are compared and shown as text.
        """
        if self.count > 1:
            self._add_entry(location, facts)
            self._wait_for_all()

    def sync_step(self, location: str, facts: Mapping[str, Any] | None = None) -> None:
        """Compares a step of a loop as `check_equal` does, at each `every_n_steps`-th.

        The facts of the steps between two barriers are compared at the second one.
        """
        if self.count > 1:
            self._add_entry(location, facts or {})
            if len(self._entries) >= self.every_n_steps:
                self._wait_for_all()

    def all_gather(self, what: str, value: Any) -> list[Any]:
        """Returns the JSON values of all processes, in the order of their ranks.

        Args:
            what: the purpose, which is compared, and named in errors.
            value: the value of this process.
        """
        if self.count == 1:
            return [value]
        folder = f"jaxdp/all/{self._num_entered}"
        coordination.put_value(folder, value)
        self._entries.append((what, {}))
        self._wait_for_all()
        values = coordination.read_values(folder)
        self._read_dirs.append(folder)
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

    def gather_errors(self, what: str, error: BaseException | None) -> str | None:
        """Returns the errors of all processes as one text; None if there are none."""
        if self.count == 1:
            return None if error is None else str(error)
        text = None if error is None else f"{type(error).__name__}: {error}"
        texts = enumerate(self.all_gather(what, text))
        failures = [f"{_format_processes([p])}: {t}" for p, t in texts if t is not None]
        return "; ".join(failures) or None

    def report_exit(self, how: str) -> None:
        """Publishes how this process exits; blocks for at most a second.

        Process 0, which has the service, may be stopped or gone.
        """
        text = f"{how}; it was at {self._location or 'no fit'}"
        message = {"passed": self._num_passed, "text": text}
        publish = functools.partial(coordination.put_value, _EXITED_DIR, message)
        thread = threading.Thread(target=publish, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts no threads in `atexit`
            publish()
        else:
            thread.join(1.0)

    def _add_entry(self, location: str, facts: Mapping[str, Any]) -> None:
        self._location = location
        self._entries.append((location, {n: str(fact) for n, fact in facts.items()}))

    def _wait_for_all(self) -> None:
        """Blocks until all processes have arrived with the same entries.

        Raises:
            RuntimeError: if the entries differ.
            PeerLost: if a process has failed or exited, or is not there in time.
        """
        entries, self._entries = self._entries, []
        self._num_entered += 1
        digest = hashlib.blake2b(repr(entries).encode(), digest_size=8).hexdigest()
        start = time.monotonic()
        is_passed = coordination.wait_at_barrier(
            f"jaxdp.meet/{self._num_entered}/{digest}",
            _FAST_BARRIER_SECONDS,
            gives_up=lambda: self._find_exited() is not None,
        )
        read_dirs, self._read_dirs = self._read_dirs, []
        if not is_passed:  # JAX gives all processes the same result
            self._wait_for_missing(entries, start)
        self._num_passed = self._num_entered
        for folder in read_dirs:  # all that arrived at this barrier have read them
            coordination.delete_value(folder)

    def _wait_for_missing(self, entries: Any, start: float) -> None:
        """Waits by polling messages; raises if processes differ or are lost."""
        folder = f"{_ARRIVED_DIR}/{self._num_entered}"
        coordination.put_value(folder, entries)
        pause, warn_after = 0.02, self.warn_after
        while True:
            arrived = dict(sorted(coordination.read_values(folder).items()))
            missing = {*range(self.count)} - arrived.keys()
            difference = _describe_difference(arrived)
            if difference and (not missing or pause > 0.1):  # most arrive by then
                if self.index == 0:
                    time.sleep(_MISMATCH_READ_SECONDS)
                raise RuntimeError(difference)
            if not missing:
                self._read_dirs.append(folder)
                return
            if exited := self._find_exited():
                raise _make_peer_lost(exited)

            waited = time.monotonic() - start
            text = (
                f"process {self.index} ({self._location}) has waited for {waited:.0f} s"
                f" for {_format_processes(missing)}"
            )
            if waited > self.timeout:
                raise _make_peer_lost(f"{text} (`Lockstep(timeout=...)`)")
            if waited > warn_after:
                log_info(text, all_processes=True)
                warn_after = math.inf
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _find_exited(self) -> str | None:
        """Returns which process has exited before this barrier, and how, if any."""
        for process, message in coordination.read_values(_EXITED_DIR).items():
            if message["passed"] < self._num_entered:
                return f"{_format_processes([process])} {message['text']}"
        return None


def _format_processes(processes: Iterable[int]) -> str:
    """Formats processes like "process 1 on node7, process 2 on node8"."""
    hosts = coordination.read_values(_HOSTS_DIR)
    return join_some(f"process {p} on {hosts.get(p, '?')}" for p in sorted(processes))


def _describe_difference(entries: Mapping[int, Sequence[Any]]) -> str | None:
    """Describes the first entry of processes that differs, for an error, if any."""
    for row in itertools.zip_longest(*entries.values(), fillvalue=("nothing", {})):
        locations, facts = zip(*row, strict=True)
        table = {"what is next": locations}
        # Those at different places have other facts, which would hide that.
        is_same_place = len({*locations}) == 1
        names = dict.fromkeys(name for each in facts for name in each)
        for name in names if is_same_place else ():
            table[name] = tuple(each.get(name) for each in facts)
        differences = [
            f"{name}: {_list_by_process(entries, values)}"
            for name, values in table.items()
            if len({*values}) > 1
        ]
        if differences:
            where = f", at {locations[0]}" if is_same_place else ""
            return (
                f"the processes of this job do not agree{where}:"
                f" {join_some(differences, '; ')}. Their numbers would be wrong. All"
                " must run the same program with the same settings."
            )
    return None


def _list_by_process(processes: Iterable[int], values: Iterable[Any]) -> str:
    """Returns "0 (process 0), 1 (processes 1 and 2)"."""
    groups: dict[Any, list[int]] = {}
    for process, value in zip(processes, values, strict=True):
        groups.setdefault(value, []).append(process)
    return ", ".join(f"{v} ({join_numbers('process', p)})" for v, p in groups.items())


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
        self._calls, self._calls_per_exchange = 0, 1
        self._exchange_time = time.monotonic()

    def poll(self, value: Any, *, force: bool = False) -> list[Any]:
        """Returns the values of all processes that have one; [] if it skips.

        Args:
            value: that of this process, JSON, or None.
            force: whether to exchange at this call. All processes must pass the same.
        """
        if self._processes.count == 1:
            return [] if value is None else [value]
        self._calls += 1
        if self._calls < self._calls_per_exchange and not force:
            return []
        seconds = max(time.monotonic() - self._exchange_time, 1e-6)
        # Not many more than before, as the next ones may take longer.
        wanted = _VOTE_SECONDS * self._calls / seconds
        calls = max(1, int(min(wanted, 4 * self._calls_per_exchange)))
        answers = self._processes.all_gather(self._what, [value, calls])
        self._exchange_time = time.monotonic()
        self._calls, self._calls_per_exchange = 0, answers[0][1]
        return [value for value, _ in answers if value is not None]
