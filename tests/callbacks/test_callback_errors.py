"""Callbacks that can not be: each refusal is an error that says what is wrong."""

import pathlib

import numpy as np
import optax
import pytest
from toys import batches, injected, linear_on_one_device, linear_trainer

from jaxdp import Callback
from jaxdp.callbacks import (
    CSVLogger,
    EarlyStopping,
    GradientMonitor,
    LearningRateMonitor,
    LivePlot,
    ModelCheckpoint,
    NanGuard,
    Preemption,
    Profiler,
    ProgressBar,
    ReduceLROnPlateau,
    StallWatch,
    TensorBoardLogger,
    ThroughputMonitor,
    WeightAveraging,
)


@pytest.mark.parametrize("callback, options, error, match", [
    *((CSVLogger, {"name": name}, ValueError,
       "`name` must be the file name of a table")
      for name in ("metrics.json", "sub/metrics.csv", "metrics", "")),
    (EarlyStopping, {"mode": "up"}, ValueError, "`mode` must be one of 'auto', "),
    (EarlyStopping, {"patience": -1}, ValueError, "`patience` must be 0 or more"),
    (EarlyStopping, {"min_delta": -0.1}, ValueError, "`min_delta` must be 0 or more"),
    (EarlyStopping, {"stopping_threshold": np.nan}, ValueError, "must be a number"),
    (GradientMonitor, {"max_layers": -1}, ValueError, "`max_layers` must be 0 or more"),
    (LivePlot, {"every_n_seconds": -1.0}, ValueError, "`every_n_seconds` must be 0 or"),
    (ModelCheckpoint, {"save_top_k": -2}, ValueError, "`save_top_k` must be -1 or mo"),
    (ModelCheckpoint, {"every_n_epochs": 0}, ValueError, "must be 1 or more or None"),
    *((ModelCheckpoint, {name: True}, TypeError, f"`{name}` is no argument.*{instead}")
      for name, instead in [
        ("filename", "named by its step, and the best and the last one have links"),
        ("save_best_only", "`save_last=False` with a `monitor`"),
        ("save_weights_only", "`jaxdp.load_model`"),
        ("every_n_step", ""),
    ]),
    (NanGuard, {"max_skips": -1}, ValueError, "`max_skips` must be 0 or more"),
    (Preemption, {"signals": "SIGKILL"}, ValueError, "'SIGKILL' is not the name of"),
    (Profiler, {"num_steps": 0}, ValueError, "`num_steps` must be 1 or more"),
    (ProgressBar, {"refresh_per_second": 0}, ValueError, "must be more than 0; got 0"),
    (ReduceLROnPlateau, {"factor": 1.0}, ValueError, "`factor` must be .* less than"),
    (StallWatch, {"timeout": np.inf}, ValueError, "more than 0 and less than inf; got"),
    (ThroughputMonitor, {"flops_per_example": 0}, ValueError, "must be more than 0"),
    (ThroughputMonitor, {"peak_flops_per_device": 1}, ValueError, "needs `flops_per_e"),
    (WeightAveraging, {"decay": 1.0}, ValueError, "0 or more and less than 1, or None"),
    (WeightAveraging, {"every_n_steps": 0}, ValueError, "`every_n_steps` must be 1 or"),
])  # fmt: skip
def test_a_wrong_argument_of_a_callback_is_named(callback, options, error, match):
    with pytest.raises(error, match=match):
        callback(**options)


def test_arguments_after_the_monitor_need_their_names():
    for callback in (EarlyStopping, ReduceLROnPlateau):
        assert callback("loss").monitor == "loss"
        with pytest.raises(TypeError, match="positional argument"):
            callback("val_loss", 0.5, 3)
    assert ModelCheckpoint("d", "val_area", "max").mode == "max"


SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
BESIDE = optax.inject_hyperparams(optax.scale_by_adam)(b1=0.9)
NO_RATE = r"keeps no learning rate.*\(%s.*inject_hyperp.*Monitor\(schedule="


@pytest.mark.parametrize("callbacks, optimizer, match", [
    *(([kind("logs"), kind(pathlib.Path("logs"))], None, f"two {kind.__name__} that w")
      for kind in (CSVLogger, TensorBoardLogger)),
    ([WeightAveraging(), WeightAveraging()], None,
     "each choose the weights for evaluation"),
    (lambda: [ModelCheckpoint("val_loss")], None, "folder.*monitor='val_loss'"),
    ([ReduceLROnPlateau()], optax.sgd(0.1), "ReduceLROnPlateau.*inject_hyperparams"),
    ([ReduceLROnPlateau()], injected(SCHEDULE),
     "set by a schedule"),
    ([LearningRateMonitor()], optax.adam(SCHEDULE), NO_RATE % "there are none"),
    ([LearningRateMonitor()], BESIDE, NO_RATE % "b1"),
])  # fmt: skip
def test_what_can_not_be_in_a_fit_is_refused(
    tmp_path, monkeypatch, callbacks, optimizer, match
):
    monkeypatch.chdir(tmp_path)
    callbacks = callbacks() if callable(callbacks) else callbacks
    trainer = linear_on_one_device(*callbacks, optimizer=optimizer)
    with pytest.raises(ValueError, match=match):
        trainer.fit(batches(8), batches(8))
    assert trainer.global_step == 0


class Reads(Callback):
    def setup(self, trainer):
        trainer.record.read_steps(self.look)

    def look(self, row):
        raise AssertionError


class ReadsByAFunction(Reads):
    def setup(self, trainer):
        trainer.record.read_means(lambda row: self.look(row))


@pytest.mark.parametrize("made, method, whose", [
    (lambda folder: EarlyStopping(), "check", "EarlyStopping"),
    (lambda folder: ModelCheckpoint(folder, "val_loss"), "handle_means",
     "ModelCheckpoint"),
    (lambda folder: ProgressBar(), "_end_epoch", "ProgressBar"),
    (lambda folder: NanGuard(), "_check", "NanGuard"),
    *((CSVLogger, name, "CSVLogger") for name in ("write", "flush", "close")),
    (lambda folder: Reads(), "look", "Reads"),
    (lambda folder: ReadsByAFunction(), "look",
     "ReadsByAFunction.setup.<locals>.<lambda>"),
])  # fmt: skip
def test_a_reader_of_the_record_that_raises_is_named(
    tmp_path, monkeypatch, made, method, whose
):
    def fails(*given):
        raise ZeroDivisionError("from the callback")

    callback = made(tmp_path)
    monkeypatch.setattr(type(callback), method, fails)
    trainer = linear_trainer(callback, ModelCheckpoint(tmp_path / "saves"))
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(batches(8), batches(8))
    assert f"raised by the callback {whose}" in caught.value.__notes__
