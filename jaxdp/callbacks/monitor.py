"""Callbacks that watch a value of validations or epochs, and messages of callbacks."""

import functools
import math
import sys
from collections.abc import Iterable
from typing import Any

from ..basics.arguments import check_count, check_number
from ..basics.columns import infer_mode, resolve_mode
from ..basics.console import log_info, log_info_once
from ..record import LogRow
from .base import Callback, Trainer


class MonitorCallback(Callback):
    """The base of callbacks that read the means of validations and epochs, logged
    values included, and may watch one, `monitor`."""

    skip_in_fast_dev_run = True
    only_in_training = True

    monitor: str | None
    mode: str = "min"

    def setup(self, trainer: Trainer) -> None:
        trainer.record.read_means(functools.partial(self.handle_means, trainer))

    def on_fit_start(self, trainer: Trainer) -> None:
        """Raises if the fit will log no value named `monitor`."""
        # A callback of the user may log a value of that name later, and a `PassMetric`
        # may return values of any names.
        is_ours = [type(c).__module__.startswith("jaxdp.") for c in trainer.callbacks]
        is_of_validation = (self.monitor or "").startswith("val_")
        if all(is_ours) and (trainer.record.names_are_all or not is_of_validation):
            self._check_is_logged(trainer.record.names)

    def handle_means(self, trainer: Trainer, row: LogRow) -> None:
        """Calls `check` if a validation or an epoch has the value; raises if an ended
        epoch lacks it, unless a later validation may log it."""
        validates = any(name.startswith("val_") for name in trainer.record.names)
        if self.monitor is not None and self.monitor in row.values:
            self.check(trainer, row.values[self.monitor])
            return
        may_come = validates and (self.monitor or "").startswith("val_")
        if row.kind == "epoch" and (trainer.record.validation or not may_come):
            self._check_is_logged(trainer.history)  # has the names of the epoch, too

    def check(self, trainer: Trainer, value: float) -> None:
        """Acts on the value of `monitor` in a validation or an epoch."""

    def identity(self, trainer: Trainer) -> str:
        return f"{self.monitor}\n{self.mode}"

    def _check_is_logged(self, names: Iterable[str]) -> None:
        if self.monitor is not None and self.monitor not in names:
            raise ValueError(
                f"`{type(self).__name__}(monitor={self.monitor!r})`: nothing of that"
                f" name is logged; what is logged: {', '.join(map(repr, names))}. Names"
                " with `val_` need a `val_loader` in `fit`; a callback logs a value of"
                " its own by `trainer.log(name, value)`. Values of `inside_step` belong"
                " to single steps: read them in `on_train_batch_end`."
            )


class PatienceCallback(MonitorCallback):
    """A callback that compares the value `monitor` of each validation or epoch with the
    best so far, and counts the checks since the last improvement."""

    monitor: str

    def __init__(self, monitor: str, patience: int, min_delta: float, mode: str):
        check_count("patience", patience, minimum=0)
        suffix = "; `mode` says in which direction"
        check_number("min_delta", min_delta, minimum=0, suffix=suffix)
        self.monitor, self.mode = monitor, check_mode(self, monitor, mode)
        self.patience, self.min_delta = int(patience), float(min_delta)
        self.wait_count = 0
        self.best_score: float | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_fit_start(trainer)
        check_validates_before_end(self, trainer)

    def update_best(self, value: float) -> bool:
        """Keeps `value` if it is the best so far; returns whether it is."""
        if not is_better(self.mode, value, self.best_score, self.min_delta):
            return False
        self.best_score, self.wait_count = value, 0
        return True

    def describe_wait(self) -> str:
        """Returns a sentence about the checks without improvement."""
        best = "none" if self.best_score is None else f"{self.best_score:.6g}"
        checks = f"{self.wait_count} check{'s' * (self.wait_count != 1)}"
        return f"{self.monitor} did not improve on {best} for {checks}"

    def state_dict(self) -> dict[str, Any]:
        best = None if self.best_score is None else str(self.best_score)
        return {"wait_count": self.wait_count, "best_score": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count, best = state["wait_count"], state["best_score"]
        self.best_score = None if best is None else float(best)


def check_validates_before_end(callback: MonitorCallback, trainer: Trainer) -> None:
    """Raises if `monitor` is of validations, and a fit validates at its end alone."""
    is_late = not trainer.record.limits.validates_before_end()
    if is_late and (callback.monitor or "").startswith("val_"):
        raise ValueError(
            f"`{type(callback).__name__}(monitor={callback.monitor!r})`: this fit"
            " validates at its end alone, where nothing is left to decide. Pass a"
            " smaller `check_val_every_n_epoch`, or leave the callback out."
        )


def check_mode(callback: Callback, monitor: str, mode: str) -> str:
    """Returns `"min"` or `"max"`, as `mode` or the name of `monitor` says; logs once
    that it is `"min"` if neither does."""
    if mode == "auto" and infer_mode(monitor) is None:
        log_info_once(
            f"`{type(callback).__name__}(monitor={monitor!r})`: the name does not tell"
            ' which values are better, so it is the smaller ones; `mode="max"` if'
            ' larger ones are, or `mode="min"`'
        )
    better = {"loss": "min", "accuracy": "max"}.get(monitor.removeprefix("val_"), mode)
    if mode != "auto" and mode != better:
        log_info_once(
            f"`{type(callback).__name__}(monitor={monitor!r}, mode={mode!r})`: the"
            f" worst value counts as the best; for the best leave `mode` out, or pass"
            f' `mode="{better}"`'
        )
    return resolve_mode(monitor, mode)


def is_better(
    mode: str, value: float, best: float | None, min_delta: float = 0.0
) -> bool:
    """Returns True if `value` is better than `best` by more than `min_delta`. NaN is
    never better, and every other value is better than NaN and None."""
    if math.isnan(value) or best is None or math.isnan(best):
        return not math.isnan(value)
    return value < best - min_delta if mode == "min" else value > best + min_delta


def announce(trainer: Trainer, callback_name: str, text: str) -> None:
    """Logs a message of a callback on rank 0."""
    if trainer.is_global_zero:
        log_info(f"{callback_name}: {text}")


def is_in_notebook() -> bool:
    """Returns True if a notebook runs this process, and so can show pictures."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython and ipython.get_ipython(), "kernel")
