"""Says what a fit waits for when it no longer moves."""

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ..basics.arguments import check_number
from ..basics.console import shout
from ..distributed import meetings
from .base import Callback, Trainer

ABORTED: Final = 70
"""Exit code of a process that `StallWatch(abort=True)` ended."""

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


class StallWatch(Callback):
    """Reports a fit that makes no progress for a while.

    Says, once per stall, what the fit is waiting for (the loader, the device, a
    checkpoint, other processes or a callback, by name), and writes the stacks of all
    threads. A thread does this; a step only notes the time. With several processes,
    each reports for itself.

    Args:
        timeout: seconds without a step or a validation batch, counted from the first
            step of a fit.
        abort: whether to end the process then, with exit code 70, so that a launcher
            can restart it.
        path: a file to append the report to; None means stderr.
    """

    looks_inside_blocks = False

    def __init__(
        self,
        timeout: float = 300.0,
        *,
        abort: bool = False,
        path: str | os.PathLike[str] | None = None,
    ):
        check_number("timeout", timeout, above=0, below=math.inf)
        self.timeout = float(timeout)
        self.abort = abort
        self.path = None if path is None else Path(path)
        self._beat = time.monotonic()
        self._where = ""
        self._onlooker: Onlooker | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        self._note(trainer)
        self._onlooker = Onlooker("StallWatch", self._watch)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        self._note(trainer)

    def on_validation_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
        self._beat = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._note(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._onlooker is not None:
            self._onlooker.stop()
        self._onlooker = None

    def _note(self, trainer: Trainer) -> None:
        self._beat = time.monotonic()
        self._where = f"step {trainer.global_step}, epoch {trainer.current_epoch}"

    def _watch(self, onlooker: "Onlooker") -> None:
        reported = None
        while onlooker.sleep(min(self.timeout / 4, 1.0)):
            beat = self._beat
            if time.monotonic() - beat > self.timeout and beat != reported:
                reported = beat
                self._report(onlooker.sees())

    def _report(self, cause: str) -> None:
        text = (
            f"jaxdp: StallWatch: nothing has moved for {self.timeout:g} s, since"
            f" {self._where}. The fit waits for {cause}.\n"
        )
        if late := meetings.who_is_late():
            text += f"jaxdp: StallWatch: the others wait for {late}.\n"
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            # Past sys.stderr, whose lock a stuck thread may hold.
            target = 2 if self.path is None else self.path
            with open(target, "ab", buffering=0, closefd=target != 2) as file:
                file.write(text.encode())
                faulthandler.dump_traceback(file, all_threads=True)
                if self.abort:
                    file.write(b"jaxdp: StallWatch: aborting.\n")
        except OSError as error:  # of a full disk or a pipe that nobody reads
            shout(f"{text}jaxdp: StallWatch: {self.path or 'stderr'}: {error}\n")
        if self.abort:
            os._exit(ABORTED)


class Onlooker:
    """A thread that watches the one it was started by.

    Args:
        name: of the callback it belongs to.
        watch: what it does, with this object as the argument.
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
