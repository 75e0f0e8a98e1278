"""The callbacks that steer: stopping, time limits, guards, donation."""

import datetime
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Mlp, batches
from toys import linear_on_one_device as make_trainer

from jaxdp import Callback, Sharded, SingleDevice, Trainer
from jaxdp.basics.arguments import parse_duration
from jaxdp.basics.tree import leaf_path
from jaxdp.callbacks import (
    DonateBuffers,
    EarlyStopping,
    GradientMonitor,
    ModelCheckpoint,
    NanGuard,
    ReduceLROnPlateau,
    WeightAveraging,
)
from jaxdp.callbacks.base import Hooks
from jaxdp.callbacks.monitor import is_better
from jaxdp.step import IN_FLIGHT as LAG


class Values(Callback):
    """Hands `EarlyStopping` made-up values, by overwriting the real ones."""

    def __init__(self, values, name="val_loss"):
        self.values = [float(value) for value in values]
        self.name = name

    def on_validation_end(self, trainer, metrics):
        metrics[self.name] = self.values[trainer.current_epoch]


def epochs_until_stopped(values, **options):
    stopping = EarlyStopping(**options)
    data = batches(8)
    trainer = make_trainer(Values(values, stopping.monitor), stopping)
    history = trainer.fit(data, data, max_epochs=len(values))
    return len(history.epochs), stopping


def test_early_stopping_waits_for_patience_checks_without_improvement():
    epochs, stopping = epochs_until_stopped([3, 2, 2.5, 2.2, 2.0, 1.9], patience=3)
    assert epochs == 5
    assert (stopping.stopped_epoch, stopping.wait_count) == (4, 3)
    assert stopping.best_score == 2
    assert stopping.reason == "val_loss did not improve on 2 for 3 checks."


def test_a_bad_stretch_before_the_minimum_ends_no_fit_that_improves():
    values, stopping = [3, 4, 5, 2, 1, 0.5, 0.4], EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(Values(values), stopping)
    history = trainer.fit(batches(8), batches(8), max_epochs=7, min_epochs=4)
    assert len(history.epochs) == 7 and stopping.reason is None


def test_early_stopping_counts_from_the_last_improvement():
    epochs, stopping = epochs_until_stopped([3, 3, 2, 2, 1, 1, 0.5], patience=2)
    assert epochs == 7 and stopping.stopped_epoch is None


class WarmsUp:
    """Leaves out what a callback does in the first two epochs, as in Lightning."""

    def on_validation_end(self, trainer, metrics):
        if trainer.current_epoch >= 2:
            super().on_validation_end(trainer, metrics)

    def on_train_epoch_end(self, trainer, metrics):
        if trainer.current_epoch >= 2:
            super().on_train_epoch_end(trainer, metrics)


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceLROnPlateau, ModelCheckpoint])
def test_a_subclass_whose_hooks_leave_the_base_out_passes_that_epoch_over(
    kind, tmp_path, monkeypatch
):
    class Mine(WarmsUp, kind):
        def handle_means(self, trainer, row):
            looked.append((row.kind, trainer.current_epoch))
            super().handle_means(trainer, row)

    looked = []
    monkeypatch.chdir(tmp_path)
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1)
    trainer = make_trainer(Mine(monitor="val_loss"), optimizer=optimizer)
    trainer.fit(batches(8), batches(8), max_epochs=4)
    assert looked == [("val", 2), ("epoch", 2), ("val", 3), ("epoch", 3)]


@pytest.mark.parametrize("monitor", ["val_loss", "loss"])
def test_early_stopping_warms_up_in_a_subclass(monitor):
    class Mine(WarmsUp, EarlyStopping):
        pass

    for kind, epochs in ((EarlyStopping, 2), (Mine, 4)):
        stopping = kind(monitor, patience=1, min_delta=99.0)
        trainer = make_trainer(stopping)
        trainer.fit(batches(8), batches(8), max_epochs=6)
        assert trainer.current_epoch == epochs and stopping.wait_count == 1


def test_early_stopping_maximizes_and_asks_for_min_delta():
    values = [0.5, 0.55, 0.58, 0.69, 0.9]
    epochs, stopping = epochs_until_stopped(
        values, monitor="val_area", mode="max", patience=2, min_delta=0.1
    )
    assert epochs == 3 and stopping.best_score == 0.5
    epochs, _ = epochs_until_stopped(values, monitor="val_area", mode="max", patience=2)
    assert epochs == 5


