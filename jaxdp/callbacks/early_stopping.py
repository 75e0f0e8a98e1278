"""Stops a fit that no longer improves."""

import math
from typing import Any, Literal

from ..basics.arguments import check_number, checks_arguments
from ..basics.console import warn
from ..strategies.placement import fetch
from .base import Trainer
from .model_checkpoint import ModelCheckpoint
from .monitor import PatienceCallback, announce, is_better


class EarlyStopping(PatienceCallback):
    """Stops when a monitored value has not improved for `patience` checks in a row.

    A check happens after every validation when `monitor` begins with `val_`, and
    after every training epoch otherwise. To skip some, as a warm-up, override
    `handle_means(trainer, row)`.

    Args:
        monitor: name of an epoch's value, such as `"val_loss"` or `"accuracy"`.
        patience: the number of checks without improvement that stops a fit; 0 and 1
            stop at the first.
        min_delta: the difference that an improvement exceeds, in the unit of the value.
        mode: `"min"` if smaller is better, `"max"` if larger is; `"auto"` goes by the
            name: `"max"` for names like `accuracy`, `auroc` and `f1`, else `"min"`.
        check_finite: whether to stop at once when the value is NaN or infinite.
        stopping_threshold: stop at once when the value is better than this.
        divergence_threshold: stop at once when the value is worse than this.
        verbose: whether to log why the fit was stopped.
        restore_best: whether a fit ends with the weights and the optimizer state of the
            best check. They are copied to the host, so each improvement waits for the
            device. Checkpoints do not contain the copy: a resumed run reads it from a
            `ModelCheckpoint` of the same `monitor`, or warns that none has it.

    Attributes:
        wait_count: checks since the last improvement.
        stopped_epoch: the last epoch, counted from 0; None before the fit is stopped.
        best_score: the best value so far; None before the first check.
        reason: why the fit was stopped; None before it is.
    """

    @checks_arguments
    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["auto", "min", "max"] = "auto",
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        verbose: bool = True,
        restore_best: bool = False,
    ):
        super().__init__(monitor, patience, min_delta, mode)
        for name, threshold in (
            ("stopping_threshold", stopping_threshold),
            ("divergence_threshold", divergence_threshold),
        ):
            if threshold is not None:
                check_number(name, threshold, suffix=", or None")
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.verbose = verbose
        self.restore_best = restore_best
        self.stopped_epoch: int | None = None
        self.reason: str | None = None
        self._last_value: float | None = None
        self._has_failed = False
        # The weights of the best check, unless that is older than a resume; and the
        # steps that have them: its own, and the last one of a fit that restored them.
        self._best: dict[str, Any] | None = None
        self._best_steps: list[int] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_fit_start(trainer)
        self._has_failed = False
        # A run that had stopped stays so, if this run's arguments stop it, too. A
        # second fit of one trainer has a reason, and continues.
        is_resumed = self.stopped_epoch is not None and self.reason is None
        self.reason = None
        if not (is_resumed and self._stop_if_due(trainer)):
            self.stopped_epoch = None
        is_best = trainer.global_step in self._best_steps
        if self.restore_best and self._best is None and is_best:
            self._best = _copy_parts(trainer)

    def check(self, trainer: Trainer, value: float) -> None:
        self._last_value = value
        if self.update_best(value):
            self._best_steps = [trainer.global_step]
            self._best = _copy_parts(trainer) if self.restore_best else None
        else:
            self.wait_count += 1
        if self._stop_if_due(trainer):
            self.stopped_epoch = trainer.current_epoch

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._has_failed = True  # a resumed run continues from this end

    def on_fit_end(self, trainer: Trainer) -> None:
        is_best = trainer.global_step in self._best_steps or self.best_score is None
        if not self.restore_best or self._has_failed or is_best:
            return
        source: Any = self._best
        if source is None:
            savers = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
            # That of a fit's last step has the weights before the best were put back.
            paths = [c.find_path(step) for step in self._best_steps[:1] for c in savers]
            source = next(filter(None, paths), None)
        try:
            if source is None:
                raise ValueError("no `ModelCheckpoint` of this trainer has them.")
            trainer.run.put_back(_list_parts(trainer), source)
        except (OSError, ValueError) as error:
            step = f" of step {self._best_steps[0]}" if self._best_steps else ""
            warn(
                f"`EarlyStopping(restore_best=True)`: the best weights{step} are older"
                " than the resume, so the fit ends with its last ones:"
                f" {error} `trainer.load(path)` restores those that you have saved."
            )
            return
        step, score = self._best_steps[0], self.best_score
        where = f", from {source}" if isinstance(source, str) else ""
        text = f"back to step {step}, where {self.monitor} was {score:.6g}{where}"
        announce(trainer, "EarlyStopping", text)
        self._best_steps = [step, trainer.global_step]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "stopped_epoch": self.stopped_epoch,
            "best_steps": self._best_steps,
            "last": [] if self._last_value is None else [str(self._last_value)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stopped_epoch = state["stopped_epoch"]
        # 0.2 saved a second value in `last`, and `last_check` had the step before it.
        last = state.get("last") or (state.get("last_check") or [])[1:]
        self._last_value = float(last[0]) if last else None
        self._best_steps = list(state.get("best_steps", []))  # not in 0.2
        # The best weights belong to steps that are undone, or to another trainer.
        self.reason = self._best = None

    def _stop_if_due(self, trainer: Trainer) -> bool:
        """Stops the fit if the last check is a reason and the fit has reached its
        minimum; returns True if it did.
        """
        reason = self._find_reason()
        # `should_stop` stays set. Set before the minimum of the fit, it would end a run
        # that improves later.
        step, epochs = trainer.global_step, trainer.record.epochs_done
        if reason is None or not trainer.record.limits.may_stop(step, epochs):
            return False
        if self.verbose and not trainer.should_stop:
            announce(trainer, "EarlyStopping", reason)
        self.reason, trainer.should_stop = reason, True
        return True

    def _find_reason(self) -> str | None:
        """Returns the reason to stop at the last check, or None."""
        value = self._last_value
        if value is None:
            return None
        got = f"{self.monitor} is {value:.6g}"
        better, worse = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return f"{got}, which is not finite."
        if better is not None and is_better(self.mode, value, better):
            return f"{got}, better than the `stopping_threshold` of {better:.6g}."
        if worse is not None and is_better(self.mode, worse, value):
            return f"{got}, worse than the `divergence_threshold` of {worse:.6g}."
        is_over = self.wait_count >= max(self.patience, 1)
        return f"{self.describe_wait()}." if is_over else None


def _copy_parts(trainer: Trainer) -> dict[str, Any]:
    """Copies the fields of `_list_parts` to the host; waits for the device."""
    return fetch({name: getattr(trainer.state, name) for name in _list_parts(trainer)})


def _list_parts(trainer: Trainer) -> tuple[str, ...]:
    """Returns the names of the state's fields that make up model and optimizer."""
    changes_all = trainer.run.arguments["after_update"] is not None
    return ("params", "model_state", "opt_state", *["buffers"] * changes_all)
