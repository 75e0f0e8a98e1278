"""`EarlyStopping(restore_best=True)`: a fit ends with the weights of the best check."""

import jax
import numpy as np
import optax
import pytest
from toys import batches, make_small

from jaxdp import FSDP, Callback, SingleDevice
from jaxdp.callbacks import EarlyStopping

SCORES = [3.0, 2.0, 1.0, 5.0, 4.0]


class MadeUp(Callback):
    """Hands out scores, and keeps the weights of each check."""

    def __init__(self):
        self.left, self.weights = list(SCORES), []

    def on_validation_end(self, trainer, metrics):
        metrics["val_loss"] = self.left.pop(0)
        self.weights.append(jax.tree.map(np.asarray, jax.tree.leaves(trainer.state)))


def fitted(**arguments):
    made_up, stopping = MadeUp(), EarlyStopping(patience=2, restore_best=True)
    trainer = make_small(
        None, optax.adam(0.1), callbacks=[made_up, stopping], **arguments
    )
    trainer.fit(batches(8, 8), batches(8), max_epochs=9)
    return trainer, made_up.weights


@pytest.mark.parametrize("strategy", [SingleDevice, FSDP])
def test_a_fit_ends_with_the_weights_of_the_best_check(strategy, caplog):
    trainer, weights = fitted(strategy=strategy())
    found, best = trainer.state, weights[2]
    number = len(jax.tree.leaves(found.params))
    for leaf, wanted in zip(jax.tree.leaves(found.params), best[:number], strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    assert not np.array_equal(jax.tree.leaves(found.params)[0], weights[4][0])
    assert trainer.global_step == 10
    assert "back to step 6, where val_loss was 1" in caplog.text


def test_a_fit_whose_last_check_is_the_best_is_left_alone(caplog):
    stopping = EarlyStopping("loss", restore_best=True)
    trainer = make_small(None, optax.sgd(1e-3), callbacks=[stopping])
    trainer.fit(batches(8), max_epochs=2)
    assert stopping.wait_count == 0
    assert "back to step" not in caplog.text


def test_of_equal_checks_the_older_stays(caplog):
    made_up = MadeUp()
    made_up.left = [2.0, 1.0, 1.0, 1.0]
    stopping = EarlyStopping(patience=2, restore_best=True)
    trainer = make_small(None, optax.adam(0.1), callbacks=[made_up, stopping])
    trainer.fit(batches(8, 8), batches(8), max_epochs=9)
    assert trainer.global_step == 8
    assert "back to step 4, where val_loss was 1" in caplog.text


def test_a_fit_that_fails_keeps_what_it_has(caplog):
    class Fails(Callback):
        def on_train_epoch_start(self, trainer):
            if trainer.current_epoch == 4:
                raise KeyError("mine")

    trainer = make_small(
        None,
        optax.adam(0.1),
        callbacks=[MadeUp(), EarlyStopping(restore_best=True), Fails()],
    )
    with pytest.raises(KeyError):
        trainer.fit(batches(8, 8), batches(8), max_epochs=9)
    assert "back to step" not in caplog.text


def test_after_a_resume_it_says_what_it_can_not_go_back_to(tmp_path, caplog):
    trainer, _ = fitted()
    path = trainer.save(tmp_path / "saved")
    stopping = EarlyStopping(patience=3, restore_best=True)
    again = make_small(None, optax.adam(0.1), callbacks=[MadeUp(), stopping])
    again.fit(batches(8, 8), batches(8), max_epochs=6, ckpt_path=path)
    assert "best weights are older than the resume" in caplog.text
