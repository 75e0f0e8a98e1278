"""The code in the documentation runs as it stands."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# Fragments that need a run of the reader's are marked "py".
PAGES = [p for p in sorted(DOCS.glob("*.md")) if "```python" in p.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert blocks
    namespace = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), namespace)
