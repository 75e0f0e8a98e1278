"""What loggers and the live plot write, when, and what they leave alone."""

import csv
import json
import re
import sys
import time
import types

import jax
import numpy as np
import optax
import pytest
from toys import batches, linear_trainer

from jaxdp import Callback, SingleDevice, Trainer
from jaxdp.callbacks import (
    CSVLogger,
    LearningRateMonitor,
    LivePlot,
    NanGuard,
    TensorBoardLogger,
)
from jaxdp.callbacks import live_plot as live_plot_module
from jaxdp.callbacks.loggers import scalars
from jaxdp.callbacks.monitor import LAG
from jaxdp.callbacks.run_facts import optimizer_text
from jaxdp.plan.page import _bytes


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


class Losses(Callback):
    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.seen[trainer.global_step] = metrics


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
        *("epoch_loss", "epoch_accuracy", "val_loss", "val_accuracy"),
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
    names = sorted(path.name for path in tmp_path.glob("*.csv"))
    assert names == ["log.1.csv", "log.2.csv", "log.csv"]
    assert "CSVLogger: the table of" in caplog.text
    assert f"is now {tmp_path / 'log.2.csv'}" in caplog.text
    assert [row["step"] for row in read(tmp_path / "log.1.csv")] == ["2", "2"]


def test_two_trainers_in_turns_do_not_share_a_table(tmp_path):
    one = linear_trainer(CSVLogger(tmp_path))
    one.fit(batches(8, 8), max_epochs=1)
    other = linear_trainer(CSVLogger(tmp_path), metrics=[])
    other.fit(batches(8, 8), max_epochs=1)
    one.fit(batches(8, 8), max_epochs=2)
    tables = {
        path.name: [row["step"] for row in read(path)]
        for path in tmp_path.glob("*.csv")
    }
    alone = ["2", "2"]
    assert tables == {
        "metrics.1.csv": alone,
        "metrics.2.csv": alone,
        "metrics.csv": ["4", "4"],
    }


def test_a_resumed_run_takes_back_what_was_logged_after_its_checkpoint(tmp_path):
    data = batches(*[8] * 4), batches(8)
    whole = CSVLogger(tmp_path / "whole")
    linear_trainer(whole).fit(*data, max_epochs=3)
    trainer = linear_trainer(CSVLogger(tmp_path))
    trainer.fit(data[0], max_steps=3)  # inside an epoch, without a row for step 3
    path = trainer.save(tmp_path / "saved")
    trainer.fit(*data, max_epochs=2)
    last_rows = read(tmp_path / "metrics.csv")
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("1,8,0.")  # what a kill may leave
    again = linear_trainer(CSVLogger(tmp_path))
    again.load(path)
    again.fit(*data, max_epochs=3)
    expected, rows = read(whole.path), read(tmp_path / "metrics.csv")
    # The fit that `max_steps` ended logged the means of its part of the epoch.
    assert rows.pop(1)["step"] == "3"
    assert rows == expected
    assert read(tmp_path / "metrics.before.csv")[: len(last_rows)] == last_rows


def test_a_resumed_run_leaves_the_table_of_another_run_alone(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path / "own"))
    trainer.fit(batches(8, 8))
    path = trainer.save(tmp_path / "saved")
    linear_trainer(CSVLogger(tmp_path)).fit(batches(8, 8, 8))
    other = read(tmp_path / "metrics.csv")
    again = linear_trainer(CSVLogger(tmp_path))
    again.fit(batches(8, 8), max_epochs=2, ckpt_path=path)
    assert read(tmp_path / "metrics.1.csv") == other
    assert [row["epoch"] for row in read(tmp_path / "metrics.csv")] == ["1", "1"]


@pytest.mark.parametrize("name", ["metrics.json", "sub/metrics.csv", "metrics", ""])
def test_the_name_of_a_table_is_that_of_a_file(name):
    with pytest.raises(ValueError, match="`name` must be the file name of a table"):
        CSVLogger("runs", name)


