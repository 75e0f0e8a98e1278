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
        if not trainer.is_global_zero:
            return
        for path in _files_of(self._folder(trainer) / self.name):
            if path.is_dir():  # which would be found after the first step
                raise IsADirectoryError(
                    f"`CSVLogger(name={self.name!r})`: {str(path)!r} is a folder,"
                    " where a file is to be written. Move it away, or pass another"
                    " `name`."
                )

    def open(self, trainer: Trainer, folder: Path) -> None:
        path, known, run_id = folder / self.name, self.path, trainer.record.run_id
        self.path = self._table = path
        whose, saved = _run_of(path), self._restored
        is_own = whose == run_id and (saved is not None or path == known)
        # The record of a table of 0.1 does not tell whose it is.
        is_own = is_own or (whose is None and saved is not None and saved["rows"] > 0)
        if not (is_own and path.exists() and self._reads_columns()):
            self._columns, self._rows = [], 0
            self._restored = saved and {**saved, "rows": 0}
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
        path, saved = self._table, self._restored
        if saved is None or not path.exists():
            return
        _, rows, torn = read_table(path)
        count = saved["rows"]
        kept = rows[:count]
        if len(kept) < count:
            text = f"{path} has {len(rows)} rows, and {count} when it was saved."
            announce(self._trainer, "CSVLogger", text)
        self._rows = len(kept)
        if len(rows) > count or torn:
            shutil.copyfile(path, path.with_name(f"{path.stem}.before{path.suffix}"))
        if torn or kept != rows:
            self._rewrite(kept)

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        self._widen(values)
        path, row = self._table, {"epoch": epoch, "step": step, **values}
        with naming(path, "CSVLogger"), path.open("ab", buffering=0) as file:
            append_whole(file, _text(self._columns, [row], with_head=not file.tell()))
        self._rows += 1

    def log_run(self, facts: Facts) -> None:
        self._record = {**facts, "started": _now(), "ended": None, "status": "running"}
        self._write_record()

    def log_plan(self, plan: Any) -> None:
        self._record["plan"] = plan.to_dict()
        self._write_record()
        path = self._table.with_suffix(PLAN)
        with naming(path, "CSVLogger"):
            write_whole(path, f"{plan}\n")

    def close(self) -> None:
        error = self._error
        status = "finished" if error is None else f"{type(error).__name__}: {error}"
        self._record |= {"ended": _now(), "status": status}
        self._write_record()

    def own_state(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def _write_record(self) -> None:
        path = self._table.with_suffix(".json")
        text = json.dumps(self._record, indent=2, default=str)
        with naming(path, "CSVLogger"):
            write_whole(path, text + "\n")

    def _reads_columns(self) -> bool:
        """Whether the table that is there is one, whose columns are then known."""
        try:
            self._columns, *_ = read_table(self._table)
        except csv.Error:
            return False
        return self._columns[:2] == ["epoch", "step"]

    def _widen(self, names: Iterable[str]) -> None:
        """Adds columns, to the file too when it is there."""
        known = self._columns or ["epoch", "step"]
        columns = sorted({**dict.fromkeys(known), **dict.fromkeys(names)}, key=_kind)
        if columns != self._columns:
            self._columns = columns
            if self._table.exists():
                _, rows, _ = read_table(self._table)
                self._rewrite(rows)

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the whole table anew, in one piece."""
        with naming(self._table, "CSVLogger"):
            write_whole(self._table, _text(self._columns, rows, with_head=True))


def _files_of(table: Path) -> list[Path]:
    """A table and what is written beside it."""
    return [table, table.with_suffix(".json"), table.with_suffix(PLAN)]


def _text(
    columns: list[str], rows: Iterable[Mapping[str, Any]], *, with_head: bool
) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    if with_head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _kind(column: str) -> tuple[bool, bool, bool]:
    """Sorts the columns of steps before those of epochs and of validations."""
    is_place = column in ("epoch", "step")
    return not is_place, column.startswith(VALIDATION), column.startswith(EPOCH)


def _run_of(table: Path) -> str | None:
    """The `run_id` of who wrote a table, if its record tells."""
    try:
        return read_json(table.with_suffix(".json")).get("run_id")
    except (OSError, ValueError, AttributeError):
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
