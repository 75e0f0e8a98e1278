"""A `Plan` as a page for a browser: one file, its style inside, nothing is loaded."""

import string
from collections.abc import Sequence
from html import escape
from typing import Any, Final

from .text import Section, headline, leaves_section, sections

SUFFIX: Final = ".plan.html"
"""Of the page that `CSVLogger` writes beside its table."""

SCROLLS: Final = """
section{overflow-x:auto;background:
linear-gradient(to right,Canvas 40%,transparent) 0/2em 100% local no-repeat,
linear-gradient(to left,Canvas 40%,transparent) 100%/2em 100% local no-repeat,
linear-gradient(to right,#888a,transparent) 0/.6em 100% scroll no-repeat,
linear-gradient(to left,#888a,transparent) 100%/.6em 100% scroll no-repeat}
"""
"""Style: what is too wide scrolls, with a shadow at the side where there is more."""

_PAGE: Final = string.Template(f"""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>
:root{{color-scheme:light dark}}
body{{font:15px/1.5 system-ui,sans-serif;
max-width:960px;margin:2em auto;padding:0 1.2em}}
h2{{font-size:1.15em;margin-top:2em;border-bottom:1px solid #8886}}{SCROLLS}\
table{{border-collapse:collapse;font-size:.87em}}
th,td{{text-align:left;padding:.22em 1em .22em 0;border-bottom:1px solid #8884;
font-variant-numeric:tabular-nums;vertical-align:top}}
td:not(:last-child){{white-space:nowrap}}
</style></head><body>
<h1>$title</h1>
<p>$headline.</p>
$sections
</body></html>
""")


def page(plan: Any) -> str:
    """The report as HTML, and a table of every leaf."""
    found = [*sections(plan), leaves_section(plan.leaves)]
    return _PAGE.substitute(
        title=escape(f"Plan for {plan.device}"),
        headline=escape(headline(plan)),
        sections="\n".join(map(_section, found)),
    )


def _section(section: Section) -> str:
    body = [_row(section.header, "th")] if section.header else []
    body += [_row(row, "td") for row in section.rows]
    table = "\n".join(["<table>", *body, "</table>"]) if body else ""
    lines = "".join(f"<p>{escape(line)}</p>" for line in section.lines)
    return f"<section><h2>{escape(section.title)}</h2>\n{table}{lines}</section>"


def _row(values: Sequence[str], tag: str) -> str:
    cells = "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values)
    return f"<tr>{cells}</tr>"
