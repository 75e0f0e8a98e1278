"""What a run did, as one HTML page that opens anywhere; several runs on one page."""

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from ..basics.files import write_whole
from ..plan.page import SCROLLS
from ..plan.page import page as plan_page
from ..plan.text import in_seconds
from .figures import Curve, draw, metric_curves, to_svg
from .runs import (
    EPOCH,
    PHASES,
    THROUGHPUT,
    VALIDATION,
    Run,
    comparison,
    differences,
    in_percent,
    in_words,
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


def write_report(run: Run, path: str | os.PathLike[str], plan: Any = None) -> Path:
    """Writes one self-contained HTML page about a run.

    Args:
        run: what is known of it.
        path: of the file; folders are made.
        plan: what `trainer.plan` gave, to be shown instead of the logged one.

    Returns:
        The path.
    """
    framed = run.plan if plan is None else plan_page(plan)
    sections = {
        "Results": _table(("", "", "at"), _results(run)),
        "Curves": _drawn(metric_charts([run]), run.xlabel),
        "Throughput": _throughput(run),
        "Other values": _drawn(other_charts(run), run.xlabel),
        "Plan": _FRAME.format(escape(framed)) if framed else "",
        "Made of": _facts(run.record),
    }
    return _write(path, run.name, _subtitle(run), sections)


def write_comparison(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Writes one self-contained HTML page about several runs."""
    (heads, *results), (_, *differing) = comparison(runs), differences(runs)
    sections = {
        "Results": _table(heads, results),
        "Curves": _drawn(metric_charts(runs), runs[0].xlabel),
        "What differs": _table(heads, differing) or "<p>Nothing that was recorded.</p>",
    }
    return _write(path, f"{len(runs)} runs", ", ".join(heads[1:]), sections)


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


def _results(run: Run) -> Iterable[tuple[str, ...]]:
    """The numbers that one looks for first."""
    for name in run.columns:
        if name.startswith(VALIDATION):
            value, place = run.best(name)
            yield f"best {name}", in_words(value), f"{run.xlabel} {in_words(place)}"
    for name in run.columns:
        if name.startswith(EPOCH):
            label = f"{name.removeprefix(EPOCH)}, last epoch"
            yield label, in_words(run.last(name)), ""

    count = run.record.get("hyperparameters", {}).get("parameters")
    if isinstance(count, int | float):
        yield "parameters", in_words(count), ""
    begin, end = run.record.get("started"), run.record.get("ended")
    if begin and end:
        took = datetime.fromisoformat(end) - datetime.fromisoformat(begin)
        yield "took", in_seconds(took.total_seconds()), ""
    found = throughput_of(run)
    if found:
        yield "examples/s", in_words(found["examples_per_s"]), ""
    if "mfu" in found:
        yield "MFU", in_percent(found["mfu"]), ""


def metric_charts(runs: Sequence[Run]) -> dict[str, list[Curve]]:
    """A chart per metric, with the curves of all runs."""
    charts = {}
    for metric in _metrics(runs):
        if len(runs) == 1:
            columns = (EPOCH + metric, VALIDATION + metric, metric)
            found = (runs[0].columns.get(name, []) for name in columns)
            charts[metric] = metric_curves(*found)
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
    found = (name.removeprefix(EPOCH).removeprefix(VALIDATION) for name in means)
    return list(dict.fromkeys(found))


def throughput_charts(run: Run) -> dict[str, list[Curve]]:
    """What `ThroughputMonitor` measured, over the steps."""
    charts = {
        title: [Curve(title, run.columns[THROUGHPUT + name], "C0")]
        for name, title in _RATES.items()
        if THROUGHPUT + name in run.columns
    }
    if found := throughput_of(run):
        charts["share of the time"] = [
            Curve(name, run.columns[THROUGHPUT + name], f"C{index}")
            for index, name in enumerate(PHASES)
            if found[name] >= 0.005
        ]
    return charts


def _throughput(run: Run) -> str:
    drawn = _drawn(throughput_charts(run), run.xlabel)
    found = throughput_of(run)
    if not found:
        return drawn
    note = (
        f"{found['examples']:,.0f} examples in {in_seconds(found['seconds'])}:"
        f" {in_words(found['examples_per_s'])} per second. Shares are of the same time,"
        " which runs from the first step to the end of each fit, without compilation"
        " before it."
    )
    largest = sorted(PHASES, key=lambda name: -found[name])
    shares = [(PHASES[name], f"{found[name]:.1%}") for name in largest]
    return f"<p>{note}</p>{_table((), shares)}{drawn}"


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
    parts = ("hyperparameters", "versions", "hardware")
    shown = {
        part: [
            (k, str(v)) for k, v in record.get(part, {}).items() if v not in (None, "")
        ]
        for part in parts
    }
    return "".join(_table((part, ""), rows) for part, rows in shown.items())


def _drawn(charts: Mapping[str, Sequence[Curve]], xlabel: str) -> str:
    """The charts that have a point."""
    shown = {k: curves for k, curves in charts.items() if any(c.points for c in curves)}
    return to_svg(draw(shown, xlabel)) if shown else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        shown = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{shown}</tr>"

    body = "".join(line(row, "td") for row in rows)
    head = f"<thead>{line(heads, 'th')}</thead>" if heads else ""
    return f"<table>{head}<tbody>{body}</tbody></table>" if body else ""


def _write(
    path: str | os.PathLike[str], title: str, subtitle: str, sections: dict[str, str]
) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(
        f"<section><h2>{name}</h2>{text}</section>"
        for name, text in sections.items()
        if text
    )
    page = _PAGE.substitute(title=escape(title), subtitle=escape(subtitle), body=body)
    write_whole(path, page)
    return path


_FRAME: Final = (  # as high as what is in it, which runs no scripts
    '<iframe sandbox="allow-same-origin" srcdoc="{}" onload="this.style.height ='
    " this.contentDocument.documentElement.scrollHeight + 40 + 'px'\"></iframe>"
)

_PAGE: Final = Template(f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root {{color-scheme: light dark}}
body {{max-width: 1200px; margin: 2em auto; padding: 0 1em;
  font: 14px/1.5 system-ui, sans-serif}}
h1 {{font-size: 22px; margin: 0; overflow-wrap: anywhere}}
h2 {{font-size: 16px; margin: 2em 0 .5em; border-bottom: 1px solid #8886}}{SCROLLS}\
svg {{max-width: 100%; height: auto}}
@media (max-width: 700px) {{svg {{max-width: none; width: 700px}}}}
table {{border-collapse: collapse; font-size: 13px; margin: 0 0 1em}}
th, td {{text-align: left; vertical-align: top; padding: 3px 14px 3px 0;
  border-bottom: 1px solid #8884; overflow-wrap: break-word}}
th, header p {{color: #888; font-weight: normal}}
iframe {{width: 100%; height: 900px; border: 1px solid #8886}}
@media (prefers-color-scheme: dark) {{svg {{filter: invert(.88) hue-rotate(180deg)}}}}
</style></head>
<body><header><h1>$title</h1><p>$subtitle</p></header>
$body
</body></html>
""")
