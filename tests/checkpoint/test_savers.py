"""Several `ModelCheckpoint`s in one run, and what else lies in their folders."""

import json
import os

import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.tree_util import tree_leaves_with_path
from toys import On, batches, fail_with, steps_in
from toys import on_one_device as make

from jaxdp import Callback
from jaxdp.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint

DATA = batches(16, 16, 5)
VAL = batches(16, seed=1)


class Kill(Callback):
    """Ends the run between the savers before and after it in the list."""

    def __init__(self, step):
        self.step = step

    def on_boundary(self, trainer):
        if trainer.global_step == self.step and not trainer.record.is_at_epoch_end:
            raise OSError("killed")


def aside(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("before"))


def newest(root, **options):
    return ModelCheckpoint(root / "newest", **{"every_n_epochs": 1} | options)


def best(root, **options):
    options = {"save_last": False} | options
    return ModelCheckpoint(root / "best", monitor="val_loss", **options)


def told(path):
    """Returns a checkpoint's metadata and state, but what two runs can't share."""
    meta = json.loads((path / "meta" / "metadata").read_text())
    for name in ("run_id", "identities"):
        meta.pop(name)
    meta["callbacks"].pop("Kill", None)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(path / "state")
    return meta, {str(name): x.tolist() for name, x in tree_leaves_with_path(state)}


@pytest.mark.slow
def test_what_was_due_when_a_run_died_is_saved_when_it_goes_on(tmp_path):
    """Between the saves of two savers at one step, which is the run's last or not."""

    def savers(root):
        often = {"every_n_train_steps": 2, "save_top_k": -1}
        return [ModelCheckpoint(root / name, **often) for name in ("newest", "other")]

    make(*savers(tmp_path / "whole")).fit(DATA, max_epochs=2)
    for step in (4, 6):
        root = tmp_path / str(step)
        first, second = savers(root)
        with pytest.raises(OSError, match="killed"):
            make(first, Kill(step), second).fit(DATA, max_epochs=2)
        assert steps_in(root / "newest")[-1] == step
        assert step not in steps_in(root / "other")
        trainer = make(*savers(root))
        if step == 6:
            with pytest.warns(UserWarning, match="nothing to do"):
                trainer.fit(DATA, max_epochs=2, ckpt_path="auto")
        else:
            trainer.fit(DATA, max_epochs=2, ckpt_path="auto")
        for folder in ("newest", "other"):
            assert steps_in(root / folder) == [2, 4, 6]
            assert aside(root / folder) == []
            expected = told(tmp_path / "whole" / folder / str(step))
            assert told(root / folder / str(step)) == expected


@pytest.mark.filterwarnings("ignore:.*takes larger values for better")
def test_what_was_due_is_judged_by_what_it_would_have_been_judged_by(tmp_path):
    def savers(root):
        return newest(root), best(root, mode="max", save_top_k=2)

    def scores(saver):
        return saver.state_dict()["scores"]

    _, expected = whole = savers(tmp_path / "whole")
    make(*whole).fit(DATA, VAL, max_epochs=3)
    first, second = savers(tmp_path)
    with pytest.raises(OSError, match="killed"):
        make(first, Kill(6), second).fit(DATA, VAL, max_epochs=3)
    first, second = savers(tmp_path)
    make(first, second).fit(DATA, VAL, max_epochs=3, ckpt_path="auto")
    assert scores(second) == scores(expected)
    for root in (tmp_path, tmp_path / "whole"):
        assert steps_in(root / "best") == [3, 6]


def test_a_save_before_the_loggers_begin_keeps_what_they_logged(tmp_path):
    """Killed between two savers' saves, and again after the second saver's."""

    def run(*others):
        savers = [
            ModelCheckpoint(tmp_path / name, every_n_train_steps=2) for name in "ab"
        ]
        trainer = make(
            savers[0], *others, savers[1], CSVLogger(tmp_path), log_every_n_steps=1
        )
        trainer.fit(DATA, max_epochs=1, ckpt_path="auto")

    for callback in Kill(2), On(on_train_batch_end=fail_with(OSError("killed"))):
        with pytest.raises(OSError, match="killed"):
            run(callback)
    run()
    with open(tmp_path / "metrics.csv") as file:
        assert [row.split(",")[1] for row in file] == ["step", "1", "2", "3", "3"]


