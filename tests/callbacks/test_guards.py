"""Rolling back from bad batches, and seeing what a fit is stuck in."""

import subprocess
import sys
import time

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Recorder, batches

from jaxdp import Callback, SingleDevice, Trainer
from jaxdp.callbacks import CSVLogger, ModelCheckpoint, NanGuard, StallWatch
from jaxdp.callbacks.onlooker import waits_for
from jaxdp.fit import loop


def make(*callbacks, lr=0.1, **options):
    return Trainer(
        eqx.nn.Linear(4, 1, key=jax.random.key(0)),
        optax.sgd(lr),
        loss="mse",
        strategy=SingleDevice(),
        callbacks=callbacks,
        enable_progress_bar=False,
        **options,
    )


def test_a_rolled_back_fit_is_not_padded_to_a_later_batch(tmp_path):
    """A block with a larger batch may be under way when the NaN before it is seen."""
    data = [(x, np.sin(x)) for x, _ in batches(*[10] * 36, 64, *[10] * 11)]
    data[24][1][0] = np.nan
    found = []
    for steps in (1, 16):
        saver = ModelCheckpoint(tmp_path / str(steps), every_n_train_steps=20)
        trainer = Trainer(
            eqx.nn.MLP(4, 4, 32, 2, key=jax.random.key(0)),
            optax.adam(1e-2),
            loss="mse",
            strategy=SingleDevice(),
            callbacks=[NanGuard("rollback"), saver],
            steps_per_execution=steps,
            enable_progress_bar=False,
        )
        with pytest.warns(UserWarning, match="batch_idx 24.*going back to .*20"):
            trainer.fit(data)
        found.append(trainer)
    assert found[0].history["loss"] == found[1].history["loss"]
    assert eqx.tree_equal(found[0].model, found[1].model)


def data(bad=None, value=np.nan):
    """Thirty batches of a linear problem, the one number `bad` with a target off."""
    result = []
    for idx, (x, _) in enumerate(batches(*[8] * 30)):
        y = x[:, :1] * 0.5
        result.append((x, np.full_like(y, value) if idx == bad else y))
    return result


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("value, spike", [(np.nan, None), (1e3, 6.0)])
def test_a_rolled_back_fit_is_one_without_the_batch(tmp_path, value, spike, steps):
    guard = NanGuard("rollback", spike=spike, warmup=10)
    saver = ModelCheckpoint(tmp_path / "a", every_n_train_steps=4, save_top_k=-1)
    log = CSVLogger(tmp_path)
    trainer = make(guard, saver, log, steps_per_execution=steps)
    trainer.log_every_n_steps = 1
    with pytest.warns(UserWarning, match="step 18 .batch_idx 17.*going back to .*16"):
        trainer.fit(data(17, value))
    without = data()
    del without[17]
    other = make()
    other.fit(without)
    assert guard.rollbacks == 1
    assert trainer.history["loss"] == other.history["loss"]
    assert eqx.tree_equal(trainer.model, other.model)
    steps = [int(r.split(",")[1]) for r in log.path.read_text().split()[1:]]
    assert steps == sorted(steps) and len(set(steps)) == trainer.global_step


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


def test_rolling_back_has_an_end_and_needs_a_checkpoint(tmp_path):
    guard = NanGuard("rollback", max_rollbacks=0)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    with pytest.raises(
        FloatingPointError, match="rolled back 0 times.*`max_rollbacks`=0"
    ):
        make(guard, saver).fit(data(17))
    with pytest.raises(FloatingPointError, match="no checkpoint from before that step"):
        make(NanGuard("rollback")).fit(data(17))


def test_a_checkpoint_that_is_still_being_saved_is_rolled_back_to(
    tmp_path, monkeypatch
):
    given = []

    class Told(loop.Loop):
        def __init__(self, trainer, train_loader, val_loader, wanted):
            given.append(wanted.max_time)
            super().__init__(trainer, train_loader, val_loader, wanted)

    monkeypatch.setattr(loop, "Loop", Told)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=16)
    trainer = make(NanGuard("rollback"), saver)
    with pytest.warns(UserWarning, match="step 18 .*going back to .*16"):
        trainer.fit(data(17), max_time=600, max_epochs=1)
    assert trainer.global_step == len(data()) - 1
    assert given[0] == 600 > given[1] > 0  # the time before it counts


def test_an_iterator_cannot_be_rolled_back(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    with (
        pytest.raises(RuntimeError, match="is an iterator, which can't go back"),
        pytest.warns(UserWarning, match="going back"),
    ):
        make(NanGuard("rollback"), saver).fit(iter(data(17)))


def test_a_spike_stops_or_is_warned_of():
    with pytest.raises(
        FloatingPointError, match="step 21.*the loss was 1.0002e.06, and"
    ):
        make(NanGuard(spike=6.0, warmup=10)).fit(data(20, 1e3))
    trainer, losses = make(NanGuard("skip", spike=6.0, warmup=10)), Recorder()
    trainer = make(NanGuard("skip", spike=6.0, warmup=10), losses, lr=1e-3)
    with pytest.warns(UserWarning, match="step 21.*a spike"):
        trainer.fit(data(20, 100.0))
    assert len(losses.losses) == 30
    make(NanGuard(spike=6.0, warmup=10)).fit(data())


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


def test_outside_of_the_trainer_nothing_is_blamed():
    assert waits_for(sys._getframe()) == "something outside of the trainer"
