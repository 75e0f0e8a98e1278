"""A crew for each test."""

import os
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Where programs that one test has compiled are for the others."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def crew(tmp_path, monkeypatch, compiled):
    pytest.importorskip("torch")
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(HERE), str(HERE.parents[1]), before]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    from crew import Crew

    started = []

    def start(*arguments, **options):
        started.append(
            Crew(tmp_path / str(len(started)), compiled, *arguments, **options)
        )
        return started[-1]

    yield start
    for each in started:
        print(each.all_outputs())  # shown if the test has failed
        each.close()
