"""Callbacks that are made once, before a loop over folds: each trainer has them new."""

import copy
import pickle

import jax
import numpy as np
import optax
import pytest
from toys import batches, make_small

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


class MadeUp(Callback):
    """Hands out scores as the validation loss."""

    def __init__(self, scores=SCORES):
        self.left = list(scores)

    def on_validation_end(self, trainer, metrics):
        metrics["val_loss"] = self.left.pop(0)


class Counter(Callback):
    """Keeps a number as its state, and beside it what all folds have shown."""

    def __init__(self):
        self.epochs, self.of_all_folds = 0, []

    def on_train_epoch_end(self, trainer, metrics):
        self.epochs += 1
        self.of_all_folds.append(metrics["loss"])

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Late(Counter):
    """Has no state before its first fit."""

    def __init__(self):
        self.of_all_folds = []

    def on_fit_start(self, trainer):
        self.epochs = 0


def fold(callback, scores=SCORES, **options):
    options = {"max_epochs": 5} | options
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    trainer = make_small(
        None, optimizer, callbacks=[MadeUp(scores), callback], log_every_n_steps=1
    )
    trainer.fit(batches(8, 8), batches(8), **options)
    return trainer


def facts(trainer, callback):
    found = dict(callback.state_dict())
    found.pop("sizes", None)  # of files that are named by the run
    rate = float(trainer.hyperparams["learning_rate"])
    return found, rate, trainer.global_step, trainer.history.state_dict()


@pytest.mark.parametrize("make", [
    lambda path: EarlyStopping("val_loss", patience=2),
    lambda path: EarlyStopping("val_loss", patience=2, restore_best=True),
    lambda path: EarlyStopping("val_loss", patience=9, check_finite=False),
    lambda path: ReduceLROnPlateau("val_loss", patience=1, cooldown=3),
    lambda path: NanGuard("skip"),
    lambda path: CSVLogger(path),
    lambda path: ModelCheckpoint(path, "val_loss", save_top_k=2, save_last=True),
    lambda path: WeightAveraging(0.5),
    lambda path: Counter(),
    lambda path: Late(),
])  # fmt: skip
def test_a_callback_of_a_second_trainer_is_as_new(make, tmp_path):
    once = make(tmp_path / "a")
    fold(once)
    second = fold(once, SCORES[1:])
    new = make(tmp_path / "b")
    wanted = fold(new, SCORES[1:])
    assert facts(second, once) == facts(wanted, new)
    for leaf, own in zip(
        *map(jax.tree.leaves, (second.model, wanted.model)), strict=True
    ):
        if isinstance(leaf, jax.Array):
            np.testing.assert_array_equal(leaf, own)


def test_no_fold_gets_the_weights_of_another(caplog):
    once = EarlyStopping("val_loss", patience=2, restore_best=True)
    fold(once)
    assert once.reason
    caplog.clear()
    fold(once, [9.0, 8.0, 7.0, 6.0, 5.0])
    assert once.reason is None and once.best_score == 5.0
    assert "back to step" not in caplog.text


def test_what_is_no_state_is_left_alone():
    once = Counter()
    for _ in range(3):
        fold(once, max_epochs=2)
    assert once.epochs == 2 and len(once.of_all_folds) == 6


def test_steps_that_another_trainer_skipped_are_forgotten():
    once = NanGuard("skip")
    bad = [(np.full_like(x, np.nan), y) for x, y in batches(8)]
    first = make_small(None, optax.sgd(0.1), callbacks=[once])
    with pytest.warns(UserWarning, match="skipped this update"):
        first.fit(bad)
    assert once.skipped_steps == [1]
    second = make_small(None, optax.sgd(0.1), callbacks=[once])
    second.fit(batches(8))
    assert once.skipped_steps == []


def test_a_second_fit_of_the_same_trainer_goes_on():
    once = Counter()
    trainer = fold(once, max_epochs=2)
    trainer.validate(batches(8))
    trainer.fit(batches(8, 8), batches(8), max_epochs=3)
    assert once.epochs == 3


def test_trainers_that_are_made_first_start_anew_too():
    once = Counter()
    trainers = [make_small(None, optax.sgd(0.1), callbacks=[once]) for _ in range(2)]
    for trainer in trainers:
        trainer.fit(batches(8), max_epochs=2)
        assert once.epochs == 2


def test_what_another_trainer_saves_or_loads_is_its_own(tmp_path):
    once = Counter()
    first = fold(once, max_epochs=2)
    path = first.save(tmp_path / "first")
    second = make_small(
        None, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), callbacks=[once]
    )
    second.save(tmp_path / "second")
    assert once.epochs == 0
    second.load(path)
    assert once.epochs == 2
    second.fit(batches(8, 8), max_epochs=3)
    assert once.epochs == 3


def test_a_load_that_fails_leaves_the_callback_to_the_first(tmp_path):
    once = Counter()
    fold(once, max_epochs=2)
    other = make_small(None, optax.sgd(0.1), callbacks=[once])
    with pytest.raises(FileNotFoundError):
        other.load(tmp_path / "nothing")
    assert once.epochs == 2


def test_a_callback_that_was_used_is_copied_and_pickled_as_before():
    once = Counter()
    fold(once, max_epochs=2)
    for copied in (copy.deepcopy(once), pickle.loads(pickle.dumps(once))):
        fold(copied, max_epochs=1)
        assert copied.epochs == 1


def test_whose_method_fails_is_said():
    class Fails(Counter):
        def load_state_dict(self, state):
            raise KeyError("mine")

    once = Fails()
    fold(once, max_epochs=1)
    with pytest.raises(KeyError) as caught:
        fold(once, max_epochs=1)
    assert (
        "the callback Fails, which another trainer has used"
        in caught.value.__notes__[0]
    )


def test_a_table_of_a_second_trainer_replaces_none(tmp_path):
    once = CSVLogger(tmp_path)
    fold(once, max_epochs=2)
    rows = (tmp_path / "metrics.csv").read_text()
    (tmp_path / "metrics.json").unlink()  # then nobody knows whose it is
    fold(once, max_epochs=2)
    assert (tmp_path / "before-1" / "metrics.csv").read_text() == rows


def test_events_of_a_second_trainer_replace_none(tmp_path):
    pytest.importorskip("tensorboard")
    once = TensorBoardLogger(tmp_path)
    fold(once, max_epochs=2)
    fold(once, max_epochs=2)
    assert len(list(tmp_path.rglob("events.*"))) == 2
