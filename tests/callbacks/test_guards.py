"""Bad batches that are kept out, and fits that are stuck."""

import sys
import tempfile
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import (
    IN_FLIGHT,
    At,
    On,
    batches,
    linear_on_one_device,
    mlp,
    on_one_device,
    run_python,
)

from jaxdp import Sharded
from jaxdp.callbacks import ModelCheckpoint, NanGuard, StallWatch


def poisoned(*bad, count=12):
    """Batches of which those numbered `bad` have a NaN in a row."""
    data = batches(*[8] * count)
    for i in bad:
        data[i][0][3, 1] = np.nan
    return data


def test_stops_and_keeps_the_last_good_model():
    trainer = linear_on_one_device(NanGuard(), strategy=Sharded())
    message = (
        r"epoch 0, step 12 \(batch_idx 11\): the loss was nan, with NaN or infinity in"
        r" the gradients of all leaves. The update was not applied"
    )
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(poisoned(11))
    good = linear_on_one_device(strategy=Sharded())
    good.fit(poisoned()[:11])
    assert eqx.tree_equal(trainer.model, good.model)


def test_finds_a_bad_step_some_steps_later():
    trainer = linear_on_one_device(NanGuard())
    with pytest.raises(FloatingPointError, match=r"step 2 \(batch_idx 1\)"):
        trainer.fit(poisoned(1, count=40))
    assert trainer.global_step == 2 + IN_FLIGHT
    assert np.isfinite(trainer.model.weight).all()


def sqrt_loss(model, x, y):
    # The gradient of sqrt at 0 is infinite, though the loss is 0 in that place.
    bias = model.bias - jax.lax.stop_gradient(model.bias)
    return jnp.sqrt(jnp.abs(bias)).sum() + jnp.mean(jax.vmap(model)(x) ** 2)


def nan_loss(model, x, y):
    return jnp.mean(jax.vmap(model)(x) ** 2) + jnp.full((), jnp.nan)


@pytest.mark.parametrize("loss_fn, message", [
    (sqrt_loss, r"the loss was \d.*, with NaN or infinity in the gradients of bias\."),
    (nan_loss, "nan, and all gradients were finite"),
])  # fmt: skip
def test_names_what_was_not_finite(loss_fn, message):
    trainer = linear_on_one_device(NanGuard(), loss_fn=loss_fn, loss=None)
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(batches(*[8] * 12))


def test_skips_and_warns_and_the_epoch_is_that_of_the_good_steps():
    guard, data = NanGuard("skip"), poisoned()
    trainer, good = linear_on_one_device(guard), linear_on_one_device()
    skipped = r"step 4 \(batch_idx 3\).*skipped this update"
    with pytest.warns(UserWarning, match=skipped):
        history = trainer.fit(poisoned(3))
    assert guard.skipped_steps == [4]
    expected = good.fit(data[:3] + data[4:])
    assert eqx.tree_equal(trainer.model, good.model)
    assert history["loss"] == expected["loss"]
    plain, guarded = linear_on_one_device(), linear_on_one_device(NanGuard())
    assert guarded.fit(data)["loss"] == plain.fit(data)["loss"]


def test_gives_up_after_max_skips_in_a_row():
    guard = NanGuard("skip", max_skips=2)
    with pytest.warns(UserWarning, match="skipped"):
        linear_on_one_device(guard).fit(poisoned(1, 2, 4, 5, 9))
    assert guard.skipped_steps == [2, 3, 5, 6, 10]
    trainer = linear_on_one_device(NanGuard("skip", max_skips=2))
    message = r"The update was not applied \(3 in a row\)"
    with pytest.raises(FloatingPointError, match=message):
        with pytest.warns(UserWarning, match="skipped"):
            trainer.fit(poisoned(1, 2, 3))


def test_a_step_within_a_dispatch_stops_the_fit():
    trainer = linear_on_one_device(NanGuard(), steps_per_execution=8)
    with pytest.raises(FloatingPointError, match="step 18"):
        trainer.fit(poisoned(17, count=30))


@pytest.mark.parametrize("bad, steps", [(0, 1), (17, 1), (29, 1), (17, 8)])
def test_ends_a_fit_as_should_stop_does(bad, steps, tmp_path):
    seen, guard, saver = [], NanGuard("end"), ModelCheckpoint(tmp_path)
    ends = On(
        on_exception=lambda trainer, exception: seen.append(exception),
        on_fit_end=lambda trainer: seen.append("end"),
    )
    trainer = linear_on_one_device(guard, ends, saver, steps_per_execution=steps)
    with pytest.warns(UserWarning, match=f"step {bad + 1} .*the fit ends") as caught:
        history = trainer.fit(poisoned(bad, count=30), batches(8), max_epochs=9)
    assert len(caught) == 1 and guard.skipped_steps == [bad + 1]
    assert len(history.epochs) == 1
    if steps == 1:
        assert trainer.global_step == min(bad + 9, 30)
    assert np.isfinite(history["val_loss"][0]) and saver.last_model_path
    assert np.isfinite(trainer.model.weight).all()
    assert seen == ["end"]
    trainer.fit(poisoned(), max_epochs=3)  # a second fit continues
    assert trainer.current_epoch == 3


def test_overflows_of_the_loss_scale_are_no_findings():
    random = np.random.default_rng(0)
    x = [30 * random.normal(size=(8, 4)).astype(np.float32) for _ in range(20)]
    data = [(rows, np.zeros(8, np.int32)) for rows in x]
    skipped = []

    def see(trainer, metrics, batch_idx):
        skipped.append(bool(metrics["skipped"]))

    options = {"model": mlp(), "precision": "16-mixed"}
    trainer = on_one_device(NanGuard(), On(on_train_batch_end=see), **options)
    trainer.fit(data)
    assert any(skipped) and not all(skipped)
    data[3] = (data[3][0] * np.nan, data[3][1])
    with pytest.raises(FloatingPointError, match="the loss was nan"):
        trainer.fit(data, max_epochs=2)


@pytest.mark.parametrize("timeout, sleeps, reports", [
    (0.4, At(4, lambda trainer: time.sleep(1.5)), 1),
    (1.0, On(on_train_batch_end=lambda *_: time.sleep(0.1)), 0),
])  # fmt: skip
def test_the_stacks_of_a_stalled_fit_are_written_once(
    monkeypatch, timeout, sleeps, reports
):
    with tempfile.TemporaryFile("w+") as file:
        monkeypatch.setattr(sys, "__stderr__", file)
        linear_on_one_device(sleeps, StallWatch(timeout)).fit(batches(*[8] * 15))
        time.sleep(1.2)  # a fit that has ended is left alone
        file.seek(0)
        text = file.read()
    assert text.count("Timeout (0:00:00.400000)!") == reports
    assert (text == "") != ("in call" in text and "most recent call first" in text)


def test_a_stalled_process_is_ended():
    script = """
import time
from jaxdp.callbacks import StallWatch
from toys import At, batches, make_small
sleeps = At(1, lambda trainer: time.sleep(60))
make_small(callbacks=[StallWatch(0.5, abort=True), sleeps]).fit(batches(8))
"""
    ended = run_python(script)
    assert ended.returncode == 1 and "in call" in ended.stderr
