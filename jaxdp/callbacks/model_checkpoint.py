"""Saves the trainer as it goes, and keeps the best."""

import math
import os
import shutil
import time
from datetime import timedelta
from typing import Any

from .base import Callback
from .monitor import announce, check_mode, check_monitor, is_better


class ModelCheckpoint(Callback):
    """Saves the whole `TrainState`, one folder per saved step, named by the step.

    Without `monitor` the newest `save_top_k` are kept; with it, the best. Load one with
    `trainer.load(callback.best_model_path)`.

    Args:
        dirpath: where to save; `trainer.default_root_dir` + "/checkpoints" by default.
        monitor: name of an epoch metric, such as "val_loss"; an epoch in which it is
            not measured is not saved. Saves by steps or time go by its latest value.
        mode: whether "min" or "max" of it is best.
        save_top_k: how many to keep; -1 keeps all, 0 none.
        save_last: also keep the newest, whatever its value.
        every_n_train_steps: save each time so many optimizer steps are done.
        every_n_epochs: save after each so many epochs; 1 if nothing else is given.
        train_time_interval: save each time so much time has passed.

    Attributes:
        best_model_path: folder of the best checkpoint (without `monitor`, the newest).
        best_model_score: its monitored value, or None.
        last_model_path: folder of the newest checkpoint.
    """

    skip_in_fast_dev_run = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
    ):
        check_mode("ModelCheckpoint", mode)
        if save_top_k < -1:
            raise ValueError(
                f"`save_top_k` must be -1 (all), 0 (none) or a number to keep; got"
                f" {save_top_k}."
            )
        for name, value in (
            ("every_n_train_steps", every_n_train_steps),
            ("every_n_epochs", every_n_epochs),
        ):
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be 1 or more, or None; got {value}.")
        if every_n_train_steps is None and train_time_interval is None:
            every_n_epochs = 1 if every_n_epochs is None else every_n_epochs
        self.dirpath = None if dirpath is None else os.path.abspath(dirpath)
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs
        self.train_time_interval = train_time_interval
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self.last_model_path = ""
        self._scores: dict[str, float] = {}
        self._score: float | None = None
        self._is_fresh = False
        self._saved_at = time.monotonic()

    def setup(self, trainer: Any) -> None:
        """Makes the folder, so that one that can't be written to is found now."""
        if self.dirpath is None:
            self.dirpath = os.path.abspath(
                os.path.join(trainer.default_root_dir, "checkpoints")
            )
        try:
            os.makedirs(self.dirpath, exist_ok=True)
            if not os.access(self.dirpath, os.W_OK):
                raise PermissionError("no permission to write")
        except OSError as error:
            raise type(error)(
                f"`dirpath`: checkpoints can't be written to {self.dirpath}: {error}."
            ) from error
        others = [
            name
            for name in os.listdir(self.dirpath)
            if name.isdecimal() and os.path.join(self.dirpath, name) not in self._scores
        ]
        if others:
            announce(
                trainer,
                "ModelCheckpoint",
                f"{self.dirpath} has {len(others)} checkpoints of another run already;"
                " those of the same step will be replaced",
            )

    def on_fit_start(self, trainer: Any) -> None:
        if self.monitor is not None:
            check_monitor(trainer, "ModelCheckpoint", self.monitor)
        self._saved_at = time.monotonic()

    def on_train_batch_end(self, trainer: Any, metrics: Any, batch_idx: int) -> None:
        every = self.every_n_train_steps
        due = every is not None and trainer.global_step % every == 0
        if self.train_time_interval is not None:
            interval = self.train_time_interval.total_seconds()
            due = due or time.monotonic() - self._saved_at >= interval
        if due:
            self._save(trainer)

    def on_validation_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._look(metrics)

    def on_train_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._look(metrics)
        every = self.every_n_epochs
        # An epoch without a value of its own can't be judged by an older model's.
        judged = self.monitor is None or self._is_fresh
        if every is not None and (trainer.current_epoch + 1) % every == 0 and judged:
            self._save(trainer)
        self._is_fresh = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_model_path": self.best_model_path,
            "best_model_score": self.best_model_score,
            "last_model_path": self.last_model_path,
            "scores": self._scores,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_model_path = state["best_model_path"]
        self.best_model_score = state["best_model_score"]
        self.last_model_path = state["last_model_path"]
        self._scores = dict(state["scores"])

    def _look(self, metrics: dict[str, float]) -> None:
        if self.monitor in metrics:
            self._score, self._is_fresh = metrics[self.monitor], True

    def _save(self, trainer: Any) -> None:
        score = float(trainer.global_step) if self.monitor is None else self._score
        if self.save_top_k == 0 and not self.save_last:
            return
        if score is None or math.isnan(score):
            # Nothing to judge by yet: worse than anything that comes.
            score = math.inf if self._mode == "min" else -math.inf
        assert self.dirpath is not None
        path = os.path.join(self.dirpath, str(trainer.global_step))
        if path in self._scores or not (self.save_last or self._is_kept(score)):
            return
        shutil.rmtree(path, ignore_errors=True)
        self._scores[path] = score
        self.last_model_path = path
        ranked = sorted(
            self._scores, key=lambda p: self._scores[p], reverse=self._mode == "max"
        )
        self.best_model_path = ranked[0]
        best = self._scores[ranked[0]]
        self.best_model_score = None if self.monitor is None else best
        kept = ranked if self.save_top_k == -1 else ranked[: self.save_top_k]
        removed = set(ranked) - set(kept) - ({path} if self.save_last else set())
        for old in removed:
            del self._scores[old]
        trainer.save(path)
        # Old ones go only when the new one is on disk.
        for old in removed:
            shutil.rmtree(old, ignore_errors=True)
        self._saved_at = time.monotonic()

    @property
    def _mode(self) -> str:
        """Without a monitor, "best" is the newest."""
        return "max" if self.monitor is None else self.mode

    def _is_kept(self, score: float) -> bool:
        if self.save_top_k == -1 or len(self._scores) < self.save_top_k:
            return True
        worst = (max if self._mode == "min" else min)(self._scores.values())
        return is_better(self._mode, score, worst)
