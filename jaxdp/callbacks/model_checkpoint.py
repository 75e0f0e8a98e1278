"""Saves the trainer as it goes, and keeps the best."""

import contextlib
import math
import os
import time
from datetime import timedelta
from typing import Any

from .. import checkpoint
from ..basics.arguments import check_choice, check_count, check_is_local
from ..basics.console import warn
from ..basics.durations import parse_duration
from ..basics.json_checks import (
    each,
    fields,
    has_form,
    maybe,
    number_text,
    row,
    truth,
    whole,
)
from ..checkpoint import CheckpointDir
from ..distributed import Pulse, is_stop
from ..history import rank
from .base import Callback, Trainer
from .monitor import announce, check_monitor
from .states import saved_state

_SAVED = fields(
    {
        "scores": each(row(whole(), number_text())),
        "score": maybe(number_text()),
        "is_due": truth(),
        "kept_for_resuming": maybe(whole()),
    },
    {"best_first": each(whole())},
)


class ModelCheckpoint(Callback):
    """Saves the whole `TrainState`, one folder per saved step, named by the step.

    Without `monitor` the newest `save_top_k` are kept; with it, the best. Resume with
    `fit(..., ckpt_path="last")`, `"best"` or `"auto"`, or load one with
    `trainer.load(callback.best_model_path)`.

    Saving happens in the background, one checkpoint at a time. An old one is removed
    only after the new one is on disk, and `fit` returns only when all are. Ctrl-C and
    SIGTERM save a checkpoint before the fit stops. While a fit runs, it locks the
    folder: a second run that would save there is refused. Checkpoints of another run
    in the folder are moved to a folder `before-<n>` in it.

    Args:
        dirpath: where to save; `trainer.default_root_dir` + "/checkpoints" by default.
        monitor: name of an epoch metric, such as "val_loss"; an epoch in which it is
            not measured is not saved. Saves by steps or time go by its latest value.
        mode: whether "min" or "max" of it is best.
        save_top_k: how many to keep; -1 keeps all, 0 none.
        save_last: also keep the newest, whatever its value.
        every_n_train_steps: save every so many optimizer steps (at the last step of an
            epoch, after its validation).
        every_n_epochs: save every so many epochs; 1 if nothing else is given.
        train_time_interval: save whenever so much time has passed; like `max_time`.
        on_save_error: what to do if a checkpoint can't be written, for example to a
            full disk: `"raise"` a SaveFailed at the next step, or `"warn"` and try
            again when the next one is due. Older checkpoints stay.

    Attributes:
        best_model_path: folder of the best checkpoint (without `monitor`, the newest).
        best_model_score: its monitored value, or None.
        last_model_path: folder of the newest checkpoint.
    """

    skip_in_fast_dev_run = True
    looks_inside_blocks = False
    only_in_training = True
    reads_logged = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | float | str | None = None,
        *,
        on_save_error: str = "raise",
    ):
        check_choice("mode", mode, ("min", "max"))
        check_choice("on_save_error", on_save_error, ("raise", "warn"))
        if not isinstance(monitor, str | None):
            text = "`monitor` must be the name of a metric or None"
            raise TypeError(f"{text}; got {monitor!r}.")
        check_count("save_top_k", save_top_k, least=-1, or_else=", -1 for all")

        # When to save: at every epoch, if nothing is said.
        if every_n_train_steps is not None:
            check_count("every_n_train_steps", every_n_train_steps, or_else=" or None")
        if every_n_epochs is not None:
            check_count("every_n_epochs", every_n_epochs, or_else=" or None")
        if train_time_interval is not None:
            seconds = parse_duration(train_time_interval, "train_time_interval")
            train_time_interval = timedelta(seconds=seconds)
        elif every_n_train_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        if dirpath is not None:
            check_is_local("dirpath", dirpath)

        self.dirpath = None if dirpath is None else os.path.abspath(dirpath)
        self._follows_trainer = dirpath is None
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs
        self.train_time_interval = train_time_interval
        self.on_save_error = on_save_error

        # Known once a fit has begun.
        self._dir: CheckpointDir | None = None
        self._scores: dict[int, float] = {}  # of every step that is saved
        self._score = math.nan  # before the first: worse than anything that comes
        self._is_due = False
        self._kept_for_resuming: int | None = None
        self._saving: tuple[int, checkpoint.Saving] | None = None
        self._saved_at = time.monotonic()
        self._is_restored = False
        self._is_alone = False

    @property
    def best_model_path(self) -> str:
        ranked = self._ranked(self._scores)
        return self._path_of(ranked[0]) if ranked else ""

    @property
    def best_model_score(self) -> float | None:
        ranked = self._ranked(self._scores)
        return self._scores[ranked[0]] if ranked and self.monitor else None

    @property
    def last_model_path(self) -> str:
        return self._path_of(max(self._scores)) if self._scores else ""

    def folder(self, trainer: Trainer) -> CheckpointDir:
        """Where the checkpoints of a trainer go."""
        if self._follows_trainer:
            root = os.path.join(trainer.default_root_dir, "checkpoints")
            self.dirpath = os.path.abspath(root)
        return CheckpointDir(str(self.dirpath))

    def ranked_in(self, state: dict[str, Any]) -> list[int]:
        """The steps that a saved state of this callback knows of, best first."""
        _SAVED(state, "state")
        return self._ranked(_scores_in(state))

    def setup(self, trainer: Trainer) -> None:
        """Locks the folder, so that an unwritable one is an error before training."""
        self._dir, self._processes = self.folder(trainer), trainer.run.processes
        self._clock = Pulse(self._processes, "the time of a checkpoint")
        self._is_alone = False
        self._processes.first("ModelCheckpoint: its folder", self._dir.open)
        sort_out, what = lambda: self._sorted_out(trainer), "what is there"
        self._scores = dict(self._processes.first(f"ModelCheckpoint: {what}", sort_out))
        self._remove_what_is_not_kept()
        self._is_due = self._is_due and self._is_restored
        self._is_restored = False
        self._save_if_due(trainer)  # else a kill came before it

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.monitor is not None:
            check_monitor(trainer, self, self.monitor)
        self._saved_at = time.monotonic()

    def next_stop(self, trainer: Trainer) -> int | None:
        every = self.every_n_train_steps
        return None if every is None else (trainer.global_step // every + 1) * every

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Any, batch_idx: int
    ) -> None:
        every = self.every_n_train_steps
        if every is not None and trainer.global_step % every == 0:
            self._is_due = True
        if self.train_time_interval is not None:
            interval = self.train_time_interval.total_seconds()
            is_over = time.monotonic() - self._saved_at >= interval
            if self._clock.beat(is_over or None):
                self._is_due = True

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if trainer.run.is_fitting:
            self._score = metrics.get(self.monitor or "", self._score)

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self.monitor is not None:
            check_monitor(trainer, self, self.monitor, metrics)
            self._score = metrics.get(self.monitor, self._score)
        every = self.every_n_epochs
        # An epoch without a value of its own can't be judged by an older model's.
        judged = self.monitor is None or self.monitor in metrics
        if every is not None and (trainer.current_epoch + 1) % every == 0 and judged:
            self._is_due = True

    def on_boundary(self, trainer: Trainer) -> None:
        self._settle()
        self._save_if_due(trainer)

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._is_alone = not is_stop(exception)
        if is_stop(exception):  # at a boundary: the state is whole
            self._settle(wait=True)
            if trainer.global_step and trainer.global_step not in self._scores:
                self._kept_for_resuming = step = trainer.global_step
                # The last value was another model's: this one must not displace its.
                self._begin(trainer, float(step) if self.monitor is None else math.nan)
                self._settle(wait=True)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._dir is None:  # another callback's `setup` has failed
            return
        try:
            self._settle(wait=True)
        finally:
            self._dir.close()

    def finish_saving(self) -> None:
        """Waits until the checkpoint that is being saved is in its folder."""
        self._settle(wait=True)

    def identity(self, trainer: Trainer) -> str:
        unit = f"{self.monitor}, {self.mode}" if self.monitor else "no monitor"
        return f"{self.folder(trainer).path}\n{unit}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "scores": [[step, str(score)] for step, score in self._scores.items()],
            "score": str(self._score),
            "is_due": self._is_due,
            "kept_for_resuming": self._kept_for_resuming,
            "best_first": self._ranked(self._scores),  # for `load_model`
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _SAVED(state, "state")
        self._is_restored = True
        self._scores = _scores_in(state)
        self._is_due = state["is_due"]
        self._score = float("nan" if state["score"] is None else state["score"])
        self._kept_for_resuming = state["kept_for_resuming"]

    def _save_if_due(self, trainer: Trainer) -> None:
        # After the last step of an epoch its validation comes first: that is what the
        # checkpoint is judged by, and need not be repeated when it is resumed.
        if self._is_due and not is_at_epoch_end(trainer):
            self._is_due = False
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        """Begins to save the present step, if it is to be kept."""
        self._settle(wait=True)  # one at a time
        step = trainer.global_step
        score = float(step) if self.monitor is None else self._score
        if step not in self._scores:
            if step in self._kept({**self._scores, step: score}):
                self._begin(trainer, score)
        elif math.isnan(self._scores[step]):  # by a signal, before it was judged
            self._scores[step] = score
            self._remove_what_is_not_kept()

    def _begin(self, trainer: Trainer, score: float) -> None:
        assert self._dir is not None
        step = trainer.global_step
        self._scores[step] = score  # what is saved knows of itself
        self._saved_at = time.monotonic()
        try:
            self._saving = step, trainer.start_saving(self._dir.path_of(step))
        except (checkpoint.SaveFailed, FileExistsError) as error:
            self._fail(step, error)
        except BaseException:
            del self._scores[step]
            raise

    def _settle(self, *, wait: bool = False) -> None:
        """When a save is done: removes what it makes superfluous, or says it failed."""
        if self._saving is None:
            return
        if not wait and (self._processes.count > 1 or not self._saving[1].is_done):
            return  # several processes are not done at the same step
        step, saving = self._saving
        try:
            saving.finish(alone=self._is_alone)
        except checkpoint.SaveFailed as error:
            self._saving = None
            self._fail(step, error)
            return
        self._saving = None
        self._remove_what_is_not_kept()

    def _fail(self, step: int, error: Exception) -> None:
        del self._scores[step]
        if self._processes.index == 0 and self._dir is not None:
            with contextlib.suppress(OSError):  # the folder may be what is gone
                self._dir.sweep()
        if self.on_save_error == "raise":
            more = "ModelCheckpoint(on_save_error='warn') would continue without it."
            error.add_note(more)
            raise error
        text = f"{error} Training continues; the next one is tried when it is due."
        warn(text)

    def _kept(self, scores: dict[int, float]) -> set[int]:
        """Which steps stay, of those in `scores`."""
        ranked, newest = self._ranked(scores), max(scores, default=-1)
        kept = set(ranked if self.save_top_k == -1 else ranked[: self.save_top_k])
        if scores and (self.save_last or newest == self._kept_for_resuming):
            kept.add(newest)
        return kept

    def _ranked(self, scores: dict[int, float]) -> list[int]:
        """Steps, best first; those without a value last; of equals the newer first."""
        # Without a monitor, "best" is the newest.
        mode = "max" if self.monitor is None else self.mode
        return sorted(scores, key=lambda step: (rank(scores[step], mode), -step))

    def _remove_what_is_not_kept(self) -> None:
        assert self._dir is not None
        for step in sorted(set(self._scores) - self._kept(self._scores)):
            del self._scores[step]
            if self._processes.index:
                continue
            try:
                self._dir.remove(step)
            except OSError as error:
                path = self._dir.path_of(step)
                text = f"the old checkpoint {path} could not be removed: {error}."
                warn(text)

    def _sorted_out(self, trainer: Trainer) -> list[tuple[int, float]]:
        """Finds out whose the checkpoints are that lie in the folder; our scores."""
        assert self._dir is not None
        there = {step: self._told_by(step, trainer) for step in self._dir.steps()}
        scores = {
            step: score
            for step, score in self._scores.items()
            # None: damaged, or older than these names.
            if step in there and there[step][0] in (None, trainer.run.id)
        }

        # Checkpoints of other runs, or that other callbacks have saved.
        strangers = self._dir.impostors()
        for step in sorted(set(there) - set(scores)):
            run_id, score = there[step]
            is_now = step == trainer.global_step
            is_ours = step <= trainer.global_step and run_id == trainer.run.id
            score = score if is_ours else None
            if score is not None and not self._is_restored:
                scores[step] = math.nan if self.monitor else score
            elif score is not None and is_now:
                scores[step] = score
            elif not (is_ours and is_now) or self._is_due:
                strangers.append(step)
            # else saved by somebody else at this very step: the fit may go on from it
        if strangers:
            path = self._dir.set_aside(strangers)
            listed = ", ".join(map(str, strangers))
            text = (
                f"{self._dir.path} has checkpoints that this run does not resume from,"
                f" or that this callback has not saved: {listed}. They are now in"
                f" {path}."
                ' (To resume from the newest, use `fit(..., ckpt_path="auto")`.)'
            )
            announce(trainer, "ModelCheckpoint", text)
        return list(scores.items())

    def _told_by(self, step: int, trainer: Trainer) -> tuple[str | None, float | None]:
        """Whose run saved a step, and its score if this callback did; None: unknown."""
        try:
            meta = checkpoint.read_meta(self._path_of(step))
        except (OSError, ValueError):
            return None, None
        state = saved_state(trainer, meta, self)
        score = _scores_in(state).get(step) if has_form(state, _SAVED) else None
        return meta.get("run_id"), score

    def _path_of(self, step: int) -> str:
        assert self.dirpath is not None
        return CheckpointDir(self.dirpath).path_of(step)


def _scores_in(state: dict[str, Any]) -> dict[int, float]:
    """The scores in a saved state, by step."""
    return {int(step): float(score) for step, score in state["scores"]}


def savers_of(trainer: Trainer) -> list[ModelCheckpoint]:
    """Those of a trainer's callbacks that save checkpoints."""
    return [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]


def is_at_epoch_end(trainer: Trainer) -> bool:
    """Whether all steps of the epoch are done, and what ends it is still to come:
    validation, history, `on_train_epoch_end`."""
    total, done = trainer.run.steps_per_epoch, trainer.run.batch_idx
    is_over = total is not None and 0 < total <= done
    return is_over and not trainer.run.progress.epoch_ended