def events(folder):
    from tensorboard.backend.event_processing import event_file_loader

    return [
        (event.step, value.tag, value.tensor.float_val[0])
        for path in sorted(folder.glob("events.*"))
        for event in event_file_loader.EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tensor.float_val  # texts and pictures have none
    ]


def test_a_resumed_run_takes_back_events_too(tmp_path):
    pytest.importorskip("tensorboard")
    data = batches(*[8] * 4), batches(8)
    whole, trainer, again = (
        linear_trainer(TensorBoardLogger(tmp_path / name))
        for name in ("whole", "a", "a")
    )
    whole.fit(*data, max_epochs=3)
    trainer.fit(*data, max_epochs=1)
    path = trainer.save(tmp_path / "saved")
    trainer.fit(*data, max_epochs=2)
    (tmp_path / "a" / "events.out.tfevents.1.other").write_text("of another run")
    again.load(path)
    again.fit(*data, max_epochs=3)
    (tmp_path / "a" / "events.out.tfevents.1.other").unlink()
    assert events(tmp_path / "a") == events(tmp_path / "whole")


def test_what_is_loaded_and_saved_before_a_fit_is_saved_as_it_came(tmp_path):
    pytest.importorskip("tensorboard")

    def make():
        loggers = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
        return linear_trainer(*loggers, NanGuard("skip"))

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
    assert saved["CSVLogger"]["rows"] == 3 and saved["TensorBoardLogger"]["sizes"]
    assert states(tmp_path / "again") == saved


def test_a_validation_inside_an_epoch_has_its_own_row(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path), log_every_n_steps=100)
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
    class Broken(dict):
        def __getitem__(self, name):
            raise ValueError("the device is gone")

    logger = CSVLogger(tmp_path)
    trainer = linear_trainer(logger)
    trainer.fit(batches(8, 8))
    logger.on_fit_start(trainer)
    logger.on_train_batch_end(trainer, Broken(loss=1.0), 0)
    with pytest.raises(ValueError, match="is gone"):  # the trainer notes it
        logger.on_exception(trainer, RuntimeError())
    logger.on_fit_end(trainer)


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
    assert names == {
        *("metrics.csv", "metrics.json", "metrics.plan.html"),
        "curves.png",
    }


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


def test_tensorboard_reads_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    trainer = linear_trainer(TensorBoardLogger(tmp_path / "tb"))
    history = trainer.fit(batches(*[8] * 4), batches(8))
    (path,) = (tmp_path / "tb").iterdir()
    found = {}
    kinds = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            kinds[value.tag] = value.metadata.plugin_data.plugin_name
            if kinds[value.tag] != "scalars":
                continue
            number = value.tensor.float_val[0]
            found.setdefault(value.tag, []).append((event.step, number))
    assert [step for step, _ in found["loss"]] == [2, 4]
    assert found["val_loss"] == [(4, pytest.approx(history["val_loss"][0]))]
    assert found["epoch_loss"] == [(4, pytest.approx(history["loss"][0]))]
    assert {kinds[tag] for tag in ("hyperparameters", "environment")} == {"text"}
    assert kinds["history"] == "images"


def test_tensorboard_shows_texts_and_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Shows(Callback):
        def on_train_epoch_end(self, trainer, metrics):
            logger.log_text("note", "4 bytes per device")

    logger = TensorBoardLogger(tmp_path, hyperparameters={"width": 64})
    trainer = linear_trainer(logger, Shows())
    trainer.fit(batches(*[8] * 4))
    read = EventAccumulator(str(tmp_path)).Reload()
    texts = {
        tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in read.Tags()["tensors"]
        if read.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    }
    assert texts["note"] == "4 bytes per device"
    plan = trainer.running_plan()
    assert texts["plan"] == f"```\n{plan}\n```"
    assert f"peak {_bytes(plan.memory.peak):>33}" in texts["plan"]
    assert "| width | 64 |" in texts["hyperparameters"]
    assert "scale_by_schedule" in texts["hyperparameters"]
    assert f"| versions/jax | {jax.__version__} |" in texts["environment"]
    (image,) = read.Images("history")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.step == 4
    with pytest.raises(RuntimeError, match="writes during a fit only"):
        logger.log_text("late", "")


