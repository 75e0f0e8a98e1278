"""Several optimizer steps per dispatch change nothing but the speed."""

import functools

import equinox as eqx
import jax
import numpy as np
import pytest
from toys import (
    At,
    Deep,
    Mlp,
    NormNet,
    Recorder,
    batches,
    bits,
    fail_with,
    linear,
    on_one_device,
    steps_in,
)

import jaxdp
from jaxdp import FSDP, Callback, Pmap, Sharded, ZeRO
from jaxdp.callbacks import CSVLogger, GradientMonitor, ModelCheckpoint, NanGuard

pytestmark = pytest.mark.bits

RAGGED = (16,) * 11 + (5,)
KEY = jax.random.key(0)


def train(steps_per_execution, *callbacks, model=None, fit=None, data=None, **kwargs):
    recorder = Recorder()
    kwargs["steps_per_execution"] = steps_per_execution
    trainer = on_one_device(recorder, *callbacks, model=model, **kwargs)
    trainer.fit(batches(*RAGGED) if data is None else data, **(fit or {}))
    return recorder.losses, trainer


def same(a, b):
    """Checks equal bits of losses and states, equal counters and history."""
    (losses, one), (other_losses, other) = a, b
    assert np.array(losses).tobytes() == np.array(other_losses).tobytes()
    assert bits(one.state) == bits(other.state)
    assert one.global_step == other.global_step
    assert one.run.progress.examples == other.run.progress.examples
    assert one.history.state_dict() == other.history.state_dict()


CASES = {
    "dropout and a ragged tail": {},
    "clipped": {"gradient_clip_val": 0.1, "metrics": ["accuracy"]},
    "accumulated, short end": {"accumulate_grad_batches": 5},
    "a loop, devices": {"model": Deep(2), "strategy": Sharded()},
    "Pmap": {"strategy": Pmap(4)},
}


@pytest.mark.slow_but("dropout and a ragged tail-4", "dropout and a ragged tail-16")
@pytest.mark.parametrize("steps", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_several_steps_per_dispatch_have_the_bits_of_single_steps(name, steps):
    same(in_single_steps(name), train(steps, fit={"max_epochs": 3}, **CASES[name]))


@functools.cache
def in_single_steps(name):
    return train(1, fit={"max_epochs": 3}, **CASES[name])


@pytest.mark.slow_but("8-widths0-options0", "32-widths0-options0")
@pytest.mark.parametrize("widths, options", [
    ((8, 2, 16, 2), {}),
    ((8, 2, 16, 2), {"precision": "16-mixed"}),
    ((64, 10, 128, 2), {"loss": "mse"}),
    ((4, 4, 32, 1), {"strategy": Pmap(2)}),
])  # fmt: skip
@pytest.mark.parametrize("size", [8, 32])
def test_sums_of_losses_have_the_bits_of_single_steps(size, widths, options):
    """The order of sums over 32 or 8 rows once depended on XLA's fusions."""
    rows = np.random.default_rng(0).normal(size=(24 * size, widths[0]))
    x = rows.astype(np.float32).reshape(24, size, -1)
    y = (x[..., 0] > 0).astype(np.int32)
    if options.get("loss") == "mse":
        y = np.sin(x[..., : widths[1]])
    model, data = eqx.nn.MLP(*widths, key=KEY), list(zip(x, y, strict=True))
    same(*(train(steps, model=model, data=data, **options) for steps in (1, 4)))


def test_batches_of_a_batch_norm_are_not_padded_in_dispatches():
    model, state = eqx.nn.make_with_state(NormNet)(KEY)
    options = {"model": model, "state": state, "data": batches(*[8] * 5, 6, 8, 8)}
    same(*(train(steps, fit={"max_epochs": 3}, **options) for steps in (1, 2)))


class Log(Callback):
    """Records every hook with its step."""

    def __init__(self):
        self.events = []

    def on_train_batch_start(self, trainer, batch, batch_idx):
        self.events.append(("start", trainer.global_step, batch_idx, len(batch[0])))

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.events.append(("end", trainer.global_step, batch_idx, metrics["loss"]))

    def on_validation_end(self, trainer, metrics):
        self.events.append(("val", trainer.global_step, metrics["val_loss"]))

    def on_train_epoch_end(self, trainer, metrics):
        rows = trainer.run.progress.examples
        self.events.append(("epoch", trainer.global_step, rows))


@pytest.mark.slow_cases("fit0", "fit2")
@pytest.mark.parametrize("fit", [
    {"max_epochs": 2},
    {"max_steps": 7},
    {"max_epochs": 2, "val_check_interval": 5},
    {"max_epochs": 2, "limit_train_batches": 6},
])  # fmt: skip
def test_hooks_get_every_step_and_limits_end_dispatches(fit):
    logs = Log(), Log()
    fit = fit | {"val_loader": batches(8, 3, seed=1)}
    same(train(1, logs[0], fit=fit), train(4, logs[1], fit=fit))
    assert logs[0].events == logs[1].events


def test_hooks_get_the_metrics_of_each_step_and_the_state_after_the_dispatch():
    def look(steps):
        seen = []
        note = lambda trainer: seen.append(bits(trainer.model))  # noqa: E731
        return seen, train(steps, At(6, note), At(8, note))

    (single, one), (of_dispatch, other) = look(1), look(4)
    same(one, other)
    assert of_dispatch == [single[1]] * 2


def by_hand(steps, data, epochs=2, **options):
    """Returns the losses of the loop with their steps, of hooks, and the trainer."""
    recorder, found = Recorder(), []
    trainer = on_one_device(recorder, steps_per_execution=steps, **options)
    for _ in range(epochs):
        for metrics in trainer.steps(data):
            found.append((float(metrics["loss"]), trainer.global_step))
    return found, recorder.losses, trainer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_custom_loop_has_dispatches_of_several_steps(accumulate, monkeypatch):
    data, options = batches(*[16] * 8), {"accumulate_grad_batches": accumulate}
    runs, calls, call = [], [], jax.stages.Compiled.__call__

    def count(self, *arguments):
        calls[-1] += len(arguments) == 2  # of the train step
        return call(self, *arguments)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", count)
    for steps in 1, 4 // accumulate:
        calls.append(0)
        runs.append(by_hand(steps, data, **options))
    one, other = runs
    assert one[0] == other[0] and one[1] == other[1]
    assert [loss for loss, _ in one[0]] == one[1]
    assert bits(one[2].state) == bits(other[2].state)
    assert other[2].current_epoch == 2
    assert calls == [16 // accumulate, 4]


@pytest.mark.parametrize("use", ["save", "load", "fit"])
def test_methods_are_refused_inside_a_dispatch(use, tmp_path):
    data, argument = batches(*[16] * 8), tmp_path / "saved"
    _, _, trainer = by_hand(4, data, epochs=1)
    steps = trainer.steps(data)
    next(steps)
    with pytest.raises(RuntimeError, match=f"`{use}`.* step 9, .* that of step 12"):
        getattr(trainer, use)(data if use == "fit" else argument)
    steps.close()
    assert trainer.global_step == 12  # the state has all steps of the dispatch
    trainer.load(trainer.save(argument))
    if use != "fit":  # in a hook
        at = At(6, lambda trainer: getattr(trainer, use)(str(argument)))
        with pytest.raises(RuntimeError, match="after step 6, but .* that of step 8"):
            train(4, at)


def test_counters_equal_the_state_after_a_hook_raised_inside_a_dispatch():
    failing = At(6, fail_with(RuntimeError("six")))
    trainer = on_one_device(failing, steps_per_execution=4)
    with pytest.raises(RuntimeError, match="six"):
        trainer.fit(batches(*[8] * 12))
    assert trainer.global_step == int(trainer.state.step) == 8
    trainer.callbacks.remove(failing)
    trainer.fit(batches(*[8] * 12))
    whole = on_one_device(steps_per_execution=4)
    whole.fit(batches(*[8] * 12))
    assert bits(trainer.state) == bits(whole.state)


def test_a_fit_stops_at_the_end_of_the_dispatch():
    stop = lambda trainer: setattr(trainer, "should_stop", True)  # noqa: E731
    one, other = train(1, At(8, stop)), train(4, At(6, stop))
    assert other[1].global_step == 8
    same(one, other)
    for _, trainer in (one, other):  # no batch is lost
        trainer.fit(batches(*RAGGED))
    same(one, other)


def test_loggers_write_the_table_of_single_steps(tmp_path):
    for steps in (1, 4):
        folder = tmp_path / str(steps)
        train(steps, GradientMonitor(), CSVLogger(folder), log_every_n_steps=3)
    tables = [(tmp_path / str(k) / "metrics.csv").read_text() for k in (1, 4)]
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) == 1 + 4 + 1
    assert "grad_norm" in tables[0]


def test_checkpoints_by_steps_are_saved_after_the_dispatch(tmp_path):
    models = []
    for steps, expected in (1, [3, 6, 9, 12]), (4, [4, 8, 9, 12]):
        folder = tmp_path / str(steps)  # the last three are single steps
        train(steps, ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1))
        assert steps_in(folder) == expected
        model = jaxdp.load_model(folder / "12", like=Mlp(jax.random.key(1)))
        models.append(bits(eqx.filter(model, eqx.is_array)))
    assert models[0] == models[1]


