"""Curves that grow while a run goes."""

import sys
import time
import types

import numpy as np
import pytest
from toys import IN_FLIGHT as LAG
from toys import On, Recorder, batches, linear_trainer

from jaxdp.callbacks import LivePlot, NanGuard

Figure = pytest.importorskip("matplotlib.figure").Figure


@pytest.fixture
def drawn(monkeypatch):
    """Every picture that is saved: the points of curves, by chart."""
    pictures, savefig = [], Figure.savefig

    def saved(figure, *arguments, **options):
        charts = {}
        for axes in figure.axes:
            charts[axes.get_ylabel()] = [
                list(zip(*line.get_data(), strict=True))
                for line in axes.lines
                if line.get_label() != "steps, smoothed"
            ]
        pictures.append(charts)
        return savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return pictures


def test_the_live_plot_ends_with_all_steps_and_epochs(tmp_path, drawn):
    path = tmp_path / "new" / "live.png"
    losses = Recorder()
    trainer = linear_trainer(LivePlot(path), losses, log_every_n_steps=1)
    history = trainer.fit(batches(*[8] * 5), batches(8), max_epochs=3)
    loss = drawn[-1]["loss"]
    steps, training, validation = loss
    seen = dict(enumerate(losses.losses, 1))
    assert dict(steps) == pytest.approx(seen, rel=1e-6)
    assert training == list(zip([5, 10, 15], history["loss"], strict=True))
    assert validation == list(zip([5, 10, 15], history["val_loss"], strict=True))
    assert list(drawn[-1]) == ["loss", "accuracy"]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["live.png"]


def test_the_live_plot_draws_every_few_seconds_and_reads_late(
    tmp_path, drawn, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def tick(trainer, batch, batch_idx):
        now[0] += 1.0

    plot = LivePlot(tmp_path / "a.png", every_n_seconds=10.0)
    for _ in range(2):  # the second run has its steps alone
        hooks = On(on_train_batch_start=tick), plot
        linear_trainer(*hooks, log_every_n_steps=1).fit(batches(*[8] * 35))
        counts = [len(picture["loss"][0]) for picture in drawn]
        assert counts == [11 - LAG, 22 - LAG, 33 - LAG, 35]
        drawn.clear()


def test_the_live_plot_is_drawn_after_an_exception(tmp_path, drawn):
    plot = LivePlot(tmp_path / "a.png")
    trainer = linear_trainer(NanGuard(), plot, log_every_n_steps=1)
    data = batches(*[8] * 12)
    data[1][0][:] = np.nan
    with pytest.raises(FloatingPointError):
        trainer.fit(data)
    assert [step for step, _ in drawn[-1]["loss"][0]] == [1, *range(3, 10)]


def test_the_live_plot_updates_one_picture_in_a_notebook(tmp_path, monkeypatch):
    shown = []

    def display(image, display_id):
        shown.append(("display", image))
        return types.SimpleNamespace(update=lambda png: shown.append(("update", png)))

    notebook = types.SimpleNamespace(kernel=None)
    for name, attributes in {
        "IPython": {"get_ipython": lambda: notebook},
        "IPython.core.display": {"Image": lambda data, format: data},
        "IPython.display": {"display": display},
    }.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**attributes))
    trainer = linear_trainer(LivePlot(tmp_path / "a.png", every_n_seconds=0.0))
    trainer.fit(batches(8, 8), max_epochs=2)
    assert [kind for kind, _ in shown] == ["display", *["update"] * (len(shown) - 1)]
    assert len(shown) > 1 and shown[-1][1].startswith(b"\x89PNG")
