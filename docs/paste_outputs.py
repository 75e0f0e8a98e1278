"""Runs the code of pages, and pastes in what it prints and the pictures that it saves.

    python docs/paste_outputs.py getting_started [index ...]

A block of code (```python) whose output is shown has a fence without a language after
it, at once or after a line that ends in a colon. A line `...` in that fence stands for
lines that are left out. Pictures go to docs/images/, and `getting_started` becomes a
notebook, too. `tests/test_docs.py` compares the pages with what is printed.
"""

import base64
import contextlib
import io
import json
import pathlib
import re
import shutil
import sys
import tempfile

import jax

DOCS = pathlib.Path(__file__).parent
_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:(?P<gap>\n(?:\S[^\n]*:\n\n)?)```\n(?P<shown>.*?)^```\n)?",
    re.M | re.S,
)

_SLOWNESS = re.compile(r"^jaxdp: .*(compiling|was compiled in) .*\n", re.M)
"""Lines that only a slow machine prints."""


def run_page(text, name):
    """Yields for each block of code what the page shows after it (or None), and what
    the block printed, on the standard output and error streams."""
    namespace = {"__name__": "docs"}
    for block in _BLOCK.finditer(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            exec(compile(block["code"], name, "exec"), namespace)
        text = printed.getvalue().replace(f"{pathlib.Path.cwd()}/", "")
        yield block["shown"], _SLOWNESS.sub("", text)


def shorten(printed, shown):
    """Returns `printed` with as many lines left out as `shown` leaves out by `...`."""
    lines = [line.rstrip() for line in printed.splitlines()]
    if "..." in shown.splitlines():
        at = shown.splitlines().index("...")
        tail = len(shown.splitlines()) - at - 1
        lines = [*lines[:at], "...", *lines[len(lines) - tail :]]
    return "".join(f"{line}\n" for line in lines)


def paste(page):
    """Runs a page in an empty folder, and writes what it prints into its fences."""
    text = page.read_text()
    outputs = iter(list(run_page(text, page.name)))

    def fill(block):
        shown, printed = next(outputs)
        if shown is None:
            return block[0]
        output = shorten(printed, shown)
        return f"```python\n{block['code']}```\n{block['gap']}```\n{output}```\n"

    page.write_text(_BLOCK.sub(fill, text))


def make_notebook(text):
    """Returns a page as a Jupyter notebook, JSON: its blocks of code are the cells.

    A picture that a block draws is its output, instead of a picture in the text."""
    cells, end = [], 0
    drawn = re.findall(r"^history\.plot\(\"(\w+\.png)\"\)$", text, re.M)

    def add_text(part):
        for name in drawn:
            part = re.sub(rf"^!\[.*\]\(images/{name}\)$", "", part, flags=re.M)
        part = re.sub(r"\]\((?!\w+:|#)", "](../docs/", part).strip()
        if part:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": part})

    for block in _BLOCK.finditer(text):
        add_text(text[end : block.start()])
        outputs = [
            {
                "output_type": "display_data",
                "metadata": {},
                "data": {"image/png": _read_picture(name)},
            }
            for name in drawn
            if f'"{name}"' in block["code"]
        ]
        if block["shown"]:
            printed = {"output_type": "stream", "name": "stdout"}
            outputs.append(printed | {"text": block["shown"]})
        cells.append(
            {
                "cell_type": "code",
                "execution_count": None,
                "metadata": {},
                "outputs": outputs,
                "source": block["code"].strip(),
            }
        )
        end = block.end()
    add_text(text[end:])
    cells = [{"id": f"cell-{i}", **cell} for i, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}}
    notebook |= {"nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1) + "\n"


def _read_picture(name):
    return base64.b64encode((DOCS / "images" / name).read_bytes()).decode()


NOTEBOOK = DOCS.parent / "examples" / "getting_started.ipynb"

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            paste(DOCS / f"{name}.md")
            for picture in pathlib.Path().glob("*.png"):
                shutil.copy(picture, DOCS / "images")
    NOTEBOOK.write_text(make_notebook((DOCS / "getting_started.md").read_text()))