@pytest.mark.parametrize(
    ("options", "values", "reason"),
    [
        ({}, [1.0, math.nan, 1.0], "val_loss is nan, which is not finite"),
        ({"stopping_threshold": 0.5}, [1, 0.4, 0.3], "0.4, better than the `stopping_"),
        ({"divergence_threshold": 2.0}, [1, 3, 1], "3, worse than the `divergence_thr"),
    ],
)
def test_early_stopping_stops_at_once(options, values, reason, caplog):
    epochs, stopping = epochs_until_stopped(values, **options)
    assert epochs == 2
    assert reason in stopping.reason
    assert f"EarlyStopping: {stopping.reason}" in caplog.text


def test_early_stopping_can_bear_nan_and_keep_quiet(caplog):
    values = [1.0, math.nan, 0.5, 0.4]
    epochs, stopping = epochs_until_stopped(values, check_finite=False, patience=2)
    assert epochs == 4 and stopping.best_score == 0.4
    epochs_until_stopped([1.0, 2.0], patience=1, verbose=False)
    assert "EarlyStopping" not in caplog.text


def test_early_stopping_watches_training_values_at_epoch_ends():
    trainer = make_trainer(EarlyStopping("loss", patience=1, min_delta=10.0))
    history = trainer.fit(batches(8, 8), max_epochs=5)
    assert history.epochs == [0, 1]


def test_early_stopping_leaves_a_validation_outside_of_fit_alone():
    stopping = EarlyStopping(patience=1)
    trainer = make_trainer(stopping)
    trainer.validate(batches(8))
    assert stopping.best_score is None


def test_early_stopping_names_what_is_logged_when_nobody_logs_the_monitor():
    trainer = make_trainer(EarlyStopping("val_acc"), metrics=["accuracy"])
    logged = "'loss', 'accuracy', 'val_loss', 'val_accuracy'"
    with pytest.raises(ValueError, match=rf"monitor='val_acc'.*: {logged}\."):
        trainer.fit(batches(8), batches(8))
    trainer = make_trainer(EarlyStopping())
    with pytest.raises(ValueError, match="Names with `val_` need a `val_loader`"):
        trainer.fit(batches(8))


def test_early_stopping_goes_on_from_its_state():
    _, stopping = epochs_until_stopped([1.0, 2.0, 3.0], patience=5)
    state = json.loads(json.dumps(stopping.state_dict(), allow_nan=False))
    other = EarlyStopping(patience=5)
    other.load_state_dict(state)
    assert (other.wait_count, other.best_score) == (2, 1.0)
    other.best_score = math.inf
    again = EarlyStopping()
    again.load_state_dict(json.loads(json.dumps(other.state_dict(), allow_nan=False)))
    assert again.best_score == math.inf


def test_better_is_strict_and_nan_is_never_better():
    assert is_better("min", 1.0, None) and is_better("min", 1.0, math.nan)
    assert is_better("min", 1.0, 2.0) and not is_better("min", 2.0, 2.0)
    assert is_better("max", 2.0, 1.0) and not is_better("max", 1.05, 1.0, 0.1)
    assert not is_better("min", math.nan, None)


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        ("00:00:01:30", 90),
        ("01:02:03:04", 93784),
        (datetime.timedelta(hours=2), 7200),
        ({"minutes": 1, "seconds": 0.5}, 60.5),
        (12.5, 12.5),
        (0, 0),
    ],
)
def test_durations_are_read_in_every_form(duration, seconds):
    assert parse_duration(duration) == seconds


def test_durations_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"`max_time`='8h' must be 'DD:HH:MM:SS'"):
        parse_duration("8h", "max_time")
    with pytest.raises(ValueError, match="`max_time`={'hour': 1} must be .* hours"):
        parse_duration({"hour": 1}, "max_time")
    for wrong in (-1, float("inf"), datetime.timedelta(-1)):
        with pytest.raises(ValueError, match="of seconds; finite and not negative"):
            parse_duration(wrong)
    for wrong in ([1], True):
        with pytest.raises(TypeError, match="of seconds; finite and not negative"):
            parse_duration(wrong)


