"""Draws docs/images/packages.svg: the packages of jaxdp, from their imports.

    python docs/draw_packages.py

`tests/test_docs.py` fails where the picture is not that of the code any more.
"""

import ast
import html
import pathlib
import textwrap

ROOT = pathlib.Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "packages.svg"
WIDTH, MARGIN, LINE, CHARACTER = 1000, 10, 15, 6.3


def layers() -> list[list[str]]:
    """The lines of `LAYERS` in tests/test_imports.py, topmost first."""
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            lines = ast.literal_eval(node.value).strip().splitlines()
            return [line.split() for line in lines if "__main__" not in line]
    raise LookupError("tests/test_imports.py has no LAYERS")


def modules(package: str) -> list[str]:
    """The modules of a package, by name; none for a package that is one file."""
    inside = sorted((ROOT / "jaxdp" / package).glob("[!_]*"))
    return [path.stem for path in inside]


def picture() -> str:
    """The SVG: a row for each line of packages, which imports from the rows below."""
    parts, y = [], MARGIN
    for packages in layers():
        weights = [max(1.0, len(modules(package)) ** 0.5) for package in packages]
        free = WIDTH - MARGIN * (len(packages) + 1)
        widths = [free * weight / sum(weights) for weight in weights]
        texts = [
            textwrap.wrap(
                ", ".join(modules(package)), max(12, int((width - 16) / CHARACTER))
            )
            for package, width in zip(packages, widths, strict=True)
        ]
        height = 26 + LINE * max(map(len, texts))

        x = float(MARGIN)
        for package, width, lines in zip(packages, widths, texts, strict=True):
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}"'
                ' rx="5" fill="#eef2fb" stroke="#5b6fae"/>'
            )
            parts.append(
                f'<text x="{x + 8:.0f}" y="{y + 17}" font-weight="bold">'
                f"{html.escape(package)}</text>"
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
