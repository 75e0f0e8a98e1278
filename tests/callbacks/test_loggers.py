"""All loggers: what they write, when, and what they leave alone."""

import json

import numpy as np
import pytest
from toys import (
    IN_FLIGHT,
    At,
    On,
    Recorder,
    batches,
    fail_with,
    linear_trainer,
    read_meta,
    read_table,
)

from jaxdp.callbacks import (
    CSVLogger,
    GradientMonitor,
    LivePlot,
    NanGuard,
    TensorBoardLogger,
)

pull = fail_with(RuntimeError("the cable was pulled"))


def test_states_are_saved_before_a_fit_as_they_were_loaded(tmp_path):
    def make():
        return linear_trainer(CSVLogger(tmp_path), NanGuard("skip"))

    trainer, again = make(), make()
    trainer.fit(batches(*[8] * 4), batches(8), max_epochs=1)
    trainer.callbacks[-1]._in_a_row = 2
    trainer.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    again.save(tmp_path / "again")
    saved = read_meta(tmp_path / "saved")["callbacks"]
    assert saved["CSVLogger"]["rows"] == 3
    assert read_meta(tmp_path / "again")["callbacks"] == saved


def test_rows_are_read_late_and_are_all_there_after_an_exception(tmp_path):
    path, written = tmp_path / "metrics.csv", []

    def count(*_):
        written.append(len(read_table(path)) if path.exists() else 0)

    callbacks = CSVLogger(tmp_path), On(on_train_batch_end=count), At(15, pull)
    trainer = linear_trainer(*callbacks, log_every_n_steps=1)
    with pytest.raises(RuntimeError, match="the cable"):
        trainer.fit(batches(*[8] * 20))
    assert written == [max(step - IN_FLIGHT, 0) for step in range(1, 16)]
    assert [row["step"] for row in read_table(path)] == [str(i) for i in range(1, 16)]


@pytest.mark.parametrize("every, before, fit, last", [
    (50, None, {"max_epochs": 2}, 8),
    (50, None, {"max_steps": 6, "max_epochs": -1}, 6),
    (50, None, {"max_steps": 20}, 20),
    (8, {"max_steps": 5}, {"max_steps": 7, "max_epochs": 9}, 7),
    (8, {"max_steps": 5}, {"max_epochs": 2}, None),
    (8, None, {"max_epochs": 2}, None),
    (50, None, {"max_epochs": -1, "max_time": 0.01}, None),
    (50, None, {"fast_dev_run": 2}, None),
])  # fmt: skip
def test_a_fit_that_ends_before_a_step_is_logged_says_so(
    tmp_path, caplog, every, before, fit, last
):
    loggers = CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")
    trainer = linear_trainer(*loggers, GradientMonitor(), log_every_n_steps=every)
    if before:
        trainer.fit(batches(*[8] * 4), max_epochs=2, **before)
        caplog.clear()
    trainer.fit(batches(*[8] * 4), **fit)
    text = f"`log_every_n_steps`={every}: this fit ends at step {last}, so"
    assert caplog.text.count(text) == (last is not None)
    assert caplog.text.count("this fit ends at step") == (last is not None)
    if last is not None:
        assert trainer.global_step == last
    elif "max_epochs" in fit and "max_time" not in fit:
        assert read_table(tmp_path / "a")[-1]["step"] == "8"
        assert any(row.get("grad_norm") for row in read_table(tmp_path / "a"))


def test_an_unreadable_value_does_not_hide_the_exception(tmp_path):
    class Gone:
        def __array__(self, dtype=None, copy=None):
            raise ValueError("the device is gone")

    spoils = On(on_train_batch_end=lambda t, metrics, _: metrics.add({"x": Gone()}))
    callbacks = CSVLogger(tmp_path), spoils, At(1, pull)
    trainer = linear_trainer(*callbacks, log_every_n_steps=1)
    with pytest.raises(RuntimeError, match="the cable") as raised:
        trainer.fit(batches(8, 8))
    assert "and after that: ValueError: the device is gone" in raised.value.__notes__
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert record["status"] == "RuntimeError: the cable was pulled"


def test_only_scalars_are_logged_in_their_kind_and_short_form(tmp_path):
    values = {"rate": np.float32(0.1), "count": np.int32(3), "is_new": np.True_}
    values["norms"] = np.ones(3)
    adds = On(on_train_batch_end=lambda trainer, metrics, _: metrics.add(values))
    linear_trainer(NanGuard(), adds, CSVLogger(tmp_path)).fit(batches(8, 8))
    row = read_table(tmp_path)[0]
    assert list(row)[:5] == ["epoch", "step", "loss", "accuracy", "skipped"]
    assert row["skipped"] == "0" and "norms" not in row
    assert (row["rate"], row["count"], row["is_new"]) == ("0.1", "3", "1")


@pytest.mark.parametrize("make", [
    CSVLogger, TensorBoardLogger, lambda path: LivePlot(path / "a.png"),
])  # fmt: skip
def test_a_place_that_cannot_be_written_to_is_an_error_before_training(tmp_path, make):
    (tmp_path / "file").write_text("mine")
    losses = Recorder()
    match = r"dirpath='.*deeper'\)`: cannot write there \("
    with pytest.raises(OSError, match=match):
        linear_trainer(make(tmp_path / "file" / "deeper"), losses).fit(batches(8))
    assert losses.losses == [] and len([*tmp_path.iterdir()]) == 1


def test_trial_runs_and_other_processes_write_nothing(tmp_path):
    loggers = CSVLogger(tmp_path), TensorBoardLogger(tmp_path), LivePlot(tmp_path / "a")
    linear_trainer(*loggers).fit(batches(8, 8), fast_dev_run=True)
    trainer = linear_trainer(*loggers)
    trainer.is_global_zero = False
    trainer.fit(batches(8, 8), batches(8))
    assert list(tmp_path.iterdir()) == []
