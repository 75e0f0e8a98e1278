"""What a run did, as one HTML page that opens anywhere; several runs on one page."""

import os
import string
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Final

from ..basics.columns import EPOCH, THROUGHPUT, VALIDATION
from ..basics.figures import Curve, draw, metric_curves, to_svg
from ..basics.files import write_whole
from ..basics.stopwatch import PHASES
from ..basics.units import in_seconds, in_words
from .runs import (
    Run,
    comparison,
    differences,
    short_names,
    throughput_of,
)

_RATES: Final = {
    "examples_per_s": "examples/s",
    "flops_per_s": "FLOP/s of the model",
    "mfu": "MFU",
}
_MOST_CURVES: Final = 16
"""In a chart of layers."""


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
        plan: what `trainer.plan` gave, to be shown instead of the logged one.

    Returns:
        The path.
    """
    planned = run.plan if plan is None else str(plan)
    sections = {
        "Results": _with_head(comparison([run])),
        "Curves": _drawn(metric_charts([run]), run.xlabel),
        "Throughput": _throughput(run),
        "Other values": _drawn(other_charts(run), run.xlabel),
        "Plan": f"<pre>{escape(planned)}</pre>" if planned else "",
        "Made of": _facts(run.record),
    }
    return _write(path, run.name, _subtitle(run), sections)


def write_comparison(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Writes one self-contained HTML page about several runs."""
    sections = {
        "Results": _with_head(comparison(runs)),
        "Curves": _drawn(metric_charts(runs), runs[0].xlabel),
        "What differs": _with_head(differences(runs))
        or "<p>Nothing that was recorded.</p>",
    }
    names = ", ".join(short_names(runs))
    return _write(path, f"{len(runs)} runs", names, sections)


def _subtitle(run: Run) -> str:
    record = run.record
    made, hardware = record.get("hyperparameters", {}), record.get("hardware", {})
    facts = [made.get("model"), made.get("strategy")]
    if {"num_devices", "device_kind"} <= hardware.keys():
        facts.append(f"{hardware['num_devices']} x {hardware['device_kind']}")
    if started := record.get("started"):
        facts.append(f"{datetime.fromisoformat(started):%Y-%m-%d %H:%M %Z}")
    facts.append(record.get("status"))
    return " | ".join(str(fact) for fact in facts if fact)


def metric_charts(runs: Sequence[Run]) -> dict[str, list[Curve]]:
    """A chart per metric, with the curves of all runs."""
    charts = {}
    for metric in _metrics(runs):
        if len(runs) == 1:
            columns = (EPOCH + metric, VALIDATION + metric, metric)
            curves_of_run = (runs[0].columns.get(name, []) for name in columns)
            charts[metric] = metric_curves(*curves_of_run)
            continue
        # Of several runs one curve each: of the validation, where there is one.
        charts[metric] = curves = []
        for index, (name, run) in enumerate(zip(short_names(runs), runs, strict=True)):
            training = run.columns.get(EPOCH + metric, [])
            validation = run.columns.get(VALIDATION + metric, [])
            kind = "validation" if validation else "training"
            points = validation or training
            curves.append(Curve(f"{name}, {kind}", points, f"C{index % 10}"))
    return charts


def _metrics(runs: Sequence[Run]) -> list[str]:
    names = [name for run in runs for name in run.columns]
    means = [name for name in names if name.startswith((EPOCH, VALIDATION))]
    metrics = (name.removeprefix(EPOCH).removeprefix(VALIDATION) for name in means)
    return list(dict.fromkeys(metrics))


def throughput_charts(run: Run) -> dict[str, list[Curve]]:
    """What `ThroughputMonitor` measured, over the steps."""
    charts = {
        title: [Curve(title, run.columns[THROUGHPUT + name], "C0")]
        for name, title in _RATES.items()
        if THROUGHPUT + name in run.columns
    }
    if totals := throughput_of(run):
        charts["share of the time"] = [
            Curve(name, run.columns[THROUGHPUT + name], f"C{index}")
            for index, name in enumerate(PHASES)
            if totals[name] >= 0.005
        ]
    return charts


def _throughput(run: Run) -> str:
    totals, drawn = throughput_of(run), _drawn(throughput_charts(run), run.xlabel)
    if not totals:
        return drawn
    return (
        f"<p>{totals['examples']:,.0f} examples in {in_seconds(totals['seconds'])}:"
        f" {in_words(totals['examples_per_s'])} per second. Shares are of the same"
        " time, which runs from the first step to the end of each fit, without"
        f" compilation before it.</p>{drawn}"
    )


def other_charts(run: Run) -> dict[str, list[Curve]]:
    """What callbacks logged, such as the learning rate; layers of one kind together."""
    charts: dict[str, list[Curve]] = {}
    known = {"epoch", *_metrics([run])}
    for name, points in run.columns.items():
        if name.startswith((EPOCH, VALIDATION, THROUGHPUT)) or name in known:
            continue
        kind, _, layer = name.partition("/")
        curves = charts.setdefault(f"{kind} by layer" if layer else kind, [])
        if len(curves) < _MOST_CURVES:
            curves.append(Curve(layer or kind, points, f"C{len(curves) % 10}"))
    return charts


def _facts(record: Mapping[str, Any]) -> str:
    tables = []
    for part in ("hyperparameters", "versions", "hardware"):
        facts = record.get(part, {}).items()
        rows = [(name, str(fact)) for name, fact in facts if fact not in (None, "")]
        tables.append(table(rows, (part, "")))
    return "".join(tables)


def _drawn(charts: Mapping[str, Sequence[Curve]], xlabel: str) -> str:
    """The charts that have a point."""
    shown = {k: curves for k, curves in charts.items() if any(c.points for c in curves)}
    return to_svg(draw(shown, xlabel)) if shown else ""


def _with_head(rows: Sequence[Sequence[str]]) -> str:
    return table(rows[1:], rows[0])


def _write(
    path: str | os.PathLike[str], title: str, subtitle: str, sections: dict[str, str]
) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, document(title, subtitle, sections))
    return path


def document(title: str, subtitle: str, sections: Mapping[str, str]) -> str:
    """A page, of the HTML of each section by its title; empty ones are left out."""
    body = "\n".join(
        f"<section><h2>{escape(name)}</h2>{html}</section>"
        for name, html in sections.items()
        if html
    )
    return _PAGE.substitute(title=escape(title), subtitle=escape(subtitle), body=body)


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table of texts; nothing without rows."""

    def line(cells: Sequence[str], tag: str) -> str:
        shown = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{shown}</tr>"

    body = "".join(line(row, "td") for row in rows)
    head = line(header, "th") if header else ""
    return f"<table>{head}{body}</table>" if body else ""
