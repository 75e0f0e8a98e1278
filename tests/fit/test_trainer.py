"""The whole: numbers, rows, what is the user's, compilations, syncs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    RAGGED,
    Deep,
    Mlp,
    Recorder,
    batches,
    cross_entropy,
    hand_written,
    quiet,
    run,
)

from jaxdp import FSDP, Callback, Pmap, Sharded, SingleDevice, Trainer, per_example
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
    before = jax.tree.map(lambda x: np.array(x) if eqx.is_array(x) else x, model)
    run(strategy(), model, epochs=1)
    assert eqx.tree_equal(
        jax.tree.map(lambda x: np.array(x) if eqx.is_array(x) else x, model), before
    )


@pytest.mark.slow_but("optimizer2", "optimizer5")
@pytest.mark.parametrize("optimizer", [
    optax.contrib.schedule_free_adamw(1e-2),
    optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
    optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    optax.contrib.muon(1e-2),
    optax.contrib.sam(optax.sgd(1e-2), optax.sgd(1e-2), sync_period=2),
    optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
])  # fmt: skip
def test_optimizers_whose_state_holds_parameters_or_numbers_compile_once(optimizer):
    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    traces = []

    def loss_fn(model, x, y):
        traces.append(1)
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    trainer = quiet(model, optimizer, loss_fn=loss_fn)
    trainer.fit(batches(16, 16, 16), max_epochs=3)
    assert np.isfinite(trainer.history["loss"]).all()
    assert len(traces) == 1


def test_trainer_model_is_live_during_and_after_a_fit_and_after_an_error():
    kept = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            kept.append(trainer.model)
            if len(kept) == 4:
                raise RuntimeError("stop here")

    trainer = quiet(Mlp(jax.random.key(0)), loss="cross_entropy", callbacks=[Keep()])
    with pytest.raises(RuntimeError, match="stop here") as caught:
        trainer.fit(batches(*RAGGED))
    assert any("Keep in on_train_batch_end" in note for note in caught.value.__notes__)
    weights = [np.asarray(model.first.weight) for model in [*kept, trainer.model]]
    assert not (weights[0] == weights[3]).all()
    np.testing.assert_array_equal(weights[3], weights[4])
    trainer.model(jnp.ones(4), key=jax.random.key(0))


@pytest.mark.parametrize("is_fitted", [False, True])
def test_trainer_model_has_values_inside_functions_that_jax_traces(is_fitted):
    trainer = Trainer(
        eqx.nn.Linear(4, 2, key=jax.random.key(0)), strategy=FSDP(min_size=1),
        loss="mse", callbacks=[WeightAveraging(0.5)], enable_progress_bar=False,
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


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap, FSDP])
def test_a_fit_traces_its_step_once_whatever_the_tail(strategy):
    traces = []

    @per_example
    def loss_fn(model, x, y, key):
        traces.append(x.shape)
        return optax.softmax_cross_entropy_with_integer_labels(model(x, key=key), y)

    _, trainer = run(strategy(), epochs=3, loss_fn=loss_fn)
    assert len(traces) == 1
    trainer.fit(batches(*RAGGED), max_epochs=5)
    assert len(traces) == 1


@pytest.mark.parametrize("several", [
    {"accumulate_grad_batches": 2},
    {"steps_per_execution": 2},
    {"steps_per_execution": 2, "accumulate_grad_batches": 2},
])  # fmt: skip
def test_a_loop_over_batches_is_traced_once(several):
    traces = []

    def loss_fn(model, x, y):
        traces.append(x.shape)
        return cross_entropy(eqx.nn.inference_mode(model), x, y)

    run(SingleDevice(), data=batches(*[16] * 8), loss_fn=loss_fn, **several)
    assert traces == [(16, 4)]


def test_a_loss_of_a_batch_is_traced_once_for_each_size():
    traces = []

    def loss_fn(model, x, y):
        traces.append(x.shape)
        return cross_entropy(eqx.nn.inference_mode(model), x, y)

    run(Sharded(), epochs=3, loss_fn=loss_fn)
    assert traces == [(16, 4), (5, 4)]


def test_the_loop_reads_no_value_from_the_device(monkeypatch):
    """The transfer guard sees no device-to-host reads on the CPU: count them."""
    from jax._src.array import ArrayImpl

    reads, steps = [], []
    original = ArrayImpl._value

    def counted(self):
        reads.append(self.shape)
        return original.fget(self)

    class Count(Callback):
        def on_train_epoch_start(self, trainer):
            reads.clear()

        def on_train_batch_end(self, trainer, metrics, batch_idx):
            steps.append(len(reads))

    monkeypatch.setattr(ArrayImpl, "_value", property(counted))
    model = Mlp(jax.random.key(0))
    trainer = Trainer(model, loss="cross_entropy", callbacks=[Count()])
    trainer.fit(batches(*[16] * 30), max_epochs=2)
    assert len(steps) == 60
    assert not any(steps), reads


def test_donated_state_is_overwritten_in_place():
    _, trainer = run(Sharded(), epochs=1)
    state = trainer.state
    trainer.fit(batches(*RAGGED), max_epochs=2)
    # An epoch starts with new totals; everything else is handed from step to step.
    carried = jax.tree.leaves(state._replace(totals=None))
    assert all(leaf.is_deleted() for leaf in carried)
    memory = trainer.compiled_train_step().memory_analysis()
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(trainer.state))
    assert memory.alias_size_in_bytes == held


def test_frozen_leaves_stay_bit_equal_and_out_of_the_optimizer():
    model = Mlp(jax.random.key(0))
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.last.weight, spec, True)
    _, trainer = run(Sharded(), model, epochs=2, filter_spec=spec)
    assert (trainer.model.first.weight == model.first.weight).all()
    assert not (trainer.model.last.weight == model.last.weight).all()
    shapes = {leaf.shape for leaf in jax.tree.leaves(trainer.state.opt_state)}
    assert shapes == {(), (3, 16)}


def test_shared_parameters_stay_shared():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            keys = jax.random.split(key)
            pair = eqx.nn.Linear(4, 4, key=keys[0]), eqx.nn.Linear(4, 4, key=keys[1])
            self.shared = eqx.nn.Shared(
                pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight
            )

        def __call__(self, x):
            first, second = self.shared()
            return second(jax.nn.relu(first(x)))[:3]

    _, trainer = run(Sharded(), Tied(jax.random.key(0)), epochs=2)
    first, second = trainer.model.shared()
    assert (first.weight == second.weight).all()


def test_steps_gives_the_loop_to_the_caller():
    expected, _ = run(SingleDevice(), epochs=2)
    trainer = quiet(Mlp(jax.random.key(0)), optax.adam(1e-2), loss="cross_entropy")
    found = []
    for _ in range(2):
        found += [float(m["loss"]) for m in trainer.steps(batches(*RAGGED))]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (trainer.global_step, trainer.current_epoch) == (10, 2)


@pytest.mark.parametrize("as_iterator", [False, True])
def test_an_epoch_cut_short_is_gone_on_with_by_the_next_fit(as_iterator):
    data = batches(*RAGGED) * 2
    whole, expected = run(SingleDevice(), epochs=1, data=data)
    recorder = Recorder()
    trainer = quiet(
        Mlp(jax.random.key(0)), optax.adam(1e-2), loss="cross_entropy",
        strategy=SingleDevice(), callbacks=[recorder],
    )  # fmt: skip
    loader = iter(data) if as_iterator else data
    trainer.fit(loader, max_steps=4)
    assert (trainer.global_step, trainer.current_epoch) == (4, 0)
    trainer.fit(loader, max_epochs=1)
    assert (trainer.global_step, trainer.current_epoch) == (10, 1)
    assert recorder.losses == list(whole)
    assert trainer.history["loss"] == expected.history["loss"]


def test_validation_follows_its_interval_and_its_epochs():
    class Seen(Callback):
        def __init__(self):
            self.steps = []

        def on_validation_end(self, trainer, metrics):
            self.steps.append(trainer.global_step)

    class Unsized:
        def __iter__(self):
            return iter(batches(*[8] * 6))

    def steps_with(loader=None, **options):
        seen = Seen()
        model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        trainer = quiet(model, loss="cross_entropy", callbacks=[seen])
        trainer.fit(loader or batches(*[8] * 6), batches(8), **options)
        return seen.steps

    assert steps_with(max_epochs=3) == [6, 12, 18]
    for loader in (batches(*[8] * 6), Unsized()):
        assert steps_with(loader, max_epochs=2, val_check_interval=1.0) == [6, 12]
    assert steps_with(max_epochs=3, check_val_every_n_epoch=2) == [12, 18]
    assert steps_with(max_epochs=5, check_val_every_n_epoch=10) == [30]
    assert steps_with(max_epochs=2, val_check_interval=4) == [4, 6, 10, 12]
    assert steps_with(max_steps=9, val_check_interval=4) == [4, 6, 9]
    assert steps_with(max_steps=8, val_check_interval=2) == [2, 4, 6, 8]
    assert steps_with(max_epochs=2, val_check_interval=0.5) == [3, 6, 9, 12]
    assert steps_with(val_check_interval=0.05) == [1, 2, 3, 4, 5, 6]
    assert steps_with(
        max_epochs=2, val_check_interval=3, check_val_every_n_epoch=2
    ) == [9, 12]
    assert steps_with(max_steps=4) == [4]
    assert steps_with(limit_val_batches=0) == []
    assert steps_with(fast_dev_run=True, val_check_interval=4) == [1]
    assert steps_with(fast_dev_run=2, check_val_every_n_epoch=3) == [2]


def test_limits_and_dev_runs():
    def steps_with(**options):
        model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        trainer = quiet(model, loss="cross_entropy")
        trainer.fit(batches(*[8] * 6), batches(8, 8), **options)
        return trainer.global_step, trainer.current_epoch

    assert steps_with(limit_train_batches=2, max_epochs=2) == (4, 2)
    assert steps_with(limit_train_batches=0.5) == (3, 1)
    assert steps_with(fast_dev_run=True, max_epochs=9) == (1, 1)
    assert steps_with(fast_dev_run=2) == (2, 1)
    trainer = quiet(eqx.nn.Linear(4, 3, key=jax.random.key(0)), loss="cross_entropy")
    trainer.fit(batches(*[8] * 6), max_steps=3)
    trainer.fit(batches(*[8] * 6), fast_dev_run=2)
    assert (trainer.global_step, trainer.current_epoch) == (5, 2)
    trainer.fit(batches(*[8] * 6), max_steps=8)
    trainer.fit(batches(8, 8), fast_dev_run=True)
    assert (trainer.global_step, trainer.current_epoch) == (9, 4)
    assert steps_with(max_steps=9) == (9, 1)
    assert steps_with(max_time=0) == (0, 0)
    assert steps_with(overfit_batches=2, max_epochs=3) == (6, 3)


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


@pytest.mark.parametrize(
    "remat", [True, jax.checkpoint_policies.dots_saveable], ids=["True", "policy"]
)
def test_remat_of_blocks_needs_some(remat):
    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    match = r"has none.*Stack\(.*there are layers\[0\], layers\[1\]"
    with pytest.raises(ValueError, match=match):
        Trainer(model, remat=remat)
    with pytest.raises(ValueError, match="`remat`: 'body' matches no submodule"):
        Trainer(model, remat="body")


class Indexing(eqx.Module):
    """Looks at its layers, as well as calling them."""

    body: eqx.nn.Sequential

    def __init__(self, key):
        layers = [
            eqx.nn.Linear(4, 8, key=key),
            eqx.nn.BatchNorm(8, axis_name="batch", mode="batch"),
            eqx.nn.Linear(8, 3, key=key),
        ]
        self.body = eqx.nn.Sequential(layers)

    def __call__(self, x, state):
        assert len(self.body) == 3
        assert isinstance(self.body, eqx.nn.Sequential)
        assert isinstance(self.body[1], eqx.nn.BatchNorm)
        return self.body(x, state)


@pytest.mark.slow_cases("body")
@pytest.mark.parametrize("remat", ["body", "body.layers*"])
def test_recomputed_submodules_are_what_they_were(remat):
    def losses(remat):
        model, state = eqx.nn.make_with_state(Indexing)(jax.random.key(0))
        return run(SingleDevice(), model, epochs=2, state=state, remat=remat)[0]

    np.testing.assert_allclose(losses(remat), losses(False), rtol=1e-5)


def test_gradient_clipping_is_by_global_norm():
    clip = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    model = Mlp(jax.random.key(0), rate=0.0)
    _, expected = hand_written(model, clip, batches(16, 16), 2, cross_entropy)
    recorder = Recorder()
    quiet(
        model, optax.sgd(1.0), loss="cross_entropy", gradient_clip_val=0.01,
        callbacks=[recorder],
    ).fit(batches(16, 16), max_epochs=2)  # fmt: skip
    np.testing.assert_allclose(recorder.losses, expected, rtol=1e-5)


def test_64_bits_are_kept_where_jax_is_told_to():
    with jax.enable_x64(True):
        model = eqx.nn.Linear(4, 3, key=jax.random.key(0), dtype=jnp.float64)
        x, y = batches(16)[0]
        data = [(x.astype(np.float64) / 3, y)]
        optimizer = optax.sgd(0.1)
        expected, _ = hand_written(model, optimizer, data, 3, cross_entropy)
        trainer = quiet(model, optimizer, loss="cross_entropy")
        trainer.fit(data, data, max_epochs=3)
        assert trainer.model.weight.dtype == np.float64
        np.testing.assert_allclose(trainer.model.weight, expected.weight, rtol=1e-12)


def test_epoch_means_are_exact_over_more_rows_than_float32_counts():
    """2**24 + 1 is not a float32; sums must not stop growing there."""
    from jaxdp.step.metrics import Facts, add_to_totals, compute_means

    totals = jnp.zeros((2, 64)).at[0, :2].set(2.0**24)
    one = jnp.ones(1)
    for _ in range(64):
        totals = jax.jit(add_to_totals)(totals, one[0], one * 3)
    means = compute_means(np.asarray(totals), Facts(("loss",), None))
    assert means["loss"] == pytest.approx((2**24 + 192) / (2**24 + 64), rel=1e-12)


def test_a_compilation_for_another_size_is_announced_with_the_leaf(caplog):
    def mean(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    trainer = Trainer(model, loss_fn=mean, strategy=SingleDevice())
    trainer.fit([(x, x), (x, x), (x[:7], x[:7])], [(x, x)], max_epochs=2)
    said = [
        r.getMessage() for r in caplog.records if "compiled again" in r.getMessage()
    ]
    assert len(said) == 1
    assert said[0].startswith("the training step was compiled again, in ")
    assert "because batch[0] was (12, 4) and is (7, 4)" in said[0]


def test_a_mistake_in_validation_shows_before_the_first_step():
    def wrong(model, x, y):
        return (jax.vmap(model)(x) - y) ** 2 @ jnp.ones(x.shape[1])

    x = np.ones((6, 4), np.float32)
    seen = Recorder()
    trainer = Trainer(
        eqx.nn.Linear(4, 4, key=jax.random.key(0)), loss_fn=wrong, callbacks=[seen]
    )
    with pytest.raises(Exception, match="3"):
        trainer.fit([(x, x)], [(x[:, :3], x[:, :3])])
    assert seen.losses == []


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


def test_a_fit_that_is_stopped_between_epochs_is_validated():
    class Ends(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            trainer.should_stop = trainer.global_step == 4  # the last of an epoch

    trainer = quiet(
        eqx.nn.Linear(4, 3, key=jax.random.key(0)), loss="cross_entropy",
        callbacks=[Ends()],
    )  # fmt: skip
    history = trainer.fit(
        batches(8, 8), batches(8), max_epochs=9, check_val_every_n_epoch=7
    )
    assert trainer.global_step == 4 and len(history["val_loss"]) == 2


def test_a_minimum_of_steps_is_of_what_is_left():
    trainer = quiet(eqx.nn.Linear(4, 3, key=jax.random.key(0)), loss="cross_entropy")
    trainer.fit(batches(*[8] * 9))
    trainer.fit(batches(8, 8), max_epochs=2, min_steps=11)
    assert trainer.global_step == 11
    with pytest.raises(ValueError, match="`min_steps`=14 is more than the 13 steps"):
        trainer.fit(batches(8, 8), max_epochs=3, min_steps=14)
