"""A crew for each test, or for those of a module."""

import contextlib
import os
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The folder of compiled programs, which all tests share."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def crew(tmp_path, compiled):
    with crews(tmp_path, compiled) as start:
        yield start


@pytest.fixture(scope="module")
def shared_crew(tmp_path_factory, compiled):
    with crews(tmp_path_factory.mktemp("shared"), compiled) as start:
        yield start


@contextlib.contextmanager
def crews(folder, compiled):
    """A function that starts crews, which are ended when this is left."""
    pytest.importorskip("torch")
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(HERE), *map(str, HERE.parents[:2]), before]
    started = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        from crew import Crew

        def start(*arguments, **options):
            started.append(
                Crew(folder / str(len(started)), compiled, *arguments, **options)
            )
            return started[-1]

        yield start
    for each in started:
        print(each.all_outputs())  # shown if the test has failed
        each.close()
