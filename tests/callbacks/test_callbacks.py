"""Callbacks that stop a fit, donation, and when hooks are called."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import At, On, batches, fail_with, path_of, scores
from toys import linear_on_one_device as make_trainer

from jaxdp import Callback, Sharded, SingleDevice
from jaxdp.callbacks import (
    DonateBuffers,
    EarlyStopping,
    GradientMonitor,
    ModelCheckpoint,
    WeightAveraging,
)


def stop(values, monitor="val_loss", fit_options=None, **options):
    """Returns the number of epochs until `EarlyStopping(**options)` ends a fit."""
    stopping = EarlyStopping(monitor, **options)
    trainer = make_trainer(scores(values, monitor), stopping)
    fit_options = {"max_epochs": len(values)} | (fit_options or {})
    history = trainer.fit(batches(8), batches(8), **fit_options)
    return len(history.epochs), stopping


AREA = {"monitor": "val_area", "mode": "max", "patience": 2}
GROWING = [0.5, 0.55, 0.58, 0.69, 0.9]


@pytest.mark.filterwarnings("ignore:the val_loss of epoch . is nan")
@pytest.mark.parametrize("values, options, epochs, best, reason", [
    ([3, 2, 2.5, 2.2, 2, 1.9], {}, 5, 2, "val_loss did not improve on 2 for 3 checks"),
    ([3, 3, 2, 2, 1, 1, 0.5], {"patience": 2}, 7, 0.5, ""),
    ([3, 3, 2], {"patience": 0}, 2, 3, "val_loss did not improve on 3 for 1 check"),
    (GROWING, {"min_delta": 0.1} | AREA, 3, 0.5,
     "val_area did not improve on 0.5 for 2 checks"),
    (GROWING, AREA, 5, 0.9, ""),
    ([1.0, math.nan, 0.5, 0.4], {"check_finite": False, "patience": 2}, 4, 0.4, ""),
    ([math.nan, 2, 2, 3, 1], {"check_finite": False, "patience": 2}, 4, 2,
     "val_loss did not improve on 2 for 2 checks"),
    # A bad stretch before the minimum ends no fit that improves.
    ([3, 4, 5, 2, 1, 0.5, 0.4], {"patience": 1, "fit_options": {"min_epochs": 4}}, 7,
     0.4, ""),
    # At once.
    ([1.0, math.nan, 1.0], {}, 2, 1.0, "val_loss is nan, which is not finite"),
    ([1, 0.4, 0.3], {"stopping_threshold": 0.5}, 2, 0.4,
     "val_loss is 0.4, better than the `stopping_threshold` of 0.5"),
    ([1, 3, 1], {"divergence_threshold": 2.0}, 2, 1,
     "val_loss is 3, worse than the `divergence_threshold` of 2"),
])  # fmt: skip
def test_early_stopping_stops_when_it_should(
    values, options, epochs, best, reason, caplog
):
    found, stopping = stop(values, **options)
    assert (found, stopping.best_score) == (epochs, best)
    assert stopping.reason == (f"{reason}." if reason else None)
    assert stopping.stopped_epoch == (epochs - 1 if reason else None)
    assert caplog.text.count(f"EarlyStopping: {reason}") == bool(reason)


def test_early_stopping_may_be_silent(caplog):
    assert stop([3, 3, 3], patience=1, verbose=False)[0] == 2
    assert "EarlyStopping" not in caplog.text


@pytest.mark.parametrize("monitor", ["val_loss", "loss"])
def test_early_stopping_checks_validations_or_epochs_and_warms_up(monitor):
    class WarmsUp(EarlyStopping):
        def handle_means(self, trainer, row):
            if trainer.current_epoch >= 2:
                super().handle_means(trainer, row)

    for kind, epochs in ((EarlyStopping, 2), (WarmsUp, 4)):
        stopping = kind(monitor, patience=1, min_delta=99.0)
        trainer = make_trainer(stopping)
        trainer.validate(batches(8))  # which is no check
        assert stopping.best_score is None
        trainer.fit(batches(8), batches(8), max_epochs=6)
        assert trainer.current_epoch == epochs and stopping.wait_count == 1


@pytest.mark.parametrize("monitor, steps, logged", [
    ("typo", 1, "'loss', 'accuracy'"),
    # A callback of the user might log it in the first validation.
    ("val_acc", 3, "'loss', 'accuracy', 'val_loss', 'val_accuracy'"),
])  # fmt: skip
def test_a_monitor_that_nothing_logs_is_refused_with_the_logged_names(
    monitor, steps, logged
):
    trainer = make_trainer(EarlyStopping(monitor), On(), metrics=["accuracy"])
    match = rf"monitor='{monitor}'.*: nothing of that name is .*: {logged}\. Names with"
    with pytest.raises(ValueError, match=match):
        trainer.fit(batches(8), batches(8), max_epochs=9, check_val_every_n_epoch=3)
    assert trainer.global_step == steps


@pytest.mark.parametrize("killed_at", [None, 4, 5])
@pytest.mark.parametrize("values, minimum, options, steps", [
    # By step. The bad stretch ends with the check that completes the minimum.
    ({2: 3, 4: 4, 6: 2, 8: 1}, {"min_epochs": 3}, {}, 8),
    ({2: 3, 4: 4, 6: 2, 8: 1}, {"min_steps": 5}, {}, 8),
    ({2: 3, 4: 4, 6: 5, 8: 1}, {"min_steps": 5}, {}, 6),
    ({1: 3, 2: 4, 3: 5, 4: 2, 5: 1.5, 6: 1, 7: 0.5, 8: 0.4}, {"min_epochs": 2},
     {"val_check_interval": 1}, 8),
    ({1: 3, 2: 4, 3: 5, 4: 6, 5: 2, 6: 1, 7: 0.5, 8: 0.4}, {"min_epochs": 2},
     {"val_check_interval": 1}, 4),
])  # fmt: skip
def test_a_wish_to_stop_from_before_the_minimum_does_not_stay(
    values, minimum, options, steps, killed_at, tmp_path
):
    def replace(trainer, metrics):
        metrics["val_loss"] = float(values[trainer.global_step])

    def fit(*callbacks):
        saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
        callbacks = On(on_validation_end=replace), EarlyStopping(patience=1), *callbacks
        trainer = make_trainer(*callbacks, saver)
        fit_options = {"max_epochs": 4, "ckpt_path": "auto"} | minimum | options
        trainer.fit(batches(8, 8), batches(8), **fit_options)
        return trainer

    if killed_at is not None and killed_at < steps:
        with pytest.raises(KeyboardInterrupt):
            fit(At(killed_at, fail_with(KeyboardInterrupt())))
    assert fit().global_step == steps


def test_the_state_of_early_stopping_is_json(tmp_path):
    stopping, other = EarlyStopping("loss", min_delta=np.float32(0.1)), EarlyStopping()
    make_trainer(stopping, ModelCheckpoint(tmp_path)).fit(batches(8), max_epochs=2)
    assert (tmp_path / "2").exists()
    stopping.best_score = math.inf
    other.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    assert other.state_dict() == stopping.state_dict() and other.best_score == math.inf


@pytest.mark.parametrize("old", [
    lambda value: {"last": [value, False]},  # of 0.2
    lambda value: {"last_check": ["2", value]},
    lambda value: {"last": [value]},  # of this version
])  # fmt: skip
def test_a_run_that_had_stopped_under_an_older_version_stays_stopped(old, tmp_path):
    stopping = EarlyStopping("loss", patience=1, min_delta=10.0)
    made_of = stopping.state_dict

    def old_state():
        state = made_of()
        (value,) = state.pop("last") or [None]
        return state | (old(value) if value else {})

    for changes, steps in (({"state_dict": old_state}, 2), ({}, 2)):
        vars(stopping).update(changes)
        trainer = make_trainer(stopping, ModelCheckpoint(tmp_path))
        trainer.fit(batches(8), max_epochs=9, ckpt_path="auto")
        assert trainer.global_step == steps
        stopping = EarlyStopping("loss", patience=1, min_delta=10.0)


@pytest.mark.parametrize("what", ["state", "all", "none"])
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded])
def test_a_donated_state_is_overwritten_and_no_other(what, strategy):
    donate, kept = DonateBuffers(what), []
    keep = On(on_train_batch_end=lambda trainer, *_: kept.append(trainer.state))
    options = {"optimizer": optax.adam(1e-3), "strategy": strategy()}
    make_trainer(donate, keep, **options).fit(batches(16, 16))
    report, is_none = donate.report, what == "none"
    assert report["donated_bytes"] == report["aliased_bytes"]
    assert report["not_aliased"] == []
    assert report["donated_bytes"] == 0 if is_none else report["donated_bytes"] > 180
    assert kept[0].params.weight.is_deleted() != is_none


def test_a_donated_leaf_that_is_not_overwritten_is_named():
    def grow(trainer, metrics, batch_idx):
        """Replaces the program that is looked at by another one."""

        def step(leaves, x):
            keep = [leaf.astype(jnp.bfloat16) for leaf in leaves[:1]]
            return [*keep, *leaves[1:]], x.sum()

        with_path = jax.tree_util.tree_leaves_with_path(trainer.state)
        leaves = list({path_of(path): leaf for path, leaf in with_path}.values())
        program = jax.jit(step, donate_argnums=0).lower(leaves, leaves[0])
        compiled = program.compile()
        trainer.compiled_train_step = lambda: compiled

    donate = DonateBuffers()
    with pytest.warns(UserWarning, match=r"1 of the leaves .*: params\.weight\."):
        make_trainer(On(on_train_batch_end=grow), donate).fit(batches(8))
    assert donate.report["not_aliased"] == ["params.weight"]
    assert donate.report["donated_bytes"] - donate.report["aliased_bytes"] == 48


def test_a_boundary_comes_after_every_callback_has_seen_the_step():
    order = []

    def note(kind):
        return lambda t, *_: order.append((kind, t.global_step, t.current_epoch))

    early, late = On(on_boundary=note("boundary")), On(on_train_batch_end=note("batch"))
    make_trainer(early, late, Callback()).fit(batches(8, 8))
    steps = [(kind, step, 0) for step in (1, 2) for kind in ("batch", "boundary")]
    assert order == [*steps, ("boundary", 2, 1)]


def test_all_callbacks_end_even_if_one_raises():
    ended = []
    bad = On(on_fit_end=fail_with(OSError("disk")))
    good = On(on_fit_end=lambda trainer: ended.append(trainer.global_step))
    with pytest.raises(OSError, match="disk"):
        make_trainer(bad, good).fit(batches(8))
    assert ended == [1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_hook_cannot_change_a_batch(accumulate):
    def mix(trainer, batch, batch_idx):
        x, _ = batch if accumulate == 1 else batch[0]
        x[:] = 0

    data = batches(8, 8)
    before = data[0][0].copy()
    mixes = On(on_train_batch_start=mix)
    with pytest.raises(ValueError, match="read-only") as caught:
        make_trainer(mixes, accumulate_grad_batches=accumulate).fit(data)
    assert "in on_train_batch_start" in caught.value.__notes__[0]
    np.testing.assert_array_equal(data[0][0], before)
    data[0][0][:] = 0  # the user's own array still can


def test_callbacks_may_be_added_later_but_for_those_in_the_step(tmp_path):
    trainer, saved = make_trainer(), []
    saves = On(on_save_checkpoint=lambda trainer, path: saved.append(path))
    trainer.callbacks += [saves, ModelCheckpoint(tmp_path)]
    trainer.fit(batches(8))
    del trainer.callbacks[:2]
    trainer.save(tmp_path / "own")
    assert saved == [str(tmp_path / "1")]
    monitor = GradientMonitor()
    trainer = make_trainer(monitor)
    for epochs in (1, 2, 3):  # one that was there from the start may come and go
        trainer.fit(batches(8), max_epochs=epochs)
        trainer.callbacks[:] = [] if epochs == 1 else [monitor]
    for late in (GradientMonitor(), WeightAveraging()):
        trainer = make_trainer()
        trainer.callbacks.append(late)
        with pytest.raises(ValueError, match=f"{type(late).__name__} was added after"):
            trainer.fit(batches(8))
