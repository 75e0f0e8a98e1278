"""The base of loggers, which write the numbers of a run to files or services."""

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..basics.arguments import check_is_local, checks_arguments
from ..basics.console import log_info_once
from ..basics.files import add_path_to_errors, expand_path
from ..record import LogRow, Number
from .base import Callback, Trainer
from .monitor import announce
from .run_metadata import Facts, collect_metadata


class Logger(Callback):
    """The base of all loggers. Subclasses write in `log`.

    Every `trainer.log_every_n_steps` optimizer steps the scalars of a step are logged
    under their own names, read some steps late so that the device never waits. After
    every epoch its training means follow as `epoch_<name>` and the validation means as
    `val_<name>`. Once per fit hyperparameters, versions and hardware are recorded. Only
    process 0 logs. A resumed run continues from its checkpoint: what was logged after
    it is removed and logged again.

    Args:
        dirpath: folder to write to, made if it is missing; None means
            `trainer.default_root_dir`.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
    """

    only_in_training = True
    skip_in_fast_dev_run = True

    @checks_arguments
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        if dirpath is not None:
            check_is_local("dirpath", dirpath)
            dirpath = expand_path(dirpath)
        self.dirpath = dirpath
        self.hyperparameters = hyperparameters
        self._error: BaseException | None = None
        self._trainer: Any = None  # in a fit, where this process logs

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        """Writes values, by name, of optimizer step `step` in `epoch` (from 0)."""
        raise NotImplementedError

    def log_run(self, facts: Facts) -> None:
        """Records hyperparameters, versions and hardware, after `open`."""

    def log_text(self, name: str, text: str) -> None:
        """Shows a text under `name`. Call it during a fit."""

    def log_figure(self, name: str, figure: Any) -> None:
        """Shows a `matplotlib.figure.Figure` under `name`. Call it during a fit."""

    def open(self, trainer: Trainer, folder: Path) -> None:
        """Called before the first `log` of a fit. `folder` exists."""

    def rewind(self, step: int) -> None:
        """Removes what was logged after optimizer step `step`. Called after `open` and
        `load_state_dict`, if a run is resumed from there."""

    def close(self) -> None:
        """Called after the last `log` of a fit."""

    def flush(self) -> None:
        """Writes everything logged so far; called before a checkpoint."""

    def setup(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            check_writable(self._folder(trainer), type(self).__name__)

    def on_fit_start(self, trainer: Trainer) -> None:
        self._error = None
        # In all processes: reading the state may run a program.
        facts = collect_metadata(trainer, self.hyperparameters)
        facts["run_id"] = trainer.record.run_id
        if trainer.is_global_zero:
            self._trainer = trainer
            self.open(trainer, self._folder(trainer))
            trainer.record.add(self, every=trainer.log_every_n_steps)
            self.log_run(facts)
            _report_short_fit(trainer)

    def write(self, row: LogRow) -> None:
        """Logs a row of the record."""
        with add_path_to_errors(self._folder(self._trainer), type(self).__name__):
            self.log(row.epoch, row.step, row.numbers())

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._error = exception

    def teardown(self, trainer: Trainer) -> None:
        self._trainer = None

    def identity(self, trainer: Trainer) -> str:
        return str(self._folder(trainer))

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Moves files of another run to a folder `before-<n>` beside them."""
        paths = [path for path in paths if path.exists()]
        if not paths:
            return
        parent = paths[0].parent
        numbered = (parent / f"before-{n}" for n in itertools.count(1))
        folder = next(
            each
            for each in numbered
            if not any((each / path.name).exists() for path in paths)
        )
        folder.mkdir(exist_ok=True)
        for path in paths:
            path.rename(folder / path.name)
        text = f"what another run has logged to {parent} is now in {folder}."
        announce(self._trainer, type(self).__name__, text)

    def _folder(self, trainer: Trainer) -> Path:
        return Path(expand_path(self.dirpath or trainer.default_root_dir))


def _report_short_fit(trainer: Trainer) -> None:
    """Logs that a fit has rows of epochs alone, if it ends before a step is logged."""
    last, every = trainer.record.find_last_step(), trainer.log_every_n_steps
    if last is not None and trainer.global_step // every == last // every:
        log_info_once(
            f"`log_every_n_steps`={every}: this fit ends at step {last}, so loggers get"
            " the means of its epochs alone. Pass a smaller `log_every_n_steps` to see"
            " steps, too."
        )


def check_writable(folder: Path, callback_name: str) -> None:
    """Makes the folder, and raises if files cannot be made in it."""
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
