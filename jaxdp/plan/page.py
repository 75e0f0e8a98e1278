"""A `Plan` as text for a terminal, as a page for a browser, and in pictures.

The page is one file: its style is inside, its pictures are SVG, nothing is loaded.
"""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

SUFFIX: Final = ".plan.html"
"""Of the page that `CSVLogger` writes beside its table."""

MOST_LEAVES: Final = 40
"""Leaves in the picture and in the text's list; the page's table has all."""

_COLORS: Final = {
    "parameters": "#3b6fb6",
    "frozen": "#8fb0d9",
    "model_state": "#5aa7a7",
    "optimizer": "#6a9e4f",
    "other": "#9a9a9a",
    "batch": "#d9a441",
    "results": "#b58ac2",
    "temporary": "#c8553d",
}
_LABELS: Final = {
    "parameters": "parameters",
    "frozen": "frozen leaves",
    "model_state": "model state",
    "optimizer": "optimizer state",
    "other": "step, key, sums",
    "batch": "batch",
    "results": "results beside the donated",
    "temporary": "temporary",
}
_GRADIENTS: Final = (
    "All gradients are {}. The compiler decides how many there are at a time, in"
    " temporary memory or where results go; they are in the peak."
)
_CAPTION: Final = {
    "exact": "exact",
    "indicative": "indicative",
    "unknown": "not known",
}


def text(plan: Any) -> str:
    """The report for a terminal."""
    memory = plan.memory
    lines = [
        f"Plan for {plan.device}: {_headline(plan)}",
        "",
        "Memory per device",
    ]
    lines += [
        f"  {_LABELS[name]:<28}{_bytes(size):>10}"
        for name, size in pieces(memory)
        if size
    ]
    lines += [
        f"  {'peak':<28}{_bytes(memory.peak):>10}",
        f"  {_GRADIENTS.format(_bytes(memory.gradients))}",
        "",
        f"Communication: a device sends {_bytes(plan.wire_bytes)} per step",
    ]
    lines += ["  " + line for line in _columns(map(_traffic, plan.traffic))]
    lines += _hosts(plan)
    lines += ["", "Lower bounds of this layout"]
    lines += [
        f"  {each.ratio:6.3f} x  {_bytes(each.found):>10} of {_bytes(each.least):>10}"
        f"  {each.what}"
        for each in plan.bounds
    ]
    lines += ["", "Donation: " + _donation(plan)]
    if plan.could_split:
        lines += [
            "",
            "Whole on every device, though it could be split: " + _saving(plan),
        ]
        lines += [
            f"  {_bytes(each.bytes_saved):>10} saved  {each.path}, axis {each.axis}"
            for each in plan.could_split[:5]
        ]
    lines += ["", *_operations(plan)]
    if plan.estimate is not None:
        lines += ["", *_estimate(plan)]
    lines += [
        "",
        _times(plan),
    ]
    for kind, notes in plan.notes.items():
        lines += [f"{_CAPTION[kind].capitalize()}:"] if notes else []
        lines += [f"  - {note}" for note in notes]
    return "\n".join(lines)


