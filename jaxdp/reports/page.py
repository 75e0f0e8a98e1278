"""What a run did, as one HTML file that opens anywhere; several runs side by side."""

import csv
import datetime
import html
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..basics.files import write_whole
from ..plan import page
from .figures import COLORS, Curve, line_chart, number, share_bar, split_box
from .run_record import check_size, read_record

_EPOCH, _VALIDATION, _THROUGHPUT = "epoch_", "val_", "throughput/"
_PHASES: Final = {
    "data": "waiting for data",
    "device": "waiting for the device",
    "callbacks": "callbacks",
    "checkpoints": "checkpoints",
    "validation": "validation",
    "loop": "the host: packing batches, calling the step",
}
_PARTS: Final = {
    "params": "parameters",
    "buffers": "frozen leaves",
    "model_state": "model state",
    "opt_state": "optimizer",
}
_PLANNED: Final = {
    "peak bytes per device": lambda plan: float(plan["memory"]["peak"]),
    "bytes sent per step": lambda plan: float(plan["wire_bytes"]),
}
_SHARE: Final = "time: "
_UNRANKED: Final = "steps", "epochs", "examples", "seconds"
_LARGER_IS_BETTER: Final = ("accuracy", "top_", "auc", "f1", "iou", "mfu", "per_s")

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
    """The page of the plan that was logged."""

    def last(self, name: str) -> float:
        """The latest value of a column; NaN if it has none."""
        points = self.columns.get(name)
        return points[-1][1] if points else math.nan

    def best(self, name: str) -> tuple[float, float]:
        """The best value of a column, and the step it belongs to."""
        points = [(v, x) for x, v in self.columns.get(name, []) if math.isfinite(v)]
        if not points:
            return math.nan, math.nan
        return max(points) if larger_is_better(name) else min(points)


def read_run(path: str | os.PathLike[str]) -> Run:
    """The run that `CSVLogger` wrote, from its folder or its table.

    Raises:
        FileNotFoundError: if there is no table; it says which there are nearby.
    """
    path = Path(path)
    table = path / "metrics.csv" if path.is_dir() else path
    if path.is_dir() and not table.exists():
        tables = sorted(path.glob("*.csv"))
        table = tables[0] if len(tables) == 1 else table
    if not table.is_file():
        if not path.exists():
            raise FileNotFoundError(
                f"`{path}`: there is no such folder. A run is a folder that"
                " `CSVLogger(dirpath)` wrote to, or its table."
            )
        near = sorted(path.rglob("*.csv"))[:5] if path.is_dir() else []
        listed = f" There are {', '.join(map(str, near))}." if near else ""
        raise FileNotFoundError(
            f"`{path}`: no {table.name} there. A run is a folder that"
            f" `CSVLogger(dirpath)` wrote to, or its table.{listed}"
        )
    try:
        columns = _columns(table)
    except (csv.Error, OSError, TypeError, ValueError) as error:
        raise ValueError(f"`{table}` is no table of `CSVLogger`: {error}.") from error
    record = read_record(table.with_suffix(".json"))
    name = str(path if path.is_dir() else path.with_suffix(""))
    plan, planned = None, table.with_suffix(page.SUFFIX)
    if planned.is_file():
        check_size(planned)
        plan = planned.read_text(encoding="utf-8")
    return Run(name, record, columns, plan=plan)


def _columns(table: Path) -> dict[str, Points]:
    """What a table has, by column."""
    check_size(table)
    with table.open(newline="", encoding="utf-8") as file:
        # A run may be writing its last row at this moment, or was killed then.
        lines = [line for line in file if line.endswith("\n")]
    reader = csv.DictReader(lines)
    if not {"epoch", "step"} <= set(reader.fieldnames or ()):
        raise ValueError("it has no columns `epoch` and `step`")
    columns: dict[str, Points] = {}
    for row in reader:
        for name, text in row.items():
            if name not in (None, "step") and text:
                columns.setdefault(name, []).append((float(row["step"]), float(text)))
    return columns


def run_of_history(name: str, history: Any, record: dict[str, Any]) -> Run:
    """A run of which only the means of epochs are known."""
    columns = {
        key if key.startswith(_VALIDATION) else _EPOCH + key: [
            (float(epoch + 1), value)
            for epoch, value in zip(history.epochs, values, strict=True)
            if not math.isnan(value)
        ]
        for key, values in history.items()
    }
    return Run(name, record, columns, "epoch")


