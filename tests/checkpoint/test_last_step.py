"""A fit that ends has a checkpoint of its last step, and monitors have their values."""

import itertools
import json

import numpy as np
import optax
import pytest
from toys import batches, steps_in
from toys import on_one_device as make

from jaxdp import Arrays
from jaxdp.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    OptunaPruning,
    ReduceLROnPlateau,
)

DATA, VAL = batches(*[16] * 6), batches(16, 9, seed=1)


class Unsized:
    """Batches without a length, over and over if `repeat`."""

    def __init__(self, repeat=False):
        self.repeat = repeat

    def __iter__(self):
        return itertools.cycle(DATA) if self.repeat else iter(DATA)


def scores_in(path):
    """The scores that a checkpoint itself has of its saver."""
    meta = json.loads((path / "meta" / "metadata").read_text())
    return dict(map(tuple, meta["callbacks"]["ModelCheckpoint"]["scores"]))


RARE = {"every_n_train_steps": 100}


@pytest.mark.parametrize("saver, fit, expected", [
    (RARE, {}, [6]),
    ({"every_n_train_steps": 4, "save_top_k": -1}, {}, [4, 6]),
    ({"every_n_epochs": 2}, {"max_epochs": 3}, [18]),
    ({"train_time_interval": "01:00:00:00"}, {"max_steps": 5}, [5]),
    (RARE, {"max_steps": 8}, [8]),
    (RARE | {"save_last": True, "save_top_k": 0}, {}, [6]),
    (RARE | {"save_last": False}, {}, []),
    (RARE | {"save_top_k": 0}, {}, []),
    ({"save_top_k": -1, "save_last": False}, {"max_epochs": 3, "val_check_interval": 4},
     [6, 12, 18]),
    ({"save_last": False}, {"max_epochs": 3}, [18]),
    # A monitor has a value of the last step where the fit has validated it.
    ({"monitor": "val_loss"}, {"max_epochs": 3, "check_val_every_n_epoch": 9}, [18]),
    ({"monitor": "val_loss", "mode": "max"}, {"max_epochs": 3}, [6, 18]),
    ({"monitor": "val_loss", "mode": "max", "save_last": False}, {"max_epochs": 3},
     [6]),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*takes larger values for better")
def test_a_fit_that_ends_has_its_last_step(tmp_path, saver, fit, expected):
    saver = ModelCheckpoint(tmp_path, **saver)
    make(saver).fit(DATA, VAL, **fit)
    assert steps_in(tmp_path) == expected


def test_steps_beyond_the_length_of_a_loader_are_saved(tmp_path):
    class TooShort(Unsized):
        def __len__(self):
            return 2

    make(ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)).fit(
        TooShort()
    )
    assert steps_in(tmp_path) == [1, 3, 4, 5, 6]  # 2 was taken for the last


def test_the_last_step_has_its_own_weights(tmp_path):
    """And not the best ones, which `EarlyStopping` puts in their place."""
    saver = ModelCheckpoint(tmp_path, **RARE)
    stopping = EarlyStopping("val_loss", restore_best=True, patience=9)
    rising = optax.sgd(-1e-2)
    trainer = make(stopping, saver, optimizer=rising)
    trainer.fit(DATA, VAL, max_epochs=2)
    assert trainer.global_step == 12 and steps_in(tmp_path) == [12]
    best = trainer.validate(VAL)["val_loss"]
    assert best < trainer.validate(VAL, "last")["val_loss"]


@pytest.mark.parametrize("loader, fit, options", [
    (Unsized(), {"max_epochs": 2}, {}),
    (Unsized(), {}, {"steps_per_execution": 3}),
    (Unsized(), {}, {"accumulate_grad_batches": 4}),
    (iter(DATA), {"limit_train_batches": 6}, {}),
    (Unsized(repeat=True), {"limit_train_batches": 4}, {}),
    (Unsized(repeat=True), {"max_steps": 4}, {}),
    (Arrays(*map(np.concatenate, zip(*DATA, strict=True))), {"max_epochs": 2}, {}),
])  # fmt: skip
def test_the_last_step_of_an_epoch_is_saved_with_its_score(
    tmp_path, loader, fit, options
):
    saver = ModelCheckpoint(
        tmp_path, "val_loss", every_n_train_steps=1, save_top_k=-1, save_last=True
    )
    trainer = make(saver, **options)
    history = trainer.fit(loader, VAL, **fit)
    last, expected = trainer.global_step, history["val_loss"][-1]
    assert float(scores_in(tmp_path / str(last))[last]) == expected


def prune(monitor):
    optuna = pytest.importorskip("optuna")
    return OptunaPruning(optuna.create_study().ask(), monitor)


LATE = {"check_val_every_n_epoch": 10, "max_epochs": 5}


@pytest.mark.parametrize("callback, val, fit, match", [
    (EarlyStopping, VAL, LATE, "`EarlyStopping.*at its end alone.*check_val_every_n"),
    (ReduceLROnPlateau, VAL, LATE, "`ReduceLROnPlateau.*at its end alone"),
    (EarlyStopping, VAL, {"check_val_every_n_epoch": 3, "max_steps": 12}, "at its end"),
    (prune, VAL, LATE, "`OptunaPruning.*at its end alone"),
    (ModelCheckpoint, None, {}, "'val_loss'.*need a `val_loader`"),
    (ModelCheckpoint, VAL, {"limit_val_batches": 0}, "'val_loss'.*need a `val_loader`"),
    (lambda monitor: EarlyStopping("val_acc"), VAL, {}, "what is logged: 'loss', 'val"),
    (lambda monitor: ModelCheckpoint(monitor="acc"), VAL, {}, "nothing of that name"),
])  # fmt: skip
def test_a_monitor_without_a_value_is_an_error_before_the_first_step(
    tmp_path, callback, val, fit, match
):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=1e-3)
    options = {"optimizer": optimizer, "default_root_dir": tmp_path}
    trainer = make(callback(monitor="val_loss"), **options)
    with pytest.raises(ValueError, match=match):
        trainer.fit(DATA, val, **fit)
    assert trainer.global_step == 0


@pytest.mark.parametrize("fit", [
    {"max_epochs": 10, "check_val_every_n_epoch": 10},
    {"max_epochs": 1},
    {"max_steps": 2},
    {"max_steps": 2, "max_epochs": -1},
])  # fmt: skip
def test_a_monitor_whose_values_may_come_is_none(fit):
    make(EarlyStopping("val_loss")).fit(DATA[:2], VAL, **fit)


@pytest.mark.parametrize("saver", [RARE, {"every_n_epochs": 9}])
def test_a_fit_that_saves_nothing_says_so(saver, tmp_path, caplog):
    make(ModelCheckpoint(tmp_path, save_last=False, **saver)).fit(DATA)
    assert f"nothing is saved in {tmp_path}: no checkpoint was due" in caplog.text
