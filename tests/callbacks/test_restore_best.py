"""`EarlyStopping(restore_best=True)`: a fit ends with the weights of the best check."""

import contextlib
import warnings

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import (
    At,
    Mlp,
    On,
    assert_equal_leaves,
    batches,
    fail_with,
    make_small,
    scores,
)

from jaxdp import FSDP, SingleDevice
from jaxdp.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging

SCORES = [3.0, 2.0, 1.0, 5.0, 4.0]


def made_up(scores=SCORES):
    """Returns a callback that replaces validation losses by scores, and what the
    state was at each check."""
    left, states = list(scores), []

    def replace(trainer, metrics):
        metrics["val_loss"] = left.pop(0)
        states.append(jax.tree.map(np.asarray, jax.tree.leaves(trainer.state)))

    return On(on_validation_end=replace), states


def fit(*callbacks, patience=2, monitor="val_loss", lr=0.1, **options):
    """A fit of two steps an epoch, and the weights of each check."""
    stopping = EarlyStopping(monitor, patience=patience, restore_best=True)
    strategy = options.pop("strategy", SingleDevice())
    callbacks = [*callbacks, stopping]
    trainer = make_small(None, optax.adam(lr), callbacks=callbacks, strategy=strategy)
    trainer.fit(batches(8, 8), batches(8), **{"max_epochs": 9, **options})
    return trainer


@pytest.mark.parametrize("strategy", [SingleDevice, FSDP])
def test_a_fit_ends_with_the_weights_of_the_best_check(strategy, caplog):
    callback, weights = made_up()
    trainer = fit(callback, strategy=strategy())
    leaves = jax.tree.leaves(trainer.state.params)
    assert_equal_leaves(leaves, weights[2][: len(leaves)])
    assert not np.array_equal(leaves[0], weights[4][0])
    assert trainer.global_step == 10
    assert "back to step 6, where val_loss was 1" in caplog.text
    assert fit(scores([2.0, 1.0, 1.0, 1.0])).global_step == 8
    assert "back to step 4, where val_loss was 1" in caplog.text  # the older of equals


def test_a_fit_whose_last_check_is_the_best_or_that_fails_is_left_alone(caplog):
    fails = At(8, fail_with(KeyError("mine")), "on_train_epoch_start")
    fit(monitor="loss", lr=1e-3, max_epochs=2)
    with pytest.raises(KeyError):
        fit(scores(SCORES), fails, patience=3)
    assert "back to step" not in caplog.text


def run(saver, kill_after=None, epochs=9, **more):
    """A fit that resumes, with two steps an epoch, whose best step is the sixth."""
    stopping = EarlyStopping(patience=2, restore_best=True)
    kill = At(kill_after, fail_with(KeyError("killed")), "on_boundary")
    callbacks = [stopping, *saver, scores(SCORES), kill, WeightAveraging(0.5)]
    model = Mlp(jax.random.key(0))
    trainer = make_small(model, optax.adam(0.1), callbacks=callbacks, **more)
    options = {"ckpt_path": "auto"} if saver else {}
    ending = pytest.raises(KeyError) if kill_after else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as told, ending:
        warnings.simplefilter("always")
        trainer.fit(batches(8, 8), batches(8), max_epochs=epochs, **options)
    return trainer, [str(w.message) for w in told]


def learned(trainer):
    state = trainer.state
    return jax.tree.leaves((state.params, state.buffers, state.opt_state))


def moves_buffers(model):
    return eqx.tree_at(lambda m: m.offsets, model, model.offsets + 1)


BEST = {"monitor": "val_loss", "save_last": True}
EVERY = {"save_top_k": -1}


@pytest.mark.parametrize("saver, kills, epochs, strategy", [
    (BEST, [9], 9, SingleDevice),  # the best is older than the resume
    (BEST, [7], 9, SingleDevice),  # it is the very step of it
    (BEST, [None], 9, SingleDevice),  # the fit had ended
    (BEST, [None], 4, SingleDevice),  # and there is nothing left to do
    (EVERY, [9], 9, SingleDevice),  # saved, though not as the best
    ({"monitor": "val_loss"}, [9], 9, FSDP),
])  # fmt: skip
def test_a_resumed_run_ends_with_the_weights_of_the_unbroken_one(
    saver, kills, epochs, strategy, tmp_path, caplog
):
    more = {"after_update": moves_buffers, "strategy": strategy()}
    wanted, _ = run([], epochs=epochs, **more)
    for kill_after in (*kills, None):
        savers = [ModelCheckpoint(tmp_path, **saver)]
        trainer, told = run(savers, kill_after, epochs, **more)
    assert all("nothing to do" in text for text in told)
    assert caplog.text.count("back to step 6, where val_loss was 1") >= 2
    assert_equal_leaves(learned(trainer), learned(wanted))


@pytest.mark.parametrize("saver, damages, reason", [
    ({}, False, "no `ModelCheckpoint`"),  # it keeps the newest alone
    (BEST, True, "damaged"),
])  # fmt: skip
def test_a_resume_says_that_no_checkpoint_has_the_best_weights(
    saver, damages, reason, tmp_path, caplog
):
    run([ModelCheckpoint(tmp_path, **saver)], 9)
    caplog.clear()
    if damages:
        (tmp_path / "6" / "files.json").unlink()
    _, (text,) = run([ModelCheckpoint(tmp_path, **saver)])
    assert "back to step" not in caplog.text
    assert "the best weights of step 6 are older than the resume" in text
    assert reason in text and "`trainer.load(path)`" in text


def test_a_checkpoint_of_after_the_end_has_the_best_weights(tmp_path, caplog):
    trainer = fit(scores(SCORES))
    path, wanted = trainer.save(tmp_path / "saved"), learned(trainer)
    again = fit(scores([9.0] * 7), patience=3, max_epochs=7, ckpt_path=path)
    assert again.global_step > 10
    assert_equal_leaves(learned(again), wanted)