def page(plan: Any) -> str:
    """The report as HTML."""
    memory = plan.memory
    title = f"Plan for {plan.device}"
    body = [
        f"<h1>{_e(title)}</h1>",
        f"<p>{_e(_headline(plan))}. {_times(plan)}</p>",
        "<div class='facts'>",
        _fact(_bytes(memory.peak), "peak memory per device"),
        _fact(_bytes(plan.wire_bytes), "sent per device and step"),
        *(
            _fact(_si(count) + "FLOP", f"{kind} per step")
            for kind, count in _counts(plan).items()
        ),
        _fact(
            "unknown" if plan.estimate is None else _seconds(plan.estimate.worst),
            "a step, at the hardware's peaks",
        ),
        "</div>",
        "<h2>Memory per device</h2>",
        memory_svg(plan),
        _table(
            ("", "bytes"),
            [
                (_LABELS[name], f"{size:,}")
                for name, size in pieces(memory)
                if size or name == "parameters"
            ]
            + [("<b>peak</b>", f"<b>{memory.peak:,}</b>")],
            escape=False,
        ),
        f"<p>{_GRADIENTS.format(f'{memory.gradients:,} bytes')} Arguments"
        f" are {memory.arguments:,}, results {memory.results:,}, of which"
        f" {memory.overwritten:,} lie where arguments lay; the peak is arguments +"
        " results - overwritten + temporary.</p>",
        f"<h2>Communication</h2><p>A device sends {_bytes(plan.wire_bytes)} per step,"
        f" in {_counted(sum(each.count for each in plan.traffic), 'collective')}.</p>",
        _table(
            ("collective", "over", "dtype", "times", "holds", "sends", "moves"),
            [_traffic(each) for each in plan.traffic],
        ),
        *_hosts_section(plan),
        "<h2>Lower bounds of this layout</h2>",
        _table(
            ("", "least", "found", "ratio"),
            [
                (each.what, _bytes(each.least), _bytes(each.found), f"{each.ratio:.3f}")
                for each in plan.bounds
            ],
        ),
        f"<h2>Donation</h2><p>{_e(_donation(plan))}</p>",
    ]
    if plan.could_split:
        body += [
            "<h2>What could be split</h2>",
            f"<p>{_e(_saving(plan))}</p>",
            _table(
                ("leaf", "axis", "saves per device"),
                [
                    (each.path, str(each.axis), _bytes(each.bytes_saved))
                    for each in plan.could_split[:MOST_LEAVES]
                ],
            ),
        ]
    body += ["<h2>Operations</h2>", *(f"<p>{_e(x)}</p>" for x in _operations(plan))]
    if plan.estimate is not None:
        lines = "".join(f"<p>{_e(line)}</p>" for line in _estimate(plan))
        body += ["<h2>Time</h2>", lines]
    body += [
        "<h2>Layout</h2>",
        layout_svg(plan),
        _table(
            ("leaf", "", "dtype", "shape", "split", "on a device", "bytes on it", ""),
            [
                (
                    each.path,
                    each.group,
                    each.dtype,
                    _shape(each.shape),
                    each.spec,
                    _shape(each.shard),
                    f"{each.bytes_per_device:,}",
                    "overwritten" if each.overwritten else "",
                )
                for each in plan.leaves
            ],
        ),
        "<h2>How sure this is</h2>",
    ]
    for kind, notes in plan.notes.items():
        items = "".join(f"<li>{_e(note)}.</li>" for note in notes)
        body += [f"<h3>{_CAPTION[kind]}</h3><ul>{items}</ul>"] if notes else []
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{_e(title)}</title><style>{_STYLE}</style></head><body><main>"
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def _headline(plan: Any) -> str:
    batches = f" in {plan.micro_batches} batches" if plan.micro_batches > 1 else ""
    steps = f", {plan.steps} steps at a time" if plan.steps > 1 else ""
    return f"{plan.strategy}, {plan.rows} rows per step{batches}{steps}"


def _times(plan: Any) -> str:
    if plan.trace_seconds is None:
        return f"Traced and compiled in {plan.compile_seconds:.1f} s."
    return (
        f"Traced in {plan.trace_seconds:.1f} s, compiled in"
        f" {plan.compile_seconds:.1f} s."
    )


def pieces(memory: Any) -> list[tuple[str, int]]:
    """What the peak is made of, by name; alignment goes to `other`."""
    held = {
        name: getattr(memory, name)
        for name in (
            "parameters",
            "frozen",
            "model_state",
            "optimizer",
            "other",
            "batch",
        )
    }
    held["other"] += memory.arguments - sum(held.values())
    held["results"] = memory.results - memory.overwritten
    held["temporary"] = memory.temporary
    return list(held.items())


