"""The name that the library is installed by, which differs from its import name."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

import jaxdp
from jaxdp.basics import environment

ROOT = Path(__file__).parents[1]
WHERE = "jaxdp", "docs", "examples", "benchmarks", "tests"
TEXTS = {".py", ".md", ".yaml", ".yml", ".cfg", ".toml", ".sh", ".sbatch", ".ipynb"}


def test_nothing_installs_the_library_by_the_name_of_another():
    """On the package index `jaxdp` is somebody else's."""
    found = re.compile(r"pip install[^#\n]*\bjaxdp(?!-trainer)\b|['\"]jaxdp\[")
    files = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "setup.cfg",
        ROOT / "Makefile",
    ]
    files += [f for d in WHERE for f in (ROOT / d).rglob("*") if f.suffix in TEXTS]
    assert len(files) > 300
    allowed = {ROOT / "docs" / "install.md", Path(__file__)}  # which warn of it
    wrong = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in {*files} - allowed
        for line in file.read_text().splitlines()
        if found.search(line)
    ]
    assert not wrong


def test_the_other_library_is_warned_of(monkeypatch):
    other = {"Author": "Somebody else", "Version": "0.1"}
    monkeypatch.setattr(importlib.metadata, "metadata", {"jaxdp": other}.get)
    with pytest.warns(UserWarning, match="`jaxdp` 0.1 .* `pip uninstall jaxdp`"):
        environment.warn_of_other_jaxdp()


def test_versions_have_the_library_by_its_import_name():
    try:
        expected = importlib.metadata.version(environment.DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the library is not installed, only on the path")
    assert environment.get_versions()["jaxdp"] == expected


def test_the_readme_and_the_metadata_have_the_version_of_the_package():
    text = (ROOT / "README.md").read_text()
    assert f"This is version {jaxdp.__version__}." in text
    assert "version = attr: jaxdp.__version__" in (ROOT / "setup.cfg").read_text()


@pytest.mark.parametrize("address", [(), ("https://example.org/a/b",)])
def test_links_of_the_readme_hold_on_a_package_index(address):
    path = ROOT / "docs" / "readme_of_package.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = (ROOT / "README.md").read_text()
    text = script.make_absolute(before, *address)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(link.startswith("https://") for link in links)
    if address:
        assert len(links) == len(re.findall(r"\]\(", before))
        assert "](https://example.org/a/b/raw/main/docs/images/" in text
        assert "](https://example.org/a/b/blob/main/docs/strategies.md)" in text
