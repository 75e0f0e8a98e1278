"""Logging for TensorBoard."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from ..basics.extras import import_extra
from ..basics.figures import to_png
from ..basics.files import naming
from ..record import Number
from .base import Trainer
from .logger import Logger, free_name
from .monitor import announce
from .run_facts import Facts, flat, markdown


class TensorBoardLogger(Logger):
    """Logs for TensorBoard: `tensorboard --logdir <dirpath>`.

    Tags of scalars are the names that `CSVLogger` has as columns, and `epoch`; the
    horizontal axis is the number of optimizer steps. Hyperparameters, versions,
    hardware and the plan are under TEXT, the curves of the epochs under IMAGES. Needs
    the extra `loggers`.

    Args:
        dirpath: folder of the event files; None means `trainer.default_root_dir`.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
    """

    _writer: Any = None
    _folder_of_events = Path()
    _suffix = ""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        _tensorboard("summary.writer.event_file_writer")

    def open(self, trainer: Trainer, folder: Path) -> None:
        self._folder_of_events = folder
        self._suffix = f".jaxdp-{trainer.record.run_id}"
        # Event files of another run would be shown as one with this run's.
        if others := [path for path in self._files() if path not in self._own()]:
            before = free_name(folder / "before")
            before.mkdir()
            for path in others:
                path.rename(before / path.name)
            text = f"{folder} had events of another run; they are in {before}."
            announce(trainer, "TensorBoardLogger", text)

    def rewind(self, step: int) -> None:
        """Cuts the files of this run to what they held when it was saved."""
        if self._restored is None:
            return
        for path in self._own():
            size = self._restored["sizes"].get(path.name)
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                os.truncate(path, size)

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        make, tagged = _proto("Summary").Value, {"epoch": epoch, **values}
        self._write(step, [make(tag=k, simple_value=v) for k, v in tagged.items()])

    def log_run(self, facts: Facts) -> None:
        self.log_text("hyperparameters", markdown(facts["hyperparameters"]))
        rest = {k: v for k, v in flat(facts).items() if "/" in k}
        self.log_text("environment", markdown(rest))

    def log_plan(self, plan: Any) -> None:
        self.log_text("plan", f"```\n{plan}\n```")

    def log_text(self, name: str, text: str) -> None:
        """Shows a text as Markdown under `name`; during a fit."""
        metadata = {"plugin_data": {"plugin_name": "text"}}
        tensor = _proto("TensorProto")(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape={"dim": [{"size": 1}]},
        )
        value = _proto("Summary").Value(tag=name, metadata=metadata, tensor=tensor)
        self._write(None, [value])

    def log_figure(self, name: str, figure: Any) -> None:
        """Shows a `matplotlib.figure.Figure` under `name`; during a fit."""
        width, height = map(int, figure.get_size_inches() * figure.dpi)
        facts = {"width": width, "height": height, "colorspace": 4}
        image = _proto("Summary").Image(encoded_image_string=to_png(figure), **facts)
        self._write(None, [_proto("Summary").Value(tag=name, image=image)])

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._naming():
                writer.close()

    def _write(self, step: int | None, values: list[Any]) -> None:
        """Writes values of a step, or of now."""
        if self._trainer is None:
            raise RuntimeError(
                "`TensorBoardLogger` writes during a fit only: between the hooks"
                " `on_fit_start` and `on_fit_end`."
            )
        if self._writer is None:  # which makes a file
            make = _tensorboard("summary.writer.event_file_writer").EventFileWriter
            folder = str(self._folder_of_events)
            self._writer = make(folder, filename_suffix=self._suffix)
        summary, now = _proto("Summary")(value=values), time.time()
        step = self._trainer.global_step if step is None else step
        event = _proto("Event")(wall_time=now, step=step, summary=summary)
        with self._naming():
            self._writer.add_event(event)

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        return naming(self._folder_of_events, "TensorBoardLogger")

    def flush(self) -> None:
        if self._writer is not None:
            with self._naming():
                self._writer.flush()

    def own_state(self) -> dict[str, Any]:
        return {"sizes": {path.name: path.stat().st_size for path in self._own()}}

    def _files(self) -> list[Path]:
        """The event files that this class wrote, of all runs."""
        paths = sorted(self._folder_of_events.glob("events.*.jaxdp-*"))
        return [path for path in paths if path.is_file() and not path.is_symlink()]

    def _own(self) -> list[Path]:
        """The event files of this run; none before its first fit."""
        # By comparing names: as a pattern the suffix might match more than it should.
        files = self._files() if self._suffix else []
        return [path for path in files if path.name.endswith(self._suffix)]


def _tensorboard(module: str) -> Any:
    return import_extra(f"tensorboard.{module}", "`TensorBoardLogger`", "loggers")


def _proto(name: str) -> Any:
    """The class of a message in an event file."""
    module = {"Event": "event", "Summary": "summary", "TensorProto": "tensor"}[name]
    return getattr(_tensorboard(f"compat.proto.{module}_pb2"), name)
