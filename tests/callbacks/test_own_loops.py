"""Callbacks in `trainer.steps`, which ends no epoch: some are idle there."""

import warnings

import optax
import pytest
from toys import batches, make_small

from jaxdp import Callback
from jaxdp.callbacks import (
    CSVLogger,
    DonateBuffers,
    EarlyStopping,
    GradientMonitor,
    LearningRateMonitor,
    ModelCheckpoint,
    NanGuard,
    Preemption,
    ProgressBar,
    ReduceLROnPlateau,
    StallWatch,
    ThroughputMonitor,
    WeightAveraging,
)


def custom(*hooks, **members):
    members |= {hook: lambda self, *arguments: None for hook in hooks}
    return type("Mine", (Callback,), members)()


STEPS = "on_train_batch_end", "on_boundary", "on_validation_end"


@pytest.mark.parametrize("make, named", [
    (ModelCheckpoint, "ModelCheckpoint (on_fit_start, on_train_epoch_e"),
    (CSVLogger, "CSVLogger (on_fit_start, on_fit_end)"),
    (lambda _: EarlyStopping("loss"), "EarlyStopping (on_fit_start, on_train_epoch_e"),
    (lambda _: ReduceLROnPlateau("loss"), "ReduceLROnPlateau (on_fit_start, on_train_"),
    (lambda _: StallWatch(60), "StallWatch (on_fit_start, on_train_epoch_end, on"),
    (lambda _: custom("on_train_epoch_end"), "Mine (on_train_epoch_end)"),
    (lambda _: custom("on_fit_start", *STEPS), "Mine (on_fit_start)"),
    *((make, None) for make in (
        lambda path: ModelCheckpoint(path, every_n_train_steps=1),
        lambda path: ModelCheckpoint(path, train_time_interval=60),
        lambda _: custom(*STEPS),
        lambda _: custom("on_fit_start", *STEPS, needs_fit=False),
        lambda _: WeightAveraging(0.5),
        *(lambda _, kind=kind: kind() for kind in (
            DonateBuffers, GradientMonitor, LearningRateMonitor, NanGuard, Preemption,
            ProgressBar, ThroughputMonitor)),
    )),
])  # fmt: skip
def test_callbacks_that_are_idle_in_an_own_loop_are_named_once(make, named, tmp_path):
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1)
    trainer = make_small(None, optimizer, callbacks=[make(tmp_path)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            for _ in trainer.steps(batches(8, 8)):
                pass
    if named is None:
        assert told == []
        return
    (warning,) = told
    text = str(warning.message)
    assert warning.filename == __file__
    assert text.startswith("`steps`: these callbacks act at the end of an epoch")
    assert named in text and "`trainer.save(path)`" in text
