"""How a process of a job ends by an exception: at once, so that its launcher hears."""

import os
import sys
from types import TracebackType

from ..basics import coordination
from ..basics.console import Outlet
from . import meetings
from .signals import is_stop


def end_at_once_by_exceptions() -> None:
    """Has an exception that nobody catches printed, and then the process ended.

    Otherwise this process waits for the others when Python ends, in JAX's `atexit`,
    and they for this one, whose heartbeat goes on.
    """
    print_it, process = sys.excepthook, os.getpid()

    def print_and_leave(
        kind: type[BaseException],
        exception: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        print_it(kind, exception, traceback)
        # By a signal that all have heard all end; and a fork is none of them.
        if is_stop(exception) or os.getpid() != process:
            return
        if coordination.is_there():
            meetings.fail(first_line(exception))
        for stream in (sys.stdout, sys.stderr):
            Outlet(stream).flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = print_and_leave


def first_line(exception: BaseException) -> str:
    """An exception in one line, without a full stop."""
    text = str(exception).strip().partition("\n")[0][:500]
    return f"{type(exception).__name__}: {text}".rstrip(".: ")
