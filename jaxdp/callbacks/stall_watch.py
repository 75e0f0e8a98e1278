"""Writes the stacks of all threads of a fit that makes no progress."""

import faulthandler
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from ..basics.arguments import check_number, checks_arguments
from .base import Callback, Trainer


class StallWatch(Callback):
    """Writes the stacks of all threads to stderr when a fit makes no progress.

    The innermost frames show what the fit waits for: a loader, the device, a
    checkpoint, another process or a callback. With several processes, each reports for
    itself. Python's `faulthandler.dump_traceback_later` does the watching, which
    only one user in a process can have at a time.

    Args:
        timeout: seconds without a step, a validation batch or the end of an epoch,
            counted from the first step of a fit. The report comes after 0.9 to 1 times
            this.
        abort: whether to end the process then, with exit code 1, so that a launcher can
            restart it.
    """

    @checks_arguments
    def __init__(self, timeout: float = 300.0, *, abort: bool = False):
        check_number("timeout", timeout, above=0, below=math.inf)
        self.timeout = float(timeout)
        self.abort = abort
        self._armed = math.inf  # when the present countdown began

    def on_fit_start(self, trainer: Trainer) -> None:
        self._armed = -math.inf
        self._restart_countdown()

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        self._restart_countdown()

    def on_validation_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
        self._restart_countdown()

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._restart_countdown()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._armed = math.inf
        faulthandler.cancel_dump_traceback_later()

    def _restart_countdown(self) -> None:
        """Restarts the countdown, not at every step, since that starts a thread."""
        now = time.monotonic()
        if now - self._armed > self.timeout / 10:
            self._armed = now
            # Past sys.stderr, whose lock a stuck thread may hold.
            file = sys.__stderr__ or 2
            faulthandler.dump_traceback_later(self.timeout, file=file, exit=self.abort)
