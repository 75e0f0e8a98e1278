"""The table of a run, and the record beside it."""

import json

import jax
import numpy as np
import optax
import pytest
from logs import Losses, read
from toys import batches, linear_trainer

from jaxdp import Callback
from jaxdp.callbacks import (
    CSVLogger,
    LearningRateMonitor,
)


def test_the_table_has_a_row_per_logged_step_and_per_epoch(tmp_path):
    losses = Losses()
    logger = CSVLogger(tmp_path)
    rates = LearningRateMonitor(optax.linear_schedule(0.1, 0.0, 100))
    trainer = linear_trainer(rates, logger, losses)
    history = trainer.fit(batches(*[8] * 5), batches(8), max_epochs=2)
    assert logger.path == tmp_path / "metrics.csv"
    rows = read(logger.path)
    assert list(rows[0]) == [
        *("epoch", "step", "loss", "accuracy", "lr"),
        *("epoch_loss", "epoch_accuracy", "epoch_lr", "val_loss", "val_accuracy"),
    ]
    places = [(row["epoch"], row["step"], row["loss"] != "") for row in rows]
    first = [("0", "2", True), ("0", "4", True), ("0", "5", False)]
    second = [("1", "6", True), ("1", "8", True), ("1", "10", True), ("1", "10", False)]
    assert places == first + second
    for row in rows:
        if row["loss"]:
            step = int(row["step"])
            assert np.float32(row["loss"]) == losses.seen[step]["loss"]
            assert float(row["lr"]) == pytest.approx(0.1 * (1 - (step - 1) / 100))
            assert row["epoch_loss"] == row["val_loss"] == ""
        else:
            epoch = int(row["epoch"])
            assert float(row["epoch_loss"]) == history["loss"][epoch]
            assert float(row["val_accuracy"]) == history["val_accuracy"][epoch]
            assert row["lr"] == ""


def test_a_second_fit_of_the_trainer_goes_on_in_the_same_table(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path))
    trainer.fit(batches(8, 8), max_epochs=1)
    trainer.fit(batches(8, 8), max_epochs=2)
    rows = read(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["2", "2", "4", "4"]
    assert len(list(tmp_path.glob("*.csv"))) == 1


def test_a_later_validation_loader_widens_the_table(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path))
    trainer.fit(batches(8, 8), max_epochs=1)
    trainer.fit(batches(8, 8), batches(8), max_epochs=2)
    rows = read(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["2", "2", "4", "4"]
    assert [row["val_loss"] != "" for row in rows] == [False, False, False, True]
    assert rows[0]["loss"] and rows[1]["epoch_loss"]
    assert len(list(tmp_path.glob("*.csv"))) == 1


def test_a_new_run_keeps_the_table_of_the_old_one_and_says_so(tmp_path, caplog):
    logger = CSVLogger(tmp_path, "log.csv")
    for _ in range(3):
        linear_trainer(logger).fit(batches(8, 8))
    tables = sorted(tmp_path.rglob("*.csv"))
    folders = tmp_path / "before-1", tmp_path / "before-2", tmp_path
    assert tables == [folder / "log.csv" for folder in folders]
    assert f"CSVLogger: what another run has logged to {tmp_path}" in caplog.text
    assert f"is now in {tmp_path / 'before-2'}" in caplog.text
    assert [row["step"] for row in read(tables[0])] == ["2", "2"]


def test_two_trainers_in_turns_do_not_share_a_table(tmp_path):
    one = linear_trainer(CSVLogger(tmp_path))
    one.fit(batches(8, 8), max_epochs=1)
    other = linear_trainer(CSVLogger(tmp_path), metrics=[])
    other.fit(batches(8, 8), max_epochs=1)
    one.fit(batches(8, 8), max_epochs=2)
    tables = [read(path) for path in sorted(tmp_path.rglob("metrics.csv"))]
    steps = [[row["step"] for row in rows] for rows in tables]
    assert steps == [["2", "2"], ["2", "2"], ["4", "4"]]


def test_a_resumed_run_takes_back_what_was_logged_after_its_checkpoint(tmp_path):
    data = batches(*[8] * 4), batches(8)
    whole = CSVLogger(tmp_path / "whole")
    linear_trainer(whole).fit(*data, max_epochs=3)
    trainer = linear_trainer(CSVLogger(tmp_path))
    trainer.fit(data[0], max_steps=3)  # inside an epoch, without a row for step 3
    path = trainer.save(tmp_path / "saved")
    trainer.fit(*data, max_epochs=2)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("1,8,0.")  # what a kill may leave
    again = linear_trainer(CSVLogger(tmp_path))
    again.load(path)
    again.fit(*data, max_epochs=3)
    expected, rows = read(whole.path), read(tmp_path / "metrics.csv")
    # The fit that `max_steps` ended logged the means of its part of the epoch.
    assert rows.pop(1)["step"] == "3"
    assert rows == expected


@pytest.mark.filterwarnings("ignore:.*CSVLogger")
def test_a_checkpoint_that_was_saved_without_the_logger_costs_no_rows(tmp_path):
    first, without = linear_trainer(CSVLogger(tmp_path)), linear_trainer()
    first.fit(batches(8, 8), max_epochs=3)
    path = first.save(tmp_path / "logged")
    without.fit(batches(8, 8), max_epochs=4, ckpt_path=path)
    path = without.save(tmp_path / "not_logged")
    again = linear_trainer(CSVLogger(tmp_path))
    again.fit(batches(8, 8), max_epochs=5, ckpt_path=path)
    steps = [row["step"] for row in read(tmp_path / "metrics.csv")]
    assert steps == ["2", "2", "4", "4", "6", "6", "10", "10"]


def test_a_resumed_run_leaves_the_table_of_another_run_alone(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path / "own"))
    trainer.fit(batches(8, 8))
    path = trainer.save(tmp_path / "saved")
    linear_trainer(CSVLogger(tmp_path)).fit(batches(8, 8, 8))
    other = read(tmp_path / "metrics.csv")
    again = linear_trainer(CSVLogger(tmp_path))
    again.fit(batches(8, 8), max_epochs=2, ckpt_path=path)
    assert read(tmp_path / "before-1" / "metrics.csv") == other
    assert [row["epoch"] for row in read(tmp_path / "metrics.csv")] == ["1", "1"]


