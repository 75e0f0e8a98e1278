"""The code in the documentation runs as it stands."""

import ast
import configparser
import importlib.util
import os
import pathlib
import pydoc
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp.extras import cli

DOCS = pathlib.Path(__file__).parents[1] / "docs"
LONG = [DOCS / "recipes" / f"{name}.md" for name in ("index", "examples", "llama")]
"""Pages of that folder that are no scripts of forty lines."""
RECIPES = sorted(set(DOCS.glob("recipes/*.md")) - set(LONG))
# What can't run here is marked "py", and a comment above it says why.
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("reference/*.md"), *LONG])
PAGES = [p for p in PAGES if "```python" in p.read_text()]
PAGES.append(DOCS.parent / "README.md")


def _name(page):
    return page.relative_to(DOCS.parent).as_posix()


@pytest.mark.slow_cases(
    "strategies.md",
    "own_strategy.md",
    "watching.md",
    "plan.md",
    "reproducibility.md",
    "checkpoints.md",
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    for package in ("torch", "sklearn"):
        if re.search(rf"^(import|from)\b.*\b{package}\b", text, re.M):
            pytest.importorskip(package)
    for shown, printed in _script("paste_outputs").run_page(text, page.name):
        if shown is not None:
            assert _agree(shown, printed), (
                f"{page.name} shows:\n{shown}\nnow:\n{printed}"
            )


def test_the_notebook_is_the_page():
    pasting = _script("paste_outputs")
    page = (DOCS / "getting_started.md").read_text()
    assert pasting.make_notebook(page) == pasting.NOTEBOOK.read_text(), (
        "run python docs/paste_outputs.py"
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_recipe_runs_as_a_script_and_draws_its_picture(page, tmp_path):
    draw_recipes = _script("draw_recipes")
    code = draw_recipes.code_of(page)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 40
    for package in re.findall(r"^(?:import|from) (\w+)", code, re.M):
        pytest.importorskip(package)

    script = tmp_path / f"{page.stem}.py"
    script.write_text(code)
    own = {"XLA_FLAGS": "", "MPLBACKEND": "agg", "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for picture in re.findall(r"\]\((\S+\.png)\)", page.read_text()):
        assert (page.parent / picture).is_file()
        assert (tmp_path / pathlib.Path(picture).name).is_file()


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.glob("*.md")), *RECIPES, *LONG[1:]], ids=_name
)
def test_each_page_says_where_to_go_next(page):
    assert "Where to go next" in page.read_text()


def test_the_index_of_recipes_names_each():
    text = (DOCS / "recipes" / "index.md").read_text()
    named = sorted(re.findall(r"\((\w+)\.md\)", text))
    assert named == sorted(p.stem for p in [*RECIPES, *LONG[1:]])


def test_the_reference_names_all_that_is_public():
    pages = [path.read_text() for path in DOCS.glob("reference/*.md")]
    listed = {
        n for page in pages for n in re.findall(r"^\| \[`([\w.]+)`\]", page, re.M)
    }
    listed |= {
        "callbacks",
        "strategies",
        "distributed",
        "finders",
    }  # pages of their own
    public = [jaxdp, jaxdp.callbacks, jaxdp.strategies]
    assert {name for module in public for name in module.__all__} <= listed


@pytest.mark.parametrize("page", sorted(DOCS.glob("reference/*.md")), ids=_name)
def test_each_entry_of_the_reference_exists(page):
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.M):
        assert pydoc.locate(name) is not None, name


