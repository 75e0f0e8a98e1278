"""Reports of runs: tables that compare them, and HTML pages."""

import csv
import io
import math
import os
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...basics.arguments import check_is_local
from ...basics.columns import (
    EPOCH,
    THROUGHPUT,
    VALIDATION,
    read_table,
    resolve_mode,
)
from ...basics.files import check_fields, read_json, write_text_atomically
from ...basics.stopwatch import PHASES
from ...basics.units import format_number, format_percent, format_seconds
from ...callbacks import CSVLogger
from ...callbacks.run_metadata import collect_metadata
from ..figures import Curve, draw, metric_curves

if TYPE_CHECKING:
    from jaxdp import Trainer

_RATES: Final = {
    "examples_per_s": "examples/s",
    "flops_per_s": "FLOP/s of the model",
    "mfu": "MFU",
}
_MAX_CURVES: Final = 16
"""The number of curves in a chart of layers; more are left out."""

_PARTS: Final = "hyperparameters", "versions", "hardware"

Points = list[tuple[float, float]]


class Run(NamedTuple):
    """The facts and values of a run, from its files or from its trainer."""

    name: str
    record: dict[str, Any]
    """`metrics.json` of `CSVLogger`: hyperparameters, versions, hardware, layout."""
    columns: dict[str, Points]
    """Values by the name of their column, as `(step, value)`."""
    xlabel: str = "optimizer step"

    def last(self, name: str) -> float:
        """Returns the latest value of a column; NaN if it has none."""
        points = self.columns.get(name)
        return points[-1][1] if points else math.nan

    def best(self, name: str) -> tuple[float, float]:
        """Returns the best value of a column, and the first step that had it."""
        points = [(v, x) for x, v in self.columns.get(name, []) if math.isfinite(v)]
        if not points:
            return math.nan, math.nan
        sign = -1 if resolve_mode(name) == "max" else 1
        return min(points, key=lambda point: (sign * point[0], point[1]))


