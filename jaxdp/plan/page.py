"""A `Plan` as a page for a browser: one file, its style inside, nothing is loaded."""

import html
import string
from collections.abc import Iterable, Sequence
from typing import Any, Final

from .text import (
    Section,
    headline,
    in_bytes,
    in_seconds,
    in_short,
    leaves_section,
    operations_of,
    sections,
)

SUFFIX: Final = ".plan.html"
"""Of the page that `CSVLogger` writes beside its table."""

_PAGE: Final = string.Template("""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
:root{color-scheme:light dark;--text:#222;--page:#fff;--soft:#667;--line:#ddd;
--box:#f4f6f8;--bar:#3b6fb6}
@media (prefers-color-scheme:dark){:root{--text:#e6e9ee;--page:#14171c;--soft:#98a2b3;
--line:#333a45;--box:#1c2027;--bar:#6f9fe0}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);
margin:0}
main{max-width:960px;margin:2em auto;padding:0 1.2em}
h1{font-size:1.6em;margin-bottom:.2em}
h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid var(--line)}
.facts{display:flex;flex-wrap:wrap;gap:1em;margin:1.2em 0}
.facts div{flex:1 1 10em;background:var(--box);border-radius:6px;padding:.7em 1em}
.facts b{display:block;font-size:1.25em}
.facts span,th{color:var(--soft);font-size:.9em}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.87em}
th,td{text-align:left;padding:.22em 1em .22em 0;border-bottom:1px solid var(--line);
font-variant-numeric:tabular-nums;vertical-align:top}
.bar{width:8em}
.bar div{height:.8em;margin-top:.3em;min-width:1px;background:var(--bar)}
</style></head><body><main>
<h1>$title</h1>
<p>$headline.</p>
<div class="facts">$facts</div>
$sections
</main></body></html>
""")


def page(plan: Any) -> str:
    """The report as HTML."""
    facts = {
        "peak memory per device": in_bytes(plan.memory.peak),
        "sent per device and step": in_bytes(plan.wire_bytes),
    }
    for kind, count in operations_of(plan).items():
        facts[f"{kind} per step"] = f"{in_short(count)}FLOP"
    if plan.estimate is not None:
        worst = in_seconds(plan.estimate.worst)
        facts["a step, at the hardware's peaks"] = worst

    found = [*sections(plan), leaves_section(plan.leaves)]
    return _PAGE.substitute(
        title=_escaped(f"Plan for {plan.device}"),
        headline=_escaped(headline(plan)),
        facts="".join(
            f"<div><b>{_escaped(value)}</b><span>{_escaped(caption)}</span></div>"
            for caption, value in facts.items()
        ),
        sections="\n".join(map(_section, found)),
    )


def _section(section: Section) -> str:
    lines = "".join(f"<p>{_escaped(line)}</p>" for line in section.lines)
    table = _table(section) if section.rows else ""
    return f"<h2>{_escaped(section.title)}</h2>\n{table}{lines}"


def _table(section: Section) -> str:
    """The rows of a section, with a bar before each if they are shares of a whole."""
    shares: list[float | None] = [None] * len(section.rows)
    shares[: len(section.shares)] = section.shares
    rows = [
        (_bar(share) if section.shares else "") + _cells(row, "td")
        for row, share in zip(section.rows, shares, strict=True)
    ]
    header = "<th></th>" * bool(section.shares) + _cells(section.header, "th")
    lines = [header] * bool(section.header) + rows
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n{body}\n</table></div>\n'


def _bar(share: float | None) -> str:
    bar = "" if share is None else f'<div style="width:{share:.2%}"></div>'
    return f'<td class="bar">{bar}</td>'


def _cells(values: Iterable[str] | Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{_escaped(value)}</{tag}>" for value in values)


def _escaped(value: str) -> str:
    return html.escape(value)
