"""Keeping bad batches out, and seeing what a fit is stuck in."""

import subprocess
import sys
import time

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Recorder, batches, on_one_device

from jaxdp import Callback, Trainer
from jaxdp.callbacks import ModelCheckpoint, NanGuard, StallWatch


def make(*callbacks, lr=0.1, **options):
    model = eqx.nn.Linear(4, 1, key=jax.random.key(0))
    options = {"optimizer": optax.sgd(lr), "loss": "mse"} | options
    return on_one_device(*callbacks, model=model, **options)


def data(bad=None, value=np.nan):
    """Thirty batches of a linear problem, the one number `bad` with a target off."""
    result = []
    for idx, (x, _) in enumerate(batches(*[8] * 30)):
        y = x[:, :1] * 0.5
        result.append((x, np.full_like(y, value) if idx == bad else y))
    return result


def test_a_step_inside_a_block_is_skipped_or_stops_the_fit():
    with pytest.raises(FloatingPointError, match="step 18"):
        make(NanGuard(), steps_per_execution=8).fit(data(17))
    found = []
    for steps in (1, 8):
        guard, losses = NanGuard("skip"), Recorder()
        trainer = make(guard, losses, steps_per_execution=steps)
        with pytest.warns(UserWarning, match="step 18 .*skipped this update"):
            history = trainer.fit(data(17))
        found.append((trainer.model, guard.skipped_steps, losses.losses, history))
    one, many = found
    assert eqx.tree_equal(one[0], many[0]) and one[1] == many[1] == [18]
    np.testing.assert_array_equal(one[2], many[2])
    assert one[3].state_dict() == many[3].state_dict()


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("bad", [0, 17, 29])
def test_a_fit_ends_gently(bad, steps, tmp_path):
    class Ends(Callback):
        exception, ended = None, 0

        def on_exception(self, trainer, exception):
            self.exception = exception

        def on_fit_end(self, trainer):
            self.ended += 1

    guard, ends, saver = NanGuard("end"), Ends(), ModelCheckpoint(tmp_path)
    trainer = make(guard, ends, saver, steps_per_execution=steps)
    with pytest.warns(UserWarning, match=f"step {bad + 1} .*the fit ends") as told:
        history = trainer.fit(data(bad), data()[:1], max_epochs=9)
    assert len(told) == 1 and guard.skipped_steps == [bad + 1]
    assert len(history.epochs) == 1
    if steps == 1:
        assert trainer.global_step == min(bad + 9, 30)
    assert np.isfinite(history["val_loss"][0]) and saver.last_model_path
    assert np.isfinite(trainer.model.weight).all()
    assert ends.exception is None and ends.ended == 1
    trainer.fit(data(), max_epochs=3)  # a second fit goes on
    assert trainer.current_epoch == 3


class Sleeping(Callback):
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        if batch_idx == 3:
            time.sleep(1.5)


def test_the_stacks_of_a_stalled_fit_are_written_once(tmp_path):
    watch = StallWatch(0.4, path=tmp_path / "stalls.txt")
    make(Sleeping(), watch).fit(data())
    text = (tmp_path / "stalls.txt").read_text()
    assert text.count("Timeout (0:00:00.400000)!") == 1
    assert "in on_train_batch_end" in text and "most recent call first" in text


def test_a_fit_that_moves_or_has_ended_is_left_alone(tmp_path):
    class Steady(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            time.sleep(0.1)

    watch = StallWatch(1.0, path=tmp_path / "stalls.txt")
    make(Steady(), watch).fit(data())
    time.sleep(1.2)
    assert (tmp_path / "stalls.txt").read_text() == ""
    with pytest.raises(ValueError, match="`timeout` must be more than 0"):
        StallWatch(0)


def test_a_stalled_process_is_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import time, numpy as np, equinox as eqx, jax
from jaxdp import Trainer, callbacks
class Sleeping(callbacks.Callback):
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        time.sleep(60)
x = np.ones((4, 2), np.float32)
watch = callbacks.StallWatch(0.5, abort=True)
model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
Trainer(model, loss="mse", callbacks=[watch, Sleeping()]).fit([(x, x)])
""")
    run = [sys.executable, str(script)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "in on_train_batch_end" in ended.stderr


def test_overflows_of_the_loss_scale_are_left_to_it():
    random = np.random.default_rng(0)
    data = [
        (30 * random.normal(size=(8, 4)).astype(np.float32), np.zeros(8, np.int32))
        for _ in range(20)
    ]
    skipped = []

    class Sees(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            skipped.append(bool(metrics["skipped"]))

    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    options = {"precision": "16-mixed", "callbacks": [NanGuard(), Sees()]}
    trainer = Trainer(model, optax.adam(1e-2), enable_progress_bar=False, **options)
    trainer.fit(data)
    assert any(skipped) and not all(skipped)

    data[3] = (data[3][0] * np.nan, data[3][1])
    with pytest.raises(FloatingPointError, match="the loss was nan"):
        trainer.fit(data, max_epochs=2)
