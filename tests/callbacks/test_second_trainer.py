"""Callbacks that several trainers use: each trainer gets them as new."""

import copy
import pickle

import pytest
from toys import assert_equal_leaves, batches, injected, make_small, scores

from jaxdp import Callback
from jaxdp.callbacks import (
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    NanGuard,
    ReduceLROnPlateau,
    TensorBoardLogger,
    WeightAveraging,
)

SCORES = [3.0, 2.0, 1.0, 5.0, 4.0, 6.0, 7.0]


class Counter(Callback):
    """Counts the epochs of a run as its state, and the losses of all runs beside it."""

    def __init__(self):
        self.epochs, self.losses = 0, []

    def on_train_epoch_end(self, trainer, metrics):
        self.epochs += 1
        self.losses.append(metrics["loss"])

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Late(Counter):
    """Has no state before its first fit."""

    def __init__(self):
        self.losses = []

    def on_fit_start(self, trainer):
        self.epochs = 0


def make(*callbacks):
    return make_small(None, injected(), callbacks=callbacks, log_every_n_steps=1)


def fit(callback, values=SCORES, **options):
    trainer = make(scores(values), callback)
    trainer.fit(batches(8, 8), batches(8), **{"max_epochs": 5, **options})
    return trainer


def facts(trainer, callback):
    rate = float(trainer.hyperparams["learning_rate"])
    history = trainer.history.state_dict()
    return callback.state_dict(), rate, trainer.global_step, history


@pytest.mark.parametrize("make", [
    lambda path: EarlyStopping("val_loss", patience=2, restore_best=True),
    lambda path: EarlyStopping("val_loss", patience=9, check_finite=False),
    lambda path: ReduceLROnPlateau("val_loss", patience=1, cooldown=3),
    lambda path: CSVLogger(path),
    lambda path: ModelCheckpoint(path, "val_loss", save_top_k=2, save_last=True),
    lambda path: WeightAveraging(0.5),
    lambda path: Counter(),
    lambda path: Late(),
])  # fmt: skip
def test_a_second_trainer_gets_a_callback_as_new(make, tmp_path):
    reused, new = make(tmp_path / "a"), make(tmp_path / "b")
    fit(reused)
    second, expected = fit(reused, SCORES[1:]), fit(new, SCORES[1:])
    assert facts(second, reused) == facts(expected, new)
    assert_equal_leaves(second.state.params, expected.state.params)


def test_the_state_belongs_to_one_run_and_everything_else_stays(tmp_path):
    counter = Counter()
    for _ in range(3):
        trainer = fit(counter, max_epochs=2)
    assert counter.epochs == 2 and len(counter.losses) == 6
    trainer.validate(batches(8))
    trainer.fit(batches(8, 8), max_epochs=3)  # the same trainer continues
    assert counter.epochs == 3
    path, second = trainer.save(tmp_path / "first"), make(counter)
    with pytest.raises(FileNotFoundError):
        second.load(tmp_path / "nothing")
    assert counter.epochs == 3
    second.save(tmp_path / "second")
    assert counter.epochs == 0
    second.load(path)
    assert counter.epochs == 3
    second.fit(batches(8, 8), max_epochs=4)
    assert counter.epochs == 4
    for copied in (copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))):
        fit(copied, max_epochs=1)
        assert copied.epochs == 1


def test_steps_that_another_trainer_skipped_are_forgotten():
    guard, ((x, y),) = NanGuard("skip"), batches(8)
    with pytest.warns(UserWarning, match="skipped this update"):
        make(guard).fit([(x * float("nan"), y)])
    assert guard.skipped_steps == [1]
    make(guard).fit([(x, y)])
    assert guard.skipped_steps == []


def test_files_of_a_second_trainer_replace_none(tmp_path):
    pytest.importorskip("tensorboard")
    reused, events = CSVLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b")
    fit(reused, max_epochs=2)
    rows = (tmp_path / "a" / "metrics.csv").read_text()
    (tmp_path / "a" / "metrics.json").unlink()  # the run is unknown then
    for logger in (reused, events, events):
        fit(logger, max_epochs=2)
    assert (tmp_path / "a" / "before-1" / "metrics.csv").read_text() == rows
    assert len(list((tmp_path / "b").rglob("events.*"))) == 2