def larger_is_better(name: str) -> bool:
    """Whether a metric of that name is one to be maximised, as far as names tell."""
    return any(word in name for word in _LARGER_IS_BETTER)


def write_report(run: Run, path: str | os.PathLike[str], plan: Any = None) -> Path:
    """One self-contained HTML page about a run.

    Args:
        run: what is known of it.
        path: of the file; folders are made.
        plan: what `trainer.plan` gave, to be shown instead of the logged one.

    Returns:
        The path.
    """
    plan = run.plan if plan is None else plan
    sections = [
        _tiles(run),
        _section("Curves", _curves([run])),
        _section("Throughput", _throughput(run)),
        _section("Other values", _others(run)),
        _section("Layout", _layout(run.record.get("layout", []))),
        _section("Plan", _plan(plan)),
        _section("Made of", _facts(run.record)),
    ]
    return _write(path, run.name, _subtitle(run), sections)


def write_comparison(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """One self-contained HTML page about several runs."""
    rows = comparison(runs)
    table = _table(rows[0], rows[1:])
    sections = [
        _section("Results", table),
        _section("Curves", _curves(runs)),
        _section("What differs", _differences(runs)),
    ]
    return _write(path, f"{len(runs)} runs", ", ".join(_names(runs)), sections)


def comparison(runs: Sequence[Run]) -> list[list[str]]:
    """A table, heads first: a row per result and a column per run.

    The best of a row is marked with `*`.
    """
    shown: dict[str, list[float]] = {
        "steps": [
            max((p[-1][0] for p in run.columns.values() if p), default=0)
            for run in runs
        ],
        "epochs": [len(run.columns.get("epoch_loss", [])) for run in runs],
    }
    names = dict.fromkeys(name for run in runs for name in run.columns)
    for name in names:
        if name.startswith(_VALIDATION):
            shown[f"{name}, best"] = [run.best(name)[0] for run in runs]
            shown[f"{name}, last"] = [run.last(name) for run in runs]
        elif name.startswith(_EPOCH):
            label = f"{name.removeprefix(_EPOCH)}, last epoch"
            shown[label] = [run.last(name) for run in runs]
    totals = [throughput_of(run) for run in runs]
    for name in ("examples", "seconds", "examples_per_s", "mfu", *_PHASES):
        if any(name in each for each in totals):
            label = _SHARE + name if name in _PHASES else name
            shown[label] = [each.get(name, math.nan) for each in totals]
    for label, value_of in _PLANNED.items():
        planned = [run.record.get("plan") for run in runs]
        if any(planned):
            shown[label] = [value_of(plan) if plan else math.nan for plan in planned]
    rows = [["", *_names(runs)]]
    rows.append(["status", *(str(r.record.get("status", "unknown")) for r in runs)])
    for name, values in shown.items():
        finite = [value for value in values if math.isfinite(value)]
        best = None
        is_share = name.startswith(_SHARE)
        if len(finite) > 1 and name not in _UNRANKED and not is_share:
            best = max(finite) if larger_is_better(name) else min(finite)
        rows.append(
            [
                name,
                *(
                    "-"
                    if not math.isfinite(value)
                    else f"{value:.1%}"
                    if is_share
                    else f"{number(value)}{' *' if value == best else ''}"
                    for value in values
                ),
            ]
        )
    return rows


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """What the runs were made of and do not have in common: a row per name."""
    made = [_flat(run.record) for run in runs]
    rows = [["", *_names(runs)]]
    for name in dict.fromkeys(name for values in made for name in values):
        values = [str(each.get(name, "-")) for each in made]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for part in ("hyperparameters", "versions", "hardware")
        for name, value in record.get(part, {}).items()
    }


def _names(runs: Sequence[Run]) -> list[str]:
    """As short as they can be: without the folders that all are in."""
    names = [run.name for run in runs]
    if len(names) < 2 or len(set(names)) < len(names):
        return [name.rstrip("/") for name in names]
    common = os.path.commonpath([os.path.dirname(name.rstrip("/")) for name in names])
    return [os.path.relpath(name, common) if common else name for name in names]


