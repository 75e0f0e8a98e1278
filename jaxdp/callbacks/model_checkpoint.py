"""Saves checkpoints during a fit, and keeps the best ones."""

import contextlib
import functools
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from .. import checkpoint
from ..basics.arguments import (
    check_count,
    check_is_local,
    checks_arguments,
    parse_duration,
)
from ..basics.console import warn
from ..basics.files import expand_path
from ..checkpoint import CheckpointDir, check_name
from ..distributed import PeriodicVote, is_graceful_stop
from ..history import rank
from ..record import LogRow
from .base import Trainer
from .monitor import MonitorCallback, announce, check_mode
from .state_matching import match_state

Scores = Mapping[int, float | None]
"""Maps each saved step to the value that was measured on its weights, or None."""


class ModelCheckpoint(MonitorCallback):
    """Saves the whole `TrainState`, one folder per saved step, named by the step.

    Without `monitor` the newest `save_top_k` are kept; with it, the best. Resume with
    `fit(..., ckpt_path="last")`, `"best"` or `"auto"`, or load one with
    `trainer.load(callback.best_model_path)`.

    **The score of a checkpoint is its own**: the value of `monitor` at the validation,
    or the end of an epoch, that saw these very weights. It is saved right after that,
    if it is among the best. A checkpoint of another step (by `every_n_train_steps`,
    `train_time_interval`, a signal) has no score, is never the best, and is kept only
    while it is the newest of all.

    Saving happens in the background, one checkpoint at a time; an old one is removed
    only after the new one is on disk. Ctrl-C and SIGTERM save a checkpoint before the
    fit stops. A fit locks the folder, so a second run that would save there is refused.
    Checkpoints of another run in it are moved to a folder `before-<n>`.

    Args:
        dirpath: where to save; `trainer.default_root_dir` + "/checkpoints" by default.
        monitor: name of a value of epochs, such as "val_loss". `best` in the folder is
            a link to the best checkpoint.
        mode: "min" if smaller is better, "max" if larger is; "auto" goes by the name:
            "max" for names like `accuracy`, `auroc` and `f1`, else "min". Of equal
            checkpoints, the older one stays.
        save_top_k: how many to keep; -1 keeps all, 0 none.
        save_last: True also keeps the newest of all, with a link `last` to it. None
            saves the last step of a fit (unless `save_top_k` is 0), which stays until a
            later fit saves a newer one. False saves nothing at the end of a fit.
        every_n_train_steps: save every so many optimizer steps (a step that is also
            validated, or the last of its epoch, after that).
        every_n_epochs: save at the end of every n-th epoch, or after the validations
            in it; 1 if nothing else is given.
        train_time_interval: save whenever so much time has passed; like `max_time`.
        keep_every_n_steps: of the checkpoints, keep all whose step is a multiple of
            this, whatever their score. It makes none due.
        save_on_exception: also save when the fit raises, in a single process.
        on_save_error: if a checkpoint can't be written, for example to a full disk,
            `"raise"` a SaveFailed at the next step, or `"warn"` and try again when the
            next one is due. Older checkpoints stay.

    Attributes:
        best_model_path: folder of the best checkpoint (without `monitor`, the newest).
        best_model_score: its monitored value, or None.
        last_model_path: folder of the newest checkpoint.
    """

    fit_end_order = -1  # before a callback puts the best weights in place of the last

    @checks_arguments
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        monitor: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        save_top_k: int = 1,
        save_last: bool | None = None,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | float | str | None = None,
        *,
        keep_every_n_steps: int | None = None,
        save_on_exception: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
    ):
        check_count("save_top_k", save_top_k, minimum=-1, suffix=", -1 for all")
        for name, value in (
            ("every_n_train_steps", every_n_train_steps),
            ("every_n_epochs", every_n_epochs),
            ("keep_every_n_steps", keep_every_n_steps),
        ):
            if value is not None:
                check_count(name, value, suffix=" or None")
        if train_time_interval is not None:
            seconds = parse_duration(train_time_interval, "train_time_interval")
            train_time_interval = timedelta(seconds=seconds)
        elif every_n_train_steps is None and every_n_epochs is None:
            every_n_epochs = 1

        self._follows_trainer = dirpath is None
        self._word = dirpath  # perhaps meant as `monitor`
        self.dirpath = None
        if dirpath is not None:
            check_is_local("dirpath", dirpath)
            self.dirpath = expand_path(dirpath)
            check_name("dirpath", self.dirpath)
        self.monitor = monitor
        # Without a monitor the best is the newest.
        self.mode = "max" if monitor is None else check_mode(self, monitor, mode)
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs
        self.train_time_interval = train_time_interval
        self.keep_every_n_steps = keep_every_n_steps
        self.save_on_exception = save_on_exception
        self.on_save_error = on_save_error

        self._dir: CheckpointDir | None = None  # during a fit
        self._scores: dict[int, float | None] = {}
        self._measured: tuple[int, float] | None = None  # a step, and the value there
        self._is_due = False
        # A step that stays, whatever its score, while it is the newest.
        self._pinned_step: int | None = None
        self._saving: tuple[int, checkpoint.PendingSave] | None = None
        self._saved_at = time.monotonic()
        self._error: BaseException | None = None  # the one that ended the fit

    @property
    def best_model_path(self) -> str:
        return self._make_path(self._best)

    @property
    def best_model_score(self) -> float | None:
        best = self._best if self.monitor else None
        return None if best is None else self._scores[best]

    @property
    def last_model_path(self) -> str:
        return self._make_path(max(self._scores, default=None))

    def find_path(self, step: int) -> str | None:
        """Returns the checkpoint of a step of this run, if it was kept."""
        return self._make_path(step) if step in self._scores else None

    def find_folder(self, trainer: Trainer) -> CheckpointDir:
        """Returns the folder for the checkpoints of a trainer."""
        if self._follows_trainer:
            root = os.path.join(trainer.default_root_dir, "checkpoints")
            self.dirpath = expand_path(root)
        return CheckpointDir(str(self.dirpath))

    def rank_saved(self, state: dict[str, Any]) -> list[int]:
        """Returns the scored steps in a saved state of this callback, best first."""
        return _rank_steps(_from_json(state["scores"]), self.mode)

    # When to save.

    def setup(self, trainer: Trainer) -> None:
        """Locks the folder, so that an unwritable one is an error before training."""
        super().setup(trainer)
        saves_by_step = self.every_n_train_steps or self.train_time_interval
        if not trainer.run.is_fitting and saves_by_step is None:
            warn(
                "`ModelCheckpoint`: a loop of `steps` ends no epoch, so this saves"
                " nothing. Pass `every_n_train_steps`, or call `trainer.save(path)`."
            )
        self._dir, self._processes = self.find_folder(trainer), trainer.run.processes
        self._clock = PeriodicVote(self._processes, "the time of a checkpoint")
        first = self._processes.run_on_rank_zero
        first("ModelCheckpoint: its folder", self._dir.open)
        claim = functools.partial(self._claim_checkpoints, trainer)
        self._scores = dict(first("ModelCheckpoint: what is there", claim))
        # The checkpoint that the run resumed from stays until another one is on disk.
        step = trainer.global_step
        self._pinned_step = step if step in self._scores else None
        self._remove_unkept()
        self.on_boundary(trainer)  # a kill may have come before

    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_fit_start(trainer)
        self._saved_at = time.monotonic()
        if self.monitor is None and (name := self._word) in trainer.record.names:
            raise ValueError(
                f"`ModelCheckpoint({name!r})`: the first argument is the folder, and"
                f" {name!r} is a logged value. To keep the best by this value, pass"
                f" monitor={name!r}; for a folder of this name, './{name}'."
            )

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Any, batch_idx: int
    ) -> None:
        every, interval = self.every_n_train_steps, self.train_time_interval
        if every is not None and trainer.global_step % every == 0:
            self._is_due = True
        if interval is not None:
            seconds = time.monotonic() - self._saved_at
            is_over = seconds >= interval.total_seconds()
            if self._clock.poll(is_over or None):
                self._is_due = True

    def handle_means(self, trainer: Trainer, row: LogRow) -> None:
        """Notes the monitor's value for the present weights; if a save is due, the next
        boundary starts it.
        """
        super().handle_means(trainer, row)
        every = self.every_n_epochs
        is_due = every is not None and (trainer.current_epoch + 1) % every == 0
        if self.monitor is None:
            self._is_due |= is_due and row.kind == "epoch"
        elif self.monitor in row.values:
            self._measured = row.step, row.values[self.monitor]
            self._is_due |= is_due or every is None

    def on_boundary(self, trainer: Trainer) -> None:
        # This runs after every step, so it must be cheap if there is nothing to save.
        if self._saving is not None:
            self._finish_save()
        # After the last step of an epoch its validation comes first: it gives the
        # score, and need not be repeated after a resume.
        if self._is_due and not trainer.record.is_at_epoch_end:
            self._is_due = False
            self._save(trainer)

    # The end of a fit, and the state.

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._error = exception
        if self._dir is None:  # raised by a `setup`
            return
        should_save = self.save_on_exception and self._processes.count == 1
        if should_save or is_graceful_stop(exception):
            self._save_last_step(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        keeps_any = self.save_top_k != 0 or self.save_last
        if self._error is None and self.save_last is not False and keeps_any:
            self._save_last_step(trainer)
        self._finish_save(wait=True)
        if self._error is None and keeps_any and not self._scores:
            why = "no checkpoint was due, and `save_last` is False"
            text = f"nothing is saved in {self.dirpath}: {why}"
            announce(trainer, "ModelCheckpoint", text)

    def _save_last_step(self, trainer: Trainer) -> None:
        """Saves the last step of a fit, which is kept whatever its score."""
        self._pinned_step = trainer.global_step
        if trainer.global_step:
            self._save(trainer)
            self._finish_save(wait=True)

    def teardown(self, trainer: Trainer) -> None:
        try:
            self._finish_save(wait=True)
        finally:
            if self._dir is not None:  # else another callback's `setup` has failed
                self._dir.close()
            self._dir, self._error, self._is_due = None, None, False

    def identity(self, trainer: Trainer) -> str:
        unit = f"{self.monitor}, {self.mode}" if self.monitor else "no monitor"
        return f"{self.find_folder(trainer).path}\n{unit}"

    def state_dict(self) -> dict[str, Any]:
        measured = self._measured
        return {
            "scores": _to_json(self._scores),
            "measured": measured and [measured[0], str(measured[1])],
            "is_due": self._is_due,
            "best_first": _rank_steps(self._scores, self.mode),  # for `load_model`
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scores = _from_json(state["scores"])
        self._is_due = state["is_due"]
        measured = state.get("measured")  # not in checkpoints of 0.2
        self._measured = measured and (measured[0], float(measured[1]))

    # Saving, one at a time.

    def _save(self, trainer: Trainer) -> None:
        """Starts to save the present step, if it would be kept."""
        self._finish_save(wait=True)
        assert self._dir is not None
        step, measured = trainer.global_step, self._measured
        if self.monitor is None:
            score = float(step)  # the best is the newest
        else:
            score = measured[1] if measured and measured[0] == step else None
        if step in self._scores:
            if self._scores[step] is None:  # saved before it was measured
                self._scores[step] = score
                self._remove_unkept()
            return
        if step not in self._select_kept({**self._scores, step: score}):
            return
        self._scores[step] = score  # the checkpoint has its own score
        self._saved_at = time.monotonic()
        try:
            self._saving = step, trainer.start_saving(self._dir.get_path(step))
        except (checkpoint.SaveFailed, FileExistsError) as error:
            self._fail(step, error)
        except BaseException:
            del self._scores[step]
            raise

    def _finish_save(self, *, wait: bool = False) -> None:
        """Removes the checkpoints that a finished save replaces, or reports its
        failure. Returns at once while a save runs, unless it is to `wait`."""
        if self._saving is None:
            return
        step, saving = self._saving
        if not wait and (self._processes.count > 1 or not saving.is_done):
            return  # processes may finish at different steps
        try:
            has_failed = self._error is not None and not is_graceful_stop(self._error)
            saving.finish(alone=has_failed)
        except checkpoint.SaveFailed as error:
            self._saving = None
            self._fail(step, error)
        else:
            self._saving = None
            self._remove_unkept()

    def _fail(self, step: int, error: Exception) -> None:
        del self._scores[step]
        if self.on_save_error == "raise":
            remedy = "ModelCheckpoint(on_save_error='warn') would continue without it."
            error.add_note(remedy)
            raise error
        warn(f"{error} Training continues; the next one is tried when it is due.")

    # The checkpoints in the folder.

    @property
    def _best(self) -> int | None:
        return next(iter(_rank_steps(self._scores, self.mode)), None)

    def _select_kept(self, scores: Scores) -> set[int]:
        """Returns the steps to keep: the best, those that `keep_every_n_steps` names,
        and the newest if that is pinned, has no score, or `save_last` asks for it."""
        if self.save_top_k == -1 or not scores:
            return set(scores)
        kept = set(_rank_steps(scores, self.mode)[: self.save_top_k])
        if (every := self.keep_every_n_steps) is not None:
            kept |= {step for step in scores if step % every == 0}
        newest = max(scores)
        is_unscored = self.save_top_k != 0 and scores[newest] is None
        if self.save_last or newest == self._pinned_step or is_unscored:
            kept.add(newest)
        return kept

    def _remove_unkept(self) -> None:
        assert self._dir is not None
        removed = sorted(set(self._scores) - self._select_kept(self._scores))
        for step in removed:
            del self._scores[step]
        if self._processes.index:
            return
        newest = max(self._scores, default=None)
        self._dir.link("best", self._best if self.monitor else None)
        self._dir.link("last", newest if self.save_last else None)
        for step in removed:
            try:
                self._dir.remove(step)
            except OSError as error:
                path = self._dir.get_path(step)
                warn(f"the old checkpoint {path} could not be removed: {error}.")

    def _claim_checkpoints(self, trainer: Trainer) -> list[tuple[int, float | None]]:
        """Returns the scores of this run's checkpoints in the folder, and moves those
        of other runs aside."""
        assert self._dir is not None
        now, scores, others = trainer.global_step, {}, self._dir.find_non_folders()
        for step in self._dir.list_steps():
            run_id, saved_scores = None, {}
            with contextlib.suppress(OSError, ValueError):  # a damaged checkpoint
                meta = checkpoint.read_meta(self._dir.get_path(step))
                run_id, state = meta["run_id"], match_state(trainer, meta, self)
                saved_scores = _from_json(state["scores"]) if state else {}
            is_of_run = run_id == trainer.record.run_id
            if step in self._scores and (is_of_run or run_id is None):
                scores[step] = self._scores[step]
            elif is_of_run and step <= now and step in saved_scores:
                scores[step] = saved_scores[step]
            elif not is_of_run or step != now or self._is_due:
                others.append(step)
            # else another callback saved this very step: the fit may resume from it
        if others:
            path, listed = self._dir.set_aside(others), ", ".join(map(str, others))
            text = (
                f"{self._dir.path} has checkpoints that this run does not resume from,"
                f" or that this callback has not saved: {listed}. They are now in"
                f' {path}. (To resume from the newest, use `ckpt_path="auto"`.)'
            )
            announce(trainer, "ModelCheckpoint", text)
        return list(scores.items())

    def _make_path(self, step: int | None) -> str:
        """Returns the folder of a step; "" if that is None."""
        return "" if step is None else CheckpointDir(str(self.dirpath)).get_path(step)


def _to_json(scores: Scores) -> list[Any]:
    """Returns rows with scores as texts, since JSON lacks NaN and infinity."""
    return [[step, s if s is None else str(s)] for step, s in scores.items()]


def _from_json(rows: list[Any]) -> dict[int, float | None]:
    """Inverts `_to_json`."""
    return {step: s if s is None else float(s) for step, s in rows}


def _rank_steps(scores: Scores, mode: str) -> list[int]:
    """Returns the steps that have a score: the best first, NaN last.

    Of steps with equal scores, the older comes first.
    """
    scored = [(rank(s, mode), step) for step, s in scores.items() if s is not None]
    return [step for _, step in sorted(scored)]
