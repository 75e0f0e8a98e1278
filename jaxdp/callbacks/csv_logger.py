"""The numbers of a run as a table, and what the run was made of beside it."""

import csv
import datetime
import io
import json
import os
import shutil
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..basics.files import append_whole, naming, write_whole
from ..basics.json_checks import by_name, maybe, read_json, text, whole
from .logger import EPOCH, VALIDATION, Logger, Number, free_name
from .monitor import announce
from .run_facts import Facts

if TYPE_CHECKING:
    from jaxdp import Trainer


class CSVLogger(Logger):
    """Logs to one table in `dirpath`, with a row per logged step and per epoch.

    The columns are `epoch` (counted from 0), `step` (optimizer steps done), one for
    each value of a step, then `epoch_<name>` for the training means of an epoch and
    `val_<name>` for its validation; a cell that does not apply is empty. A name that
    appears later gets its column then.

    Several fits of one trainer, and a run that is resumed, make one table. Rows that
    a resumed run takes back are kept in `metrics.before.csv`. Another run that finds a
    table in its way keeps it, as `metrics.1.csv` and so on, and says so.

    Beside the table, `metrics.json` has the hyperparameters, versions and hardware of
    the run, what its step takes, and how it ended; `metrics.plan.html` is the plan as a
    page. `python -m jaxdp report <dirpath>` and `... compare` read them.

    Args:
        dirpath: folder of the table; None means `trainer.default_root_dir`.
        name: file name of the table.
        hyperparameters: your own, by name, to record beside the trainer's arguments.
    """

    own_form = {"rows": whole(), "last": maybe(by_name(text()))}

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        name: str = "metrics.csv",
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        super().__init__(dirpath, hyperparameters)
        given = name
        name = os.path.normpath(name) if isinstance(name, str) and name else ""
        if os.path.basename(name) != name or Path(name).suffix in ("", ".json"):
            raise ValueError(
                "`name` must be the file name of a table, such as 'metrics.csv', and"
                f" `dirpath` its folder; got {given!r}."
            )
        self.name = name
        self._record: dict[str, Any] = {}
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._trainer: weakref.ref[Any] | None = None
        self._columns: list[str] = []
        self._rows = 0
        self._last: dict[str, str] | None = None  # row, by column
        self._inode: int | None = None  # of the table; others may have put theirs there

    @property
    def path(self) -> Path | None:
        """Where the table is; None before the first fit."""
        return self._path

    def setup(self, trainer: "Trainer") -> None:
        from ..plan.page import SUFFIX

        super().setup(trainer)
        if not trainer.is_global_zero:
            return
        table = self._folder(trainer) / self.name
        for path in (table, table.with_suffix(".json"), table.with_suffix(SUFFIX)):
            if path.is_dir():
                raise IsADirectoryError(
                    f"`CSVLogger(name={self.name!r})`: {str(path)!r} is a folder, and a"
                    " file is to be written there. Move it away, or pass another"
                    " `name`."
                )
        if self._restored is not None and table.exists():
            _read(table)  # what is wrong with it is found before the first step

    def open(self, trainer: "Trainer", folder: Path) -> None:
        path = folder / self.name
        latest = None if self._trainer is None else self._trainer()
        if not path.exists():
            self._columns, self._rows, self._last = [], 0, None
        elif (path, latest, path.stat().st_ino) != (self._path, trainer, self._inode):
            self._take_over(trainer, path)
        self._path, self._trainer = path, weakref.ref(trainer)
        epoch_names = [
            name if name.startswith(VALIDATION) else EPOCH + name
            for name in trainer.run.logged_names
        ]
        self._widen([*trainer.run.metric_names, *epoch_names])

    def log(self, epoch: int, step: int, values: dict[str, Number]) -> None:
        self._widen(values)
        row = {"epoch": epoch, "step": step, **values}
        if self._file is None:
            assert self._path is not None
            with naming(self._path, "CSVLogger"):
                self._file = self._path.open("ab", buffering=0)
        rows = [[row.get(column, "") for column in self._columns]]
        if not os.fstat(self._file.fileno()).st_size:
            rows.insert(0, self._columns)
        with naming(str(self._path), "CSVLogger"):
            append_whole(self._file, _text(rows))
        self._rows += 1
        self._last = dict(zip(self._columns, map(str, rows[-1]), strict=True))

    def log_run(self, facts: Facts) -> None:
        trainer = None if self._trainer is None else self._trainer()
        assert trainer is not None  # it is what calls this
        self._record = {**facts, "run_id": trainer.run.id, "started": _now()}
        self._record |= {"ended": None, "status": "running"}
        self._write_record()

    def log_plan(self, plan: Any) -> None:
        assert self._path is not None
        from ..plan.page import SUFFIX

        # The record has a layout of its own.
        found = {k: v for k, v in plan.to_dict().items() if k != "leaves"}
        self._record["plan"] = found
        self._write_record()
        page = self._path.with_suffix(SUFFIX)
        with naming(page, "CSVLogger"):
            plan.to_html(page)

    def close(self) -> None:
        self._close_file()
        error = self._error
        status = "finished" if error is None else f"{type(error).__name__}: {error}"
        self._record |= {"ended": _now(), "status": status}
        self._write_record()
        if self._path is not None and self._path.exists():
            self._inode = self._path.stat().st_ino

    def _write_record(self) -> None:
        """Writes the record anew, in one piece."""
        assert self._path is not None
        path = self._path.with_suffix(".json")
        text = json.dumps(self._record, indent=2, default=str)
        with naming(path, "CSVLogger"):
            write_whole(path, text + "\n")

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def own_state(self) -> dict[str, Any]:
        # With the last row a torn one is mended.
        return {"rows": self._rows, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._path = None

    def _take_over(self, trainer: "Trainer", path: Path) -> None:
        """Goes on with the table of the run that is resumed, or moves it away."""
        from ..plan.page import SUFFIX

        self._columns, self._rows, self._last = [], 0, None
        is_own = self._restored is not None and _run_of(path) in (None, trainer.run.id)
        columns, rows, torn = _read(path) if is_own else ([], [], False)
        if columns[:2] != ["epoch", "step"]:
            kept = free_name(path)
            os.replace(path, kept)
            for suffix in (".json", SUFFIX):
                if path.with_suffix(suffix).exists():
                    os.replace(path.with_suffix(suffix), kept.with_suffix(suffix))
            announce(trainer, "CSVLogger", f"the table of {path} is now {kept}.")
            return

        # What the checkpoint has seen of it; the rows after come again.
        assert self._restored is not None
        count, last = self._restored["rows"], self._restored["last"]
        found = [_dict(columns, row) for row in rows[:count]]
        if len(found) == count - 1 and last is not None:
            found.append(last)
            announce(trainer, "CSVLogger", f"mended the last row of {path}.")
        elif len(found) < count:
            announce(
                trainer,
                "CSVLogger",
                f"{path} has {len(rows)} rows, of the {count} that were logged when the"
                " checkpoint was saved.",
            )

        self._columns, self._rows = columns, len(found)
        self._last = found[-1] if found else None
        if len(rows) > count or torn:
            shutil.copyfile(path, path.with_name(f"{path.stem}.before{path.suffix}"))
        if torn or found != [_dict(columns, row) for row in rows]:
            self._rewrite(path, found)

    def _widen(self, names: Iterable[str]) -> None:
        """Adds columns, to the file too when it is there."""
        known = self._columns or ["epoch", "step"]
        columns = sorted({**dict.fromkeys(known), **dict.fromkeys(names)}, key=_kind)
        if columns == self._columns:
            return
        assert self._path is not None
        self._columns = columns
        if self._path.exists():
            self._close_file()
            columns, rows, _ = _read(self._path)
            self._rewrite(self._path, [_dict(columns, row) for row in rows])

    def _rewrite(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the whole table anew, in one piece."""
        cells = [[row.get(name, "") for name in self._columns] for row in rows]
        with naming(path, "CSVLogger"):
            write_whole(path, _text([self._columns, *cells]))


def _read(path: Path) -> tuple[list[str], list[list[str]], bool]:
    """The columns and rows of a table, and whether a torn row was left out."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = list(file)
    torn = bool(lines) and not lines[-1].endswith("\n")
    try:
        columns, *rows = list(csv.reader(lines[:-1] if torn else lines)) or [[]]
    except csv.Error as error:
        raise ValueError(
            f"`CSVLogger`: {str(path)!r} can't be read as a table: {error}. Move it"
            " away, or restore it from a copy."
        ) from error
    return columns, rows, torn


def _dict(columns: list[str], row: list[str]) -> dict[str, str]:
    return dict(zip(columns, row, strict=False))


def _text(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _kind(column: str) -> int:
    """Sorts the columns of steps before those of epochs and of validations."""
    if column in ("epoch", "step"):
        return 0
    if column.startswith(EPOCH):
        return 2
    return 3 if column.startswith(VALIDATION) else 1


def _run_of(table: Path) -> str | None:
    """The `run_id` of who wrote a table, if its record tells."""
    try:
        return read_json(table.with_suffix(".json")).get("run_id")
    except (OSError, ValueError, AttributeError):
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
