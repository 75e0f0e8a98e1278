"""Callbacks in a caller's own loop, which ends no epoch: some are idle there."""

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


class AtSteps(Callback):
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        pass

    def on_boundary(self, trainer):
        pass

    def on_validation_end(self, trainer, metrics):
        """Runs in `trainer.validate`, too."""


class AtEnds(Callback):
    def on_train_epoch_end(self, trainer, metrics):
        pass


class AtBoth(AtSteps):
    def on_fit_start(self, trainer):
        pass


class AtBothIfThereIsOne(AtBoth):
    needs_fit = False


def told_of(callback, epochs=2):
    """What is warned of, and the lines of it."""
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1)
    trainer = make_small(None, optimizer, callbacks=[callback])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for _ in trainer.steps(batches(8, 8)):
                pass
    assert all(warning.filename == __file__ for warning in told)
    return [str(warning.message) for warning in told]


IDLE = {
    "ModelCheckpoint (on_fit_start, on_train_epoch_e": lambda p: ModelCheckpoint(p),
    "CSVLogger (on_fit_start, on_fit_end)": CSVLogger,
    "EarlyStopping (on_fit_start, on_train_epoch_end": lambda _: EarlyStopping("loss"),
    "ReduceLROnPlateau (on_fit_start, on_train_": lambda _: ReduceLROnPlateau("loss"),
    "StallWatch (on_fit_start, on_train_epoch_end, on": lambda _: StallWatch(60),
    "AtEnds (on_train_epoch_end)": lambda _: AtEnds(),
    "AtBoth (on_fit_start)": lambda _: AtBoth(),
}
BUSY = [
    lambda path: ModelCheckpoint(path, every_n_train_steps=1),
    lambda path: ModelCheckpoint(path, train_time_interval=60),
    lambda _: AtSteps(),
    lambda _: AtBothIfThereIsOne(),
    lambda _: DonateBuffers(),
    lambda _: GradientMonitor(),
    lambda _: LearningRateMonitor(),
    lambda _: NanGuard(),
    lambda _: Preemption(),
    lambda _: ProgressBar(),
    lambda _: ThroughputMonitor(),
    lambda _: WeightAveraging(0.5),
]


@pytest.mark.parametrize("named", IDLE)
def test_a_callback_that_is_idle_in_an_own_loop_is_named_once(named, tmp_path):
    (text,) = told_of(IDLE[named](tmp_path))
    assert text.startswith("`steps`: these callbacks act at the end of an epoch")
    assert named in text and "`trainer.save(path)`" in text


@pytest.mark.parametrize("make", BUSY)
def test_one_that_works_there_is_not(make, tmp_path):
    assert told_of(make(tmp_path)) == []
