"""A thread that sees what another one is busy with."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from .base import Callback

_PHASES: Final = {
    "checkpoint.saving": "a checkpoint",
    "checkpoint.restoring": "a checkpoint",
    "checkpoint.folder": "a checkpoint",
    "engine.engine": "the device (a step, or its compilation)",
    "basics.coordination": "the other processes",
    "distributed.meetings": "the other processes",
    "distributed.agreement": "the other processes",
    "strategies": "the device (a step, or its compilation)",
    "step.metrics": "the device (a step whose result is read)",
    "data": "the loader",
}
"""What a module of the package means, where the main thread is in it."""


class Onlooker:
    """A thread that watches the one it was started by.

    Args:
        name: the callback that starts it.
        watch: runs in the thread, with this object as the argument.
    """

    def __init__(self, name: str, watch: Callable[["Onlooker"], None]):
        self._watched = threading.get_ident()
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=watch, args=(self,), name=f"jaxdp {name}", daemon=True
        )
        self._thread.start()

    def sleep(self, seconds: float) -> bool:
        """Waits, and says whether to go on."""
        return not self._end.wait(seconds)

    def sees(self) -> str:
        """What the other thread waits for."""
        return waits_for(sys._current_frames().get(self._watched))

    def stop(self) -> None:
        """Ends it, and waits until it has."""
        self._end.set()
        self._thread.join()


def waits_for(frame: FrameType | None) -> str:
    """What the innermost known function on a stack is busy with."""
    package = __name__.split(".")[0]
    while frame is not None:
        owner = frame.f_locals.get("self")
        parts = frame.f_globals.get("__name__", "").split(".")
        if parts[0] == package:
            for known in (".".join(parts[1:]), *parts[1:2]):
                if known in _PHASES:
                    return _PHASES[known]
        if isinstance(owner, Callback):
            return f"the callback {type(owner).__name__}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "something outside of the trainer"
