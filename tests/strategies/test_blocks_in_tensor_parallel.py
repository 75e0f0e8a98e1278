"""Blocks that are split by rules, and gathered over "fsdp" one by one."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from layered_models import Block
from toys import quiet

from jaxdp import SingleDevice, Stack, TensorParallel
from jaxdp.extras.plan import hlo
from jaxdp.strategies import find_layouts, tensor_rules

WIDTH, BLOCKS = 64, 8
MESHES = {
    "fsdp": {"data": 1, "fsdp": 4, "model": 2},
    "data": {"data": 2, "fsdp": 2, "model": 2},
}


class Model(eqx.Module):
    blocks: Stack
    last: eqx.nn.Linear

    def __init__(self):
        *keys, last = jax.random.split(jax.random.key(0), BLOCKS + 1)
        self.blocks = Stack([Block(WIDTH, key) for key in keys])
        self.last = eqx.nn.Linear(WIDTH, 4, key=last)

    def __call__(self, x, key=None):
        return self.last(self.blocks(x, key=key).mean(axis=0))


def scalar(model, x, y, key):
    keys = jax.random.split(key, len(x))
    return jnp.mean((jax.vmap(model)(x, keys) - y) ** 2)


def penalized(model, x, y, key):
    keys = jax.random.split(key, len(x))
    weights = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    penalty = sum(jnp.sum(weight**2) for weight in weights)
    return jnp.mean((jax.vmap(model)(x, keys) - y) ** 2, axis=1) + 1e-3 * penalty


LOSSES = {"rows": None, "scalar": scalar, "penalized": penalized}


def make(mesh="fsdp", loss="rows", gather="auto"):
    rules = tensor_rules(Model())
    strategy = mesh and TensorParallel(MESHES[mesh], rules, gather=gather)
    how = {"loss": "mse"} if loss == "rows" else {"loss_fn": LOSSES[loss]}
    strategy, how["remat"] = strategy or SingleDevice(), "blocks.stacked"
    return quiet(Model(), optax.adam(1e-3), strategy=strategy, **how)


def batches():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 16, 4, WIDTH)).astype(np.float32)
    y = rng.normal(size=(3, 16, 4)).astype(np.float32)
    return list(zip(x, y, strict=True))


@functools.cache
def on_one_device(loss):
    return make(None, loss).fit(batches(), max_epochs=2)["loss"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow_but("fsdp-rows")
def test_blocks_give_the_numbers_of_one_device(mesh, loss):
    trainer = make(mesh, loss)
    found = trainer.fit(batches(), max_epochs=2)["loss"]
    np.testing.assert_allclose(found, on_one_device(loss), rtol=1e-5)
    # Blocks keep their split by rules when they are gathered.
    program = hlo.read(trainer.compiled_train_step().as_text())
    shape = dict(trainer.strategy.mesh.shape)
    gathers = [each for each in program.collectives if each.kind == "all-gather"]
    assert any(each.axes(shape) == ("fsdp",) for each in gathers)
    assert not any("model" in each.axes(shape) for each in gathers)


def test_memory_and_traffic_are_those_of_blocks():
    by_block, at_once = (make(gather=way).plan(batches()) for way in ("auto", "once"))
    assert by_block.memory.temporary < 0.5 * at_once.memory.temporary

    def sent(plan, axis):
        return sum(t.wire_bytes for t in plan.traffic if t.axes == (axis,))

    # Gathered once more in the backward pass.
    assert sent(by_block, "fsdp") == pytest.approx(1.5 * sent(at_once, "fsdp"), 0.05)
    assert sent(by_block, "model") == sent(at_once, "model")


def test_rules_leave_axes_of_a_block_to_fsdp():
    layouts = find_layouts(make().strategy, make().state)
    mlp = "params: blocks.stacked.mlp.layers[0]"
    assert layouts[f"{mlp}.weight"] == PartitionSpec(None, "model", "fsdp")
    # By blocks, and so beforehand.
    assert layouts[f"{mlp}.bias"] == PartitionSpec("fsdp", "model")
