"""Curves as pictures: what is drawn of them, and that any can be."""

import math

import numpy as np
import pytest

from jaxdp.extras.figures import Curve, draw, metric_curves
from jaxdp.extras.reports.runs import to_svg


def test_points_that_are_not_finite_are_left_out():
    def lines(points):
        (axes,) = draw({"a": [Curve("a", points, "C0")]}, "x").axes
        return [line.get_xydata().tolist() for line in axes.lines]

    points = [(0, math.nan), (1, 2.0), (2, math.inf), (3, 1.0)]
    assert lines(points) == [[[1, 2], [3, 1]]]
    assert lines(points[:1]) == []


@pytest.mark.parametrize("values", [
    [],
    [0.0, 0.0],
    [math.nan, 1.0, math.inf],
    [-5.0, 1e-30, 3e8],
    [1e-320, 1.0],
    [1e-38, 3e38],
    np.random.default_rng(0).normal(size=100_000),
], ids=len)  # fmt: skip
def test_any_numbers_can_be_drawn_and_long_curves_make_no_long_pages(values):
    curves = metric_curves(list(enumerate(values)), [], list(enumerate(values)))
    svg = to_svg(draw({"a": curves}, "x"))
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")
    assert len(svg) < 1_500_000


def test_texts_are_drawn_as_they_are():
    name, label = "$a_b", "_x $y$ <b>"
    svg = to_svg(draw({name: [Curve(label, [(0, 1), (1, 2)], "C0")]}, "x"))
    assert ">$a b<" in svg and "_x $y$ &lt;b&gt;<" in svg