def memory_svg(plan: Any) -> str:
    """The peak as one bar."""
    width, shown = 860, [(n, max(0, s)) for n, s in pieces(plan.memory)]
    total = sum(size for _, size in shown) or 1
    parts, x = [], 0.0
    for name, size in shown:
        length = width * size / total
        if length > 0:
            tip = f"{_LABELS[name]}: {size:,} bytes"
            parts.append(
                f"<rect x='{x:.2f}' y='0' width='{length:.2f}' height='42'"
                f" fill='{_COLORS[name]}'><title>{tip}</title></rect>"
            )
        if length > _needed(name):
            parts.append(
                f"<text x='{x + 8:.2f}' y='19' class='on'>{_LABELS[name]}</text>"
                f"<text x='{x + 8:.2f}' y='35' class='on'>{_bytes(size)}</text>"
            )
        x += length
    # What is too narrow for words inside is listed below.
    keys, x = [], 0.0
    for name, size in shown:
        if 0 < width * size / total <= _needed(name):
            label = f"{_LABELS[name]} {_bytes(size)}"
            keys.append(
                f"<rect x='{x}' y='54' width='11' height='11' fill='{_COLORS[name]}'/>"
                f"<text x='{x + 16}' y='64'>{label}</text>"
            )
            x += 34 + 6.9 * len(label)
    return _svg(width, 74 if keys else 46, parts + keys, "What the peak is made of")


def _needed(name: str) -> float:
    """How wide a piece must be to have its name inside."""
    return 16 + 7.2 * max(len(_LABELS[name]), 9)


def layout_svg(plan: Any) -> str:
    """The largest leaves as boxes, each piece in the color of the devices that hold it.

    A box of one color is whole on every device. Bands across are a split of the first
    axis, bands down one of a later axis.
    """
    chosen = sorted(plan.leaves, key=lambda leaf: -leaf.bytes)[:MOST_LEAVES]
    chosen = [leaf for leaf in plan.leaves if leaf in chosen and leaf.bytes]
    largest = max((leaf.bytes for leaf in chosen), default=1)
    parts, y, group, box = [], 4, None, 300
    for leaf in chosen:
        if leaf.group != group:
            group, y = leaf.group, y + 20
            parts.append(f"<text x='0' y='{y}' class='head'>{_e(group)}</text>")
            y += 8
        length = max(14.0, box * math.sqrt(leaf.bytes / largest))
        label = leaf.path if len(leaf.path) <= 42 else "..." + leaf.path[-39:]
        parts.append(f"<text x='0' y='{y + 17}'>{_e(label)}</text>")
        parts += _box(leaf, 300, y, length, 24)
        note = (
            "whole on each" if leaf.parts == 1 else f"{leaf.spec}, {leaf.parts} parts"
        )
        note = f"{_shape(leaf.shape)} {note}"
        parts.append(f"<text x='{308 + length:.1f}' y='{y + 17}'>{_e(note)}</text>")
        y += 30
    left = sum(1 for leaf in plan.leaves if leaf.bytes) - len(chosen)
    if left:
        parts.append(f"<text x='0' y='{y + 18}'>and {left} smaller leaves</text>")
        y += 24
    return _svg(860, y + 6, parts, "How every leaf is laid out over the devices")


