"""Loggers: the numbers of a run, written where they can be read later."""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..basics.console import warn
from ..basics.files import naming
from ..basics.json_checks import by_name, fields, maybe, number, row, text, whole
from ..reports import layout, to_png
from .base import Callback
from .monitor import LateReads, announce
from .run_facts import Facts, flat, markdown, run_facts

VALIDATION: Final = "val_"
EPOCH: Final = "epoch_"

_SIZES: Final = fields({}, {"sizes": by_name(whole())})
_SAVED: Final = fields(
    {},
    {
        "validation": maybe(row(whole(), by_name(number()))),
        "rows": whole(),
        "last": maybe(by_name(text())),
    },
)

Number = int | float


class Logger(Callback):
    """What all loggers share: when to log what. A subclass says how, in `log`.

    Every `trainer.log_every_n_steps` optimizer steps the scalars of a step are logged
    under their own names (`loss`, `accuracy`, whatever `inside_step` returned), read
    some steps late so that the device never waits, and flushed at the end of an epoch
    or fit. After every epoch its training means follow as `epoch_<name>` and the
    validation means as `val_<name>`. What the run was made of is recorded once per
    fit: hyperparameters, versions of packages, hardware, and after the first step the
    plan of the program that runs (`Trainer.running_plan`). Only one process of a run
    logs.

    A run that is resumed goes on where the checkpoint was saved: what was logged after
    that is taken back, and comes again.

    Args:
        dirpath: folder to write to, made if it is missing; None means
            `trainer.default_root_dir`.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
    """

    looks_inside_blocks = False

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
        self._fitting = False
        self._active = False
        self._lacks_plan = False
        self._validation: tuple[int, dict[str, float]] | None = None
        self._restored: dict[str, Any] | None = None

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        """Writes values, by name, of optimizer step `step` in `epoch` (from 0)."""
        raise NotImplementedError

    def log_run(self, facts: Facts) -> None:
        """Records what a run is made of, after `open`. See `run_facts.Facts`."""

    def log_plan(self, plan: Any) -> None:
        """Shows the `jaxdp.plan.Plan` of the step that runs, once per fit."""
        self.log_text("plan", str(plan))

    def log_text(self, name: str, text: str) -> None:
        """Shows a text under `name`; during a fit."""

    def log_figure(self, name: str, figure: Any) -> None:
        """Shows a `matplotlib.figure.Figure` under `name`; during a fit."""

    def open(self, trainer: Any, folder: Path) -> None:
        """Before the first `log` of a fit. `folder` exists."""

    def close(self) -> None:
        """After the last `log` of a fit."""

    def setup(self, trainer: Any) -> None:
        if trainer.is_global_zero:
            check_writable(self._folder(trainer), type(self).__name__)

    def on_fit_start(self, trainer: Any) -> None:
        self._active = bool(trainer.is_global_zero)
        self._lacks_plan = self._active and (
            self._shows("log_plan") or self._shows("log_text")
        )
        self._fitting = True
        self._late, self._validation, self._error = LateReads(), None, None
        # In all processes: what looks at the state may run a program.
        facts = run_facts(trainer, self.hyperparameters)
        facts["layout"] = layout(trainer.state)
        if self._active:
            if self._restored and self._restored.get("validation"):
                step, values = self._restored["validation"]
                self._validation = int(step), dict(values)
            self.open(trainer, self._folder(trainer))
            self.log_run(facts)
        self._restored = None

    def on_train_batch_end(
        self, trainer: Any, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % trainer.log_every_n_steps == 0 and self._active:
            self._late.push(step, (trainer.current_epoch, step), metrics)
        if self._late:
            self._log_steps(self._late.ready(step))
        if self._lacks_plan:
            self._lacks_plan = False
            self._log_plan(trainer)

    def on_validation_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if self._fitting and self._active:
            self._log_steps(self._late.drain())  # the device is done with them
            self._log_validation(trainer)
            self._validation = trainer.global_step, dict(metrics)

    def on_train_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if not self._active:
            return
        self._log_steps(self._late.drain())
        values = {
            EPOCH + name: value
            for name, value in metrics.items()
            if not name.startswith(VALIDATION)
        }
        if self._validation and self._validation[0] == trainer.global_step:
            values |= self._validation[1]
            self._validation = None
        self._log_validation(trainer)
        self.log(trainer.current_epoch, trainer.global_step, values)

    def on_exception(self, trainer: Any, exception: BaseException) -> None:
        self._error = exception
        try:
            self._log_steps(self._late.drain())
        finally:
            self._late = LateReads()  # the device may be what failed

    def on_fit_end(self, trainer: Any) -> None:
        self._fitting = False
        if self._active:
            self._log_steps(self._late.drain())
            self._log_validation(trainer)
            if trainer.run.last_values:
                is_new = trainer.batch_idx == 0  # the next epoch, which has not begun
                epoch = max(0, trainer.current_epoch - is_new)
                self.log(epoch, trainer.global_step, trainer.run.last_values)
            self._log_history(trainer)
            self.close()
        self._active = False

    def identity(self, trainer: Any) -> str:
        return os.path.abspath(self._folder(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Logs what is left to log first, so that a checkpoint's log is complete.

        What was loaded for a fit that has not begun yet is saved as it came.
        """
        if self._restored is not None:
            return self._restored
        try:
            if self._active:
                self._log_steps(self._late.drain())
        except OSError as error:  # a full disk of logs costs no checkpoint
            warn(f"{error}. These rows are missing.", stacklevel=2)
        return {"validation": self._validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _SAVED(state, "state")
        self._restored = state

    def _folder(self, trainer: Any) -> Path:
        return Path(trainer.default_root_dir if self.dirpath is None else self.dirpath)

    def _log_history(self, trainer: Any) -> None:
        """The curves of the epochs, where figures can be shown."""
        if (
            self._shows("log_figure")
            and trainer.history.epochs
            and find_spec("matplotlib")
        ):
            self.log_figure("history", trainer.history.plot())

    def _log_plan(self, trainer: Any) -> None:
        """Reads the program's text, while the device is busy with the first step."""
        try:
            plan = trainer.running_plan()
        except Exception as error:
            if not comes_of_reading(error):
                raise
            # Compilers change how they write; that is no reason to end a run.
            kind = type(self).__name__
            announce(trainer, kind, f"the plan could not be read: {error!r}")
            return
        if plan is not None:
            self.log_plan(plan)

    def _shows(self, what: str) -> bool:
        """Whether a subclass has given the method `what` something to do."""
        return getattr(type(self), what) is not getattr(Logger, what)

    def _log_steps(self, past: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
        for (epoch, step), metrics in past:
            self.log(epoch, step, scalars(metrics))

    def _log_validation(self, trainer: Any) -> None:
        """Logs a validation in the middle of an epoch, which no epoch's row has."""
        if self._validation is not None:
            step, values = self._validation
            self.log(trainer.current_epoch, step, values)
        self._validation = None


class TensorBoardLogger(Logger):
    """Logs for TensorBoard: `tensorboard --logdir <dirpath>`.

    Tags of scalars are the names that `CSVLogger` has as columns, and `epoch`; the
    horizontal axis is the number of optimizer steps. What the run is made of and its
    plan are under TEXT, the curves of the epochs under IMAGES. Needs the extra
    `loggers`.

    Args:
        dirpath: folder of the event files; None means `trainer.default_root_dir`.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        super().__init__(dirpath, hyperparameters)
        self._writer: Any = None
        self._step = 0
        self._folder_of_events: Path | None = None
        self._suffix = ""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        _tensorboard()
        folder = str(self._folder(trainer))
        try:
            folder.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"`TensorBoardLogger`: the name of the folder {folder!r} is not UTF-8,"
                " which tensorboard asks for. Pass another `dirpath`."
            ) from error

    def open(self, trainer: Any, folder: Path) -> None:
        writer_type, self._event, self._summary, self._tensor = _tensorboard()
        self._step = trainer.global_step
        self._folder_of_events = folder
        self._suffix = f".jaxdp-{trainer.run.id}"
        if self._restored is not None and "sizes" in self._restored:
            self._take_back(self._restored["sizes"])
        self._move_others(trainer)
        self._writer = writer_type(str(folder), filename_suffix=self._suffix)

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        self._step = max(step, self._step)
        tagged = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in {"epoch": epoch, **values}.items()
        ]
        self._write(step, tagged)

    def log_run(self, facts: Facts) -> None:
        self.log_text("hyperparameters", markdown(facts["hyperparameters"]))
        rest = {k: v for k, v in flat(facts).items() if "/" in k}
        self.log_text("environment", markdown(rest))

    def log_plan(self, plan: Any) -> None:
        self.log_text("plan", f"```\n{plan}\n```")

    def log_text(self, name: str, text: str) -> None:
        """Shows a text as Markdown under `name`; during a fit."""
        metadata = {"plugin_data": {"plugin_name": "text"}}
        tensor = self._tensor(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape={"dim": [{"size": 1}]},
        )
        value = self._summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._write(self._step, [value])

    def log_figure(self, name: str, figure: Any) -> None:
        """Shows a `matplotlib.figure.Figure` under `name`; during a fit."""
        width, height = map(int, figure.get_size_inches() * figure.dpi)
        image = self._summary.Image(
            width=width,
            height=height,
            colorspace=4,
            encoded_image_string=to_png(figure),
        )
        self._write(self._step, [self._summary.Value(tag=name, image=image)])

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._naming():
                writer.close()

    def _write(self, step: int, values: list[Any]) -> None:
        if self._writer is None:
            raise RuntimeError(
                "`TensorBoardLogger` writes during a fit only: between the hooks"
                " `on_fit_start` and `on_fit_end`."
            )
        summary = self._summary(value=values)
        event = self._event(wall_time=time.time(), step=step, summary=summary)
        with self._naming():
            self._writer.add_event(event)

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        assert self._folder_of_events is not None
        return naming(self._folder_of_events, "TensorBoardLogger")

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if state is self._restored:
            return state
        if self._writer is not None:
            try:
                with self._naming():
                    self._writer.flush()
            except OSError as error:
                warn(f"{error}. These events are missing.", stacklevel=2)
        return state | {"sizes": {p.name: p.stat().st_size for p in self._files()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _SIZES(state, "state")
        super().load_state_dict(state)

    def _take_back(self, sizes: Mapping[str, int]) -> None:
        """Cuts the files of this run to what they held when it was saved."""
        for path in self._files():
            if path.name not in sizes:
                path.unlink()
            elif path.stat().st_size > sizes[path.name]:
                os.truncate(path, sizes[path.name])

    def _move_others(self, trainer: Any) -> None:
        """Event files of another run would be shown as one with this run's."""
        others = [path for path in self._files(True) if path not in self._files()]
        if others:
            folder = free_name(others[0].with_name("before"))
            folder.mkdir()
            for path in others:
                path.rename(folder / path.name)
            announce(
                trainer,
                "TensorBoardLogger",
                f"{others[0].parent} had events of another run; they are now in"
                f" {folder}.",
            )

    def _files(self, of_all: bool = False) -> list[Path]:
        """The event files of this run, or of all runs that this class wrote."""
        if self._folder_of_events is None or not self._folder_of_events.is_dir():
            return []
        mark = ".jaxdp-" if of_all else self._suffix
        # By comparing names: a pattern might match more than it should.
        return [
            path
            for path in sorted(self._folder_of_events.iterdir())
            if path.name.startswith("events.")
            and (mark in path.name if of_all else path.name.endswith(mark))
            and path.is_file()
            and not path.is_symlink()
        ]


def comes_of_reading(error: Exception) -> bool:
    """Whether what reads a program has raised this, and not what came in between.

    That may be a handler of the user's for an alarm, or memory that is short.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    known = {"builtins", "jax", "jaxlib", "jaxdp", "numpy"} | sys.stdlib_module_names
    return not isinstance(error, MemoryError) and all(
        module.partition(".")[0] in known for module in (type(error).__module__, where)
    )


def scalars(metrics: Mapping[str, Any]) -> dict[str, Number]:
    """The single numbers in a step's metrics. Waits for that step."""
    values = {name: np.asarray(metrics[name]) for name in metrics}
    return {name: _number(value) for name, value in values.items() if value.ndim == 0}


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


def _tensorboard() -> tuple[Any, Any, Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise ImportError(
            "`TensorBoardLogger` needs tensorboard, which is not installed; run"
            ' `pip install "jaxdp[loggers]"`.'
        ) from error
    events: Any = event_pb2
    summaries: Any = summary_pb2
    tensors: Any = tensor_pb2
    return EventFileWriter, events.Event, summaries.Summary, tensors.TensorProto
