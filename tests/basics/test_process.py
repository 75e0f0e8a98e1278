"""What is kept on disk for later starts."""

import os

from jaxdp.basics.process import _sweep


def names(folder):
    return sorted(os.listdir(folder))


def keep(folder, name, age):
    with open(folder / name, "wb") as file:
        file.truncate(2**29)  # half of what is kept; a hole, no bytes
    os.utime(folder / name, (1e9 - age,) * 2)


def test_the_oldest_programs_go_once_a_day_where_there_are_too_many(tmp_path):
    for age, name in enumerate(("new", "older", "oldest")):
        keep(tmp_path, name, age)
    _sweep(tmp_path)
    assert names(tmp_path) == ["new", "older", "swept"]
    keep(tmp_path, "oldest", 3)
    _sweep(tmp_path)
    assert "oldest" in names(tmp_path)
    os.utime(tmp_path / "swept", (0, 0))
    _sweep(tmp_path)
    assert names(tmp_path) == ["new", "older", "swept"]