def test_convolutions_are_outside_of_loops_on_cpus(caplog):
    """In loops XLA has only slow code for them: LeNet takes five times as long."""
    conv, last = eqx.nn.Conv1d(1, 3, 2, key=KEY), linear(9)
    before, after = (lambda x: x[None]), (lambda x: jax.nn.relu(x).ravel())
    layers = [eqx.nn.Lambda(before), conv, eqx.nn.Lambda(after), last]
    options = {"model": eqx.nn.Sequential(layers), "data": batches(16, 16, 16, 16)}
    _, trainer = train(1, accumulate_grad_batches=4, **options)
    program = trainer.compiled_train_step().as_text()
    convolutions = [line for line in program.splitlines() if " convolution(" in line]
    assert convolutions and not any("/while/" in line for line in convolutions)
    same(*(train(steps, **options) for steps in (1, 4)))
    assert "This trainer runs one at a time" in caplog.text


def test_nan_does_not_reach_other_steps_of_a_dispatch():
    data = [(x.copy(), y) for x, y in batches(*[8] * 10)]
    data[6][0][:] = np.nan

    def run(steps):
        guard = NanGuard("skip")
        with pytest.warns(UserWarning, match="skipped this update"):
            trained = train(steps, guard, data=data, accumulate_grad_batches=3)
        assert guard.skipped_steps == [3]
        return trained

    one = run(1)
    same(one, run(2))
    same(one, run(4))


@pytest.mark.slow_but("<lambda>-16_1")
@pytest.mark.parametrize("strategy, size", [
    (lambda: Sharded(2), 16), (Sharded, 64), (lambda: Pmap(2), 16),
    (lambda: FSDP(min_size=0), 64), (ZeRO, 64),
])  # fmt: skip
def test_dispatches_have_the_bits_of_single_steps_on_several_devices(strategy, size):
    data = batches(*[size] * 12)
    same(*(train(steps, data=data, strategy=strategy()) for steps in (1, 4)))