def test_the_record_says_what_the_run_was_made_of(tmp_path):
    logger = CSVLogger(tmp_path, hyperparameters={"width": np.int64(64), "seed": 9})
    linear_trainer(logger, gradient_clip_val=1.0).fit(batches(8, 8), max_epochs=3)
    record = json.loads((tmp_path / "metrics.json").read_text())
    found = record["hyperparameters"]
    assert list(found)[:2] == ["width", "seed"]  # the user's own come first, and win
    assert found["width"] == 64 and found["seed"] == 9
    assert found["model"] == "Linear" and found["loss"] == "cross_entropy"
    assert found["parameters"] == 15 and found["max_epochs"] == 3
    assert found["optimizer"].startswith("clip_by_global_norm(max_norm=1.0), scale_by_")
    assert found["strategy"].startswith("SingleDevice(")
    assert record["versions"]["jax"] == jax.__version__
    assert record["hardware"]["num_devices"] == 8
    assert record["status"] == "finished" and record["started"] <= record["ended"]


def test_the_record_says_how_a_run_failed(tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            record = json.loads((tmp_path / "metrics.json").read_text())
            assert record["status"] == "running"
            raise RuntimeError("the cable was pulled")

    with pytest.raises(RuntimeError):
        linear_trainer(CSVLogger(tmp_path), Fails()).fit(batches(8))
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert record["status"] == "RuntimeError: the cable was pulled"


def test_the_record_goes_with_its_table(tmp_path):
    for seed in range(2):
        linear_trainer(CSVLogger(tmp_path), seed=seed).fit(batches(8, 8))
    assert (tmp_path / "before-1" / "metrics.csv").exists()
    seeds = [
        json.loads((folder / "metrics.json").read_text())["hyperparameters"]["seed"]
        for folder in (tmp_path / "before-1", tmp_path)
    ]
    assert seeds == [0, 1]
