"""However a fit ends: Ctrl-C, exceptions, and callbacks that fail."""

import os
import signal
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Watching, batches
from toys import make_small as make

from jaxdp import Callback
from jaxdp.callbacks import (
    ModelCheckpoint,
    Preemption,
    ThroughputMonitor,
)
from jaxdp.distributed import is_graceful_stop


def x_y(x, y):
    return [(np.asarray(x), np.asarray(y))]


X = np.ones((8, 4), np.float32)


Y = np.zeros(8, np.int32)


class CtrlC(Callback):
    def on_validation_end(self, trainer, metrics):
        self.validated = True

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        if batch_idx == 2 and self.validated:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_at_a_boundary_and_keeps_the_model():
    watching = Watching()
    trainer = make(callbacks=[CtrlC(), watching])
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.fit(batches(*[8] * 10), batches(8), val_check_interval=2)
    assert trainer.global_step == 3
    assert watching.seen == [KeyboardInterrupt, "end"]
    # Of this very class, or Python would exit with 1 instead of 130.
    assert type(stopped.value) is KeyboardInterrupt and is_graceful_stop(stopped.value)
    trainer.model(jnp.ones(4))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):  # another one, at batch number 2 of epoch 1
        trainer.fit(batches(*[8] * 10), max_epochs=2)
    assert (trainer.global_step, trainer.current_epoch) == (13, 1)


def test_ctrl_c_that_preemption_names_returns_from_fit():
    preemption = Preemption(("SIGINT",), action="return")
    ctrl_c = CtrlC()
    trainer = make(callbacks=[ctrl_c, preemption])
    ctrl_c.validated = True
    history = trainer.fit(batches(*[8] * 10))
    assert (trainer.global_step, preemption.received) == (3, "SIGINT")
    assert history is trainer.history


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_says_what_is_saved_and_how_to_go_on(tmp_path, saves):
    saver = [ModelCheckpoint(tmp_path)] if saves else []
    trainer = make(callbacks=[CtrlC(), *saver])
    with pytest.raises(KeyboardInterrupt, match="after step 3,") as stopped:
        trainer.fit(batches(*[8] * 10), batches(8), val_check_interval=2)
    text = str(stopped.value)
    assert (f"and saved in {tmp_path / '3'}: `fit(" in text) is saves
    assert ("`trainer.save(path)` saves" in text) is not saves
    assert os.path.isdir(tmp_path / "3") is saves

    # Both ways to go on that it names.
    trainer.callbacks = trainer.callbacks[1:]
    if saves:
        again = make(callbacks=[ModelCheckpoint(tmp_path)])
        again.fit(batches(*[8] * 10), max_steps=5, ckpt_path="last")
        assert again.global_step == 5
    trainer.fit(batches(*[8] * 10))
    assert trainer.global_step == 10


STOPPED = """
import os, signal
import equinox as eqx, jax, numpy as np
from jaxdp import Callback, Trainer

class CtrlC(Callback):
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
trainer = Trainer(model, loss="mse", callbacks=[CtrlC()], enable_progress_bar=False)
trainer.fit([(np.ones((8, 4), np.float32), np.ones((8, 3), np.float32))] * 4)
"""


def test_ctrl_c_that_nobody_catches_ends_with_how_to_go_on():
    command = [sys.executable, "-c", STOPPED]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGINT  # for which a shell has 130
    last = done.stderr.splitlines()[-1]
    assert last.startswith("KeyboardInterrupt: stopped after step 2, and not saved")


class CtrlCLate(Callback):
    def on_train_epoch_end(self, trainer, metrics):
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_after_the_last_step_is_not_kept_for_the_next_fit():
    trainer = make(callbacks=[CtrlCLate()])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches(8))
    trainer.validate(batches(8))


def test_an_error_after_ctrl_c_is_a_keyboard_interrupt():
    class Dying(CtrlC):
        validated = True

        def on_train_batch_end(self, trainer, metrics, batch_idx):
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("a worker died of it")

    with pytest.raises(KeyboardInterrupt) as caught:
        make(callbacks=[Dying()]).fit(batches(8, 8))
    assert "a worker died" in str(caught.value.__cause__)


def test_a_second_exception_does_not_hide_the_first():
    class Worse(Callback):
        def on_exception(self, trainer, exception):
            raise OSError("disk full")

    trainer = make(callbacks=[Worse()])
    with pytest.raises(ValueError, match="labels must be") as caught:
        trainer.fit(x_y(X, Y + 5))
    assert any("disk full" in note for note in caught.value.__notes__)


def test_a_setup_that_fails_is_the_only_error(tmp_path):
    class Fails(Callback):
        def setup(self, trainer):
            raise OSError("no")

    for others in (
        [ThroughputMonitor(), Fails(), ModelCheckpoint(tmp_path)],
        [ModelCheckpoint(tmp_path), ThroughputMonitor(), Fails()],
    ):
        with pytest.raises(OSError, match="no") as caught:
            make(callbacks=others).fit(batches(8))
        first, about_frames = caught.value.__notes__
        assert first == "raised by the callback Fails in setup"
        assert "JAX_TRACEBACK_FILTERING=off" in about_frames


@pytest.mark.parametrize("limits, steps", [
    ({"max_epochs": -1}, 4),
    ({"max_epochs": -1, "max_steps": -1}, 4),
    ({"max_epochs": 2, "max_steps": -1}, 2),
    ({"max_steps": -1}, 1),
    ({"max_steps": -1, "max_time": 1000}, 4),
])  # fmt: skip
def test_minus_one_is_no_limit_but_no_reason_for_more_epochs(limits, steps):
    class Stops(Callback):
        def on_train_epoch_end(self, trainer, metrics):
            trainer.should_stop = trainer.current_epoch == 3

    trainer = make(callbacks=[Stops()])
    trainer.fit(batches(8), **limits)
    assert trainer.global_step == steps


def test_a_loss_that_becomes_nan_is_told_once(recwarn):
    model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    trainer = make(model, optax.sgd(1e30), loss="mse")
    x = np.ones((8, 4), np.float32)
    trainer.fit([(x, x[:, :3])] * 3, max_epochs=3)
    told = [w for w in recwarn if "NanGuard" in str(w.message)]
    assert len(told) == 1
    assert str(told[0].message).startswith("the loss of epoch 0 is inf: ")
