"""Time limits for a fit, and how long it took."""

import datetime
import time
from collections.abc import Mapping
from typing import Any

from ..basics.arguments import check_choice
from ..basics.durations import Duration, parse_duration
from ..basics.json_checks import fields, number
from .base import Callback, Trainer
from .monitor import announce

_SECONDS = number(0.0, finite=True)
_SAVED = fields({"elapsed": fields({"train": _SECONDS, "validate": _SECONDS})})


class Timer(Callback):
    """Stops a fit when its time is up, and reports the time it has taken.

    The fit ends at the next boundary, as every fit does: a validation that has begun is
    finished, and checkpoints are written. In a resumed run, the time used before
    counts.

    Args:
        duration: `"DD:HH:MM:SS"`, a `datetime.timedelta`, keywords of one as a dict
            (`{"hours": 8}`), or seconds. None only measures.
        verbose: whether to print that the time is up.
    """

    looks_inside_blocks = False

    def __init__(self, duration: Duration | None = None, *, verbose: bool = True):
        self._limit = None if duration is None else parse_duration(duration)
        self.verbose = verbose
        self._spent = {"train": 0.0, "validate": 0.0}  # in what is over
        self._began: dict[str, float] = {}  # what is not
        self._deadline = float("inf")

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds spent in a stage so far, resumed runs included.

        `"train"` is all of `fit` after compilation, its validations included;
        `"validate"` is these.
        """
        check_choice("stage", stage, tuple(self._spent))
        now = time.monotonic()
        return self._spent[stage] + (now - self._began.get(stage, now))

    def time_remaining(self) -> float | None:
        """Seconds of training left, negative when over; None without a limit."""
        return None if self._limit is None else self._limit - self.time_elapsed()

    def on_fit_start(self, trainer: Trainer) -> None:
        self._began["train"] = time.monotonic()
        if self._limit is not None:
            self._deadline = time.monotonic() + self._limit - self._spent["train"]
            self._check(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if time.monotonic() > self._deadline:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._check(trainer)

    def on_validation_start(self, trainer: Trainer) -> None:
        self._began["validate"] = time.monotonic()

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._end("validate")

    def on_fit_end(self, trainer: Trainer) -> None:
        self._end("train")
        self._end("validate")

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": {stage: self.time_elapsed(stage) for stage in self._spent}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _SAVED(state, "state")
        self._spent = {stage: float(state["elapsed"][stage]) for stage in self._spent}
        self._began = {}

    def _end(self, stage: str) -> None:
        self._spent[stage] = self.time_elapsed(stage)
        self._began.pop(stage, None)

    def _check(self, trainer: Trainer) -> None:
        left = self.time_remaining()
        if left is None or left > 0 or trainer.should_stop:
            return
        trainer.should_stop = True
        if self.verbose:
            limit = datetime.timedelta(seconds=self._limit or 0)
            announce(trainer, "Timer", f"the {limit} of `duration` are over; stopping.")