def throughput_of(run: Run) -> dict[str, float]:
    """What `ThroughputMonitor` measured of all of a run, by its names in `summary`.

    All examples over all seconds, and shares of the same seconds; of a run that was
    resumed, over its fits. Rows of a version that logged no seconds are left out; empty
    where there are no others.
    """
    logged = {
        name.removeprefix(_THROUGHPUT): [value for _, value in points]
        for name, points in run.columns.items()
        if name.startswith(_THROUGHPUT)
    }
    seconds = logged.get("seconds", [])
    total = sum(seconds)
    if not total:
        return {}
    # Rows without seconds come first: they are of before the run was resumed.
    rows = {name: logged[name][-len(seconds) :] for name in ("examples", *_PHASES)}
    examples = sum(rows["examples"])
    found = {"examples": examples, "seconds": total, "examples_per_s": examples / total}
    for name in _PHASES:
        each = zip(rows[name], seconds, strict=True)
        found[name] = sum(share * time for share, time in each) / total
    if "mfu" in logged:  # in proportion to the examples per second
        scale = sum(logged["mfu"]) / sum(logged["examples_per_s"])
        found["mfu"] = found["examples_per_s"] * scale
    return found


def _subtitle(run: Run) -> str:
    record = run.record
    made, hardware = record.get("hyperparameters", {}), record.get("hardware", {})
    facts = [made.get("model"), made.get("strategy")]
    if {"num_devices", "device_kind"} <= hardware.keys():
        facts.append(f"{hardware['num_devices']} x {hardware['device_kind']}")
    facts += [record.get("started"), record.get("status")]
    return " | ".join(str(fact) for fact in facts if fact)


def _tiles(run: Run) -> str:
    tiles = []
    for name in run.columns:
        if name.startswith(_VALIDATION):
            value, place = run.best(name)
            where = f"{run.xlabel} {number(place)}"
            tiles.append((f"best {name}", number(value), where))
    for name in run.columns:
        if name.startswith(_EPOCH):
            what = name.removeprefix(_EPOCH)
            tiles.append((f"{what}, last epoch", number(run.last(name)), ""))
    made = run.record.get("hyperparameters", {})
    if isinstance(made.get("parameters"), int | float):
        tiles.append(("parameters", number(made["parameters"]), ""))
    seconds = _duration(run.record)
    if seconds is not None:
        tiles.append(("took", str(datetime.timedelta(seconds=round(seconds))), ""))
    found = throughput_of(run)
    if found:
        tiles.append(("examples/s", number(found["examples_per_s"]), ""))
    if "mfu" in found:
        tiles.append(("MFU", f"{found['mfu']:.1%}", ""))
    cells = "".join(
        f"<div><span>{html.escape(name)}</span><b>{html.escape(value)}</b>"
        f"<small>{html.escape(note)}</small></div>"
        for name, value, note in tiles
    )
    return f'<div class="tiles">{cells}</div>' if tiles else ""


def _duration(record: Mapping[str, Any]) -> float | None:
    try:
        start = datetime.datetime.fromisoformat(record["started"])
        return (
            datetime.datetime.fromisoformat(record["ended"]) - start
        ).total_seconds()
    except (KeyError, TypeError, ValueError):
        return None


def _curves(runs: Sequence[Run]) -> str:
    """A chart per metric, with the curves of all runs."""
    metrics = dict.fromkeys(
        name.removeprefix(_EPOCH).removeprefix(_VALIDATION)
        for run in runs
        for name in run.columns
        if name.startswith((_EPOCH, _VALIDATION))
    )
    charts, names = [], _names(runs)
    for metric in metrics:
        curves = []
        for index, run in enumerate(runs):
            alone = len(runs) == 1
            color = COLORS[index % len(COLORS)]
            label = "" if alone else f"{names[index]}, "
            training = run.columns.get(_EPOCH + metric, [])
            validation = run.columns.get(_VALIDATION + metric, [])
            steps = run.columns.get(metric, [])
            if steps and (alone or not validation):
                curves.append(Curve(label + "steps", steps, color, "faint"))
            if training and (alone or not validation):
                curves.append(Curve(label + "training", training, color, "dots"))
            if validation:
                own = COLORS[1] if alone else color
                curves.append(Curve(label + "validation", validation, own, "dots"))
        charts.append(line_chart(metric, curves, runs[0].xlabel))
    return _charts(charts)


