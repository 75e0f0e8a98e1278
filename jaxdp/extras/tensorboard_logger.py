"""Logs to event files for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..callbacks.base import Trainer
from ..callbacks.logger import Logger
from ..callbacks.run_metadata import Facts, flat
from ..record import Number
from .figures import to_png
from .import_package import import_package


class TensorBoardLogger(Logger):
    """Logs for TensorBoard: `tensorboard --logdir <dirpath>`.

    Tags of scalars are the names that `CSVLogger` has as columns, and `epoch`; the
    horizontal axis is the number of optimizer steps. Hyperparameters, versions,
    and hardware are under TEXT. Needs the extra `loggers`.

    Args:
        dirpath: folder of the event files; None means `trainer.default_root_dir`.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
    """

    _writer: Any = None  # during a fit

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        loggers = [c for c in trainer.callbacks if isinstance(c, TensorBoardLogger)]
        folder = self._folder(trainer)
        if [logger._folder(trainer) for logger in loggers].count(folder) > 1:
            raise ValueError(
                f"`callbacks` has two TensorBoardLogger that write to {folder}, where"
                " each value would be twice. Pass one of them, or another `dirpath`."
            )
        _tensorboard("summary.writer.event_file_writer")

    def open(self, trainer: Trainer, folder: Path) -> None:
        # Event files of another run would be shown as one with this run's.
        suffix = f".jaxdp-{trainer.record.run_id}"
        ours = folder.glob("events.*.jaxdp-*")
        self.set_aside(path for path in ours if path.suffix != suffix)
        make = _tensorboard("summary.writer.event_file_writer").EventFileWriter
        self._writer = make(str(folder), filename_suffix=suffix)

    def rewind(self, step: int) -> None:
        """Makes TensorBoard ignore the events of this run after `step`."""
        self._write(step + 1, session_log={"status": "START"})

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        named = {"epoch": epoch, **values}.items()
        scalars = [{"tag": name, "simple_value": value} for name, value in named]
        self._write(step, summary={"value": scalars})

    def log_run(self, facts: Facts) -> None:
        self.log_text("hyperparameters", _to_markdown(facts["hyperparameters"]))
        rest = {k: v for k, v in flat(facts).items() if "/" in k}
        self.log_text("environment", _to_markdown(rest))

    def log_text(self, name: str, text: str) -> None:
        """Shows a text as Markdown under `name`. Call it during a fit."""
        tensor = {
            "dtype": "DT_STRING",
            "string_val": [text.encode()],
            "tensor_shape": {"dim": [{"size": 1}]},
        }
        metadata = {"plugin_data": {"plugin_name": "text"}}
        self._show(tag=name, metadata=metadata, tensor=tensor)

    def log_figure(self, name: str, figure: Any) -> None:
        """Shows a `matplotlib.figure.Figure` under `name`. Call it during a fit."""
        width, height = map(int, figure.get_size_inches() * figure.dpi)
        size = {"width": width, "height": height, "colorspace": 4}
        self._show(tag=name, image={"encoded_image_string": to_png(figure), **size})

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        writer.close()

    def _show(self, **value: Any) -> None:
        """Writes a value at the present step."""
        if self._writer is None:
            raise RuntimeError(
                "`TensorBoardLogger` writes during a fit only: between the hooks"
                " `on_fit_start` and `on_fit_end`."
            )
        self._write(self._trainer.global_step, summary={"value": [value]})

    def _write(self, step: int, **content: Any) -> None:
        event = _tensorboard("compat.proto.event_pb2").Event
        self._writer.add_event(event(wall_time=time.time(), step=step, **content))


def _to_markdown(values: Mapping[str, Any]) -> str:
    """Returns a Markdown table, which TensorBoard renders."""
    rows = [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "| --- | --- |", *rows])


def _tensorboard(module: str) -> Any:
    return import_package(f"tensorboard.{module}", "loggers", "`TensorBoardLogger`")