def read_run(path: str | os.PathLike[str]) -> Run:
    """Reads the run that `CSVLogger` wrote, from its folder or its table.

    Raises:
        FileNotFoundError: if there is no table; it names the tables nearby.
    """
    path = Path(path)
    table = path / "metrics.csv" if path.is_dir() else path
    if not table.is_file():
        raise FileNotFoundError(
            f"`{path}` is not a run: a run is a folder that `CSVLogger(dirpath)` wrote"
            " a metrics.csv to, or its table."
        )
    record, file = {}, table
    try:
        columns = _read_columns(file)
        file = table.with_suffix(".json")
        if file.is_file():
            record = read_json(file)
            check_fields(record, {part: dict | None for part in _PARTS}, "record")
    except (csv.Error, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{file}` is not what `CSVLogger` writes: {error}. Mend it, or move it"
            " away."
        ) from error

    name = str(path if path.is_dir() else path.with_suffix(""))
    return Run(name, record, columns)


def _read_columns(table: Path) -> dict[str, Points]:
    """Reads the values of a table by column."""
    names, rows = read_table(table)
    if not {"epoch", "step"} <= set(names):
        raise ValueError("it has no columns `epoch` and `step`")
    columns: dict[str, Points] = {}
    for row in rows:
        for name, cell in row.items():
            if name != "step" and cell:
                columns.setdefault(name, []).append((float(row["step"]), float(cell)))
    return columns


def make_run(name: str, history: Any, record: dict[str, Any]) -> Run:
    """Makes a run from the means of its epochs alone."""
    columns = {
        key if key.startswith(VALIDATION) else EPOCH + key: [
            (float(epoch), value)
            for epoch, value in zip(history.epochs, values, strict=True)
            if not math.isnan(value)
        ]
        for key, values in history.items()
    }
    return Run(name, record, columns, "epoch")


def compare_runs(runs: Sequence[Run]) -> list[list[str]]:
    """Returns a table, header first: a row per result and a column per run.

    The best of a row is marked with `*`.
    """
    rows = [
        ["", *shorten_names(runs)],
        ["status", *(str(run.record.get("status", "unknown")) for run in runs)],
        ["took", *(_format_duration(run.record) for run in runs)],
    ]

    def add(
        name: str,
        values: Iterable[float],
        shown: Callable[[float], str] = format_number,
        is_ranked: bool = True,
    ) -> None:
        values = list(values)
        finite = [value for value in values if math.isfinite(value)]
        best = None
        if is_ranked and len(finite) > 1:
            best = max(finite) if resolve_mode(name) == "max" else min(finite)
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
    totals = [summarize_throughput(run) for run in runs]
    for name in ("examples", "seconds", "examples_per_s", "mfu"):
        if any(name in total for total in totals):
            shown = format_percent if name == "mfu" else format_number
            is_ranked = name not in ("examples", "seconds")
            add(name, (total.get(name, math.nan) for total in totals), shown, is_ranked)
    for phase, label in PHASES.items() if any(totals) else ():
        shares = (f"{total[phase]:.1%}" if total else "-" for total in totals)
        rows.append([f"time: {label}", *shares])
    return rows


def _format_duration(record: Mapping[str, Any]) -> str:
    """Formats the time between the start and the end of a record."""
    begin, end = record.get("started"), record.get("ended")
    if not begin or not end:
        return "unknown"
    took = datetime.fromisoformat(end) - datetime.fromisoformat(begin)
    return format_seconds(took.total_seconds())


def tabulate_differences(runs: Sequence[Run]) -> list[list[str]]:
    """Returns a table of the settings in which the runs differ: a row per name."""
    settings = [
        {
            name: str(value)
            for part in _PARTS
            for name, value in run.record.get(part, {}).items()
        }
        for run in runs
    ]
    rows = [["", *shorten_names(runs)]]
    for name in dict.fromkeys(name for values in settings for name in values):
        values = [facts.get(name, "-") for facts in settings]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows


def shorten_names(runs: Sequence[Run]) -> list[str]:
    """Returns the names of runs without the folders that all have in common."""
    names = [os.path.abspath(run.name) for run in runs]
    if len(set(names)) < max(len(names), 2):
        return [run.name.rstrip("/") for run in runs]
    common = os.path.commonpath([os.path.dirname(name) for name in names])
    return [os.path.relpath(name, common) for name in names]


def summarize_throughput(run: Run) -> dict[str, float]:
    """Summarizes the measurements of `ThroughputMonitor` over a run, by name.

    All fits of a resumed run count. The rate is all examples divided by all seconds;
    each share is that of the same seconds. The result is empty if nothing was measured.
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


_PAGE: Final = string.Template("""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
:root{color-scheme:light dark}
body{font:14px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}
h1{font-size:1.6em;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15em;margin:2em 0 .5em;border-bottom:1px solid #8886}
section{overflow-x:auto;background:
linear-gradient(to right,Canvas 40%,transparent) 0/2em 100% local no-repeat,
linear-gradient(to left,Canvas 40%,transparent) 100%/2em 100% local no-repeat,
linear-gradient(to right,#888a,transparent) 0/.6em 100% scroll no-repeat,
linear-gradient(to left,#888a,transparent) 100%/.6em 100% scroll no-repeat}
svg{max-width:100%;height:auto}
@media (max-width:700px){svg{max-width:none;width:700px}}
table{border-collapse:collapse;font-size:.93em;margin:0 0 1em}
th,td{text-align:left;padding:.22em 1em .22em 0;border-bottom:1px solid #8884;
font-variant-numeric:tabular-nums;vertical-align:top;overflow-wrap:break-word}
th,header p{color:#888;font-weight:normal}
pre{line-height:1.3}
@media (prefers-color-scheme:dark){svg{filter:invert(.88) hue-rotate(180deg)}}
</style></head><body>
<header><h1>$title</h1><p>$subtitle</p></header>
$body
</body></html>
""")
"""Its style is inside, and what is too wide scrolls, with a shadow at that side."""


def write_report(run: Run, path: str | os.PathLike[str], plan: Any = None) -> Path:
    """Writes one self-contained HTML page about a run.

    Args:
        run: what is known of it.
        path: of the file; folders are made.
        plan: what `trainer.plan` returns, if it is to be shown.

    Returns:
        The path.
    """
    sections = {
        "Results": _format_table(compare_runs([run])),
        "Curves": _draw_charts(make_metric_charts(run), run.xlabel),
        "Throughput": _format_throughput(run),
        "Other values": _draw_charts(make_other_charts(run), run.xlabel),
        "Plan": "" if plan is None else f"<pre>{escape(str(plan))}</pre>",
        "Made of": _format_facts(run.record),
    }
    return _write_page(path, run.name, _make_subtitle(run), sections)


def report_trainer(
    trainer: "Trainer", path: str | os.PathLike[str], plan: Any = None
) -> str:
    """Implements `Trainer.report`.

    It reads the table of a `CSVLogger`; without one, it takes the history.
    """
    check_is_local("path", path)
    record: dict[str, Any] = dict(collect_metadata(trainer, None))
    tables = [c.path for c in trainer.callbacks if isinstance(c, CSVLogger)]
    tables = [table for table in tables if table is not None and table.exists()]
    file = Path(path).expanduser()
    if file.is_dir() or not file.suffix:
        file = file / "report.html"
    if tables:
        run = read_run(tables[0])
        run.record.update({**record, **run.record})
        run = run._replace(name=str(tables[0].parent))
    else:
        run = make_run(str(trainer.default_root_dir), trainer.history, record)
    return str(write_report(run, file, plan or trainer.running_plan()))


def _make_subtitle(run: Run) -> str:
    record = run.record
    settings, hardware = record.get("hyperparameters", {}), record.get("hardware", {})
    facts = [settings.get("model"), settings.get("strategy")]
    if {"num_devices", "device_kind"} <= hardware.keys():
        facts.append(f"{hardware['num_devices']} x {hardware['device_kind']}")
    if started := record.get("started"):
        facts.append(f"{datetime.fromisoformat(started):%Y-%m-%d %H:%M %Z}")
    facts.append(record.get("status"))
    return " | ".join(str(fact) for fact in facts if fact)


def make_metric_charts(run: Run) -> dict[str, list[Curve]]:
    """Makes a chart per metric."""
    charts = {}
    for metric in _list_metrics(run):
        columns = (EPOCH + metric, VALIDATION + metric, metric)
        curves = (run.columns.get(name, []) for name in columns)
        charts[metric] = metric_curves(*curves)
    return charts


def _list_metrics(run: Run) -> list[str]:
    means = [name for name in run.columns if name.startswith((EPOCH, VALIDATION))]
    metrics = (name.removeprefix(EPOCH).removeprefix(VALIDATION) for name in means)
    return list(dict.fromkeys(metrics))


def make_throughput_charts(run: Run) -> dict[str, list[Curve]]:
    """Makes charts of the measurements of `ThroughputMonitor` over the steps."""
    charts = {
        title: [Curve(title, run.columns[THROUGHPUT + name], "C0")]
        for name, title in _RATES.items()
        if THROUGHPUT + name in run.columns
    }
    if totals := summarize_throughput(run):
        charts["share of the time"] = [
            Curve(name, run.columns[THROUGHPUT + name], f"C{index}")
            for index, name in enumerate(PHASES)
            if totals[name] >= 0.005
        ]
    return charts


def _format_throughput(run: Run) -> str:
    totals, drawn = (
        summarize_throughput(run),
        _draw_charts(make_throughput_charts(run), run.xlabel),
    )
    if not totals:
        return drawn
    return (
        f"<p>{totals['examples']:,.0f} examples in {format_seconds(totals['seconds'])}:"
        f" {format_number(totals['examples_per_s'])} per second. Shares are of the same"
        " time, which runs from the first step to the last logged one of each fit,"
        f" without compilation before it.</p>{drawn}"
    )


def make_other_charts(run: Run) -> dict[str, list[Curve]]:
    """Makes charts of other values, such as rates; one per kind of layer."""
    charts: dict[str, list[Curve]] = {}
    known = {"epoch", *_list_metrics(run)}
    for name, points in run.columns.items():
        if name.startswith((EPOCH, VALIDATION, THROUGHPUT)) or name in known:
            continue
        kind, _, layer = name.partition("/")
        curves = charts.setdefault(f"{kind} by layer" if layer else kind, [])
        if len(curves) < _MAX_CURVES:
            curves.append(Curve(layer or kind, points, f"C{len(curves) % 10}"))
    return charts


def _format_facts(record: Mapping[str, Any]) -> str:
    tables = []
    for part in _PARTS:
        facts = record.get(part, {}).items()
        rows = [(name, str(fact)) for name, fact in facts if fact not in (None, "")]
        tables.append(_format_table([(part, ""), *rows]))
    return "".join(tables)


def to_svg(figure: Any) -> str:
    """Returns the figure as an element of an HTML page."""
    import matplotlib

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # texts stay texts
        figure.savefig(text, format="svg", metadata=nothing, transparent=True)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]  # without the header of a separate file


def _draw_charts(charts: Mapping[str, Sequence[Curve]], xlabel: str) -> str:
    """Draws the charts that have a point."""
    shown = {k: curves for k, curves in charts.items() if any(c.points for c in curves)}
    return to_svg(draw(shown, xlabel)) if shown else ""


def _write_page(
    path: str | os.PathLike[str], title: str, subtitle: str, sections: dict[str, str]
) -> Path:
    """Writes a page of sections, HTML by title, without the empty ones."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(
        f"<section><h2>{escape(name)}</h2>{html}</section>"
        for name, html in sections.items()
        if html
    )
    texts = {"title": escape(title), "subtitle": escape(subtitle), "body": body}
    write_text_atomically(path, _PAGE.substitute(texts))
    return path


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    """Formats a table of texts, header first; an empty text without other rows."""

    def line(cells: Sequence[str], tag: str) -> str:
        shown = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{shown}</tr>"

    head, *others = rows
    body = "".join(line(row, "td") for row in others)
    return f"<table>{line(head, 'th')}{body}</table>" if body else ""
