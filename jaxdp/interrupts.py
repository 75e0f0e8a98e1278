"""Ctrl-C during a fit, taken at a moment when nothing can be lost."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from .console import say


class Interrupts:
    """Holds the first Ctrl-C back until `check`; the second goes through at once.

    An exception raised between a step's call and the assignment of its result would
    lose the state, whose old buffers the step has overwritten. Active only in the main
    thread and where Ctrl-C would raise KeyboardInterrupt. Can be entered again inside.
    """

    def __init__(self) -> None:
        self.pending = False
        self._previous: Any = None
        self._depth = 0

    def check(self) -> None:
        """Raises the KeyboardInterrupt that is held back, if any."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        self._depth += 1
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth or self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        pending, self.pending, self._previous = self.pending, False, None
        # An error after Ctrl-C is most often its doing, such as a worker's that died.
        if pending and (kind is None or issubclass(kind, Exception)):
            raise KeyboardInterrupt from exception

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
        say("Ctrl-C: stopping after this step; press again to stop at once")