def _throughput(run: Run) -> str:
    columns = {
        name.removeprefix(_THROUGHPUT): points
        for name, points in run.columns.items()
        if name.startswith(_THROUGHPUT)
    }
    if not columns:
        return ""
    titles = {
        "examples_per_s": "examples/s",
        "flops_per_s": "FLOP/s of the model",
        "mfu": "MFU",
    }
    charts = [
        line_chart(title, [Curve(title, columns[name], COLORS[0])], run.xlabel)
        for name, title in titles.items()
        if name in columns
    ]
    found = throughput_of(run)
    phases = {name: found[name] for name in _PHASES if name in found}
    charts.append(
        line_chart(
            "share of the time",
            [
                Curve(_PHASES[name], columns[name], COLORS[i % len(COLORS)])
                for i, name in enumerate(phases)
                if phases[name] >= 0.005
            ],
            run.xlabel,
        )
    )
    if not phases:
        return _charts(charts)
    note = (
        f"{found['examples']:,.0f} examples in {number(found['seconds'])} s:"
        f" {number(found['examples_per_s'])} per second. Shares are of the same time,"
        " which runs from the first step to the end of each fit, without compilation"
        " before it."
    )
    return f"<p>{note}</p>{share_bar(phases, _PHASES)}{_charts(charts)}"


def _others(run: Run) -> str:
    """What callbacks logged, such as the learning rate; layers of one kind together."""
    groups: dict[str, list[tuple[str, Points]]] = {}
    known = {
        name.removeprefix(_EPOCH).removeprefix(_VALIDATION)
        for name in run.columns
        if name.startswith((_EPOCH, _VALIDATION))
    } | {"epoch"}
    for name, points in run.columns.items():
        if name.startswith((_EPOCH, _VALIDATION, _THROUGHPUT)) or name in known:
            continue
        kind, _, rest = name.partition("/")
        groups.setdefault(kind + ("/" if rest else ""), []).append(
            (rest or kind, points)
        )
    return _charts(
        line_chart(
            kind.rstrip("/") + (" by layer" if kind.endswith("/") else ""),
            [
                Curve(label, points, COLORS[i % len(COLORS)])
                for i, (label, points) in enumerate(named[:16])
            ],
            run.xlabel,
        )
        for kind, named in groups.items()
    )


def _layout(rows: Sequence[Mapping[str, Any]]) -> str:
    """Bytes per device, and how every leaf is cut."""
    if not rows:
        return ""
    held = dict.fromkeys(_PARTS, 0)
    for row in rows:
        if row["part"] in held:
            held[row["part"]] += row["bytes_per_device"]
    labels = {part: f"{name} {_bytes(held[part])}" for part, name in _PARTS.items()}
    total = f"<p>{_bytes(sum(held.values()))} per device in the placed state.</p>"
    ordered = sorted(rows, key=lambda row: -row["bytes"])
    cells = [
        "<tr>"
        + f"<td>{split_box(row['splits'], row['copies'], 64, 22)}</td>"
        + "".join(
            f"<td>{html.escape(str(value))}</td>"
            for value in (
                _PARTS.get(row["part"], row["part"]),
                row["path"],
                " x ".join(map(str, row["shape"])) or "scalar",
                row["dtype"],
                row["spec"],
                _bytes(row["bytes"]),
                _bytes(row["bytes_per_device"]),
            )
        )
        + "</tr>"
        for row in ordered[:400]
    ]
    heads = ("", "part", "leaf", "shape", "dtype", "layout", "bytes", "per device")
    head = "".join(f"<th>{head}</th>" for head in heads)
    table = (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(cells)}</tbody></table>"
    )
    more = len(ordered) - 400
    note = f"<p>and {more} smaller ones</p>" if more > 0 else ""
    return (
        f"{total}{share_bar(held, labels)}<p class=note>A box is an array. Grey: every"
        " device has all of it. Colours: each device has its part.</p>"
        f'<div class="scroll rows">{table}</div>{note}'
    )


def _plan(plan: Any) -> str:
    """The page that the plan writes itself, in a frame."""
    if plan is None:
        return ""
    page = str(plan)
    if hasattr(plan, "to_html"):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "plan.html")
            plan.to_html(path)
            page = Path(path).read_text(encoding="utf-8")
    elif not page.startswith("<!DOCTYPE html>"):
        return f"<pre>{html.escape(page)}</pre>"
    return f'<iframe class="plan" srcdoc="{html.escape(page, quote=True)}"></iframe>'


def _facts(record: Mapping[str, Any]) -> str:
    tables = []
    for part in ("hyperparameters", "versions", "hardware"):
        values = record.get(part)
        if values:
            shown = {k: v for k, v in values.items() if v is not None and v != ""}
            rows = [[name, str(value)] for name, value in shown.items()]
            tables.append(f"<div><h3>{part}</h3>{_table(None, rows)}</div>")
    return f'<div class="facts">{"".join(tables)}</div>' if tables else ""


