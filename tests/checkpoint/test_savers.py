"""Several `ModelCheckpoint`s in one run, and what else lies in their folders."""

import contextlib
import os

import pytest
from toys import On, batches, fail_with, read_meta, steps_in
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


def newest(root, **options):
    return ModelCheckpoint(root / "newest", **{"every_n_epochs": 1} | options)


def best(root, **options):
    options = {"save_last": False} | options
    return ModelCheckpoint(root / "best", monitor="val_loss", **options)


def scores(saver):
    return saver.state_dict()["scores"]


def steps_and_aside(folder):
    """The steps in a folder, and the names of folders of other runs in it."""
    return steps_in(folder), [n for n in os.listdir(folder) if n.startswith("before")]


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("step", [4, 6])
def test_what_was_due_when_a_run_died_is_saved_when_it_goes_on(step, tmp_path):
    """Between the saves of two savers at one step, which is the run's last or not."""

    def fit(root, *kill):
        often = {"every_n_train_steps": 2, "save_top_k": -1}
        first, second = (ModelCheckpoint(root / name, **often) for name in "ab")
        make(first, *kill, second).fit(DATA, max_epochs=2, ckpt_path="auto")

    fit(tmp_path / "whole")
    with pytest.raises(OSError, match="killed"):
        fit(tmp_path, Kill(step))
    assert step in steps_in(tmp_path / "a") and step not in steps_in(tmp_path / "b")
    is_over = pytest.warns(UserWarning, match="nothing to do")
    with is_over if step == 6 else contextlib.nullcontext():
        fit(tmp_path)
    for name in "ab":
        assert steps_and_aside(tmp_path / name) == ([2, 4, 6], [])
        paths = (root / name / str(step) for root in (tmp_path, tmp_path / "whole"))
        found, expected = map(read_meta, paths)
        differ = {name for name in expected if found[name] != expected[name]}
        assert differ <= {"run_id", "identities", "callbacks" if name == "a" else ""}


@pytest.mark.filterwarnings("ignore:.*takes larger values for better")
def test_what_was_due_is_judged_by_what_it_would_have_been_judged_by(tmp_path):
    def fit(root, *kill, **options):
        saver = best(root, mode="max", save_top_k=2)
        make(newest(root), *kill, saver).fit(DATA, VAL, max_epochs=3, **options)
        assert steps_in(root / "best") == [3, 6]
        return scores(saver)

    expected = fit(tmp_path / "whole")
    with pytest.raises(OSError, match="killed"):
        fit(tmp_path, Kill(6))
    assert fit(tmp_path, ckpt_path="auto") == expected


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
        assert steps_and_aside(tmp_path / "best") == (paths, [])
        assert steps_and_aside(tmp_path / "newest") == ([9], [])
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
    # The one that was gone on from stays.
    assert steps_and_aside(tmp_path / "newest") == ([3, 5, 6], [])
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
    trainer, again = make(), make()
    trainer.fit(DATA, max_epochs=1)
    again.load(trainer.save(tmp_path / "saved"))
    again.save(tmp_path / "again")
    saved, then = (read_meta(tmp_path / name) for name in ("saved", "again"))
    assert saved == then and saved["padded_rows"][1]
