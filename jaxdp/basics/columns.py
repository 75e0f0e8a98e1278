"""The metrics table of a run: its file, and the meaning of its column names."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from .files import append_atomically, write_text_atomically

EPOCH: Final = "epoch_"
VALIDATION: Final = "val_"
THROUGHPUT: Final = "throughput/"
MEMBER: Final = re.compile(r"\[\d+\]$")
"""The end of a name of a member of an ensemble: `val_loss[2]`."""


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Reads the columns and rows of a table, without an unfinished last row."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = list(file)
    # A run may be writing its last row now, or was killed while it wrote it.
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    reader = csv.DictReader(lines, restval="")
    columns = list(reader.fieldnames or [])
    return columns, [{name: row[name] for name in columns} for row in reader]


class Table:
    """A table in a file, which grows by rows and by columns for new names.

    Args:
        path: the file. An existing table is continued.
    """

    def __init__(self, path: Path):
        self._path = path
        self._columns = read_table(path)[0] if path.exists() else []

    def read_rows(self) -> list[dict[str, str]]:
        """Reads all rows, as texts by column, without an unfinished last one."""
        return read_table(self._path)[1] if self._columns else []

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; the columns that it lacks stay empty."""
        self.add_columns(row)
        with self._path.open("ab", buffering=0) as file:
            append_atomically(file, self._format([row]))

    def add_columns(self, names: Iterable[str]) -> None:
        """Adds columns that are missing."""
        columns = sorted(dict.fromkeys([*self._columns, *names]), key=_sort_key)
        if columns != self._columns:
            rows = self.read_rows()
            self._columns = columns
            self.replace_rows(rows)

    def replace_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replaces all rows."""
        header = dict(zip(self._columns, self._columns, strict=True))
        write_text_atomically(self._path, self._format([header, *rows]))

    def _format(self, rows: Iterable[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="").writerows(rows)
        return text.getvalue()


def _sort_key(column: str) -> tuple[bool, bool, bool]:
    """Sorts the columns of steps before those of epochs and of validations."""
    is_position = column in ("epoch", "step")
    return not is_position, column.startswith(VALIDATION), column.startswith(EPOCH)


_LARGER_IS_BETTER: Final = re.compile(
    "acc|auc|auroc|bleu|dice|f1|fbeta|iou|jaccard|kappa|mfu|ndcg"
    "|per_s|precision|psnr|recall|rouge|sensitivity|specificity|ssim|top_"
    "|(^|_)(map|mrr|r2)(_|$)"
)
_SMALLER_IS_BETTER: Final = re.compile("(loss|error|err)$")
_IS_AN_ERROR: Final = re.compile(
    "loss|error|entropy|perplexity"
    "|(^|_)(err|mse|rmse|mae|mape|huber|nll|ppl|wer|cer|fid|kl|regret)(_|$)"
)


def resolve_mode(name: str, mode: str = "auto") -> str:
    """Returns `mode`; for `"auto"` what the name says, or else `"min"`."""
    return (infer_mode(name) or "min") if mode == "auto" else mode


def infer_mode(name: str) -> str | None:
    """Returns `"min"` or `"max"` if the name of a metric says which is better."""
    name = name.partition("[")[0].lower()  # without the number of a member
    if _LARGER_IS_BETTER.search(name) and not _SMALLER_IS_BETTER.search(name):
        return "max"
    return "min" if _IS_AN_ERROR.search(name) else None