def _differences(runs: Sequence[Run]) -> str:
    rows = differences(runs)
    if len(rows) == 1:
        return "<p>Nothing that was recorded.</p>"
    return _table(rows[0], rows[1:])


def _table(heads: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)
            + "</tr>"
        )

    head = f"<thead>{line(heads, 'th')}</thead>" if heads else ""
    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _charts(charts: Iterable[str]) -> str:
    text = "".join(charts)
    return f'<div class="charts">{text}</div>' if text else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _bytes(count: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _write(
    path: str | os.PathLike[str], title: str, subtitle: str, sections: Iterable[str]
) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = _PAGE.format(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        style=_STYLE,
        script=_SCRIPT,
        body="\n".join(sections),
    )
    write_whole(path, page)
    return path


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><header><h1>{title}</h1><p>{subtitle}</p></header>
<main>{body}</main><script>{script}</script></body></html>
"""

_STYLE: Final = """
:root{--ink:#1d2129;--soft:#667080;--line:#e3e6eb;--card:#fff;--page:#f6f7f9;
--whole:#c9ced6}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#98a2b3;--line:#333a45;
--card:#1c2027;--page:#14171c;--whole:#4a5261}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
header,main{max-width:1240px;margin:auto;padding:0 20px}
header{padding-top:28px}
h1{font-size:22px;margin:0;overflow-wrap:anywhere}
header p,.note,small{color:var(--soft);margin:4px 0}
h2{font-size:16px;margin:0 0 12px}h3{font-size:13px;color:var(--soft);margin:0 0 6px}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:16px;margin:16px 0}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:10px 16px;min-width:120px}
.tiles span,.tiles small{display:block;color:var(--soft);font-size:12px}
.tiles b{font-size:20px;font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(360px,1fr));gap:20px}
.chart{margin:0;position:relative}.chart svg{width:100%;height:auto;display:block}
figcaption{font-weight:600;font-size:13px;margin-bottom:2px}
.chart polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
.chart text{fill:var(--soft);font-size:10.5px}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.cursor{stroke:var(--soft);stroke-dasharray:3 3;pointer-events:none}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px;color:var(--soft)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;
margin-right:5px}
.legend b{color:var(--ink)}
.tip{position:absolute;top:22px;right:14px;background:var(--card);
border:1px solid var(--line);border-radius:6px;padding:4px 8px;font-size:12px;
display:none;pointer-events:none;white-space:pre}
.bar{display:flex;height:22px;border-radius:5px;overflow:hidden;margin:6px 0;
background:var(--line)}
.bar+.legend{margin-bottom:14px}
.scroll{overflow-x:auto;max-height:480px;overflow-y:auto}
table{border-collapse:collapse;font-size:12.5px;width:100%}
th,td{text-align:left;padding:4px 10px;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:anywhere}
th{color:var(--soft);font-weight:600;position:sticky;top:0;background:var(--card)}
.rows td,.rows th{white-space:nowrap}
.facts{display:grid;grid-template-columns:2fr 1fr 1fr;gap:24px}
.facts .scroll{max-height:none}
.facts td:first-child{white-space:nowrap;color:var(--soft)}
@media (max-width:800px){.facts{grid-template-columns:1fr}
.charts{grid-template-columns:1fr}}
.box{display:block;border-radius:3px}.box rect{stroke:var(--card);stroke-width:1}
.plan{width:100%;height:900px;border:1px solid var(--line);border-radius:6px}
"""

_SCRIPT: Final = """
for (const chart of document.querySelectorAll(".chart")) {
  const curves = JSON.parse(chart.dataset.curves);
  const [low, high, left, right] = JSON.parse(chart.dataset.x);
  const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip");
  const cursor = chart.querySelector(".cursor");
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const x = low + (place - left) / (right - left) * (high - low);
    const lines = [];
    let nearest = null;
    for (const [label, points] of curves) {
      let best = points[0];
      for (const p of points)
        if (Math.abs(p[0] - x) < Math.abs(best[0] - x)) best = p;
      if (nearest === null || Math.abs(best[0] - x) < Math.abs(nearest - x))
        nearest = best[0];
      lines.push(label + ": " + Number(best[1].toPrecision(5)));
    }
    tip.textContent = Number(nearest.toPrecision(7)) + "\\n" + lines.join("\\n");
    tip.style.display = "block";
    const at = left + (nearest - low) / (high - low) * (right - left);
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at);
  });
  svg.addEventListener("mouseleave", () => {
    tip.style.display = "none";
    cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9);
  });
}
document.documentElement.dataset.ready = "yes";
"""
