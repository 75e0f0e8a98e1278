"""Tests of the dtypes of arrays in a step, and of the scaling of float16's losses."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    Mlp,
    NormNet,
    On,
    Recorder,
    assert_close,
    batches,
    cross_entropy,
    equations,
    hand_written,
    quiet,
    tracing,
)

from jaxdp import Pmap, Sharded, SingleDevice


def make(model=None, *, data=None, epochs=1, callbacks=(), **options):
    """The losses of a training, and its trainer."""
    recorder, model = Recorder(), Mlp(KEY) if model is None else model
    if "loss_fn" not in options:
        options = {"loss": "cross_entropy"} | options
    options = {"optimizer": optax.adam(1e-2)} | options
    trainer = quiet(model, callbacks=[recorder, *callbacks], **options)
    trainer.fit(data or batches(16, 16, 5), max_epochs=epochs)
    return recorder.losses, trainer


KEY = jax.random.key(0)


def dtypes_of(jaxpr, *primitives):
    """The dtypes that primitives of these names compute in."""
    return {
        str(equation.invars[0].aval.dtype)
        for equation in equations(jaxpr)
        if equation.primitive.name in primitives
    }


class Block(eqx.Module):
    """Attention, every norm that works on one example, and a convolution."""

    attention: eqx.nn.MultiheadAttention
    layer: eqx.nn.LayerNorm
    rms: eqx.nn.RMSNorm
    group: eqx.nn.GroupNorm
    conv: eqx.nn.Conv1d
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[0])
        self.layer = eqx.nn.LayerNorm(8)
        self.rms = eqx.nn.RMSNorm(8)
        self.group = eqx.nn.GroupNorm(2, 8)
        self.conv = eqx.nn.Conv1d(8, 8, 1, key=keys[1])
        self.last = eqx.nn.Linear(8, 3, key=keys[2])

    def __call__(self, x):  # (4, 8)
        h = jax.vmap(self.layer)(x)
        x = x + self.attention(h, h, h)
        x = jax.vmap(self.rms)(x)
        x = x + self.conv(self.group(x.T)).T
        return self.last(x.mean(axis=0))


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_matrices_are_multiplied_narrow_and_norms_and_softmax_are_not(name):
    narrow = "float16" if name == "16-mixed" else "bfloat16"

    def loss(prediction, y):
        assert prediction.dtype == jnp.float32
        return prediction.sum()

    strategy, programs = tracing(SingleDevice)
    data = [(np.ones((2, 4, 8), np.float32), np.zeros(2, np.float32))]
    options = {"loss": loss, "strategy": strategy, "optimizer": optax.sgd(0.1)}
    make(Block(KEY), data=data, precision=name, **options)
    jaxpr = programs[0].jaxpr
    assert dtypes_of(jaxpr, "dot_general", "conv_general_dilated") == {narrow}
    # exp is softmax's; rsqrt, sqrt and the squares of variances are the norms'.
    assert dtypes_of(jaxpr, "exp", "rsqrt", "sqrt", "square") == {"float32"}


@pytest.mark.slow_but("ema-bf16-mixed")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_batch_norm_has_its_statistics_in_float32(mode, precision):
    seen = set()

    class Net(NormNet):
        def __call__(self, x, state):
            assert isinstance(self.norm, eqx.nn.BatchNorm)
            before = self.first(x)
            after, state = self.norm(before, state)
            seen.update((before.dtype, after.dtype))
            return self.last(jax.nn.relu(after)), state

    model, state = eqx.nn.make_with_state(Net)(KEY, mode=mode)
    options = {"state": state, "strategy": Sharded(4), "epochs": 3}
    expected, _ = make(model, **options)
    seen.clear()
    losses, trainer = make(model, precision=precision, **options)
    assert seen == {jnp.dtype("float16" if precision == "16-mixed" else "bfloat16")}
    floating = jax.tree.leaves(eqx.filter(trainer.model_state, eqx.is_inexact_array))
    assert {leaf.dtype for leaf in floating} == {jnp.dtype("float32")}
    assert trainer.state.params.norm.weight.dtype == jnp.float32
    assert type(trainer.model.norm) is eqx.nn.BatchNorm
    trainer.validate(batches(16))
    np.testing.assert_allclose(np.mean(losses), np.mean(expected), rtol=2e-2)


def test_gradients_of_common_words_are_summed_in_float32():
    class Words(eqx.Module):
        table: eqx.nn.Embedding

        def __call__(self, x):
            return jax.vmap(self.table)(x)

    rng = np.random.default_rng(0)
    x = np.where(rng.random((16, 1024)) < 0.3, 0, rng.integers(0, 50, (16, 1024)))
    weight = rng.normal(0.5, 1, (16, 1024, 4)).astype(np.float32)
    table = eqx.nn.Embedding(weight=jnp.zeros((50, 4)))

    def loss_fn(model, x, weight):
        return (jax.vmap(model)(x) * weight).sum((1, 2))

    _, trainer = make(
        Words(table), data=[(x, weight)], loss_fn=loss_fn, precision="bf16-mixed",
        optimizer=optax.sgd(1.0), strategy=SingleDevice(),
    )  # fmt: skip
    expected = np.zeros((50, 4))
    np.add.at(expected, x.ravel(), -weight.reshape(-1, 4).astype(np.float64) / 16)
    error = np.linalg.norm(np.asarray(trainer.model.table.weight) - expected, axis=1)
    assert (error < 0.005 * np.linalg.norm(expected, axis=1)).all()


@pytest.mark.parametrize("options", [{}, {"loss_fn": cross_entropy}])
def test_bf16_mixed_is_the_textbook_cast(options):
    """Float32 parameters and Adam; a cast in the loss; the loss in float32."""
    model, data = Mlp(KEY, rate=0.0), batches(16, 16, 16)

    def loss_of(model, x, y):
        narrow = jax.tree.map(
            lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, model
        )
        logits = jax.vmap(narrow)(x.astype(jnp.bfloat16)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    expected, full = (
        hand_written(model, optax.adam(1e-2), data, 5, loss)[1]
        for loss in (loss_of, cross_entropy)
    )
    options = {"precision": "bf16-mixed", "strategy": SingleDevice()} | options
    losses, trainer = make(model, data=data, epochs=5, **options)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert max(np.abs(np.subtract(losses, full))) > 1e-5  # it did compute narrow
    kept = jax.tree.leaves(eqx.filter(trainer.state, eqx.is_inexact_array))
    assert {leaf.dtype for leaf in kept} == {jnp.dtype("float32")}
    assert trainer.predict([data[0][0]]).dtype == np.float32


def test_bf16_true_keeps_parameters_and_optimizer_in_bfloat16():
    model = Block(KEY)
    x = np.random.default_rng(0).normal(size=(16, 4, 8)).astype(np.float32)
    data = [(x, (x[:, 0, 0] > 0).astype(np.int32))]
    losses, trainer = make(model, data=data, epochs=20, precision="bf16-true")
    state = trainer.state
    for leaf in state.params.last.weight, state.opt_state[0].mu.last.weight:
        assert leaf.dtype == jnp.bfloat16
    for leaf in state.params.layer.weight, trainer.model.last.weight, model.last.weight:
        assert leaf.dtype == jnp.float32
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow_but("Pmap-bf16-mixed", "Pmap-bf16-true")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("strategy", [Sharded, Pmap])
def test_narrow_losses_are_one_devices_up_to_narrow_rounding(precision, strategy):
    """A device rounds the gradient of its share, so 1e-5 is not to be had."""
    options = {"precision": precision, "epochs": 4, "accumulate_grad_batches": 2}
    expected, _ = make(strategy=SingleDevice(), **options)
    losses, _ = make(strategy=strategy(), **options)
    np.testing.assert_allclose(losses, expected, rtol=2e-2)


class Narrow(eqx.nn.Linear):
    def __call__(self, x):
        assert self.weight.dtype == x.dtype == jnp.bfloat16
        return super().__call__(x)


class Encoder(eqx.Module):
    """A model that a loss calls by its parts."""

    encoder: eqx.nn.Linear
    decoders: eqx.nn.Sequential
    scale: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.encoder = Narrow(4, 8, key=keys[0])
        self.decoders = eqx.nn.Sequential([Narrow(8, 4, key=key) for key in keys[1:]])
        self.scale = jnp.ones(())

    def encode(self, x):
        return self.encoder(x)


def by_methods(model, x, y):
    hidden = jax.vmap(model.encode)(x)
    _, decoder = model.decoders
    rebuilt = jax.vmap(decoder)(hidden)
    assert jax.vmap(model.decoders[0])(hidden).dtype == jnp.float32
    assert hidden.dtype == rebuilt.dtype == x.dtype == jnp.float32
    assert model.encoder.weight.dtype == model.scale.dtype == jnp.float32
    assert model.encoder.out_features == 8
    return model.scale * ((rebuilt - x) ** 2).mean(axis=1)


def test_a_loss_fn_may_use_parts_of_a_model_and_sees_float32():
    options = {"loss_fn": by_methods, "precision": "bf16-mixed", "epochs": 10}
    losses, _ = make(Encoder(KEY), **options)
    assert losses[-1] < losses[0]


def test_what_cannot_be_called_is_cast_with_its_batch():
    params = {"w": jnp.ones((4, 3)), "n": jnp.arange(3)}

    def loss_fn(params, x, y):
        assert params["w"].dtype == x.dtype == jnp.bfloat16
        assert y.dtype == params["n"].dtype == jnp.int32
        return (x @ params["w"]).sum(axis=1) ** 2

    losses, trainer = make(params, loss_fn=loss_fn, precision="bf16-mixed")
    assert trainer.model["w"].dtype == jnp.float32
    assert losses[0] > 0


@pytest.mark.slow_but("Sharded")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap])
def test_an_overflow_skips_the_step_and_halves_the_scale(strategy):
    data, states = batches(*[16] * 8), []
    x, y = data[3]
    data[3] = np.where(np.arange(4) == 0, np.float32(3e4), x), y

    def watch(trainer, metrics, batch_idx):
        state = trainer.state
        kept = jax.tree.map(np.array, (state.params, state.opt_state, state.loss_scale))
        states.append((*kept, bool(metrics["skipped"])))

    options = {"strategy": strategy(), "callbacks": [On(on_train_batch_end=watch)]}
    _, trainer = make(data=data, precision="16-mixed", **options)
    skipped = [state[3] for state in states]
    assert skipped[3] and not any(skipped[4:])
    first = skipped.index(False)  # 2**16 may be too much for the first steps
    for before, after in zip(states[first:], states[first + 1 :], strict=False):
        assert eqx.tree_equal(before[:2], after[:2]) == after[3]
        assert after[2].scale == before[2].scale / (2 if after[3] else 1)
    assert int(trainer.state.opt_state[0].count) == 8 - sum(skipped)
    assert int(trainer.state.step) == trainer.global_step == 8


class FromScale(SingleDevice):
    """Begins with a loss scale, as after so many finite steps."""

    def __init__(self, *start):
        super().__init__()
        self.start = start

    def place(self, state):
        kinds = [leaf.dtype for leaf in state.loss_scale]
        start = map(jnp.asarray, self.start, kinds)
        return super().place(state._replace(loss_scale=type(state.loss_scale)(*start)))


def test_the_scale_grows_and_changes_no_number():
    still, grown = (
        make(precision="16-mixed", epochs=4, strategy=FromScale(1024.0, steps))[1]
        for steps in (0, 2000 - 5)  # it doubles after 2000 of them
    )
    for trainer, expected in (still, (1024, 12)), (grown, (2048, 7)):
        assert trainer.state.loss_scale == expected
    # Powers of two only move the exponent, where nothing is too small.
    assert_close(still.model, grown.model, rtol=1e-2, atol=1e-4)


def test_small_gradients_are_lost_without_the_scale():
    def moved(scale):
        model = eqx.nn.Linear(4, 3, use_bias=False, key=KEY)
        options = {"precision": "16-mixed", "strategy": FromScale(scale, 0)}
        tiny = lambda prediction, _: 1e-7 * (prediction**2).mean(axis=1)  # noqa: E731
        _, trainer = make(model, loss=tiny, optimizer=optax.sgd(1.0), **options)
        return float(jnp.abs(trainer.model.weight - model.weight).max())

    assert moved(1.0) == 0 < moved(65536.0)
