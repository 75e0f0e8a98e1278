"""However a fit ends: Ctrl-C, exceptions, and callbacks that fail."""

import os
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import At, On, batches, fail_with, linear, run_python, stop
from toys import make_small as make

from jaxdp.callbacks import ModelCheckpoint, Preemption


def press(*_):
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_stops_at_a_boundary_and_keeps_the_model():
    seen = []
    watching = On(
        on_exception=lambda trainer, exception: seen.append(type(exception)),
        on_fit_end=lambda trainer: seen.append("end"),
    )
    trainer = make(callbacks=[At(3, press), At(13, press), watching])
    with pytest.raises(KeyboardInterrupt) as stopped:
        trainer.fit(batches(*[8] * 10), batches(8), val_check_interval=2)
    assert trainer.global_step == 3
    assert seen == [KeyboardInterrupt, "end"]
    # Of this very class, or Python would exit with 1 instead of 130.
    assert type(stopped.value) is KeyboardInterrupt
    trainer.model(jnp.ones(4))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches(*[8] * 10), max_epochs=2)
    assert (trainer.global_step, trainer.current_epoch) == (13, 1)


def test_ctrl_c_that_preemption_names_returns_from_fit():
    preemption = Preemption(("SIGINT",), action="return")
    trainer = make(callbacks=[At(3, press), preemption])
    history = trainer.fit(batches(*[8] * 10))
    assert (trainer.global_step, preemption.received) == (3, "SIGINT")
    assert history is trainer.history


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_says_what_is_saved_and_how_to_go_on(tmp_path, saves):
    saver = [ModelCheckpoint(tmp_path)] if saves else []
    trainer = make(callbacks=[At(3, press), *saver])
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
import signal
from toys import At, batches, make_small

signal.signal(signal.SIGINT, signal.default_int_handler)
press = At(2, lambda trainer: signal.raise_signal(signal.SIGINT))
make_small(callbacks=[press]).fit(batches(8, 8, 8, 8))
"""


def test_ctrl_c_that_nobody_catches_ends_with_how_to_go_on():
    done = run_python(STOPPED)
    assert done.returncode == -signal.SIGINT  # for which a shell has 130
    last = done.stderr.splitlines()[-1]
    assert last.startswith("KeyboardInterrupt: stopped after step 2, and not saved")


def test_ctrl_c_after_the_last_step_is_not_kept_for_the_next_fit():
    trainer = make(callbacks=[On(on_train_epoch_end=press)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(batches(8))
    trainer.validate(batches(8))


def test_an_error_after_ctrl_c_is_a_keyboard_interrupt():
    def die(trainer):
        press()
        raise RuntimeError("a worker died of it")

    with pytest.raises(KeyboardInterrupt) as caught:
        make(callbacks=[At(1, die)]).fit(batches(8, 8))
    assert "a worker died" in str(caught.value.__cause__)


def test_a_second_exception_does_not_hide_the_first():
    ((x, y),) = batches(8)
    trainer = make(callbacks=[On(on_exception=fail_with(OSError("disk full")))])
    with pytest.raises(ValueError, match="labels must be") as caught:
        trainer.fit([(x, y + 5)])
    assert any("disk full" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("hook", ["on_exception", "on_fit_end", "teardown"])
def test_a_hook_that_fails_after_a_signal_is_an_error_of_a_fit_that_returns(hook):
    preemption = Preemption(("SIGINT",), action="return")
    seen = []
    others = On(on_fit_end=seen.append, teardown=seen.append)
    fails = On(**{hook: fail_with(OSError("disk full"))})
    trainer = make(callbacks=[At(1, press), preemption, fails, others])
    with pytest.raises(OSError, match="disk full") as caught:
        trainer.fit(batches(8, 8))
    assert f"in {hook}" in caught.value.__notes__[0]
    assert trainer.global_step == 1 and len(seen) == 2


def test_a_teardown_that_fails_after_a_loop_was_left_is_an_error():
    trainer = make(callbacks=[On(teardown=fail_with(OSError("disk full")))])
    steps = trainer.steps(batches(8, 8))
    next(steps)
    with pytest.raises(OSError, match="disk full"):
        steps.close()


LEFT = """
from toys import On, batches, make_small

steps = make_small(callbacks=[On(teardown=print)], loss="cross_entropy").steps(
    batches(8, 8)
)
next(steps)
"""


def test_python_ends_quietly_with_a_loop_that_was_left():
    done = run_python(LEFT)
    assert done.stderr == "" and done.stdout.startswith("Trainer(")


@pytest.mark.parametrize("method, hooks", [
    ("fit", "setup on_fit_start on_train_epoch_start on_train_batch_start"
     " on_train_batch_end on_boundary on_train_epoch_end on_validation_start"
     " on_validation_batch_end on_validation_end on_fit_end teardown"),
    ("steps", "setup on_train_batch_start on_train_batch_end on_boundary teardown"),
    ("validate", "setup on_validation_start on_validation_batch_end on_validation_end"
     " teardown"),
    ("test", "setup on_test_start on_test_end teardown"),
    ("predict", "setup on_predict_start on_predict_batch_end on_predict_end teardown"),
])  # fmt: skip
def test_a_stop_iteration_of_a_hook_is_an_error_at_its_line(method, hooks):
    def read_nothing(*_):
        next(iter(()))

    trainer, options = make(), {}
    for hook in hooks.split():
        if method == "fit":
            options = {"val_loader": batches(8), "val_check_interval": 1}
            options["max_epochs"] = trainer.current_epoch + 2
        trainer.callbacks = [On(**{hook: read_nothing})]
        with pytest.raises(RuntimeError, match=f"{hook} raised Stop") as caught:
            [*getattr(trainer, method)(batches(8, 8), **options)]
        assert caught.traceback[-1].name == "read_nothing"
        assert "raised by the callback" in caught.value.__cause__.__notes__[0]


@pytest.mark.parametrize("limits, steps", [
    ({"max_epochs": -1}, 4),
    ({"max_epochs": -1, "max_steps": -1}, 4),
    ({"max_epochs": 2, "max_steps": -1}, 2),
    ({"max_steps": -1}, 1),
    ({"max_steps": -1, "max_time": 1000}, 4),
])  # fmt: skip
def test_minus_one_is_no_limit_but_no_reason_for_more_epochs(limits, steps):
    trainer = make(callbacks=[At(4, stop, "on_train_epoch_end")])
    trainer.fit(batches(8), **limits)
    assert trainer.global_step == steps


@pytest.mark.parametrize("rate, scale, told", [
    (1e30, 1.0, "the loss of epoch 0 is inf: .*NanGuard"),
    (0.0, np.nan, "the val_broken_loss of epoch 0 is nan: "),
])  # fmt: skip
def test_a_loss_that_is_not_finite_is_told_once(rate, scale, told):
    x = np.ones((8, 4), np.float32)
    trainer = make(linear(), optax.sgd(rate), loss="mse")
    vals = {"clean": [(x, 0 * x[:, :3])], "broken": [(x, x[:, :3] * scale)]}
    with pytest.warns(UserWarning, match=told) as warned:
        trainer.fit([(x, x[:, :3])] * 3, vals if rate == 0 else None, max_epochs=3)
    assert len(warned) == 1
