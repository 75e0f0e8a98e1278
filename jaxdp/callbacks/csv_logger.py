"""The numbers of a run as a table, and what the run was made of beside it."""

import csv
import datetime
import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..basics.columns import EPOCH, PLAN, VALIDATION, read_table
from ..basics.files import append_whole, naming, write_whole
from ..basics.json_checks import read_json
from ..record import Number, Row
from .base import Trainer
from .logger import Logger, free_name
from .monitor import announce
from .run_facts import Facts


class CSVLogger(Logger):
    """Logs to one table in `dirpath`, with a row per logged step and per epoch.

    The columns are `epoch` (counted from 0), `step` (optimizer steps done), one for
    each value of a step, then `epoch_<name>` for the training means of an epoch and
    `val_<name>` for its validation; a cell that does not apply is empty. A name that
    first appears later gets its column then.

    Several fits of one trainer, and a resumed run, share one table. Rows from after
    the checkpoint move to `metrics.before.csv`. A new run that finds the table of
    another run keeps it as `metrics.1.csv` and so on, and says so.

    Beside the table, `metrics.json` has the hyperparameters, versions and hardware of
    the run, the plan of its step, and how it ended; `metrics.plan.txt` has the plan in
    words. `python -m jaxdp report <dirpath>` and `... compare` read them.

    Args:
        dirpath: folder of the table; None means `trainer.default_root_dir`.
        name: file name of the table.
        hyperparameters: your own, by name, to record beside the trainer's arguments.

    Attributes:
        path: where the table is; None before the first fit.
    """

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
        self._table = Path()  # the same
        self._record: dict[str, Any] = {}
        self._columns: list[str] = []
        self._rows = 0

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        for path in _files_of(self._folder(trainer) / self.name):
            if trainer.is_global_zero and path.is_dir():
                raise IsADirectoryError(
                    f"`CSVLogger(name={self.name!r})`: {str(path)!r} is a folder,"
                    " where a file is to be written. Move it away, or pass another"
                    " `name`."
                )

    def open(self, trainer: Trainer, folder: Path) -> None:
        path, known, run_id = folder / self.name, self.path, trainer.record.run_id
        self.path = self._table = path
        self._columns, self._record = _columns_of(path), {}
        is_own = _run_of(path) == run_id and (self._restored or path == known)
        if not (self._columns and is_own):
            self._columns, self._rows = [], 0
            if path.exists():
                kept = free_name(path)
                for old, new in zip(_files_of(path), _files_of(kept), strict=True):
                    if old.exists():
                        old.rename(new)
                announce(trainer, "CSVLogger", f"the table of {path} is now {kept}.")
        values = Row("epoch", 0, 0, dict.fromkeys(trainer.record.names)).numbers()
        self._widen([*trainer.record.step_names, *values])

    def rewind(self, step: int) -> None:
        """Keeps the rows that the checkpoint knows; those after come again."""
        path = self._table
        if self._restored is None or not path.exists():
            return
        _, rows, torn = read_table(path)
        count = self._restored["rows"]
        self._rows = min(count, len(rows))
        if len(rows) < count:
            text = f"{path} has {len(rows)} rows, and {count} when it was saved."
            announce(self._trainer, "CSVLogger", text)
        if len(rows) > count or torn:
            shutil.copyfile(path, path.with_name(f"{path.stem}.before{path.suffix}"))
            self._rewrite(rows[:count])

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        self._widen(values)
        row, path = {"epoch": epoch, "step": step, **values}, self._table
        with naming(path, "CSVLogger"), path.open("ab", buffering=0) as file:
            append_whole(file, self._text([row], with_head=not file.tell()))
        self._rows += 1

    def log_run(self, facts: Facts) -> None:
        self._note({**facts, "started": _now(), "ended": None, "status": "running"})

    def log_plan(self, plan: Any) -> None:
        self._note({"plan": plan.to_dict()})
        self._write(f"{plan}\n", PLAN)

    def close(self) -> None:
        error = self._error
        status = "finished" if error is None else f"{type(error).__name__}: {error}"
        self._note({"ended": _now(), "status": status})

    def own_state(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def _note(self, facts: Facts) -> None:
        """Adds to the record beside the table."""
        self._record |= facts
        self._write(json.dumps(self._record, indent=2, default=str) + "\n", ".json")

    def _widen(self, names: Iterable[str]) -> None:
        """Adds columns, to the file too when it is there."""
        known = dict.fromkeys(["epoch", "step", *self._columns, *names])
        columns = sorted(known, key=_kind)
        if columns != self._columns:
            self._columns = columns
            if self._table.exists():
                self._rewrite(read_table(self._table)[1])

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._write(self._text(rows, with_head=True), self._table.suffix)

    def _text(self, rows: Iterable[Mapping[str, Any]], *, with_head: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="")
        if with_head:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def _write(self, text: str, suffix: str) -> None:
        """Writes the table, or what is beside it, in one piece."""
        path = self._table.with_suffix(suffix)
        with naming(path, "CSVLogger"):
            write_whole(path, text)


def _files_of(table: Path) -> list[Path]:
    """A table and what is written beside it."""
    return [table, table.with_suffix(".json"), table.with_suffix(PLAN)]


def _kind(column: str) -> tuple[bool, bool, bool]:
    """Sorts the columns of steps before those of epochs and of validations."""
    is_place = column in ("epoch", "step")
    return not is_place, column.startswith(VALIDATION), column.startswith(EPOCH)


def _columns_of(table: Path) -> list[str]:
    """The columns of a table; none of what is not there, or is no table of a run."""
    try:
        columns, *_ = read_table(table)
    except (OSError, csv.Error):
        return []
    return columns if columns[:2] == ["epoch", "step"] else []


def _run_of(table: Path) -> str | None:
    """The `run_id` of who wrote a table, if its record tells."""
    try:
        return read_json(table.with_suffix(".json")).get("run_id")
    except (OSError, ValueError, AttributeError):
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