def poisoned(*bad, count=12, value=np.nan):
    data = batches(*[8] * count)
    for i in bad:
        data[i][0][3, 1] = value
    return data


def test_nan_guard_stops_and_keeps_the_last_good_model():
    trainer = make_trainer(NanGuard(), strategy=Sharded())
    message = (
        r"epoch 0, step 12 \(batch_idx 11\): the loss was nan, with NaN or infinity in"
        r" the gradients of all leaves. The update was not applied"
    )
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(poisoned(11))
    good = make_trainer(strategy=Sharded())
    good.fit(poisoned()[:11])
    for leaf, expected in zip(
        jax.tree.leaves(trainer.model), jax.tree.leaves(good.model), strict=True
    ):
        np.testing.assert_array_equal(leaf, expected)


def test_nan_guard_finds_a_bad_step_in_the_middle_some_steps_later():
    trainer = make_trainer(NanGuard())
    with pytest.raises(FloatingPointError, match=r"step 2 \(batch_idx 1\)"):
        trainer.fit(poisoned(1, count=40))
    assert trainer.global_step == 2 + LAG
    assert np.isfinite(trainer.model.weight).all()


def sqrt_loss(model, x, y):
    # The gradient of sqrt at 0 is infinite, though the loss is 0 in that place.
    bias = model.bias - jax.lax.stop_gradient(model.bias)
    return jnp.sqrt(jnp.abs(bias)).sum() + jnp.mean(jax.vmap(model)(x) ** 2)


def test_nan_guard_names_the_gradients_that_were_not_finite():
    trainer = make_trainer(NanGuard(), loss_fn=sqrt_loss, loss=None)
    message = r"the loss was \d.*, with NaN or infinity in the gradients of bias\."
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(batches(*[8] * 12))


def test_nan_guard_says_where_no_gradient_was_bad():
    def loss_fn(model, x, y):
        return jnp.mean(jax.vmap(model)(x) ** 2) + jnp.full((), jnp.nan)

    trainer = make_trainer(NanGuard(), loss_fn=loss_fn, loss=None)
    with pytest.raises(FloatingPointError, match="nan, and all gradients were finite"):
        trainer.fit(batches(8))


def test_nan_guard_skips_and_warns_and_the_epoch_is_that_of_the_good_steps():
    guard = NanGuard("skip")
    trainer = make_trainer(guard)
    with pytest.warns(
        UserWarning, match=r"step 4 \(batch_idx 3\).*skipped this update"
    ):
        history = trainer.fit(poisoned(3))
    assert guard.skipped_steps == [4]
    data = poisoned()
    good = make_trainer()
    expected = good.fit(data[:3] + data[4:])
    np.testing.assert_array_equal(trainer.model.weight, good.model.weight)
    assert history["loss"] == expected["loss"]


def test_nan_guard_gives_up_after_max_skips_in_a_row():
    guard = NanGuard("skip", max_skips=2)
    with pytest.warns(UserWarning, match="skipped"):
        make_trainer(guard).fit(poisoned(1, 2, 4, 5, 9))
    assert guard.skipped_steps == [2, 3, 5, 6, 10]
    trainer = make_trainer(NanGuard("skip", max_skips=2))
    message = "makes 3 steps in a row without an update, more than `max_skips`=2"
    with pytest.raises(FloatingPointError, match=message):
        with pytest.warns(UserWarning, match="skipped"):
            trainer.fit(poisoned(1, 2, 3))


def test_nan_guard_changes_nothing_in_a_run_that_is_well():
    guarded, plain = make_trainer(NanGuard()), make_trainer()
    assert guarded.fit(poisoned())["loss"] == plain.fit(poisoned())["loss"]


@pytest.mark.parametrize("what", ["state", "all"])
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded])
def test_donated_state_is_overwritten(what, strategy):
    donate = DonateBuffers(what)
    trainer = make_trainer(
        donate, optimizer=optax.adam(1e-3), strategy=strategy(), metrics=["accuracy"]
    )
    trainer.fit(batches(16, 16))
    report = donate.report
    assert report["donated_bytes"] == report["aliased_bytes"] > 3 * 15 * 4
    assert report["not_aliased"] == []