def _script(name):
    """A module of the folder of the documentation."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def _agree(shown, printed):
    """Returns True if they are the same, up to the lines that `...` leaves out.

    Times are not compared. Temporary memory, and with it the peak, is for the CPU's
    kind; the values of an epoch may differ in the third digit, as sums are made in
    another order; of another jax no number need be the same.
    """
    shown, printed = (
        shown.splitlines(),
        _script("paste_outputs").shorten(printed, shown),
    )
    printed = printed.splitlines()
    return len(shown) == len(printed) and all(map(_lines_agree, shown, printed))


def _lines_agree(shown, printed):
    is_epoch = re.match(r"epoch \d", shown)
    if is_epoch:
        shown, printed = (re.sub(_SPEED, "", line) for line in (shown, printed))
    is_rough = shown.lstrip().startswith(("temporary", "peak"))
    if is_epoch or is_rough or not jax.__version__.startswith("0.10."):
        a, b = (re.findall(_NUMBER, line) for line in (shown, printed))
        if len(a) != len(b) or is_epoch and not _are_near(a, b):
            return False
        shown, printed = (re.sub(_NUMBER, "#", line) for line in (shown, printed))
    return shown.split() == printed.split()


def _are_near(a, b):
    return np.allclose([*map(float, a)], [*map(float, b)], rtol=0.05, atol=0.02)


_NUMBER = r"\d(?:[\d,]*\d)?(?:\.\d+)?"
_SPEED = rf"{_NUMBER} (?:k |M )?(?:[mu]?s|min|\w+/s)\b"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=_name)
def test_a_code_block_that_does_not_run_says_why(page):
    text = page.read_text()
    said = re.findall(r"^<!-- not run here: [^>]+ -->\n```py$", text, re.M)
    assert len(said) == len(re.findall(r"^```py$", text, re.M))


TEXTS = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_commands_of_a_page_are_there(page, monkeypatch):
    monkeypatch.chdir(DOCS.parent)
    text = page.read_text()
    for command in re.findall(r"python -m jaxdp ([a-z]+ [^\n`#|)]+)", text):
        options, others = cli._make_parser().parse_known_args(command.split())
        assert options.command and (others == [] or command.startswith("plan"))
    for script in re.findall(r"(?:examples|benchmarks)/[\w/]+\.py", text):
        assert pathlib.Path(script).is_file()
    for module in re.findall(r"python -m (benchmarks[\w.]*\w)", text):
        assert importlib.util.find_spec(module)
    targets = re.findall(r"^([\w-]+):", pathlib.Path("Makefile").read_text(), re.M)
    for target in re.findall(r"^    make ([\w-]+)|`make ([\w-]+)", text, re.M):
        assert "".join(target) in targets


def test_the_lowest_versions_that_are_tried_are_those_of_setup_cfg():
    config = configparser.ConfigParser()
    config.read(DOCS.parent / "setup.cfg")
    allowed = config["options"]["install_requires"].replace(">=", "==").split()
    tried = (DOCS.parent / "tests" / "lowest.txt").read_text().splitlines()
    assert [line for line in tried if not line.startswith("#")] == allowed


def _anchors(page):
    """Returns the names of a page's headings in links, as MkDocs and GitHub have it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    found = {re.sub(r"[^\w\- ]", "", t).strip().lower() for t in plain}
    for name in re.findall(r"^::: (\S+)", text, re.M):  # of the reference
        there = pydoc.locate(name)
        names = {*vars(there), *getattr(there, "__all__", ())}
        found |= {name, *(f"{name}.{each}" for each in names)}
    return {title.replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", TEXTS, ids=_name)
def test_links_of_a_page_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), link
        assert there.is_relative_to(DOCS) or page.name == "README.md", link  # the site
        assert not anchor or anchor in _anchors(there), link


def test_the_readme_is_read_in_three_minutes():
    assert len((DOCS.parent / "README.md").read_text().split()) <= 600


def test_the_picture_of_the_packages_is_that_of_the_code():
    draw_packages = _script("draw_packages")
    assert draw_packages.picture() == draw_packages.PICTURE.read_text(), (
        "the packages have changed: run python docs/draw_packages.py"
    )


def test_the_modules_that_the_map_names_are_there():
    text = (DOCS / "inside.md").read_text() + (
        DOCS.parent / "CONTRIBUTING.md"
    ).read_text()
    named = re.findall(r"`(?:jaxdp/)?([a-z_]+/[a-z_]+\.py|[a-z_]+/)`", text)
    assert len(named) > 10
    for name in named:
        there = DOCS.parent / "jaxdp" / name, DOCS.parent / name
        assert any(path.exists() for path in there), name


def test_the_names_that_the_map_answers_with_are_there():
    _, _, text = (DOCS / "inside.md").read_text().partition("## Where is ...?")
    rows = re.findall(r"^\| .* \| (`.*) \|$", text.partition("\n## ")[0], re.M)
    assert len(rows) > 10
    for place in "; ".join(rows).split("; "):
        file, *names = re.findall(r"`([^`]+)`", place)
        module = "jaxdp." + file.removesuffix(".py").replace("/", ".")
        for name in names:
            assert pydoc.locate(f"{module}.{name}") is not None, place


def test_messages_that_troubleshooting_names_are_those_of_the_code():
    sources = [path.read_text() for path in (DOCS.parent / "jaxdp").rglob("*.py")]
    texts = [
        re.sub(r"\{[^{}]*\}+", "...", " ".join(ast.unparse(each).split()))
        for source in sources
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.JoinedStr | ast.Constant)
    ]
    page = " ".join((DOCS / "troubleshooting.md").read_text().split())
    named = re.findall(r'\*\*"(.+?)"\*\*', page)
    assert len(named) > 5
    for message in named:
        parts = ".*".join(map(re.escape, message.split("...")))
        assert any(re.search(parts, text) for text in texts), message
