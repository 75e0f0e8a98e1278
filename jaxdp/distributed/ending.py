"""How a process of a job ends: never so that the others wait for it in vain."""

import atexit
import contextlib
import os
import signal
import sys
from types import TracebackType
from typing import Final

from ..basics.console import Outlet, shout
from .lifeline import Lifeline
from .signals import is_stop

ABANDONED: Final = 71
"""Exit code of a process that ended because another one had died or failed."""


def end_with_the_others(line: Lifeline) -> None:
    """Makes every end of this process one that the others hear of."""
    # Before JAX's own, which waits for the others to be done.
    atexit.register(line.leave)
    print_it, process = sys.excepthook, os.getpid()

    def tell_and_end(
        kind: type[BaseException],
        exception: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        agreed = is_stop(exception)  # all others end by the same signal
        if agreed or os.getpid() != process:  # or this is a fork of it
            print_it(kind, exception, traceback)
            return
        failure = first_line(exception)
        # From a launcher that has seen another one die: this one says so, and ends.
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        line.fail(failure)
        print_it(kind, exception, traceback)
        for text in line.lost.values():  # it may be by their end that this one fails
            if failure not in text:
                Outlet(sys.stderr).write(f"jaxdp: {text}.\n")
        for stream in (sys.stdout, sys.stderr):
            Outlet(stream).flush()
        line.wait_for_others()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = tell_and_end


def first_line(exception: BaseException) -> str:
    """An exception in one line, without a full stop."""
    text = str(exception).strip().partition("\n")[0][:500]
    return f"{type(exception).__name__}: {text}".rstrip(".: ")


def abandon(line: Lifeline, text: str) -> None:
    """Ends this process at once: it may be stuck where no exception can reach it."""
    end = f"Process {line.place.process_id}, {line.where}, can't go on without it."
    shout(f"jaxdp: {text}. {end}\n")
    os._exit(ABANDONED)