def test_the_record_says_what_the_run_was_made_of(tmp_path):
    logger = CSVLogger(tmp_path, hyperparameters={"width": np.int64(64), "seed": 9})
    linear_trainer(logger, gradient_clip_val=1.0).fit(batches(8, 8), max_epochs=3)
    record = json.loads((tmp_path / "metrics.json").read_text())
    found = record["hyperparameters"]
    assert list(found)[:2] == ["width", "seed"]  # the user's own come first, and win
    assert found["width"] == 64 and found["seed"] == 9
    assert found["model"] == "Linear" and found["loss"] == "cross_entropy"
    assert found["parameters"] == 15 and found["max_epochs"] == 3
    assert found["optimizer"].startswith("clip_by_global_norm(max_norm=1), scale_by_")
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


def test_the_record_has_the_plan_of_the_program_that_ran(tmp_path):
    trainer = linear_trainer(CSVLogger(tmp_path))
    trainer.fit(batches(8, 8))
    plan = json.loads((tmp_path / "metrics.json").read_text())["plan"]
    found = trainer.compiled_train_step().memory_analysis()
    assert plan["memory"]["temporary"] == found.temp_size_in_bytes
    assert plan["memory"]["arguments"] == found.argument_size_in_bytes
    page = (tmp_path / "metrics.plan.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "http" not in page
    assert f"{plan['memory']['peak']:,}" in page


@pytest.mark.parametrize("pattern", ["", "("])  # what raises is ours, or Python's
def test_a_program_that_cannot_be_read_is_no_reason_to_end_a_run(
    tmp_path, caplog, pattern
):
    class Odd(jax.stages.Compiled):
        """A compiled step that writes itself in another language."""

        __slots__ = ()

        def as_text(self):
            return "(module)" if re.compile(pattern) else ""

    class Engine(SingleDevice):
        def compile(self, *arguments, **options):
            compiled = super().compile(*arguments, **options)
            compiled.__class__ = Odd
            return compiled

    trainer = linear_trainer(CSVLogger(tmp_path))
    trainer = Trainer(**trainer.run.arguments | {"strategy": Engine()})
    history = trainer.fit(batches(8, 8))
    assert len(history["loss"]) == 1
    assert "CSVLogger: the plan could not be read: " in caplog.text
    assert not (tmp_path / "metrics.plan.html").exists()


def test_the_record_goes_with_its_table(tmp_path):
    for seed in range(2):
        linear_trainer(CSVLogger(tmp_path), seed=seed).fit(batches(8, 8))
    assert (tmp_path / "metrics.1.plan.html").exists()
    seeds = [
        json.loads((tmp_path / name).read_text())["hyperparameters"]["seed"]
        for name in ("metrics.1.json", "metrics.json")
    ]
    assert seeds == [0, 1]


def test_optimizers_are_described_by_their_stages():
    cosine = optax.cosine_decay_schedule(0.1, 100)
    adam = "scale_by_adam(b1=0.9, b2=0.999, eps=1e-08, eps_root=0)"
    for optimizer, text in [
        (optax.adam(1e-3), f"{adam}, scale(step_size=-0.001)"),
        (
            optax.adam(cosine),
            f"{adam}, scale_by_schedule(step_size_fn=cosine_decay_schedule(alpha=0,"
            " decay_steps=100, exponent=1, init_value=0.1))",
        ),
        (
            optax.sgd(optax.join_schedules([optax.constant_schedule(2), cosine], [5])),
            "scale_by_schedule(step_size_fn=join_schedules(boundaries=[5], schedules=["
            "constant_schedule(value=2), cosine_decay_schedule(",
        ),
        (optax.sgd(lambda step: 0.1), "scale_by_schedule(step_size_fn="),
        (optax.sgd(0.1, momentum=0.9), "trace(decay=0.9), scale(step_size=-0.1)"),
        (
            optax.partition({"a": optax.sgd(1.0), "b": optax.set_to_zero()}, None),
            "partition(a: scale(step_size=-1); b: set_to_zero())",
        ),
        (
            optax.inject_hyperparams(optax.sgd)(learning_rate=0.25),
            "inject_hyperparams(inner_factory=sgd)",
        ),
        (optax.GradientTransformation(lambda p: (), lambda u, s, p: (u, s)), ""),
    ]:
        assert optimizer_text(optimizer.update).startswith(text)


def test_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    name = "tensorboard.summary.writer.event_file_writer"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "jaxdp\[loggers\]"'):
        linear_trainer(TensorBoardLogger(tmp_path)).fit(batches(8))


@pytest.fixture
def drawn(monkeypatch):
    """Every picture that is drawn: its charts, as points by the label of a curve."""
    pictures = []
    real = live_plot_module.draw

    def draw(charts, *args, **kwargs):
        if charts:
            kept = {
                name: {curve.label: list(curve.points) for curve in curves}
                for name, curves in charts.items()
            }
            pictures.append(kept)
        return real(charts, *args, **kwargs)

    monkeypatch.setattr(live_plot_module, "draw", draw)
    return pictures


def test_the_live_plot_ends_with_all_steps_and_epochs(tmp_path, drawn):
    path = tmp_path / "new" / "live.png"
    losses = Losses()
    trainer = linear_trainer(LivePlot(path), losses)
    history = trainer.fit(batches(*[8] * 5), batches(8), max_epochs=3)
    loss = drawn[-1]["loss"]
    steps, training, validation = loss.values()
    assert steps == [(s, float(m["loss"])) for s, m in losses.seen.items()]
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

    class Tick(Callback):
        def on_train_batch_start(self, trainer, batch, batch_idx):
            now[0] += 1.0

    trainer = linear_trainer(Tick(), LivePlot(tmp_path / "a.png", every_n_seconds=10.0))
    trainer.fit(batches(*[8] * 35))
    assert [len(picture["loss"]["steps, smoothed"]) for picture in drawn] == [
        11 - LAG,
        22 - LAG,
        33 - LAG,
        35,
    ]


def test_the_live_plot_thins_out_long_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(live_plot_module, "_MAX_POINTS", 10)
    plot = LivePlot(tmp_path / "a.png")
    linear_trainer(plot).fit(batches(*[8] * 45))
    assert [step for step, _ in plot._steps] == [8, 16, 24, 32, 40]


def test_the_live_plot_is_drawn_after_an_exception(tmp_path, drawn):
    trainer = linear_trainer(NanGuard(), LivePlot(tmp_path / "a.png"))
    data = batches(*[8] * 12)
    data[1][0][:] = np.nan
    with pytest.raises(FloatingPointError):
        trainer.fit(data)
    steps = drawn[-1]["loss"]["steps, smoothed"]
    assert [step for step, _ in steps] == [1, *range(3, 10)]


def test_the_live_plot_updates_one_picture_in_a_notebook(tmp_path, monkeypatch):
    shown = []

    class Handle:
        def update(self, image):
            shown.append(("update", image))

    def display(image, display_id):
        shown.append(("display", image))
        return Handle()

    core = types.SimpleNamespace(Image=lambda data, format: data)
    monkeypatch.setattr(live_plot_module, "in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython.core.display", core)
    monkeypatch.setitem(
        sys.modules, "IPython.display", types.SimpleNamespace(display=display)
    )
    trainer = linear_trainer(LivePlot(tmp_path / "a.png", every_n_seconds=0.0))
    trainer.fit(batches(8, 8), max_epochs=2)
    assert [kind for kind, _ in shown] == ["display", *["update"] * (len(shown) - 1)]
    assert len(shown) > 1 and shown[-1][1].startswith(b"\x89PNG")
