"""What the columns of a run's table are called, and how the table is read."""

import csv
from pathlib import Path
from typing import Final

PLAN: Final = ".plan.txt"
"""The end of the file that `CSVLogger` writes the plan to."""
EPOCH: Final = "epoch_"
VALIDATION: Final = "val_"
THROUGHPUT: Final = "throughput/"


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]], bool]:
    """The columns and rows of a table, and whether a torn last row was left out."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = list(file)
    # A run may be writing its last row at this moment, or was killed then.
    torn = bool(lines) and not lines[-1].endswith("\n")
    reader = csv.DictReader(lines[:-1] if torn else lines, restval="")
    columns = list(reader.fieldnames or [])
    return columns, [{name: row[name] for name in columns} for row in reader], torn
