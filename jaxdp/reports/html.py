"""Pages for a browser: one file each, its style inside, nothing is loaded.

What is too wide scrolls, with a shadow at the side where there is more.
"""

import string
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

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
