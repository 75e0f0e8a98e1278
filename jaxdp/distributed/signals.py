"""Ctrl-C and signals, taken when nothing can be lost, and the end by an exception."""

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
from ..basics.console import SafeStream, ignore_flush_errors, log_info
from . import process_group
from .process_group import PeriodicVote, ProcessGroup

EXIT_CODE: Final = 143
"""128 + SIGTERM: what SLURM, Kubernetes and torchrun take for a job that was told to
end and did."""

SIGNALS: Final = tuple(n for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n))
"""What ends a fit unless the user says otherwise: a scheduler, and a terminal that is
closed. `nohup` has the latter ignored, and so it is here."""

_HANGUP: Final = getattr(signal, "SIGHUP", None)


class Preempted(SystemExit):
    """A signal such as SIGTERM, raised at a boundary. Exits with 143 if not caught.

    Attributes:
        signal: its name.
    """

    def __init__(self, name: str):
        super().__init__(EXIT_CODE)
        self.signal = name
        ignore_flush_errors()  # the code is to be this one whoever reads the output


def is_graceful_stop(exception: BaseException | None) -> bool:
    """Whether a signal was answered at a boundary by it, the state being whole."""
    return isinstance(exception, Preempted) or hasattr(exception, _AT_BOUNDARY)


# Not a class: Python exits with 130 for `KeyboardInterrupt` itself, and with 1 for what
# inherits from it.
_AT_BOUNDARY: Final = "at_boundary"


class SignalHandler:
    """Holds the first Ctrl-C or signal back until `check`; a second acts at once.

    An exception raised between a step's call and the assignment of its result would
    lose the state, whose old buffers the step has overwritten. So the handler sets a
    flag and nothing else. Active only in the main thread, and for signals that nobody
    else handles. Can be entered again inside.

    With several processes `check` asks them all, several times a second: what one of
    them holds back is raised in all, at the same step.
    """

    def __init__(self, processes: ProcessGroup) -> None:
        self._pulse = (
            None if processes.count == 1 else PeriodicVote(processes, "signals")
        )
        self.signals: tuple[str, ...] = SIGNALS  # that end a fit, beside Ctrl-C
        self.returns = False  # `fit`, instead of exiting with code 143
        self.defers_log = False  # before somebody calls `tell`
        self._pending: int | None = None
        self._held_signals: set[int] = set()  # signals that are held while inside
        self._depth = 0

    def check(self, *, force: bool = False) -> None:
        """Raises what is held back, if anything; with `now` all processes are asked."""
        if self._pulse is not None:
            heard = self._pulse.poll(self._pending, force=force)
            if heard:
                self._pending = None
                process_group.get_barrier().is_stop_pending = False
                raise self._exception(max(heard))
        elif self._pending is not None:
            number, self._pending = self._pending, None
            raise self._exception(number)

    @contextlib.contextmanager
    def defer_signals(self) -> Iterator[None]:
        """What happens inside is not interrupted: a signal is raised after it.

        Within a fit, at its next boundary. All processes must come here.
        """
        with self:
            yield
            if self._depth == 1:
                self.check(force=True)

    def set_signals(self, signals: Sequence[str]) -> None:
        """From now on these are `signals`."""
        self.signals = tuple(signals)
        if self._held_signals:
            self._restore_handlers()
            self._install_handlers()

    def __enter__(self) -> "SignalHandler":
        if not self._depth:
            self._install_handlers()
        self._depth += 1  # last: a Ctrl-C before leaves `with` unentered
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
        if self._pulse is not None and kind is None:
            return  # the others have to hear of it first
        number, self._pending = self._pending, None
        process_group.get_barrier().is_stop_pending = False
        # An error after a signal is most often its doing, such as a worker's that died.
        # But a launcher signals, too, when another process has died.
        is_its_doing = kind is None or issubclass(kind, Exception)
        if number is not None and is_its_doing and not _is_peer_failure(exception):
            raise self._exception(number) from exception

    # `_signal` has the functions of `signal` without a search for the enum of each
    # handler, which takes ten times as long.

    def _install_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        # With several processes, jax.distributed has answered SIGTERM so far, below
        # Python, and would do nothing but note it.
        for number in (signal.SIGINT, *(getattr(signal, n) for n in self.signals)):
            if _signal.getsignal(number) == _get_default_handler(number):
                self._held_signals.add(number)
                _signal.signal(number, self._handle)

    def _restore_handlers(self) -> None:
        for number in sorted(
            self._held_signals, key=signal.SIGINT.__eq__
        ):  # Ctrl-C last
            if _signal.getsignal(number) == self._handle:  # and not a caller's own
                _signal.signal(number, _get_default_handler(number))
            self._held_signals.remove(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        process_group.get_barrier().is_stop_pending = self._pulse is not None
        if self._pending is None:
            self._pending = number
        elif _HANGUP in (number, self._pending):
            # Of a terminal that goes away often come two; and the end of a login
            # session is one beside SIGTERM, in either order. The other is told of.
            self._pending = max(self._pending, number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            os._exit(EXIT_CODE)

    def _exception(self, number: int) -> BaseException:
        if number == signal.SIGINT and "SIGINT" not in self.signals:
            stop = KeyboardInterrupt("stopped between two batches; nothing is lost")
            setattr(stop, _AT_BOUNDARY, True)
            return stop
        exception = Preempted(signal.Signals(number).name)
        if not self.defers_log:
            log_stop(exception)
        return exception


def _get_default_handler(number: int) -> Any:
    """The handler of a signal that nobody has changed."""
    return signal.default_int_handler if number == signal.SIGINT else _signal.SIG_DFL


def _is_peer_failure(exception: BaseException | None) -> bool:
    """Whether other processes, or their devices, are what failed."""
    failures = process_group.PeerLost, jax.errors.JaxRuntimeError
    return jax.process_count() > 1 and isinstance(exception, failures)


def log_stop(exception: BaseException) -> None:
    """Says what a signal has done, once that is done."""
    if isinstance(exception, Preempted):
        more = ", and a second one would have ended it at once"
        is_counted = exception.signal != "SIGHUP"
        log_info(
            f"{exception.signal}: stopped between two steps; nothing is"
            f" lost{more * is_counted}"
        )


def install_exit_hooks() -> None:
    """Has this process publish its end to the others, by whatever way out of Python.

    An exception that nobody catches is printed, and then the process ended: it would
    wait for the others in JAX's `atexit`, and they for this one, whose heartbeat goes
    on.
    """
    print_it, process = sys.excepthook, os.getpid()

    def leave(how: str) -> None:
        if os.getpid() == process and coordination.has_peers():  # and no fork of it
            process_group.get_barrier().report_exit(how)

    def print_and_leave(
        kind: type[BaseException],
        exception: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        print_it(kind, exception, traceback)
        # By a signal that all have heard all end; and a fork is none of them.
        if is_graceful_stop(exception) or os.getpid() != process:
            return
        leave(f"has failed: {format_error_line(exception)}")
        for stream in (sys.stdout, sys.stderr):
            SafeStream(stream).flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = print_and_leave
    atexit.register(leave, "has ended its program, by sys.exit perhaps")


def format_error_line(exception: BaseException) -> str:
    """An exception in one line, without a full stop."""
    text = str(exception).strip().partition("\n")[0][:500]
    return f"{type(exception).__name__}: {text}".rstrip(".: ")
