"""Curves as pictures: what is drawn of them, and that any can be."""

import math

import numpy as np
import pytest

from jaxdp.extras.figures import Curve, draw, metric_curves
from jaxdp.extras.reports.runs import to_svg


def axes_of(points):
    (axes,) = draw({"a": [Curve("a", points, "C0")]}, "x").axes
    return axes


def test_points_that_are_not_finite_are_left_out():
    axes = axes_of([(0, math.nan), (1, 2.0), (2, math.inf), (3, 1.0)])
    assert axes.lines[0].get_xydata().tolist() == [[1, 2], [3, 1]]
    assert axes_of([(0, math.nan)]).lines[:] == []


@pytest.mark.parametrize("values", [
    [],
    [1.0],
    [0.0, 0.0],
    [math.nan, 1.0, math.inf],
    [-5.0, 1e-30, 3e8],
    [1e-320, 1.0],
    [1e-38, 3e38],
])  # fmt: skip
def test_any_numbers_can_be_drawn(values):
    curves = metric_curves(list(enumerate(values)), [], list(enumerate(values)))
    svg = to_svg(draw({"a": curves}, "x"))
    assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>")


def test_texts_are_drawn_as_they_are():
    name, label = "$a_b", "_x $y$ <b>"
    svg = to_svg(draw({name: [Curve(label, [(0, 1), (1, 2)], "C0")]}, "x"))
    assert ">$a b<" in svg and "_x $y$ &lt;b&gt;<" in svg


def test_long_curves_do_not_make_long_pages():
    noise = np.random.default_rng(0).normal(size=100_000)
    svg = to_svg(draw({"a": metric_curves([], [], list(enumerate(noise)))}, "x"))
    assert len(svg) < 1_000_000