def test_of_equal_steps_the_last_savers_is_gone_on_from(tmp_path, caplog):
    expected = best(tmp_path)
    make(newest(tmp_path), expected).fit(DATA, VAL, max_epochs=3)
    score, paths = expected.best_model_score, steps_in(tmp_path / "best")
    for where in ("auto", "last", tmp_path / "newest" / "9"):
        saver = best(tmp_path)
        with pytest.warns(UserWarning, match="nothing to do"):
            make(newest(tmp_path), saver).fit(DATA, VAL, max_epochs=3, ckpt_path=where)
        assert saver.best_model_score == score
        assert steps_in(tmp_path / "best") == paths and aside(tmp_path / "best") == []
        assert steps_in(tmp_path / "newest") == [9] and aside(tmp_path / "newest") == []
        if where != tmp_path / "newest" / "9":
            assert f"from {tmp_path / 'best' / '9'}" in caplog.text
        caplog.clear()


def test_what_this_run_has_saved_and_does_not_know_is_set_aside(tmp_path, caplog):
    trainer = make(newest(tmp_path, save_top_k=-1))
    trainer.fit(DATA, max_epochs=1)
    by_hand = make(newest(tmp_path, save_top_k=-1), Kill(5))
    with pytest.raises(OSError, match="killed"):
        by_hand.fit(DATA, max_epochs=3, ckpt_path="auto")
    by_hand.save(tmp_path / "newest" / "5")
    make(newest(tmp_path, save_top_k=-1)).fit(DATA, max_epochs=2, ckpt_path="auto")
    assert steps_in(tmp_path / "newest") == [3, 5, 6]  # the one that was gone on from
    assert aside(tmp_path / "newest") == []
    make(newest(tmp_path, save_top_k=-1)).fit(DATA, max_epochs=3, ckpt_path="auto")
    assert steps_in(tmp_path / "newest") == [3, 6, 9]
    assert os.listdir(tmp_path / "newest" / "before-1") == ["5"]
    assert "not saved: 5. They are now in" in caplog.text
    make().load(tmp_path / "newest" / "before-1" / "5")


def test_other_callbacks_may_change_places(tmp_path):
    def stoppers():
        return EarlyStopping("loss", patience=50), EarlyStopping("accuracy", mode="max")

    def loggers():
        return [CSVLogger(tmp_path / name) for name in ("a", "b")]

    stopping, (first, second) = stoppers(), loggers()
    options = {"metrics": "accuracy", "log_every_n_steps": 1}
    trainer = make(*stopping, first, second, **options)
    trainer.fit(DATA, max_epochs=2)
    second.state_dict = lambda: CSVLogger.state_dict(second) | {"rows": 1}
    path = trainer.save(tmp_path / "saved")
    again, (first, second) = stoppers(), loggers()
    loaded = make(*reversed(again), second, first, metrics="accuracy")
    loaded.load(path)
    for now, then in zip(again, stopping, strict=True):
        assert now.state_dict() == then.state_dict()
    assert second._rows == 1 < first._rows


def test_a_saver_less_or_more_takes_no_other_ones_state(tmp_path):
    saver = best(tmp_path)
    trainer = make(newest(tmp_path), saver)
    trainer.fit(DATA, VAL, max_epochs=2)
    path = trainer.save(tmp_path / "saved")
    alone = best(tmp_path)
    make(alone).load(path)
    assert alone.state_dict() == saver.state_dict()
    more, alone = ModelCheckpoint(tmp_path / "more"), best(tmp_path)
    with pytest.warns(
        UserWarning, match=r"no state for the callback ModelCheckpoint \(.*more, no m"
    ):
        make(more, alone, newest(tmp_path)).load(path)
    assert alone.state_dict() == saver.state_dict() and not more.best_model_path


def test_what_is_loaded_and_saved_pads_as_it_did(tmp_path):
    trainer = make()
    trainer.fit(DATA, max_epochs=1)
    path = trainer.save(tmp_path / "saved")
    again = make()
    again.load(path)
    again.save(tmp_path / "again")
    assert told(tmp_path / "again") == told(tmp_path / "saved")
    np.testing.assert_array_equal(again.model.first.weight, trainer.model.first.weight)
