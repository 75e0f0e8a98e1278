"""The code in the documentation runs as it stands."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# What can't run here is marked "py", and a comment above it says why.
PAGES = [p for p in sorted(DOCS.glob("*.md")) if "```python" in p.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks
    if re.search(r"^(import|from)\b.*\btorch\b", "\n".join(blocks), re.M):
        pytest.importorskip("torch")
    namespace = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), namespace)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_code_block_that_does_not_run_says_why(page):
    text = page.read_text()
    said = re.findall(r"^<!-- not run here: [^>]+ -->\n```py$", text, re.M)
    assert len(said) == len(re.findall(r"^```py$", text, re.M))