def test_nothing_is_overwritten_when_nothing_is_donated():
    donate = DonateBuffers("none")
    kept = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            kept.append(trainer.state)

    make_trainer(donate, Keep()).fit(batches(8, 8))
    assert donate.report == {"donated_bytes": 0, "aliased_bytes": 0, "not_aliased": []}
    assert not kept[0].params.weight.is_deleted()


def test_a_donated_leaf_that_is_not_overwritten_is_named():
    class Grows(Callback):
        """Asks about another program than the real one."""

        def on_train_batch_end(self, trainer, metrics, batch_idx):
            def step(leaves, x):
                keep = [leaf.astype(jnp.bfloat16) for leaf in leaves[:1]]
                return [*keep, *leaves[1:]], x.sum()

            with_path = jax.tree_util.tree_leaves_with_path(trainer.state)
            named = {leaf_path(path): leaf for path, leaf in with_path}
            leaves = list(named.values())
            program = jax.jit(step, donate_argnums=0).lower(leaves, leaves[0])
            compiled = program.compile()
            trainer.compiled_train_step = lambda: compiled

    donate = DonateBuffers()
    trainer = make_trainer(Grows(), donate)
    with pytest.warns(UserWarning, match=r"1 of the leaves .*: params\.weight\."):
        trainer.fit(batches(8))
    assert donate.report["not_aliased"] == ["params.weight"]
    assert donate.report["donated_bytes"] - donate.report["aliased_bytes"] == 48


def test_a_boundary_comes_after_every_callback_has_seen_the_step():
    order = []

    class Early(Callback):
        def on_boundary(self, trainer):
            order.append(("boundary", trainer.global_step, trainer.current_epoch))

    class Late(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            order.append(("batch", trainer.global_step, trainer.current_epoch))

    callbacks = [Early(), Late(), Callback()]
    trainer = make_trainer(*callbacks)
    trainer.fit(batches(8, 8))
    assert order == [
        ("batch", 1, 0),
        ("boundary", 1, 0),
        ("batch", 2, 0),
        ("boundary", 2, 0),
        ("boundary", 2, 1),
    ]
    assert Hooks(callbacks).has("on_boundary")
    assert not Hooks(callbacks).has("on_train_batch_start")


def test_every_callback_may_end_well_also_after_one_that_cannot():
    ended = []

    class Bad(Callback):
        def on_fit_end(self, trainer):
            raise OSError("disk")

    class Good(Callback):
        def on_fit_end(self, trainer):
            ended.append(trainer.global_step)

    trainer = make_trainer(Bad(), Good())
    with pytest.raises(OSError, match="disk"):
        trainer.fit(batches(8))
    assert ended == [1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_can_not_be_changed_by_a_hook(accumulate):
    class Mixing(Callback):
        def on_train_batch_start(self, trainer, batch, batch_idx):
            x, _ = batch if accumulate == 1 else batch[0]
            x[:] = 0

    data = batches(8, 8)
    before = data[0][0].copy()
    with pytest.raises(ValueError, match="read-only") as caught:
        Trainer(
            Mlp(jax.random.key(0)),
            loss="cross_entropy",
            accumulate_grad_batches=accumulate,
            callbacks=[Mixing()],
        ).fit(data)
    assert "callback Mixing in on_train_batch_start" in caught.value.__notes__[0]
    np.testing.assert_array_equal(data[0][0], before)
    data[0][0][:] = 0  # the user's own array still can


def test_callbacks_may_be_added_later_but_for_those_in_the_step(tmp_path):
    trainer, saved = make_trainer(), []

    class Saves(Callback):
        def on_save_checkpoint(self, trainer, path):
            saved.append(path)

    trainer.callbacks += [Saves(), ModelCheckpoint(tmp_path)]
    trainer.fit(batches(8))
    assert [path == str(tmp_path / "1") for path in saved] == [True]
    del trainer.callbacks[:2]
    trainer.save(tmp_path / "own")
    assert len(saved) == 1  # `Saves` is gone
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


def test_early_stopping_with_numpys_numbers_can_be_saved(tmp_path):
    stopping = EarlyStopping("loss", min_delta=np.float32(0.001), patience=np.int64(2))
    make_trainer(stopping, ModelCheckpoint(tmp_path)).fit(batches(8), max_epochs=2)
    assert (tmp_path / "2").exists()
