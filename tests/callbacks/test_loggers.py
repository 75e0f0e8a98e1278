"""What all loggers share: what they write, when, and what they leave alone."""

import json

import numpy as np
import pytest
from logs import Losses, read
from toys import batches, linear_trainer

from jaxdp import Callback
from jaxdp.callbacks import (
    CSVLogger,
    LivePlot,
    NanGuard,
    TensorBoardLogger,
)
from jaxdp.record import scalars
from jaxdp.step import IN_FLIGHT as LAG


def test_what_is_loaded_and_saved_before_a_fit_is_saved_as_it_came(tmp_path):
    def make():
        return linear_trainer(CSVLogger(tmp_path), NanGuard("skip"))

    def states(path):
        return json.loads((path / "meta" / "metadata").read_text())["callbacks"]

    trainer = make()
    trainer.fit(batches(*[8] * 4), batches(8), max_epochs=1)
    trainer.callbacks[-1]._in_a_row = 2
    trainer.save(tmp_path / "saved")
    again = make()
    again.load(tmp_path / "saved")
    again.save(tmp_path / "again")
    saved = states(tmp_path / "saved")
    assert saved["CSVLogger"]["rows"] == 3
    assert states(tmp_path / "again") == saved


def test_a_validation_inside_an_epoch_has_its_own_row(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path), log_every_n_steps=100)
    with pytest.warns(UserWarning, match="`log_every_n_steps`=100, and 5 steps are do"):
        trainer.fit(batches(*[8] * 5), batches(8), val_check_interval=2)
    rows = read(tmp_path / "metrics.csv")
    seen = [
        (row["step"], row["val_loss"] != "", row["epoch_loss"] != "") for row in rows
    ]
    assert ("2", True, False) in seen and ("4", True, False) in seen
    assert sum(epoch for *_, epoch in seen) == 1
    assert len({row["val_loss"] for row in rows if row["val_loss"]}) == len(
        [row for row in rows if row["val_loss"]]
    )


def test_a_validation_outside_of_fit_is_not_logged(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path))
    trainer.validate(batches(8))
    assert list(tmp_path.iterdir()) == []


def test_rows_are_read_late_and_are_all_there_after_an_exception(tmp_path):
    path = tmp_path / "metrics.csv"
    written = []

    class Fails(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            written.append(len(read(path)) if path.exists() else 0)
            if trainer.global_step == 15:
                raise RuntimeError("the cable was pulled")

    trainer = linear_trainer(CSVLogger(tmp_path), Fails(), log_every_n_steps=1)
    with pytest.raises(RuntimeError, match="the cable"):
        trainer.fit(batches(*[8] * 20))
    assert written == [max(step - LAG, 0) for step in range(1, 16)]
    assert [row["step"] for row in read(path)] == [str(i) for i in range(1, 16)]


def test_an_unreadable_value_does_not_hide_the_exception(tmp_path):
    class Gone:
        def __array__(self, dtype=None, copy=None):
            raise ValueError("the device is gone")

    class Fails(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            metrics.add({"unreadable": Gone()})
            raise RuntimeError("the cable was pulled")

    with pytest.raises(RuntimeError, match="the cable") as raised:
        linear_trainer(CSVLogger(tmp_path), Fails(), log_every_n_steps=1).fit(
            batches(8, 8)
        )
    assert "and after that: ValueError: the device is gone" in raised.value.__notes__
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert record["status"] == "RuntimeError: the cable was pulled"


def test_values_that_are_no_scalars_are_left_out(tmp_path):
    trainer = linear_trainer(NanGuard(), CSVLogger(tmp_path))
    trainer.fit(batches(8, 8))
    row = read(tmp_path / "metrics.csv")[0]
    assert list(row)[:5] == ["epoch", "step", "loss", "accuracy", "skipped"]
    assert row["skipped"] == "0"


def test_scalars_keep_their_kind_and_their_short_form():
    values = {
        "loss": np.float32(0.1),
        "count": np.int32(3),
        "skipped": np.True_,
        "norms": np.ones(3),
    }
    assert scalars(values) == {"loss": 0.1, "count": 3, "skipped": 1}


def test_the_default_folder_is_the_trainers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = linear_trainer(CSVLogger(), LivePlot(), default_root_dir="out/runs")
    trainer.fit(batches(8, 8))
    names = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    assert names == {"metrics.csv", "metrics.json", "curves.png"}


@pytest.mark.parametrize(
    "make", [CSVLogger, TensorBoardLogger, lambda path: LivePlot(path / "a.png")]
)
def test_a_folder_that_cannot_be_written_to_is_an_error_before_training(tmp_path, make):
    (tmp_path / "file").write_text("in the way")
    losses = Losses()
    trainer = linear_trainer(make(tmp_path / "file" / "deeper"), losses)
    with pytest.raises(OSError, match=r"dirpath='.*deeper'\)`: cannot write there \("):
        trainer.fit(batches(8))
    assert losses.seen == {}


@pytest.mark.parametrize("make, name", [
    (CSVLogger, "metrics.csv"),
    (CSVLogger, "metrics.json"),
    (lambda path: CSVLogger(path, "log.txt"), "log.json"),
    (lambda path: LivePlot(path / "curves"), "curves"),
])  # fmt: skip
def test_a_folder_where_a_file_is_to_be_stays_and_is_an_error(tmp_path, make, name):
    (tmp_path / name / "mine").mkdir(parents=True)
    losses = Losses()
    match = f"`(name|path)`: {tmp_path / name} is a folder"
    with pytest.raises(ValueError, match=match):
        linear_trainer(make(tmp_path), losses).fit(batches(8))
    assert losses.seen == {} and (tmp_path / name / "mine").exists()


def test_a_trial_run_writes_nothing(tmp_path):
    callbacks = (
        CSVLogger(tmp_path),
        TensorBoardLogger(tmp_path),
        LivePlot(tmp_path / "a"),
    )
    linear_trainer(*callbacks).fit(batches(8, 8), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


def test_other_processes_write_nothing(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path), LivePlot(tmp_path / "curves.png"))
    trainer.is_global_zero = False
    trainer.fit(batches(8, 8), batches(8))
    assert list(tmp_path.iterdir()) == []


def test_rows_of_steps_are_missed_where_there_are_none(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path), log_every_n_steps=4)
    with pytest.warns(UserWarning, match=r"no row of a step.*log_every_n_steps=1"):
        trainer.fit(batches(8, 8, 8))
    trainer.fit(batches(8, 8, 8), max_epochs=2)  # step 4 has one
    linear_trainer(log_every_n_steps=4).fit(batches(8))  # nobody logs
