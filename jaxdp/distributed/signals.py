"""Holds signals back while state could be lost, and reports the exits of processes."""

import _signal  # pyright: ignore
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Final

import jax

from ..basics import coordination
from ..basics.console import SafeStream, log_info
from .process_group import PeerLost, PeriodicVote, ProcessGroup, get_process_group

EXIT_CODE: Final = 143
"""128 + SIGTERM. SLURM, Kubernetes and torchrun expect it of a terminated job."""

SIGNALS: Final = tuple(n for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n))
"""The signals that end a fit by default: those of a scheduler, and of a terminal that
is closed. Under `nohup` the latter is ignored, here too."""

_HANGUP: Final = getattr(signal, "SIGHUP", None)


_AT_BOUNDARY: Final = "at_boundary"
"""The attribute of a Ctrl-C that is raised at a boundary. It is no subclass, because
Python exits with 130 for `KeyboardInterrupt` itself, and with 1 for subclasses."""


class Preempted(SystemExit):
    """A signal such as SIGTERM, raised at a boundary. Exits with 143 if not caught.

    Attributes:
        signal: its name.
        later_error: the first error of the hooks that ran after it, or None.
    """

    def __init__(self, name: str):
        super().__init__(EXIT_CODE)
        self.signal = name
        self.later_error: Exception | None = None


def is_graceful_stop(exception: BaseException | None) -> bool:
    """Returns True for the answer to a signal at a boundary, with no state lost."""
    return isinstance(exception, Preempted) or hasattr(exception, _AT_BOUNDARY)


class SignalHandler:
    """Holds the first Ctrl-C or signal back until `check`; a second acts at once.

    An exception raised between a step's call and the assignment of its result would
    lose the state, whose old buffers the step has overwritten. So the handler only sets
    a flag. It is active only in the main thread, and for signals with Python's default
    handler. The context may be nested.

    With several processes, `check` asks all of them, several times a second: a signal
    to one of them is raised in all, at the same step.

    Attributes:
        signals: the names of those that end a fit, beside Ctrl-C.
        returns: whether `fit` returns after one, instead of exiting with code 143.
    """

    def __init__(self, processes: ProcessGroup) -> None:
        several = processes.count > 1
        self._vote = PeriodicVote(processes, "signals") if several else None
        self.signals: tuple[str, ...] = SIGNALS
        self.returns = False
        self._pending: int | None = None
        self._handled: set[int] = set()  # signals that have our handler now
        self._depth = 0

    def check(self, *, force: bool = False) -> None:
        """Raises a signal that is held back; `force` asks all processes for one now."""
        if self._vote is not None:
            signals = self._vote.poll(self._pending, force=force)
            if signals:
                self._pending = None
                raise self._make_exception(max(signals))
        elif self._pending is not None:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raises a signal of this process that is held back, and asks no other one."""
        if self._pending is not None:
            number, self._pending = self._pending, None
            raise self._make_exception(number)

    @contextlib.contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Raises a signal only after the block; within a fit, at its next boundary.

        All processes must enter it.
        """
        with self:
            yield
            if self._depth == 1:
                self.check(force=True)

    def set_signals(self, signals: Sequence[str]) -> None:
        """Replaces `signals`, from now on."""
        self.signals = tuple(signals)
        if self._handled:
            self._restore_handlers()
            self._install_handlers()

    def __enter__(self) -> "SignalHandler":
        if not self._depth:
            self._install_handlers()
        self._depth += 1  # last: after an earlier Ctrl-C the block is not entered
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._depth == 1:
                self._restore_handlers()
        finally:
            self._depth -= 1
        if self._depth:
            return
        if self._vote is not None and kind is None:
            return  # the other processes must get the signal first
        number, self._pending = self._pending, None
        # A signal most often causes the error after it, such as that of a worker that
        # died. But a launcher sends one, too, when another process has died.
        is_cause = kind is None or issubclass(kind, Exception)
        failures = PeerLost, jax.errors.JaxRuntimeError
        is_of_peer = self._vote is not None and isinstance(exception, failures)
        if number is not None and is_cause and not is_of_peer:
            raise self._make_exception(number) from exception

    # `_signal` has the functions of `signal` without a search for the enum of each
    # handler, which takes ten times as long.

    def _install_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        # With several processes, the handler of jax.distributed, below Python, only
        # notes SIGTERM. This one replaces it.
        for number in (signal.SIGINT, *(getattr(signal, n) for n in self.signals)):
            if _signal.getsignal(number) == _get_default_handler(number):
                self._handled.add(number)
                _signal.signal(number, self._handle)

    def _restore_handlers(self) -> None:
        for number in sorted(self._handled, key=signal.SIGINT.__eq__):  # Ctrl-C last
            if _signal.getsignal(number) == self._handle:  # else the caller replaced it
                _signal.signal(number, _get_default_handler(number))
            self._handled.remove(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._pending is None or _HANGUP in (number, self._pending):
            # A terminal that is closed often sends two, and the end of a login session
            # sends one beside SIGTERM, in either order. SIGTERM is reported.
            self._pending = max(self._pending or 0, number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            _signal.signal(number, _signal.SIG_DFL)
            signal.raise_signal(number)  # which ends the process

    def _make_exception(self, number: int) -> BaseException:
        if number == signal.SIGINT and "SIGINT" not in self.signals:
            stop = KeyboardInterrupt("stopped between two batches; nothing is lost")
            setattr(stop, _AT_BOUNDARY, True)
            return stop
        return Preempted(signal.Signals(number).name)


def _get_default_handler(number: int) -> Any:
    """Returns Python's own handler of a signal."""
    return signal.default_int_handler if number == signal.SIGINT else _signal.SIG_DFL


def log_stop(exception: BaseException) -> None:
    """Logs that a signal has stopped a fit, once it has."""
    if isinstance(exception, Preempted):
        log_info(f"{exception.signal}: stopped between two steps; nothing is lost")


def install_exit_hooks() -> None:
    """Makes this process of a job publish its exit to the others, however Python ends.

    After an uncaught exception is printed, the process ends at once. Otherwise it would
    wait for the others in JAX's `atexit`, and they would wait for it, since its
    heartbeat continues.
    """
    print_exception, process = sys.excepthook, os.getpid()

    def report_exit(how: str) -> None:
        if os.getpid() == process and coordination.has_peers():  # not in a fork
            get_process_group().report_exit(how)

    def print_and_exit(
        kind: type[BaseException],
        exception: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        print_exception(kind, exception, traceback)
        # A graceful stop ends all processes, and a fork is no process of the job.
        if not is_graceful_stop(exception) and os.getpid() == process:
            report_exit(f"has failed: {format_error_line(exception)}")
            SafeStream(sys.stdout).flush()
            SafeStream(sys.stderr).flush()
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = print_and_exit
    atexit.register(report_exit, "has ended its program, by sys.exit perhaps")


def format_error_line(exception: BaseException) -> str:
    """Formats an exception as one line without a full stop."""
    text = str(exception).strip().partition("\n")[0][:500]
    return f"{type(exception).__name__}: {text}".rstrip(".: ")
