"""Ends a fit that no longer gets better."""

import math
from typing import TYPE_CHECKING, Any, Final

from ..basics.arguments import check_choice, check_count, check_number
from ..basics.json_checks import fields, maybe, number_text, row, truth, whole
from .base import Callback
from .monitor import announce, check_monitor, is_better

if TYPE_CHECKING:
    from jaxdp import Trainer

_SAVED: Final = fields(
    {
        "wait_count": whole(),
        "stopped_epoch": maybe(whole()),
        "best_score": maybe(number_text()),
    },
    {"last": maybe(row(number_text(), truth()))},
)


class EarlyStopping(Callback):
    """Stops when a monitored value has not improved for `patience` checks in a row.

    A check happens after every validation when `monitor` begins with `val_`, and
    after every training epoch otherwise.

    Args:
        monitor: name of an epoch's value, such as `"val_loss"` or `"accuracy"`.
        patience: how many checks without improvement to allow; at least 1 is needed
            to stop, and 0 stops at the first.
        min_delta: what counts as improvement: more than this, in the unit of the value.
        mode: `"min"` when smaller is better, `"max"` when larger is.
        check_finite: whether to stop at once when the value is NaN or infinite.
        stopping_threshold: stop at once when the value is better than this.
        divergence_threshold: stop at once when the value is worse than this.
        verbose: whether to print why the fit was stopped.

    Attributes:
        wait_count: checks since the last improvement.
        stopped_epoch: the epoch that was the last one, counted from 0; None before.
        best_score: the best value so far; None before the first check.
        reason: why the fit was stopped; None before.
    """

    skip_in_fast_dev_run = True

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "min",
        *,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        verbose: bool = True,
    ):
        if not isinstance(monitor, str):
            raise TypeError(f"`monitor` must be the name of a metric; got {monitor!r}.")
        check_choice("mode", mode, ("min", "max"))
        check_count("patience", patience, least=0)
        way = "; `mode` says in which direction"
        check_number("min_delta", min_delta, least=0, or_else=way)
        for name, threshold in (
            ("stopping_threshold", stopping_threshold),
            ("divergence_threshold", divergence_threshold),
        ):
            if threshold is not None:
                check_number(name, threshold, or_else=", or None")
        self.monitor = monitor
        self.patience = int(patience)
        self.min_delta = float(min_delta)
        self.mode = mode
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.verbose = verbose
        self.wait_count = 0
        self.stopped_epoch: int | None = None
        self.best_score: float | None = None
        self.reason: str | None = None
        self._fitting = False
        self._last: tuple[float, bool] | None = None
        self._is_restored = False

    def on_fit_start(self, trainer: "Trainer") -> None:
        check_monitor(trainer, "EarlyStopping", self.monitor)
        self._fitting = True
        if self._is_restored and self._last is not None:
            # A run that was killed when it was to stop has nothing more to do, unless
            # the rules are others now.
            self._stop_if(self._reason(*self._last), trainer)
        self._is_restored = False

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._fitting = False

    def on_validation_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if self._fitting and self.monitor.startswith("val_"):
            self._check(trainer, metrics)

    def on_train_epoch_end(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        if not self.monitor.startswith("val_"):
            self._check(trainer, metrics)

    def identity(self, trainer: "Trainer") -> str:
        return self.monitor

    def state_dict(self) -> dict[str, Any]:
        best = self.best_score
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": best if best is None or math.isfinite(best) else str(best),
            "last": self._last and [str(self._last[0]), self._last[1]],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _SAVED(state, "state")
        self.wait_count = state["wait_count"]
        self.stopped_epoch = state["stopped_epoch"]
        best = state["best_score"]
        self.best_score = None if best is None else float(best)
        last = state.get("last")
        self._last = None if last is None else (float(last[0]), last[1])
        self._is_restored = True

    def _check(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        value = metrics[self.monitor]
        improved = is_better(self.mode, value, self.best_score, self.min_delta)
        if improved:
            self.best_score, self.wait_count = value, 0
        else:
            self.wait_count += 1
        self._last = value, improved
        self.reason = self._reason(value, improved)
        if self.reason is not None:
            self.stopped_epoch = trainer.current_epoch
        self._stop_if(self.reason, trainer)

    def _stop_if(self, reason: str | None, trainer: "Trainer") -> None:
        if reason is None:
            return
        trainer.should_stop, self.reason = True, reason
        if self.verbose:
            announce(trainer, "EarlyStopping", reason)

    def _reason(self, value: float, improved: bool) -> str | None:
        """Why to stop now, or None."""
        got = f"{self.monitor} is {value:.6g}"
        better, worse = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return f"{got}, which is not finite."
        if better is not None and is_better(self.mode, value, better):
            return f"{got}, better than the `stopping_threshold` of {better:.6g}."
        if worse is not None and is_better(self.mode, worse, value):
            return f"{got}, worse than the `divergence_threshold` of {worse:.6g}."
        if not improved and self.wait_count >= self.patience:
            best = "none" if self.best_score is None else f"{self.best_score:.6g}"
            return (
                f"{self.monitor} did not improve on {best} for {self.wait_count}"
                f" {'check' if self.wait_count == 1 else 'checks'}."
            )
        return None
