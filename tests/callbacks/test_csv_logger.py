"""The table of a run, and the metadata beside it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import At, On, Recorder, batches, linear_trainer, read_table

from jaxdp.callbacks import CSVLogger, LearningRateMonitor


def steps(folder):
    return [row["step"] for row in read_table(folder)]


def metadata(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_the_table_has_a_row_per_logged_step_and_per_epoch(tmp_path):
    losses, logger = Recorder(), CSVLogger(tmp_path)
    rates = LearningRateMonitor(optax.linear_schedule(0.1, 0.0, 100))
    trainer = linear_trainer(rates, logger, losses)
    history = trainer.fit(batches(*[8] * 5), batches(8), max_epochs=2)
    assert logger.path == tmp_path / "metrics.csv"
    rows = read_table(logger.path)
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
            assert np.float32(row["loss"]) == losses.losses[step - 1]
            assert float(row["lr"]) == pytest.approx(0.1 * (1 - (step - 1) / 100))
            assert row["epoch_loss"] == row["val_loss"] == ""
        else:
            epoch = int(row["epoch"])
            assert float(row["epoch_loss"]) == history["loss"][epoch]
            assert float(row["val_accuracy"]) == history["val_accuracy"][epoch]
            assert row["lr"] == ""


@pytest.mark.parametrize("value, in_table", [
    (jnp.float32(2), True),
    (jnp.ones(3), False),
    (jnp.ones((1, 2)), False),
])  # fmt: skip
def test_scalars_of_a_step_reach_the_table_and_other_arrays_hooks_alone(
    value, in_table, tmp_path
):
    seen = []
    values = On(
        inside_step=lambda grads, updates, state: {"mine": value},
        on_train_batch_end=lambda trainer, metrics, _: seen.append(metrics["mine"]),
    )
    linear_trainer(values, CSVLogger(tmp_path)).fit(batches(8, 8))
    np.testing.assert_array_equal(seen, [value] * 2)
    assert any(row.get("mine") for row in read_table(tmp_path)) == in_table


def test_a_second_fit_continues_the_table_and_may_add_columns(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path))
    for epochs, val in enumerate((None, None, batches(8)), 1):
        trainer.fit(batches(8, 8), val, max_epochs=epochs)
    rows = read_table(tmp_path)
    assert steps(tmp_path) == ["2", "2", "4", "4", "6", "6"]
    assert [row["val_loss"] != "" for row in rows] == [*[False] * 5, True]
    assert rows[0]["loss"] and rows[1]["epoch_loss"]
    assert len(list(tmp_path.rglob("*.csv"))) == 1


def test_a_new_run_moves_the_files_of_the_old_one_aside(tmp_path, caplog):
    logger = CSVLogger(tmp_path, "log.csv")
    for seed in range(3):
        linear_trainer(logger, seed=seed).fit(batches(8, 8))
    folders = tmp_path / "before-1", tmp_path / "before-2", tmp_path
    tables = sorted(tmp_path.rglob("*.csv"))
    assert tables == [folder / "log.csv" for folder in folders]
    assert f"CSVLogger: what another run has logged to {tmp_path}" in caplog.text
    assert f"is now in {tmp_path / 'before-2'}" in caplog.text
    for seed, table in enumerate(tables):
        assert [row["step"] for row in read_table(table)] == ["2", "2"]
        record = json.loads(table.with_suffix(".json").read_text())
        assert record["hyperparameters"]["seed"] == seed


def test_a_resumed_run_removes_what_was_logged_after_its_checkpoint(tmp_path):
    data = batches(*[8] * 4), batches(8)
    whole = CSVLogger(tmp_path / "whole")
    linear_trainer(whole).fit(*data, max_epochs=3)
    trainer = linear_trainer(CSVLogger(tmp_path))
    trainer.fit(data[0], max_steps=3)  # inside an epoch, without a row for step 3
    path = trainer.save(tmp_path / "saved")
    trainer.fit(*data, max_epochs=2)
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("1,8,0.")  # a kill may leave this
    again = linear_trainer(CSVLogger(tmp_path))
    again.fit(*data, max_epochs=3, ckpt_path=path)
    rows = read_table(tmp_path)
    # The fit that `max_steps` ended logged the means of its part of the epoch.
    assert rows.pop(1)["step"] == "3"
    assert rows == read_table(whole.path)


@pytest.mark.filterwarnings("ignore:.*CSVLogger")
def test_a_checkpoint_that_was_saved_without_the_logger_costs_no_rows(tmp_path):
    first, without = linear_trainer(CSVLogger(tmp_path)), linear_trainer()
    first.fit(batches(8, 8), max_epochs=2)
    without.load(first.save(tmp_path / "logged"))
    path = without.save(tmp_path / "not_logged")
    first.fit(batches(8, 8), max_epochs=4)
    again = linear_trainer(CSVLogger(tmp_path))
    again.fit(batches(8, 8), max_epochs=3, ckpt_path=path)
    assert steps(tmp_path) == ["2", "2", "4", "4", "6", "6"]


def test_a_resumed_run_leaves_the_table_of_another_run_alone(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path / "own"))
    trainer.fit(batches(8, 8))
    path = trainer.save(tmp_path / "saved")
    linear_trainer(CSVLogger(tmp_path)).fit(batches(8, 8, 8))
    other, again = read_table(tmp_path), linear_trainer(CSVLogger(tmp_path))
    again.fit(batches(8, 8), max_epochs=2, ckpt_path=path)
    assert read_table(tmp_path / "before-1" / "metrics.csv") == other
    assert [row["epoch"] for row in read_table(tmp_path)] == ["1", "1"]


def test_the_metadata_has_arguments_versions_and_hardware(tmp_path):
    logger = CSVLogger(tmp_path, hyperparameters={"width": np.int64(64), "seed": 9})
    seen = At(1, lambda trainer: statuses.append(metadata(tmp_path)["status"]))
    statuses, trainer = [], linear_trainer(logger, seen, gradient_clip_val=1.0)
    trainer.fit(batches(8, 8), max_epochs=3)
    record = metadata(tmp_path)
    hyperparameters = record["hyperparameters"]
    assert list(hyperparameters)[:2] == ["width", "seed"]  # the user's own come first
    expected = {"width": 64, "seed": 9, "model": "Linear", "loss": "cross_entropy"}
    expected |= {"parameters": 15, "max_epochs": 3}
    assert expected.items() <= hyperparameters.items()
    optimizer, strategy = hyperparameters["optimizer"], hyperparameters["strategy"]
    assert optimizer.startswith("clip_by_global_norm(max_norm=1.0), scale_by_")
    assert strategy.startswith("SingleDevice(")
    assert record["versions"]["jax"] == jax.__version__
    assert record["hardware"]["num_devices"] == 8
    assert [*statuses, record["status"]] == ["running", "finished"]
    assert record["started"] <= record["ended"]


def test_two_tables_may_be_in_one_folder(tmp_path):
    linear_trainer(CSVLogger(tmp_path), CSVLogger(tmp_path, "own.csv")).fit(batches(8))
    assert read_table(tmp_path) == read_table(tmp_path / "own.csv")
