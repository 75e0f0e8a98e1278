"""Logs to a CSV file, with the metadata of the run beside it."""

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..basics.arguments import checks_arguments
from ..basics.columns import Table
from ..basics.files import read_json, write_text_atomically
from ..record import LogRow, Number
from .base import Trainer
from .logger import Logger
from .run_metadata import Facts


class CSVLogger(Logger):
    """Logs to one table in `dirpath`, with a row per logged step and per epoch.

    The columns are `epoch` (counted from 0), `step` (optimizer steps done), one
    for each value of a step, then `epoch_<name>` for the training means of an epoch and
    `val_<name>` for its validation; a cell that does not apply is empty.

    Several fits of one trainer, and a resumed run, share one table. The files of
    another run in the folder are moved to a folder `before-1`, `before-2` and so on.

    Beside the table, `metrics.json` has the hyperparameters, versions and hardware of
    the run, and how it ended. `python -m jaxdp report <dirpath>` and `... compare` read
    both.

    Args:
        dirpath: folder of the table; None means `trainer.default_root_dir`.
        name: file name of the table.
        hyperparameters: your own, by name, to record beside the trainer's arguments.

    Attributes:
        path: the path of the table; None before the first fit.
    """

    @checks_arguments
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        name: str = "metrics.csv",
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        super().__init__(dirpath, hyperparameters)
        file = Path(str(name))
        if file.name != name or file.suffix in ("", ".json"):
            raise ValueError(
                "`name` must be the file name of a table, such as 'metrics.csv', and"
                f" `dirpath` its folder; got {name!r}."
            )
        self.name = name
        self.path: Path | None = None
        self._table: Any = None  # during a fit
        self._rows = -1  # unknown, until a fit or a checkpoint sets it
        self._facts: Facts = {}

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        path = self._folder(trainer) / self.name
        loggers = [c for c in trainer.callbacks if isinstance(c, CSVLogger)]
        if [c._folder(trainer) / c.name for c in loggers].count(path) > 1:
            raise ValueError(
                f"`callbacks` has two CSVLogger that write to {path}, which would have"
                " each row twice. Pass one of them, or another `dirpath` or `name`."
            )

    def open(self, trainer: Trainer, folder: Path) -> None:
        self.path, self._facts = folder / self.name, {}
        if not self.path.exists() or _read_run_id(self.path) != trainer.record.run_id:
            self._rows = 0
            self.set_aside([self.path, self.path.with_suffix(".json")])
        self._table = Table(self.path)
        # Add the columns that are known to be needed, so that the table is seldom
        # rewritten.
        names = dict.fromkeys(trainer.record.names)
        of_epochs = LogRow("epoch", 0, 0, names).numbers()
        self._table.add_columns(["epoch", "step", *names, *of_epochs])

    def rewind(self, step: int) -> None:
        rows = self._table.read_rows()
        if self._rows < 0:  # the checkpoint was saved without this logger
            self._rows = sum(int(row["step"]) <= step for row in rows)
        rows = rows[: self._rows]
        self._rows = len(rows)
        self._table.replace_rows(rows)

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        self._table.append({"epoch": epoch, "step": step, **values})
        self._rows += 1

    def log_run(self, facts: Facts) -> None:
        self._update_metadata(**facts, started=_now(), ended=None, status="running")

    def close(self) -> None:
        error = self._error
        status = "finished" if error is None else f"{type(error).__name__}: {error}"
        self._update_metadata(ended=_now(), status=status)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = state["rows"]

    def _update_metadata(self, **facts: Any) -> None:
        """Adds to the metadata beside the table."""
        assert self.path is not None  # since `open`
        self._facts |= facts
        text = json.dumps(self._facts, indent=2, default=str) + "\n"
        write_text_atomically(self.path.with_suffix(".json"), text)


def _read_run_id(table: Path) -> str | None:
    """Returns the `run_id` of the run that wrote a table, if it is known."""
    try:
        return read_json(table.with_suffix(".json")).get("run_id")
    except (OSError, ValueError, AttributeError):
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
