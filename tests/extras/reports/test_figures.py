"""Curves as pictures: what is drawn of them, and that any can be."""

import math

import numpy as np
import pytest

from jaxdp.basics.figures import (
    Curve,
    _smoothed,
    draw,
    metric_curves,
    to_svg,
)
from jaxdp.basics.files import save_figure


def axes_of(points, *, is_rough=False):
    (axes,) = draw({"a": [Curve("a", points, "C0", is_rough)]}, "x").axes
    return axes


def test_curves_over_several_decades_get_a_log_axis():
    wide = [(x, 10.0**-x) for x in range(6)]
    charts = {"loss": metric_curves(wide, []), "rate": metric_curves([(0, 1)], [])}
    assert [axes.get_yscale() for axes in draw(charts, "epoch").axes] == [
        "log",
        "linear",
    ]


def test_points_that_are_not_finite_are_left_out():
    axes = axes_of([(0, math.nan), (1, 2.0), (2, math.inf), (3, 1.0)])
    assert axes.lines[0].get_xydata().tolist() == [[1, 2], [3, 1]]
    assert axes_of([(0, math.nan)]).lines[:] == []


def test_rough_curves_are_drawn_thin_with_a_smoothed_line_over_them():
    noise = [(x, (-1.0) ** x) for x in range(100)]
    thin, smooth = axes_of(noise, is_rough=True).lines
    assert thin.get_linewidth() < smooth.get_linewidth()
    assert max(abs(smooth.get_ydata())) < 0.2 < max(abs(thin.get_ydata()))


def test_smoothing_keeps_constants_and_slopes_and_calms_noise():
    assert _smoothed([3.0] * 5) == pytest.approx([3.0] * 5)
    assert len(_smoothed([1.0])) == 1
    slope = [0.5 * x for x in range(400)]
    assert _smoothed(slope)[20:-20] == pytest.approx(slope[20:-20])
    noise = [(-1.0) ** x for x in range(400)]
    assert max(abs(_smoothed(noise))) < 0.05


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1.0],
        [0.0, 0.0],
        [math.nan, 1.0, math.inf],
        [-5.0, 1e-30, 3e8],
        [1e-320, 1.0],
        [1e-38, 3e38],
    ],
)
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


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "curves.png"
    path.write_text("old")
    figure = draw({}, "x")
    monkeypatch.setattr(figure, "savefig", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_figure(figure, path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
