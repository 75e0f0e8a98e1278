"""Draws docs/images/rooms.svg: the rooms of the package, from its own imports.

    python docs/draw_rooms.py

`tests/test_docs.py` fails where the picture is not that of the code any more.
"""

import ast
import html
import pathlib
import textwrap

ROOT = pathlib.Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
WIDTH, MARGIN, LINE, CHARACTER = 1000, 10, 15, 6.3


def layers() -> list[list[str]]:
    """The lines of `ROOMS` in tests/test_imports.py, topmost first."""
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS":
            lines = ast.literal_eval(node.value).strip().splitlines()
            return [line.split() for line in lines if "__main__" not in line]
    raise LookupError("tests/test_imports.py has no ROOMS")


def modules(room: str) -> list[str]:
    """The modules of a room, by name; none for a room that is one file."""
    inside = sorted((ROOT / "jaxdp" / room).glob("[!_]*"))
    return [path.stem for path in inside]


def picture() -> str:
    """The SVG: a row for each line of rooms, which imports from the rows below it."""
    parts, y = [], MARGIN
    for rooms in layers():
        weights = [max(1.0, len(modules(room)) ** 0.5) for room in rooms]
        free = WIDTH - MARGIN * (len(rooms) + 1)
        widths = [free * weight / sum(weights) for weight in weights]
        texts = [
            textwrap.wrap(
                ", ".join(modules(room)), max(12, int((width - 16) / CHARACTER))
            )
            for room, width in zip(rooms, widths, strict=True)
        ]
        height = 26 + LINE * max(map(len, texts))

        x = float(MARGIN)
        for room, width, lines in zip(rooms, widths, texts, strict=True):
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}"'
                ' rx="5" fill="#eef2fb" stroke="#5b6fae"/>'
            )
            parts.append(
                f'<text x="{x + 8:.0f}" y="{y + 17}" font-weight="bold">'
                f"{html.escape(room)}</text>"
            )
            parts += [
                f'<text x="{x + 8:.0f}" y="{y + 17 + LINE * number}" font-size="11">'
                f"{html.escape(line)}</text>"
                for number, line in enumerate(lines, 1)
            ]
            x += width + MARGIN
        y += height + MARGIN

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}"'
        ' font-family="sans-serif" font-size="13" fill="#1c2333">\n'
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
