"""The whole: numbers, rows, what is the user's, compilations, syncs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    RAGGED,
    At,
    Deep,
    Mlp,
    On,
    Recorder,
    batches,
    bits,
    cross_entropy,
    fail_with,
    hand_written,
    linear,
    linear_on_one_device,
    mlp,
    on_one_device,
    quiet,
    run,
    stop,
)

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, Trainer, per_example
from jaxdp.callbacks import WeightAveraging


@pytest.mark.slow_cases("asarray-<lambda>")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, lambda: Sharded(1), Pmap])
@pytest.mark.parametrize(
    "own", [jnp.asarray, lambda x: jax.device_put(x, jax.devices()[2])]
)
def test_the_users_model_is_never_deleted_or_changed(strategy, own):
    model = jax.tree.map(
        lambda x: own(x) if eqx.is_array(x) else x, Mlp(jax.random.key(0))
    )
    before = bits(eqx.filter(model, eqx.is_array))
    run(strategy(), model, epochs=1)
    assert bits(eqx.filter(model, eqx.is_array)) == before


@pytest.mark.slow_but("optimizer2", "optimizer4")
@pytest.mark.parametrize("optimizer", [
    optax.contrib.schedule_free_adamw(1e-2),
    optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
    optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    optax.contrib.muon(1e-2),
    optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
])  # fmt: skip
def test_optimizers_whose_state_holds_parameters_or_numbers_compile_once(optimizer):
    traces = []

    def loss_fn(model, x, y):
        traces.append(1)
        return cross_entropy(model, x, y)

    trainer = quiet(mlp(), optimizer, loss_fn=loss_fn)
    trainer.fit(batches(16, 16, 16), max_epochs=3)
    assert np.isfinite(trainer.history["loss"]).all()
    assert len(traces) == 1


def test_trainer_model_is_live_during_and_after_a_fit_and_after_an_error():
    kept = []

    def keep(trainer, metrics, batch_idx):
        kept.append(trainer.model)
        if len(kept) == 4:
            raise RuntimeError("stop here")

    keeps = On(on_train_batch_end=keep)
    trainer = quiet(Mlp(jax.random.key(0)), loss="cross_entropy", callbacks=[keeps])
    with pytest.raises(RuntimeError, match="stop here") as caught:
        trainer.fit(batches(*RAGGED))
    assert any("keep in on_train_batch_end" in note for note in caught.value.__notes__)
    weights = [np.asarray(model.first.weight) for model in [*kept, trainer.model]]
    assert not (weights[0] == weights[3]).all()
    np.testing.assert_array_equal(weights[3], weights[4])
    trainer.model(jnp.ones(4), key=jax.random.key(0))


@pytest.mark.parametrize("is_fitted", [False, True])
def test_trainer_model_has_values_inside_functions_that_jax_traces(is_fitted):
    trainer = Trainer(
        linear(4, 2), strategy=FSDP(min_size=1), loss="mse",
        callbacks=[WeightAveraging(0.5)], enable_progress_bar=False,
    )  # fmt: skip
    x = np.ones((8, 4), np.float32)
    if is_fitted:
        trainer.fit([(x, x[:, :2])] * 2)

    @jax.jit
    def predict(x):
        weights = trainer.state.params.weight
        return jax.vmap(lambda row: trainer.model(row))(x), weights

    found, weights = predict(x)
    np.testing.assert_allclose(found, trainer.predict([x]), rtol=1e-6)
    np.testing.assert_array_equal(weights, trainer.state.params.weight)
    trainer.fit([(x, x[:, :2])], max_epochs=3)


def test_a_loss_of_one_example_is_traced_once_for_all_sizes_and_fits():
    traces = []

    @per_example
    def loss_fn(model, x, y, key):
        traces.append(x.shape)
        return optax.softmax_cross_entropy_with_integer_labels(model(x, key=key), y)

    _, trainer = run(FSDP(), epochs=3, loss_fn=loss_fn)
    trainer.fit(batches(*RAGGED), max_epochs=5)
    assert len(traces) == 1


def test_the_loop_reads_no_value_from_the_device(monkeypatch):
    """The transfer guard sees no device-to-host reads on the CPU: count them."""
    from jax._src.array import ArrayImpl

    reads, steps = [], []
    original = ArrayImpl._value

    def counted(self):
        reads.append(self.shape)
        return original.fget(self)

    count = On(
        on_train_epoch_start=lambda trainer: reads.clear(),
        on_train_batch_end=lambda *_: steps.append(len(reads)),
    )
    monkeypatch.setattr(ArrayImpl, "_value", property(counted))
    model = Mlp(jax.random.key(0))
    trainer = Trainer(model, loss="cross_entropy", callbacks=[count])
    trainer.fit(batches(*[16] * 30), max_epochs=2)
    assert len(steps) == 60
    assert not any(steps), reads


class Unsized:
    def __iter__(self):
        return iter(batches(*[8] * 6))


class Restarting(Unsized):
    """An iterator that starts again."""

    def __iter__(self):
        self.batches = super().__iter__()
        return self

    def __next__(self):
        return next(self.batches)


SIX = batches(*[8] * 6)


@pytest.mark.parametrize("loader", [SIX, Unsized(), Restarting()])
def test_the_end_of_an_epoch_is_known_when_it_is_validated(loader):
    seen = []

    def see(trainer, metrics):
        record = trainer.record
        seen.append((trainer.global_step, record.is_at_epoch_end, record.examples))

    trainer = linear_on_one_device(On(on_validation_end=see))
    trainer.fit(loader, batches(8), max_epochs=2, val_check_interval=4)
    assert seen == [(4, False, 32), (6, True, 48), (10, False, 32), (12, True, 48)]


def test_nothing_is_read_after_the_last_step_of_a_fit():
    read = []

    class Stream:
        def __iter__(self):
            for batch in SIX:
                read.append(batch)
                yield batch

    linear_on_one_device().fit(Stream(), max_steps=2)
    assert len(read) == 2


@pytest.mark.parametrize("fit, steps", [
    ({"max_epochs": 3}, [6, 12, 18]),
    ({"max_epochs": 2, "val_check_interval": 1.0}, [6, 12]),
    ({"max_epochs": 2, "val_check_interval": 1.0, "train_loader": Unsized()}, [6, 12]),
    ({"max_epochs": 3, "check_val_every_n_epoch": 2}, [12, 18]),
    ({"max_epochs": 5, "check_val_every_n_epoch": 10}, [30]),
    ({"max_epochs": 2, "val_check_interval": 4}, [4, 6, 10, 12]),
    ({"max_steps": 9, "val_check_interval": 4}, [4, 6, 9]),
    ({"max_steps": 8, "val_check_interval": 2}, [2, 4, 6, 8]),
    ({"max_epochs": 2, "val_check_interval": 0.5}, [3, 6, 9, 12]),
    ({"max_epochs": 2, "val_check_interval": 3, "check_val_every_n_epoch": 2}, [9, 12]),
    ({"max_steps": 4}, [4]),
    ({"limit_val_batches": 0}, []),
    ({"fast_dev_run": True, "val_check_interval": 4}, [1]),
    ({"fast_dev_run": 2, "check_val_every_n_epoch": 3}, [2]),
])  # fmt: skip
def test_validation_follows_its_interval_and_its_epochs(fit, steps):
    seen = []
    trainer = linear_on_one_device(
        On(on_validation_end=lambda trainer, _: seen.append(trainer.global_step))
    )
    trainer.fit(**{"train_loader": SIX, "val_loader": batches(8)} | fit)
    assert seen == steps


@pytest.mark.parametrize("fit, steps, epochs", [
    ({"limit_train_batches": 2, "max_epochs": 2}, 4, 2),
    ({"limit_train_batches": 0.5}, 3, 1),
    ({"fast_dev_run": True, "max_epochs": 9}, 1, 1),
    ({"fast_dev_run": 2}, 2, 1),
    ({"max_steps": 9}, 9, 1),
    ({"max_steps": -1}, 6, 1),
    ({"max_time": 0}, 0, 0),
    ({"overfit_batches": 2, "max_epochs": 3}, 6, 3),
])  # fmt: skip
def test_limits_and_dev_runs(fit, steps, epochs):
    trainer = linear_on_one_device()
    trainer.fit(SIX, batches(8, 8), **fit)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)


def test_dev_runs_are_epochs_of_their_own_and_minima_are_totals():
    trainer = linear_on_one_device()
    trainer.fit(SIX, max_steps=3)
    trainer.fit(SIX, fast_dev_run=2)
    assert (trainer.global_step, trainer.current_epoch) == (5, 2)
    trainer.fit(SIX, max_steps=8)
    trainer.fit(batches(8, 8), fast_dev_run=True)
    assert (trainer.global_step, trainer.current_epoch) == (9, 4)
    trainer.fit(batches(8, 8), max_epochs=5, min_steps=11)
    assert trainer.global_step == 11


class Stateful:
    """Batches of their numbers, with a state that leads to the next one."""

    next = 0

    def __iter__(self):
        while self.next < 40:
            self.next += 1
            yield np.full((8, 4), self.next, np.float32), np.zeros(8, np.int32)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_dev_run_leaves_a_resumed_epoch_and_starts_the_next_one(tmp_path):
    first, seen = linear_on_one_device(), []
    first.fit(Stateful(), max_steps=20)
    see = On(on_train_batch_start=lambda trainer, batch, _: seen.append(batch[0][0, 0]))
    again = linear_on_one_device(see)
    again.load(first.save(tmp_path / "saved"))
    again.fit(Stateful(), fast_dev_run=2)
    assert seen == [1, 2]


def test_another_loader_starts_where_it_is_after_a_fit_of_no_steps():
    fails = On(on_train_batch_start=fail_with(RuntimeError("no step")))
    trainer, other, seen = linear_on_one_device(fails), Stateful(), []
    with pytest.raises(RuntimeError, match="no step"):
        trainer.fit(Stateful())
    other.next = 5
    see = On(on_train_batch_start=lambda trainer, batch, _: seen.append(batch[0][0, 0]))
    trainer.callbacks = [see]
    trainer.fit(other, max_steps=2)
    assert seen == [6, 7]


@pytest.mark.slow_but("SingleDevice-blocks", "FSDP-policy")
@pytest.mark.parametrize(
    "remat",
    [True, "last", "blocks", jax.checkpoint_policies.dots_saveable],
    ids=["blocks", "last", "stack", "policy"],  # a policy's name differs by JAX
)
@pytest.mark.parametrize("strategy", [SingleDevice, FSDP])
def test_remat_changes_no_number(strategy, remat):
    expected, _ = run(strategy(), Deep(2), epochs=2)
    losses, _ = run(strategy(), Deep(2), epochs=2, remat=remat)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_gradient_clipping_is_by_global_norm():
    clip = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    data = batches(16, 16)
    _, expected = hand_written(mlp(), clip, data, 2, cross_entropy)
    options = {"optimizer": optax.sgd(1.0), "gradient_clip_val": 0.01}
    trainer = on_one_device(recorder := Recorder(), model=mlp(), **options)
    trainer.fit(data, max_epochs=2)
    np.testing.assert_allclose(recorder.losses, expected, rtol=1e-5)


def test_epoch_means_are_exact_over_more_rows_than_float32_counts():
    """2**24 + 1 is not a float32; sums must not stop growing there."""
    many, one = ([(np.full((1, 4), x, np.float32),)] for x in (2.0**24, 1.0))

    @per_example
    def weighted(model, x):
        return jnp.where(x[0] > 1, 1.0, 3.0) + 0 * model(x).sum(), x[0]

    trainer = linear_on_one_device(loss=None, loss_fn=weighted)
    trainer.fit(many + one * 64)
    expected = (2**24 + 192) / (2**24 + 64)
    assert trainer.history["loss"] == [pytest.approx(expected, rel=1e-12)]


def test_what_an_optimizer_starts_from_is_never_computed_beside_the_state():
    # For a large model it would be the state's size once more.
    plain, is_traced = optax.adam(1e-3), []

    def init(params):
        state = plain.init(params)
        is_traced.extend(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state))
        return state

    optimizer = optax.GradientTransformation(init, plain.update)
    quiet(Mlp(jax.random.key(0)), optimizer, loss="cross_entropy").fit(batches(8))
    assert is_traced and all(is_traced)


@pytest.mark.parametrize("minimum", [None, 2])
def test_a_fit_that_is_stopped_between_epochs_is_validated(minimum):
    trainer = linear_on_one_device(At(4, stop))  # the last of an epoch
    limits = {"max_epochs": 9, "min_epochs": minimum, "check_val_every_n_epoch": 7}
    history = trainer.fit(batches(8, 8), batches(8), **limits)
    assert trainer.global_step == 4 and len(history["val_loss"]) == 2


@pytest.mark.parametrize("options", [
    {"max_epochs": 2, "min_steps": 20},
    {"max_steps": 7, "min_epochs": 2},
])  # fmt: skip
def test_a_minimum_that_the_end_of_the_fit_comes_before_is_warned_of(options):
    trainer = linear_on_one_device()
    with pytest.warns(
        UserWarning, match="the fit ends after .*, before `min_[a-z]+`=(20|2)$"
    ):
        trainer.fit(Unsized(), **options)
