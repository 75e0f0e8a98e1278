"""A crew for each test."""

import os
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def crew(tmp_path, monkeypatch):
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(HERE), str(HERE.parents[1]), before]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    from crew import Crew

    started = []

    def start(*arguments, **options):
        started.append(
            Crew(tmp_path / str(len(started)), *arguments, **options).__enter__()
        )
        return started[-1]

    yield start
    for each in started:
        each.__exit__()
