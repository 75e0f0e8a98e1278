"""What is known of a run, from its files or its trainer; several runs in a table."""

import contextlib
import csv
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..basics.columns import EPOCH, PLAN, THROUGHPUT, VALIDATION, read_table
from ..basics.json_checks import check_fields, read_json
from ..basics.metric_names import larger_is_better
from ..basics.stopwatch import PHASES
from ..basics.units import in_percent, in_seconds, in_words

_PARTS: Final = "hyperparameters", "versions", "hardware"

Points = list[tuple[float, float]]


class Run(NamedTuple):
    """What is known of a run, from its files or from its trainer."""

    name: str
    record: dict[str, Any]
    """`metrics.json` of `CSVLogger`: hyperparameters, versions, hardware, layout."""
    columns: dict[str, Points]
    """Values by the name of their column, as `(step, value)`."""
    xlabel: str = "optimizer step"
    plan: str | None = None
    """The plan that was logged, in words."""

    def last(self, name: str) -> float:
        """The latest value of a column; NaN if it has none."""
        points = self.columns.get(name)
        return points[-1][1] if points else math.nan

    def best(self, name: str) -> tuple[float, float]:
        """The best value of a column, and the first step that had it."""
        points = [(v, x) for x, v in self.columns.get(name, []) if math.isfinite(v)]
        if not points:
            return math.nan, math.nan
        sign = -1 if larger_is_better(name) else 1
        return min(points, key=lambda point: (sign * point[0], point[1]))


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run that `CSVLogger` wrote, from its folder or its table.

    Raises:
        FileNotFoundError: if there is no table; it says which there are nearby.
    """
    path = Path(path)
    table = path / "metrics.csv" if path.is_dir() else path
    if not table.is_file():
        raise FileNotFoundError(
            f"`{path}` is not a run: a run is a folder that `CSVLogger(dirpath)` wrote"
            " a metrics.csv to, or its table."
        )
    with _of_csv_logger(table):
        columns = _columns(table)
    record, file = {}, table.with_suffix(".json")
    if file.is_file():
        with _of_csv_logger(file):
            record = read_json(file)
            check_fields(record, {part: dict | None for part in _PARTS}, "record")

    name = str(path if path.is_dir() else path.with_suffix(""))
    text = table.with_suffix(PLAN)
    plan = text.read_text(encoding="utf-8") if text.is_file() else None
    return Run(name, record, columns, plan=plan)


@contextlib.contextmanager
def _of_csv_logger(path: Path) -> Iterator[None]:
    """Has what is wrong with a file say which one it is."""
    try:
        yield
    except (csv.Error, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{path}` is not what `CSVLogger` writes: {error}. Mend it, or move it"
            " away."
        ) from error


def _columns(table: Path) -> dict[str, Points]:
    """What a table has, by column."""
    names, rows, _ = read_table(table)
    if not {"epoch", "step"} <= set(names):
        raise ValueError("it has no columns `epoch` and `step`")
    columns: dict[str, Points] = {}
    for row in rows:
        for name, cell in row.items():
            if name != "step" and cell:
                columns.setdefault(name, []).append((float(row["step"]), float(cell)))
    return columns


def run_of_history(name: str, history: Any, record: dict[str, Any]) -> Run:
    """A run of which only the means of epochs are known."""
    columns = {
        key if key.startswith(VALIDATION) else EPOCH + key: [
            (float(epoch + 1), value)
            for epoch, value in zip(history.epochs, values, strict=True)
            if not math.isnan(value)
        ]
        for key, values in history.items()
    }
    return Run(name, record, columns, "epoch")


def comparison(runs: Sequence[Run]) -> list[list[str]]:
    """A table, heads first: a row per result and a column per run.

    The best of a row is marked with `*`.
    """
    rows = [
        ["", *short_names(runs)],
        ["status", *(str(run.record.get("status", "unknown")) for run in runs)],
        ["took", *(_took(run.record) for run in runs)],
    ]

    def add(
        name: str,
        values: Iterable[float],
        shown: Callable[[float], str] = in_words,
        is_ranked: bool = True,
    ) -> None:
        values = list(values)
        finite = [value for value in values if math.isfinite(value)]
        best = None
        if is_ranked and len(finite) > 1:
            best = max(finite) if larger_is_better(name) else min(finite)
        marked = (shown(v) + (" *" if v == best else "") for v in values)
        rows.append([name, *marked])

    # What they measured.
    last = (
        max((p[-1][0] for p in run.columns.values() if p), default=0) for run in runs
    )
    add("steps", last, is_ranked=False)
    epochs = (len(run.columns.get("epoch_loss", [])) for run in runs)
    add("epochs", epochs, is_ranked=False)
    for name in dict.fromkeys(name for run in runs for name in run.columns):
        if name.startswith(VALIDATION):
            best, places = zip(*(run.best(name) for run in runs), strict=True)
            add(f"{name}, best", best)
            add(f"{name}, best at {runs[0].xlabel}", places, is_ranked=False)
            add(f"{name}, last", (run.last(name) for run in runs))
        elif name.startswith(EPOCH):
            label = f"{name.removeprefix(EPOCH)}, last epoch"
            add(label, (run.last(name) for run in runs))

    # What it took.
    totals = [throughput_of(run) for run in runs]
    for name in ("examples", "seconds", "examples_per_s", "mfu"):
        if any(name in total for total in totals):
            shown = in_percent if name == "mfu" else in_words
            is_ranked = name not in ("examples", "seconds")
            add(name, (total.get(name, math.nan) for total in totals), shown, is_ranked)
    for phase, (label, _) in PHASES.items() if any(totals) else ():
        shares = (f"{total[phase]:.1%}" if total else "-" for total in totals)
        rows.append([f"time: {label}", *shares])
    return rows


def _took(record: Mapping[str, Any]) -> str:
    """The time between the two that a record has."""
    begin, end = record.get("started"), record.get("ended")
    if not begin or not end:
        return "unknown"
    took = datetime.fromisoformat(end) - datetime.fromisoformat(begin)
    return in_seconds(took.total_seconds())


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """What the runs were made of and do not have in common: a row per name."""
    made = [
        {
            name: str(value)
            for part in _PARTS
            for name, value in run.record.get(part, {}).items()
        }
        for run in runs
    ]
    rows = [["", *short_names(runs)]]
    for name in dict.fromkeys(name for values in made for name in values):
        values = [facts.get(name, "-") for facts in made]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows


def short_names(runs: Sequence[Run]) -> list[str]:
    """The names of runs without the folders that all are in."""
    names = [os.path.abspath(run.name) for run in runs]
    if len(set(names)) < max(len(names), 2):
        return [run.name.rstrip("/") for run in runs]
    common = os.path.commonpath([os.path.dirname(name) for name in names])
    return [os.path.relpath(name, common) for name in names]


def throughput_of(run: Run) -> dict[str, float]:
    """What `ThroughputMonitor` measured of all of a run, by its names in `summary`.

    All examples over all seconds, and shares of the same seconds; of a run that was
    resumed, over its fits. Empty where nothing was measured.
    """
    logged = {
        name.removeprefix(THROUGHPUT): [value for _, value in points]
        for name, points in run.columns.items()
        if name.startswith(THROUGHPUT)
    }
    seconds = logged.get("seconds", [])
    total = sum(seconds)
    if not total:
        return {}
    examples = sum(logged["examples"])
    totals = {
        "examples": examples,
        "seconds": total,
        "examples_per_s": examples / total,
    }
    for name in PHASES:
        fits = zip(logged[name], seconds, strict=True)
        totals[name] = sum(share * time for share, time in fits) / total
    if "mfu" in logged:  # in proportion to the examples per second
        scale = sum(logged["mfu"]) / sum(logged["examples_per_s"])
        totals["mfu"] = totals["examples_per_s"] * scale
    return totals
