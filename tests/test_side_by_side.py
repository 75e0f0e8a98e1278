"""Trainings of examples/side_by_side: both ways agree, and the page has their lines."""

import importlib
import re

import numpy as np
import pytest

from benchmarks import side_by_side

FEW = {
    "mnist": {"epochs": 2, "rows": 700},
    "diffusion": {"epochs": 2},
    "bert": {"epochs": 1, "rows": 500},
    "neural_ode": {"shorter": 20},
    "nanogpt": {"steps": 6, "every": 3},
    "ppo": {"rounds": 2},
}
"""Steps enough to be at odds, were anything else done."""
PAGE = side_by_side.PAGE.read_text()


@pytest.mark.slow_but("diffusion", "ppo")
@pytest.mark.parametrize("name", side_by_side.NAMES)
def test_both_ways_have_the_same_means(name, request, capsys):
    if name in ("mnist", "bert", "nanogpt"):
        request.getfixturevalue("real_data")
    if name == "bert":
        pytest.importorskip("datasets")
    if name == "mnist":
        pytest.importorskip("torch")
    module = importlib.import_module(f"side_by_side.{name}")
    by_hand, ours = (getattr(module, way)(**FEW[name]) for way in side_by_side.WAYS)
    assert set(by_hand) <= set(ours) and by_hand["loss"]
    for key, values in by_hand.items():
        np.testing.assert_allclose(ours[key], values, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", side_by_side.NAMES)
def test_the_page_has_the_lines_of_both(name):
    pytest.importorskip("datasets")
    pytest.importorskip("torch")
    title = re.escape(side_by_side.title_of(name))
    (row,) = re.findall(rf"^\| {title} .*$", PAGE, re.M)
    lines = " / ".join(
        str(side_by_side.lines_of(name, way)) for way in side_by_side.WAYS
    )
    assert f"| {lines} |" in row  # `--write` brings it up to date
