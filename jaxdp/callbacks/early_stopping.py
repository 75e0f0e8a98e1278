"""Stops a fit that no longer improves."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from ..basics.arguments import check_number, checks_arguments
from ..basics.console import warn
from ..strategies.placement import fetch
from .base import Trainer
from .model_checkpoint import ModelCheckpoint
from .monitor import MonitorCallback, announce, is_better


class EarlyStopping(MonitorCallback):
    """Stops when a monitored value has not improved for `patience` checks in a row.

    A check happens after every validation when `monitor` begins with `val_`, and
    after every training epoch otherwise. To skip some, as a warm-up, override
    `handle_means(trainer, row)`.

    Args:
        monitor: name of an epoch's value, such as `"val_loss"` or `"accuracy"`.
        patience: how many checks without improvement to allow; at least 1 is needed
            to stop, and 0 stops at the first.
        min_delta: an improvement must be larger than this, in the unit of the value; an
            equal value is none.
        mode: `"min"` when smaller is better, `"max"` when larger is; `"auto"` goes by
            the name, whatever is computed: `"max"` for names like `accuracy`, `auroc`
            and `f1`, else `"min"`.
        check_finite: whether to stop at once when the value is NaN or infinite.
        stopping_threshold: stop at once when the value is better than this.
        divergence_threshold: stop at once when the value is worse than this.
        verbose: whether to print why the fit was stopped.
        restore_best: whether a fit ends with the weights and the optimizer state of
            the best check. A copy is kept on the host, so each improvement waits for
            the device. Checkpoints do not contain it: after a resume, those of an
            earlier check are taken from a `ModelCheckpoint` with the same `monitor`;
            a warning says so where none has them.

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
        if stopping_threshold is not None:
            check_number("stopping_threshold", stopping_threshold, suffix=", or None")
        if divergence_threshold is not None:
            number = divergence_threshold
            check_number("divergence_threshold", number, suffix=", or None")
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.verbose = verbose
        self.restore_best = restore_best
        self.stopped_epoch: int | None = None
        self.reason: str | None = None
        self._last_check: tuple[int, float] | None = None  # its step and value
        self._is_restored = self._has_failed = False
        # The steps that have the best weights (a fit may continue with them), and a
        # copy, if they were seen in this run.
        self._best_steps: list[int] = []
        self._best: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_fit_start(trainer)
        self._has_failed, was_restored = False, self._is_restored
        self._is_restored = False
        if not was_restored or self._last_check is None:
            return
        # A run that was killed when it was to stop has nothing more to do, unless its
        # rules have changed. Between two checks it is the next one that decides, as it
        # did before a minimum of the fit was reached.
        step, value = self._last_check
        if step == trainer.global_step or self.stopped_epoch is not None:
            self._stop_if_due(trainer, value)
        if self.restore_best and self.best_score is not None:
            if trainer.global_step in self._best_steps:
                self._best = _copy_parts(trainer)
            elif self.reason is None and self._find_best_path(trainer) is None:
                self._warn_best_is_lost("no `ModelCheckpoint` of this trainer has them")

    def check(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        value = values[self.monitor]
        self._last_check = trainer.global_step, value
        if not self.update_best(value):
            self.wait_count += 1
        else:
            self._best_steps = [trainer.global_step]
            self._best = _copy_parts(trainer) if self.restore_best else None
        self._stop_if_due(trainer, value)
        if self.reason is not None and trainer.should_stop:
            self.stopped_epoch = trainer.current_epoch

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._has_failed = True  # a resumed run continues from this end

    def on_fit_end(self, trainer: Trainer) -> None:
        if not self.restore_best or self._has_failed or self.best_score is None:
            return
        if trainer.global_step in self._best_steps:
            return
        source = self._find_best_path(trainer) if self._best is None else self._best
        try:
            if source is None:
                raise ValueError("no `ModelCheckpoint` of this trainer has them")
            trainer.run.put_back(_list_parts(trainer), source)
        except (OSError, ValueError) as error:
            return self._warn_best_is_lost(str(error))
        where = f", from {source}" if isinstance(source, str) else ""
        text = (
            f"back to step {self._best_steps[0]}, where {self.monitor} was"
            f" {self.best_score:.6g}{where}"
        )
        self._best_steps = [self._best_steps[0], trainer.global_step]
        announce(trainer, "EarlyStopping", text)

    def _find_best_path(self, trainer: Trainer) -> str | None:
        """Returns the checkpoint of the best weights, if a callback has one."""

        def find() -> str | None:
            savers = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
            # A checkpoint of any other step is no candidate.
            paths = (c.find_path(step) for step in self._best_steps[:1] for c in savers)
            return next(filter(None, paths), None)

        processes = trainer.run.processes
        return processes.run_on_rank_zero("where the best weights are", find)

    def _warn_best_is_lost(self, why: str) -> None:
        step = f" of step {self._best_steps[0]}" if self._best_steps else ""
        warn(
            f"`EarlyStopping(restore_best=True)`: the best weights{step} are older than"
            f" the resume: {why}. Without a better check the fit ends with its last"
            " weights. A `ModelCheckpoint` of the same `monitor` keeps them;"
            " `trainer.load(path)` brings back those that you have saved yourself."
        )

    def state_dict(self) -> dict[str, Any]:
        of_run = {"stopped_epoch": self.stopped_epoch, "best_steps": self._best_steps}
        last = self._last_check
        return (
            super().state_dict() | of_run | {"last_check": last and [*map(str, last)]}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stopped_epoch, self._is_restored = state["stopped_epoch"], True
        last = state.get("last_check")
        if last is None and state.get("last"):  # of 0.2, without the step
            last = [-1, state["last"][0]]
        self._last_check = (int(last[0]), float(last[1])) if last else None
        self._best_steps = list(state.get("best_steps", []))  # in no older checkpoint
        # The best weights belong to steps that are undone, or to another trainer.
        self.reason = self._best = None

    def _stop_if_due(self, trainer: Trainer, value: float) -> None:
        """Stops if the last check, which found `value`, says so."""
        self.reason = self._find_limit(value)
        if self.reason is None and self.wait_count >= max(self.patience, 1):
            self.reason = f"{self.describe_wait()}."
        # `should_stop` stays set once it is set. So it is not set before the minimum of
        # the fit, or it would end a run that improves later.
        step, epochs = trainer.global_step, trainer.record.epochs_done
        if self.reason is not None and trainer.record.limits.may_stop(step, epochs):
            was_said, trainer.should_stop = trainer.should_stop, True
            if self.verbose and not was_said:
                announce(trainer, "EarlyStopping", self.reason)

    def _find_limit(self, value: float) -> str | None:
        """Returns the reason to stop at this value, or None."""
        got = f"{self.monitor} is {value:.6g}"
        better, worse = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(value):
            return f"{got}, which is not finite."
        if better is not None and is_better(self.mode, value, better):
            return f"{got}, better than the `stopping_threshold` of {better:.6g}."
        if worse is not None and is_better(self.mode, worse, value):
            return f"{got}, worse than the `divergence_threshold` of {worse:.6g}."
        return None


def _copy_parts(trainer: Trainer) -> dict[str, Any]:
    """Returns these parts of the state on the host; waits for the device."""
    return fetch({name: getattr(trainer.state, name) for name in _list_parts(trainer)})


def _list_parts(trainer: Trainer) -> tuple[str, ...]:
    """Returns the parts of the state that make a model and its optimizer."""
    changes_all = trainer.run.arguments["after_update"] is not None
    return ("params", "model_state", "opt_state", *["buffers"] * changes_all)
