"""Time limits for a fit, and how long it took."""

import datetime
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..basics.durations import Duration, parse_duration
from ..basics.json_checks import fields, number
from .base import Callback
from .monitor import announce

if TYPE_CHECKING:
    from jaxdp import Trainer

_SECONDS = number(0.0, finite=True)
_SAVED = fields({"elapsed": fields({"train": _SECONDS, "validate": _SECONDS})})


class Timer(Callback):
    """Stops a fit when its time is up, and tells the time it has taken.

    The fit ends at the next boundary, with everything that ends a fit: validation
    under way is finished and checkpoints are written. A resumed run goes on with the
    time that was used before.

    Args:
        duration: `"DD:HH:MM:SS"`, a `datetime.timedelta`, keywords of one as a dict
            (`{"hours": 8}`), or seconds. None only measures.
        verbose: whether to print that the time is up.
    """

    looks_inside_blocks = False

    def __init__(self, duration: Duration | None = None, *, verbose: bool = True):
        self._limit = None if duration is None else parse_duration(duration)
        self.verbose = verbose
        self._offsets = {"train": 0.0, "validate": 0.0}
        self._starts: dict[str, float | None] = {"train": None, "validate": None}
        self._ends: dict[str, float | None] = {"train": None, "validate": None}
        self._deadline = float("inf")

    def start_time(self, stage: str = "train") -> float | None:
        """When the stage last began, on the clock of `time.monotonic`; None before."""
        return self._starts[_known(stage)]

    def end_time(self, stage: str = "train") -> float | None:
        """When the stage last ended, or None while it runs and before."""
        return self._ends[_known(stage)]

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds spent in a stage so far, resumed runs included.

        `"train"` is all of `fit` after compilation, its validations included.
        """
        start, end = self._starts[_known(stage)], self._ends[stage]
        if start is None:
            return self._offsets[stage]
        now = time.monotonic() if end is None else end
        return self._offsets[stage] + now - start

    def time_remaining(self) -> float | None:
        """Seconds of training left, negative when over; None without a limit."""
        return None if self._limit is None else self._limit - self.time_elapsed()

    def on_fit_start(self, trainer: "Trainer") -> None:
        self._begin("train")
        if self._limit is not None:
            self._deadline = time.monotonic() + self._limit - self._offsets["train"]
            self._check(trainer)

    def on_train_batch_end(
        self, trainer: "Trainer", metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if time.monotonic() > self._deadline:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        self._check(trainer)

    def on_validation_start(self, trainer: "Trainer") -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        self._end("validate")

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._end("train")
        self._end("validate")

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": {stage: self.time_elapsed(stage) for stage in self._offsets}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _SAVED(state, "state")
        elapsed = state["elapsed"]
        self._offsets = {stage: float(elapsed[stage]) for stage in self._offsets}
        self._starts = dict.fromkeys(self._starts)
        self._ends = dict.fromkeys(self._ends)

    def _begin(self, stage: str) -> None:
        self._offsets[stage] = self.time_elapsed(stage)
        self._starts[stage], self._ends[stage] = time.monotonic(), None

    def _end(self, stage: str) -> None:
        if self._starts[stage] is not None and self._ends[stage] is None:
            self._ends[stage] = time.monotonic()

    def _check(self, trainer: "Trainer") -> None:
        left = self.time_remaining()
        if left is None or left > 0 or trainer.should_stop:
            return
        trainer.should_stop = True
        if self.verbose:
            limit = datetime.timedelta(seconds=self._limit or 0)
            announce(trainer, "Timer", f"the {limit} of `duration` are over; stopping.")


def _known(stage: str) -> str:
    if stage not in ("train", "validate"):
        raise ValueError(f"`stage`={stage!r} must be 'train' or 'validate'.")
    return stage
