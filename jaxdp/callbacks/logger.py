"""Loggers: the numbers of a run, written where they can be read later."""

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..basics.columns import EPOCH, VALIDATION
from ..basics.console import warn
from .base import Callback, Trainer
from .monitor import LateReads, announce
from .run_facts import Facts, run_facts

Number = int | float

_MISREAD: Final = AssertionError, AttributeError, LookupError, TypeError, ValueError
"""What comes of reading a text that is another than was thought."""


class Logger(Callback):
    """The base of all loggers: decides what to log when. Subclasses write it in `log`.

    Every `trainer.log_every_n_steps` optimizer steps the scalars of a step are logged
    under their own names, read some steps late so that the device never waits. After
    every epoch its training means follow as `epoch_<name>` and the validation means as
    `val_<name>`. Once per fit hyperparameters, versions, hardware and the plan of the
    program that runs are recorded. Only one process of a run logs.

    A resumed run continues from its checkpoint: what was logged after it is removed
    and logged again.

    Args:
        dirpath: folder to write to, made if it is missing; None means
            `trainer.default_root_dir`.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
    """

    looks_inside_blocks = False
    only_in_training = True
    reads_logged = True
    skip_in_fast_dev_run = True
    fit_end_order = 2

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        self.dirpath = dirpath
        self.hyperparameters = hyperparameters
        self._error: BaseException | None = None
        self._late = LateReads()
        self._active = False
        self._lacks_plan = False
        self._validation: tuple[int, dict[str, float]] | None = None
        self._restored: dict[str, Any] | None = None

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        """Writes values, by name, of optimizer step `step` in `epoch` (from 0)."""
        raise NotImplementedError

    def log_run(self, facts: Facts) -> None:
        """Records hyperparameters, versions and hardware, after `open`."""

    def log_plan(self, plan: Any) -> None:
        """Shows the `jaxdp.plan.Plan` of the step that runs, once per fit."""
        self.log_text("plan", str(plan))

    def log_text(self, name: str, text: str) -> None:
        """Shows a text under `name`; during a fit."""

    def log_figure(self, name: str, figure: Any) -> None:
        """Shows a `matplotlib.figure.Figure` under `name`; during a fit."""

    def open(self, trainer: Trainer, folder: Path) -> None:
        """Called before the first `log` of a fit. `folder` exists."""

    def close(self) -> None:
        """Called after the last `log` of a fit."""

    def flush(self) -> None:
        """Called before a checkpoint: everything logged so far must be written."""

    def setup(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            check_writable(self._folder(trainer), type(self).__name__)

    def on_fit_start(self, trainer: Trainer) -> None:
        self._active = bool(trainer.is_global_zero)
        shows_plan = self._shows("log_plan") or self._shows("log_text")
        self._lacks_plan = self._active and shows_plan
        self._late, self._error = LateReads(), None
        self._validation = self._restored["validation"] if self._restored else None
        # In all processes: what looks at the state may run a program.
        facts = run_facts(trainer, self.hyperparameters)
        facts["run_id"] = trainer.run.id
        if self._active:
            self.open(trainer, self._folder(trainer))
            self.log_run(facts)
        self._restored = None

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 and self._active:
            self._late.push(step, (trainer.current_epoch, step), metrics)
        if self._late:
            self._log_steps(self._late.ready(step))
        if self._lacks_plan:
            self._lacks_plan = False
            self._log_plan(trainer)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self._active:
            self._log_steps(self._late.drain())  # the device is done with them
            self._log_validation(trainer)
            self._validation = trainer.global_step, dict(metrics)

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if not self._active:
            return
        self._log_steps(self._late.drain())
        values = epoch_means(trainer, metrics)
        if self._validation and self._validation[0] == trainer.global_step:
            values |= self._validation[1]
            self._validation = None
        self._log_validation(trainer)
        self.log(trainer.current_epoch, trainer.global_step, values)

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._error = exception
        try:
            self._log_steps(self._late.drain())
        finally:
            self._late = LateReads()  # the device may be what failed

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._active:
            self._log_steps(self._late.drain())
            self._log_validation(trainer)
            if trainer.run.last_values:
                # At an epoch's end the trainer stands in the next, which has not begun.
                is_new = trainer.run.batch_idx == 0
                epoch = max(0, trainer.current_epoch - is_new)
                self.log(epoch, trainer.global_step, trainer.run.last_values)
            self._log_history(trainer)
            self.close()
            step, every = trainer.global_step, trainer.log_every_n_steps
            if 0 < step < every and self._error is None:
                warn(
                    f"no row of a step was logged: `log_every_n_steps`={every}, and"
                    f" {step} steps are done. Use Trainer(log_every_n_steps=1) to see"
                    " single steps."
                )
        self._active = False

    def identity(self, trainer: Trainer) -> str:
        return os.path.abspath(self._folder(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Writes pending rows first, so that the log is complete up to here."""
        # What was loaded for a fit that has not begun yet is saved as it came.
        if self._restored is not None:
            return self._restored
        try:
            if self._active:
                self._log_steps(self._late.drain())
                self.flush()
        except OSError as error:  # a full disk of logs costs no checkpoint
            warn(f"{error}. These rows are missing.")
        return {"validation": self._validation, **self.own_state()}

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint also saves of a subclass: JSON values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def _folder(self, trainer: Trainer) -> Path:
        return Path(
            trainer.default_root_dir if self.dirpath is None else self.dirpath
        ).expanduser()

    def _log_history(self, trainer: Trainer) -> None:
        """The curves of the epochs, where figures can be shown."""
        has_curves = self._shows("log_figure") and trainer.history.epochs
        if has_curves and find_spec("matplotlib"):
            self.log_figure("history", trainer.history.plot())

    def _log_plan(self, trainer: Trainer) -> None:
        """Reads the program's text, while the device is busy with the first step."""
        try:
            plan = trainer.running_plan()
        except _MISREAD as error:
            # Compilers change how they write; that is no reason to end a run.
            text = f"the plan could not be read: {error!r}"
            return announce(trainer, type(self).__name__, text)
        if plan is not None:
            self.log_plan(plan)

    def _shows(self, what: str) -> bool:
        """Whether a subclass has given the method `what` something to do."""
        return getattr(type(self), what) is not getattr(Logger, what)

    def _log_steps(self, past: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
        for (epoch, step), metrics in past:
            self.log(epoch, step, scalars(metrics))

    def _log_validation(self, trainer: Trainer) -> None:
        """Logs a validation in the middle of an epoch, which no epoch's row has."""
        if self._validation is not None:
            step, values = self._validation
            self.log(trainer.current_epoch, step, values)
        self._validation = None


def scalars(metrics: Mapping[str, Any]) -> dict[str, Number]:
    """The single numbers in a step's metrics. Waits for that step."""
    # waits for the device
    values = {name: np.asarray(metrics[name]) for name in metrics}
    return {name: _number(value) for name, value in values.items() if value.ndim == 0}


def epoch_means(trainer: Trainer, metrics: dict[str, float]) -> dict[str, float]:
    """The means of an epoch without its validation, by the names of their columns."""
    return {
        name if name.startswith(VALIDATION) else EPOCH + name: value
        for name, value in metrics.items()
        if name not in trainer.run.progress.val_metrics
    }


def check_writable(folder: Path, callback_name: str) -> None:
    """Makes the folder, and raises when files cannot be made in it."""
    probe = folder / f".write-test.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(
            f"`{callback_name}(dirpath={str(folder)!r})`: cannot write there"
            f" ({error.strerror or error}). Pass a `dirpath` that can be written to, or"
            " set `Trainer(default_root_dir=...)`."
        ) from error


def _number(value: np.ndarray) -> Number:
    if value.dtype.kind in "iub":
        return int(value)
    # Through text, so that a float32 0.1 is 0.1 and not 0.10000000149011612.
    return float(str(value)) if value.dtype.kind == "f" else float(value)


def free_name(path: Path) -> Path:
    """A name beside `path` that nothing has."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
