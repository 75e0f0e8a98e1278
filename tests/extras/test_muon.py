"""Muon that stays split, beside optax's."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from toys import assert_close, path_of, quiet

from jaxdp import (
    FSDP,
    Pipeline,
    Pmap,
    Sharded,
    SingleDevice,
    Stack,
    TensorParallel,
    ZeRO,
    muon,
)

WIDTH = 16


class Block(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.tanh, key=key)

    def __call__(self, x):
        return x + self.mlp(x)


class Model(eqx.Module):
    """Matrices in a stack and outside, one that nothing divides, and an embedding."""

    embed: eqx.nn.Embedding
    blocks: Stack
    middle: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 8)
        self.embed = eqx.nn.Embedding(20, WIDTH, key=keys[0])
        self.blocks = Stack([Block(key) for key in keys[3:6]])
        self.middle = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, 7, key=keys[2])

    def __call__(self, token):
        return self.head(self.middle(self.blocks(self.embed(token))))


def axes(params):
    """Returns the axes of matrices for optax, in Equinox's order."""
    labels = jax.tree.map(lambda _: None, params)
    where = lambda m: (  # noqa: E731
        *(layer.weight for layer in m.blocks.stacked.mlp.layers),
        m.middle.weight,
        m.head.weight,
    )
    is_leaf = lambda x: x is None  # noqa: E731
    numbers = [MuonDimensionNumbers(-1, -2)] * 4
    return eqx.tree_at(where, labels, numbers, is_leaf=is_leaf)


def batches(count=2):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, (count, 16)).astype(np.int32)
    return [(row, row % 7) for row in tokens]


@functools.cache
def losses(optimizer, strategy=SingleDevice, epochs=4):
    trainer = quiet(
        Model(jax.random.key(0)), optimizer, loss="cross_entropy", strategy=strategy()
    )
    return trainer.fit(batches(), max_epochs=epochs)["loss"]


OURS = muon(0.02)
OPTAX = optax.contrib.muon(0.02, muon_weight_dimension_numbers=axes)


def test_fifty_steps_are_those_of_optax_given_the_same_axes():
    params = eqx.filter(Model(jax.random.key(0)), eqx.is_array)

    def run(optimizer):
        def step(carry, key):
            params, state = carry
            grads = jax.tree.map(
                lambda leaf: leaf + jax.random.normal(key, leaf.shape), params
            )
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(1), 50)
        return jax.lax.scan(step, (params, optimizer.init(params)), keys)[0][0]

    scaled = {"weight_decay": 0.1, "consistent_rms": 0.2, "nesterov": False}
    scaled |= {"learning_rate": 0.01, "adam_learning_rate": 1e-3, "beta": 0.9}
    optaxs = optax.contrib.muon(**scaled, muon_weight_dimension_numbers=axes)
    for pair in (OURS, OPTAX), (muon(**scaled), optaxs):
        found, wanted = (jax.jit(run, static_argnums=0)(each) for each in pair)
        assert_close(found, wanted, 1e-4, 1e-5)


STRATEGIES = {
    "Sharded": Sharded,
    "Pmap": Pmap,
    "ZeRO": ZeRO,
    "FSDP, small leaves": functools.partial(FSDP, min_size=100),
    "FSDP, gathered once": functools.partial(FSDP, gather="once"),
    "TensorParallel": lambda: TensorParallel(
        {"data": 4, "model": 2}, [("*middle.weight", P("model"))]
    ),
    "Pipeline": lambda: Pipeline(3, 2, devices=3),
}


@pytest.mark.slow_but("ZeRO", "FSDP, small leaves", "Pipeline")
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_every_layout_trains_as_one_device_does(strategy):
    found = losses(OURS, strategy)
    np.testing.assert_allclose(found, losses(OURS), rtol=1e-5)


def sent(optimizer, wide):
    """Bytes that all devices send in a step under FSDP, and products of one device."""

    keys = jax.random.split(jax.random.key(0), 8)
    layers = [eqx.nn.Linear(128, 128, use_bias=False, key=key) for key in keys]
    model = Stack(layers) if wide else eqx.nn.Sequential(layers)
    trainer = quiet(
        model, optimizer, loss="mse", strategy=FSDP(gather="auto" if wide else "once")
    )
    x = np.ones((16, 128), np.float32)
    trainer.fit([(x, x)])
    plan = trainer.running_plan()
    compiled = trainer.compiled_train_step()
    return plan.wire_bytes, compiled.cost_analysis()["flops"]


@pytest.mark.parametrize("in_stack", [True, False])
def test_it_sends_little_more_than_adam_and_divides_the_products(in_stack):
    of_adam, few = sent(optax.adam(1e-3), in_stack)
    of_muon, many = sent(muon(1e-3), in_stack)
    factor = 1.5 if in_stack else 1.0  # of F, what Adam sends
    assert of_muon / of_adam * factor < 1.7
    whole = 8 * 5 * 3 * 2 * 128**3  # eight matrices, five iterations of three products
    assert (many - few) / whole < 1 / 8 + 0.05


def test_patterns_leave_matrices_to_adam():
    params = eqx.filter(Model(jax.random.key(0)), eqx.is_array)
    state = muon(0.01, adam=["head", "blocks.stacked.mlp.layers[0].*"]).init(params)
    momentum = state.inner_states["muon"].inner_state[0].mean
    leaves = jax.tree_util.tree_leaves_with_path(momentum)
    held = {path_of(path) for path, leaf in leaves if isinstance(leaf, jax.Array)}
    assert held == {"blocks.stacked.mlp.layers[1].weight", "middle.weight"}
