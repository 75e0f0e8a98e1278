"""The history of a run: its mapping, its files, its pictures."""

import csv
import json
import math
import sys

import pytest

from jaxdp import History


def make_history(epochs=3):
    history = History()
    for epoch in range(epochs):
        metrics = {"loss": 2.0 * 0.8**epoch, "accuracy": 1 - 0.7**epoch}
        if epoch % 2 == 1:
            metrics["val_loss"] = 2.1 * 0.82**epoch
        history.append(epoch, metrics)
    return history


def test_a_history_maps_names_to_one_value_per_epoch():
    history = make_history(4)
    assert list(history) == list(history.keys()) == ["loss", "accuracy", "val_loss"]
    assert "val_loss" in history and "val_accuracy" not in history
    assert history.epochs == [0, 1, 2, 3]
    assert [len(history[name]) for name in history] == [4, 4, 4]
    assert [math.isnan(value) for value in history["val_loss"]] == [True, False] * 2
    assert all(isinstance(value, float) for value in history["loss"])
    assert type(history.history) is dict  # Keras's
    assert dict(history)["accuracy"] == history.history["accuracy"]
    history["loss"].clear()  # a copy
    assert len(history["loss"]) == 4


def test_wrong_names_and_paths_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history = make_history()
    with pytest.raises(KeyError, match=r"history\['acc'\].*known names: 'loss', 'acc"):
        history["acc"]
    with pytest.raises(KeyError, match="known names: none yet"):
        History()["loss"]
    with pytest.raises(ValueError, match="'loss' is the name of a metric"):
        history.plot("loss")
    assert not [*tmp_path.iterdir()]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="`pip install matplotlib`"):
        history.plot()


def test_the_same_epoch_again_overwrites():
    history = make_history()
    history.append(2, {"loss": 0.5})
    assert history.epochs == [0, 1, 2] and history["loss"][-1] == 0.5
    assert history["accuracy"][-1] == pytest.approx(0.51)


def test_csv_has_a_row_per_epoch_and_empty_cells_for_nan(tmp_path):
    path = tmp_path / "new" / "history.csv"
    make_history(2).to_csv(path)
    rows = list(csv.reader(path.read_text().splitlines()))
    assert rows[0] == ["epoch", "loss", "accuracy", "val_loss"]
    assert rows[1] == ["0", "2.0", "0.0", ""]
    assert [float(cell) for cell in rows[2]] == pytest.approx([1, 1.6, 0.3, 1.722])


def test_the_state_is_strict_json_and_is_restored_exactly():
    history, loaded = make_history(), make_history(1)
    history.append(3, {"loss": math.inf, "accuracy": 0.1 + 0.2})
    text = json.dumps(history.state_dict(), allow_nan=False)
    loaded.load_state_dict(json.loads(text))
    assert loaded.epochs == history.epochs and repr(loaded) == repr(history)
    assert loaded["loss"][-1] == math.inf and loaded["accuracy"][-1] == 0.1 + 0.2


def test_repr_shows_the_first_and_the_last_epochs():
    history = make_history(1000)
    history.append(1000, {"loss": 3.0, "val_loss": 3.0})
    title, names, *lines = repr(history).splitlines()
    assert title == "History(1001 epochs)"
    assert names.split() == ["epoch", "loss", "accuracy", "val_loss"]
    assert [line.split()[0] for line in lines] == ["0", "998", "999", "1000"]
    assert lines[-1].split() == ["1000", "3", "nan", "3"]
    assert repr(History()) == "History(no epochs yet)"
    assert repr(make_history(1)).splitlines()[0] == "History(1 epoch)"


def test_plot_draws_training_and_validation_of_a_metric_together(tmp_path):
    path = tmp_path / "deep" / "curves.png"
    figure = make_history(6).plot(path)
    loss, accuracy = figure.axes
    assert loss.get_xlabel() == accuracy.get_xlabel() == "epoch"
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy")
    curves = {line.get_label(): line.get_xydata().tolist() for line in loss.lines}
    assert list(curves) == ["training", "validation"]
    assert [x for x, _ in curves["training"]] == [0, 1, 2, 3, 4, 5]
    assert [x for x, _ in curves["validation"]] == [1, 3, 5]
    figure.draw_without_rendering()
    assert all(tick == round(tick) for tick in loss.get_xticks())
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]


def test_plot_shows_few_epochs_other_formats_and_notebooks(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    figure = make_history(1).plot(tmp_path / "curves.pdf")
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert len(figure.axes) == 2 and figure.axes[0].lines[0].get_marker() == "o"
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert History().plot().axes == []
    assert "matplotlib.pyplot" not in sys.modules
