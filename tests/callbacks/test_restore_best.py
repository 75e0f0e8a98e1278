"""`EarlyStopping(restore_best=True)`: a fit ends with the weights of the best check."""

import contextlib
import warnings

import equinox as eqx
import jax
import optax
import pytest
from toys import At, Mlp, assert_equal_leaves, batches, fail_with, make_small, scores

from jaxdp import FSDP, SingleDevice
from jaxdp.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging

BEST = {"monitor": "val_loss", "save_last": True}


def moves_buffers(model):
    return eqx.tree_at(lambda m: m.offsets, model, model.offsets + 1)


def run(folder=None, saver=BEST, kill_after=None, values=(3, 2, 1, 5, 4), **more):
    """Fits two steps an epoch, and resumes if a saver has a folder; the best step of
    these scores is the sixth, the last one the tenth. Returns the trainer, what it has
    learned, and the warnings."""
    fit_options = {"max_epochs": more.pop("epochs", 9)}
    fit_options["ckpt_path"] = more.pop("ckpt_path", "auto" if folder else None)
    stopping = EarlyStopping(patience=more.pop("patience", 2), restore_best=True)
    kill = At(kill_after, fail_with(KeyError("killed")), "on_boundary")
    callbacks = [stopping, scores(values), kill, WeightAveraging(0.5)]
    if folder is not None:
        callbacks.insert(1, ModelCheckpoint(folder, **saver))
    model, options = Mlp(jax.random.key(0)), {"after_update": moves_buffers} | more
    trainer = make_small(model, optax.adam(0.1), callbacks=callbacks, **options)
    ending = pytest.raises(KeyError) if kill_after else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, ending:
        warnings.simplefilter("always")
        trainer.fit(batches(8, 8), batches(8), **fit_options)
    state = trainer.state
    learned = jax.tree.leaves((state.params, state.buffers, state.opt_state))
    return trainer, learned, [str(warning.message) for warning in caught]


def test_a_fit_whose_last_check_is_the_best_or_that_fails_is_left_alone(caplog):
    trainer, _, _ = run(epochs=3)
    assert trainer.global_step == 6
    run(kill_after=8)
    assert "back to step" not in caplog.text


def test_of_equal_checks_the_older_is_the_best(caplog):
    assert run(values=(2, 1, 1, 1))[0].global_step == 8
    assert "back to step 4, where val_loss was 1" in caplog.text


@pytest.mark.parametrize("saver, kills, epochs, strategy", [
    (None, [], 9, SingleDevice),
    (None, [], 9, FSDP),
    (BEST, [9], 9, SingleDevice),  # the best is older than the resume
    (BEST, [7], 9, SingleDevice),  # it is the very step of it
    (BEST, [None], 9, SingleDevice),  # the fit had ended
    (BEST, [None], 4, SingleDevice),  # and there is nothing left to do
    ({"save_top_k": -1}, [9], 9, SingleDevice),  # saved, though not as the best
    ({"monitor": "val_loss"}, [9], 9, FSDP),
])  # fmt: skip
def test_a_fit_ends_with_the_weights_of_the_best_check_also_if_it_resumes(
    saver, kills, epochs, strategy, tmp_path, caplog
):
    _, wanted, _ = run(epochs=3, strategy=strategy())  # which ends at the best check
    for kill_after in (*kills, None):
        options = {"epochs": epochs, "strategy": strategy()}
        trainer, learned, told = run(saver and tmp_path, saver, kill_after, **options)
    assert trainer.global_step == 2 * min(epochs, 5)
    assert all("nothing to do" in text for text in told)
    assert "back to step 6, where val_loss was 1" in caplog.text
    assert_equal_leaves(learned, wanted)


@pytest.mark.parametrize("saver, damages, reason", [
    ({}, False, "no `ModelCheckpoint`"),  # it keeps the newest alone
    (BEST, True, "damaged"),
])  # fmt: skip
def test_a_resume_says_that_no_checkpoint_has_the_best_weights(
    saver, damages, reason, tmp_path, caplog
):
    run(tmp_path, saver, 9)
    caplog.clear()
    if damages:
        (tmp_path / "6" / "files.json").unlink()
    _, _, (text,) = run(tmp_path, saver)
    assert "back to step" not in caplog.text
    assert "the best weights of step 6 are older than the resume" in text
    assert reason in text and "`trainer.load(path)`" in text


def test_a_checkpoint_of_after_the_end_has_the_best_weights(tmp_path):
    trainer, wanted, _ = run()
    path = trainer.save(tmp_path / "saved")
    again, learned, _ = run(values=[9] * 7, patience=3, epochs=7, ckpt_path=path)
    assert again.global_step > 10
    assert_equal_leaves(learned, wanted)
