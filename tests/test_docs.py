"""The code in the documentation runs as it stands."""

import pathlib
import re

import jax
import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# What can't run here is marked "py", and a comment above it says why.
PAGES = [p for p in sorted(DOCS.glob("*.md")) if "```python" in p.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks
    if re.search(r"^(import|from)\b.*\btorch\b", "\n".join(blocks), re.M):
        pytest.importorskip("torch")
    namespace = {"__name__": "docs"}
    for block in blocks:
        capsys.readouterr()
        exec(compile(block, page.name, "exec"), namespace)
        if printed := _printed_after(block, page.read_text()):
            said = capsys.readouterr().out
            assert _agree(printed, said), f"{page.name} shows:\n{printed}\nnow:\n{said}"


def _printed_after(block, text):
    """What the page shows as printed by `block`, in a fence without a language."""
    rest = text[text.index(block) + len(block) :]
    found = re.match(r"```\n\n(?:\S[^\n]*:\n\n)?```\n(.*?)^```", rest, re.M | re.S)
    return found and found[1]


def _agree(shown, said):
    """Whether they are the same, up to what `...` leaves out at the end of a sample.

    Temporary memory, and with it the peak, is for the CPU's kind; of another jax no
    number need be the same.
    """
    shown = shown.splitlines()
    count = shown.index("...") if "..." in shown else len(shown)
    same_jax = jax.__version__.startswith("0.10.")

    def comparable(lines):
        return [
            line
            if same_jax and not line.lstrip().startswith(("temporary", "peak"))
            else re.sub(r"[0-9.]+ [kM]?B", "so many bytes", line)
            for line in lines[:count]
        ]

    return comparable(shown) == comparable(said.splitlines())


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_code_block_that_does_not_run_says_why(page):
    text = page.read_text()
    said = re.findall(r"^<!-- not run here: [^>]+ -->\n```py$", text, re.M)
    assert len(said) == len(re.findall(r"^```py$", text, re.M))