def _box(leaf: Any, x: float, y: float, width: float, height: float) -> list[str]:
    tip = (
        f"<title>{_e(leaf.path)} {_shape(leaf.shape)}, {_e(leaf.spec)}: a device holds"
        f" {_shape(leaf.shard)}, {leaf.bytes_per_device:,} bytes</title>"
    )
    if leaf.parts == 1:
        return [
            f"<rect x='{x}' y='{y}' width='{width:.1f}' height='{height}'"
            f" fill='#b8bec6' stroke='#666'>{tip}</rect>"
        ]
    counts = [
        max(1, whole // part)
        for whole, part in zip(leaf.shape, leaf.shard, strict=True)
    ]
    rows = counts[0]
    columns = math.prod(counts[1:])
    # More than so many bands would be thinner than can be seen.
    rows, columns = min(rows, 12), min(columns, 32)
    found = []
    for row in range(rows):
        for column in range(columns):
            hue = 360 * (row * columns + column) / (rows * columns)
            found.append(
                f"<rect x='{x + width * column / columns:.2f}'"
                f" y='{y + height * row / rows:.2f}' width='{width / columns:.2f}'"
                f" height='{height / rows:.2f}' fill='hsl({hue:.0f} 55% 58%)'>{tip}"
                "</rect>"
            )
    found.append(
        f"<rect x='{x}' y='{y}' width='{width:.1f}' height='{height}' fill='none'"
        " stroke='#666'/>"
    )
    return found


def scaling_text(scaling: Any) -> str:
    """A table."""
    header = (
        "devices",
        "rows",
        "peak/device",
        "sent/device",
        "step",
        "rows/s",
        "efficiency",
    )
    lines = [
        (
            str(row.devices),
            str(row.rows),
            _bytes(row.peak),
            _bytes(row.wire_bytes),
            "-" if row.step is None else _seconds(row.step),
            "-" if row.rows_per_second is None else _si(row.rows_per_second),
            "-" if row.efficiency is None else f"{row.efficiency:.0%}",
        )
        for row in scaling.rows
    ]
    return "\n".join(_columns([header, *lines], right=True))


def scaling_svg(scaling: Any) -> str:
    """Memory, communication and speed over the number of devices."""
    rows = scaling.rows
    panels = [
        ("peak per device, bytes", "#c8553d", [row.peak for row in rows]),
        (
            "sent per device and step, bytes",
            "#3b6fb6",
            [row.wire_bytes for row in rows],
        ),
    ]
    if all(row.rows_per_second is not None for row in rows):
        panels += [
            ("rows per second, estimated", "#6a9e4f", [r.rows_per_second for r in rows])
        ]
        panels += [("efficiency", "#8a63a8", [row.efficiency for row in rows])]
    columns = 2 if len(panels) > 1 else 1
    parts = []
    for index, (title, color, values) in enumerate(panels):
        x = (index % columns) * 430
        y = (index // columns) * 250
        parts += _panel(x, y, title, color, [row.devices for row in rows], values)
    height = 250 * math.ceil(len(panels) / columns)
    title = "The step on other numbers of devices"
    return _svg(430 * columns, height, parts, title, is_file=True)


def _panel(
    x: float,
    y: float,
    title: str,
    color: str,
    counts: Sequence[int],
    values: Sequence[float],
) -> list[str]:
    """A line over numbers of devices, which are as far apart as their logarithms."""
    left, right, top, bottom = x + 64, x + 410, y + 34, y + 206
    share = title == "efficiency"
    most = 1.0 if share else max(values) or 1.0
    grows = not share and min(values) > 0 and most / min(values) > 50
    least = min(values) if grows else 0.0
    low, high = math.log(min(counts)), math.log(max(counts))

    def place(count: int, value: float) -> tuple[float, float]:
        along = (math.log(count) - low) / (high - low) if high > low else 0.5
        if grows:
            up = math.log(value / least) / math.log(most / least)
        else:
            up = value / most
        return left + along * (right - left), bottom - up * (bottom - top)

    parts = [
        f"<text x='{x + 8}' y='{y + 18}' class='head'>{_e(title)}</text>",
        f"<path d='M{left} {top}V{bottom}H{right}' fill='none' stroke='#888'/>",
    ]
    for part in (0.0, 0.5, 1.0):
        value = least * (most / least) ** part if grows else part * most
        at = bottom - part * (bottom - top)
        label = f"{value:.0%}" if share else _si(value, 3)
        parts.append(
            f"<path d='M{left} {at}H{right}' stroke='#e2e2e2'/>"
            f"<text x='{left - 6}' y='{at + 4}' text-anchor='end'>{label}</text>"
        )
    points = [place(*pair) for pair in zip(counts, values, strict=True)]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    parts.append(
        f"<polyline points='{line}' fill='none' stroke='{color}' stroke-width='2.2'/>"
    )
    last = -math.inf
    for count, value, (px, py) in zip(counts, values, points, strict=True):
        tip = f"{count} devices: {f'{value:.1%}' if share else f'{value:,.0f}'}"
        parts.append(
            f"<circle cx='{px:.1f}' cy='{py:.1f}' r='3.4' fill='{color}'><title>{tip}"
            "</title></circle>"
        )
        if px - last > 30:
            last = px
            parts.append(
                f"<text x='{px:.1f}' y='{bottom + 17}' text-anchor='middle'>{count}"
                "</text>"
            )
    parts.append(
        f"<text x='{(left + right) / 2}' y='{bottom + 34}' text-anchor='middle'>devices"
        "</text>"
    )
    return parts


def _svg(
    width: float,
    height: float,
    parts: Iterable[str],
    title: str,
    *,
    is_file: bool = False,
) -> str:
    start = (
        "<svg xmlns='http://www.w3.org/2000/svg' style='background:#fff;color:#222'"
        if is_file
        else "<div class=wide><svg"
    )
    return (
        f"{start} viewBox='0 0 {width} {height}'"
        f" width='{width}' role='img'><title>{_e(title)}</title><style>text{{font:12px"
        " system-ui,sans-serif;fill:currentColor}.head{font-weight:600}.on{fill:#fff}"
        "</style>" + "".join(parts) + "</svg>" + ("" if is_file else "</div>")
    )


def _traffic(each: Any) -> tuple[str, ...]:
    axes = "other groups" if each.axes is None else ", ".join(each.axes) or "-"
    times = f"{each.count} x ?" if each.times is None else str(each.count * each.times)
    extras = [
        word
        for word, is_so in (
            ("between hosts", each.crosses),
            ("beside computation", each.overlapped),
            ("in a branch", each.optional),
            ("in a loop of unknown length", each.times is None),
        )
        if is_so
    ]
    return (
        each.kind,
        f"{axes} ({each.group_size})",
        each.dtype,
        f"{times} x",
        _bytes(each.operand_bytes),
        _bytes(each.wire_bytes),
        each.part + (f" ({', '.join(extras)})" if extras else ""),
    )


def _hosts_table(hosts: Any) -> list[tuple[str, str]]:
    return [
        ("rows that it loads per step", f"{hosts.rows}, {_bytes(hosts.batch_bytes)}"),
        (
            "sent to other hosts per step",
            f"{_bytes(hosts.sent_bytes)}, where a ring visits host after host",
        ),
        (
            "written per checkpoint",
            f"{_bytes(hosts.checkpoint_bytes)} of {_bytes(hosts.checkpoint_total)},"
            " before compression",
        ),
    ]


def _hosts_title(hosts: Any) -> str:
    return f"Each of {hosts.count} hosts, with {_counted(hosts.devices, 'device')}"


def _hosts(plan: Any) -> list[str]:
    if plan.hosts.count == 1:
        return []
    rows = _hosts_table(plan.hosts)
    lines = [f"  {name:<30}{value}" for name, value in rows]
    return ["", _hosts_title(plan.hosts), *lines]


def _hosts_section(plan: Any) -> list[str]:
    if plan.hosts.count == 1:
        return []
    rows = _hosts_table(plan.hosts)
    return [f"<h2>{_hosts_title(plan.hosts)}</h2>", _table(("", ""), rows)]


def _donation(plan: Any) -> str:
    state = [leaf for leaf in plan.leaves if leaf.group != "batch" and leaf.bytes]
    over = [leaf for leaf in state if leaf.overwritten]
    size = _bytes(sum(leaf.bytes_per_device for leaf in over))
    found = f"{len(over)} of {len(state)} leaves of the state are overwritten, {size}."
    if plan.not_overwritten:
        listed = ", ".join(plan.not_overwritten[:10])
        more = len(plan.not_overwritten) - 10
        listed += f" and {more} more" if more > 0 else ""
        found += f" Donated, and copied all the same: {listed}."
    elif not over:
        found += " Nothing is donated, so a step needs the memory of two states."
    return found


def _saving(plan: Any) -> str:
    total = sum(each.bytes_saved for each in plan.could_split)
    return (
        f"{len(plan.could_split)} leaves; to split them all saves {_bytes(total)} per"
        " device. ZeRO splits the optimizer state, FSDP the parameters too."
    )


_MATRIX: Final = "matrix operations"
_COMPILED: Final = "compiled operations"


def _counts(plan: Any) -> dict[str, float]:
    """Per step, on all devices together: of two kinds, which have nothing in common."""
    compiled = plan.flops_compiled
    found = {
        _MATRIX: plan.flops,
        _COMPILED: None if compiled is None else compiled * plan.num_devices,
    }
    return {kind: count for kind, count in found.items() if count is not None}


def _operations(plan: Any) -> list[str]:
    what = {
        _MATRIX: "of products and convolutions, as traced",
        _COMPILED: "of all kinds, as the compiler counts: loop bodies once",
    }
    lines = [
        f"{kind.capitalize()}: {_si(count)}FLOP per step,"
        f" {_si(count / plan.num_devices)}FLOP per device,"
        f" {_si(count / plan.rows)}FLOP per row; {what[kind]}."
        for kind, count in _counts(plan).items()
    ]
    if plan.bubble:
        lines += [f"Stages wait for {plan.bubble:.1%} of the blocks' time."]
    return lines or ["Operations: not known for this strategy and compiler."]


def _estimate(plan: Any) -> list[str]:
    found = plan.estimate
    fits = "fits" if found.fits else "does NOT fit"
    return [
        f"Time on {found.hardware} at its peaks: {_seconds(found.best)} to"
        f" {_seconds(found.worst)} per step, {_si(plan.rows / found.worst)} rows/s.",
        f"  computing {_seconds(found.compute)}, memory {_seconds(found.memory)},"
        f" communication {_seconds(found.communication)}; efficiency"
        f" {found.efficiency:.0%} or more of one device's.",
        f"  The peak {fits} into its memory.",
    ]


def _columns(rows: Iterable[Sequence[str]], right: bool = False) -> list[str]:
    rows = [tuple(row) for row in rows]
    if not rows:
        return ["nothing"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(size) if right else cell.ljust(size)
            for cell, size in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], escape: bool = True
) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}>{_e(cell) if escape else cell}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    if not body:
        return "<p>none</p>"
    return (
        f"<div class='wide'><table><thead><tr>{cells(header, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _fact(value: str, caption: str) -> str:
    return f"<div><b>{_e(value)}</b><span>{_e(caption)}</span></div>"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _e(value: str) -> str:
    return html.escape(str(value))


def _bytes(number: float) -> str:
    return _si(number) + "B" if number >= 1000 else f"{number:.0f} B"


def _seconds(number: float) -> str:
    if number >= 1:
        return f"{number:.3g} s"
    for power, unit in ((3, "ms"), (6, "us")):
        if number * 10**power >= 1:
            return f"{number * 10**power:.3g} {unit}"
    return f"{number * 1e9:.3g} ns"


def _si(number: float, digits: int = 4) -> str:
    """`12345678` as `12.35 M`: powers of 1000."""
    for power, prefix in (
        (18, "E"),
        (15, "P"),
        (12, "T"),
        (9, "G"),
        (6, "M"),
        (3, "k"),
    ):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.{digits}g} {prefix}"
    return f"{number:.{digits}g} "


_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;margin:0}
main{max-width:900px;margin:2em auto;padding:0 1.2em}
h1{font-size:1.6em;margin-bottom:.2em}
h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #ddd;padding-bottom:.2em}
h3{font-size:1em;margin:.8em 0 .1em}
ul{margin:.2em 0}
.facts{display:flex;flex-wrap:wrap;gap:1em;margin:1.2em 0}
.facts div{flex:1 1 10em;background:#f4f6f8;border-radius:6px;padding:.7em 1em}
.facts b{display:block;font-size:1.25em}
.facts span{color:#555;font-size:.87em}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.87em;margin:.6em 0}
th,td{text-align:left;padding:.22em 1em .22em 0;border-bottom:1px solid #eee;
vertical-align:top;font-variant-numeric:tabular-nums}
th{color:#555;font-weight:600}
td+td{white-space:nowrap}
svg{max-width:100%;min-width:720px;height:auto;display:block;margin:.8em 0}
@media (prefers-color-scheme:dark){body{color:#e6e9ee;background:#14171c}
h2,th,td{border-color:#333a45}.facts div{background:#1c2027}
.facts span,th{color:#98a2b3}}
"""
