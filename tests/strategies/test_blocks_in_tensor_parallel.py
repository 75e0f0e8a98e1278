"""Blocks that are split by rules, and gathered over "fsdp" one by one."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxdp import SingleDevice, Stack, TensorParallel, Trainer
from jaxdp.extras.plan import hlo
from jaxdp.strategies import tensor_rules

WIDTH, BLOCKS = 64, 8
MESH = {"data": 1, "fsdp": 4, "model": 2}
MESHES = {"fsdp": MESH, "data": {"data": 2, "fsdp": 2, "model": 2}}


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key=None):
        x = x + self.attention(x, x, x)
        return x + self.dropout(jax.vmap(self.mlp)(x), key=key)


class Model(eqx.Module):
    blocks: Stack
    last: eqx.nn.Linear

    def __init__(self):
        *keys, last = jax.random.split(jax.random.key(0), BLOCKS + 1)
        self.blocks = Stack([Block(key) for key in keys])
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


def trainer_for(strategy, loss="rows", **arguments):
    how = {"loss": "mse"} if LOSSES[loss] is None else {"loss_fn": LOSSES[loss]}
    return Trainer(
        Model(),
        optax.adam(1e-3),
        strategy=strategy,
        enable_progress_bar=False,
        **how,
        **arguments,
    )


def batches():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 16, 4, WIDTH)).astype(np.float32)
    y = rng.normal(size=(3, 16, 4)).astype(np.float32)
    return list(zip(x, y, strict=True))


def tensor_parallel(mesh_shape=MESH, **arguments):
    return TensorParallel(mesh_shape, tensor_rules(Model()), **arguments)


@functools.cache
def on_one_device(loss, **arguments):
    return trainer_for(SingleDevice(), loss, **arguments).fit(batches(), max_epochs=2)


@functools.cache
def fitted(mesh_name="fsdp", loss="rows", **arguments):
    strategy = tensor_parallel(MESHES[mesh_name])
    trainer = trainer_for(strategy, loss, **arguments)
    return trainer, trainer.fit(batches(), max_epochs=2)


def traffic(trainer):
    """Bytes that a device sends in a step, by the axis of the mesh."""
    program = hlo.read(trainer.compiled_train_step().as_text())
    shape, sent = dict(trainer.strategy.mesh.shape), {}
    for each in program.collectives:
        key = each.kind, each.axes(shape)
        sent[key] = sent.get(key, 0) + each.wire_bytes * (each.times or 1)
    return sent


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.slow_but("fsdp-rows")
def test_blocks_give_the_numbers_of_one_device(mesh_name, loss):
    trainer, history = fitted(mesh_name, loss, remat="blocks.stacked")
    wanted = on_one_device(loss)
    np.testing.assert_allclose(history["loss"], wanted["loss"], rtol=1e-5)
    # Blocks keep their split by rules when they are gathered.
    sent = traffic(trainer)
    assert sent["all-gather", ("fsdp",)] > 0
    assert not any("model" in axes for kind, axes in sent if kind == "all-gather")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_blocks_with_other_arguments_of_the_trainer(arguments):
    history = fitted("data", **arguments)[1]
    rtol = 2e-3 if "precision" in arguments else 1e-5
    wanted = on_one_device("rows", **arguments)
    np.testing.assert_allclose(history["loss"], wanted["loss"], rtol=rtol)


def test_memory_and_traffic_are_those_of_blocks():
    at_once = trainer_for(tensor_parallel(gather="once"), remat="blocks.stacked")
    by_block = fitted("fsdp", "rows", remat="blocks.stacked")[0]
    plans = [trainer.plan(batches()) for trainer in (by_block, at_once)]
    assert plans[0].memory.temporary < 0.5 * plans[1].memory.temporary
    sent = [
        sum(t.wire_bytes for t in plan.traffic if t.axes == ("fsdp",)) for plan in plans
    ]
    # Gathered once more in the backward pass.
    assert sent[0] == pytest.approx(1.5 * sent[1], rel=0.05)
    over_model = [
        sum(t.wire_bytes for t in plan.traffic if t.axes == ("model",))
        for plan in plans
    ]
    assert over_model[0] == over_model[1]


def test_rules_leave_axes_of_a_block_to_fsdp():
    layouts = tensor_parallel().layouts(trainer_for(SingleDevice()).state)
    weight = layouts["params: blocks.stacked.mlp.layers[0].weight"]
    assert weight == PartitionSpec(None, "model", "fsdp")
    bias = layouts["params: blocks.stacked.mlp.layers[0].bias"]
    assert bias == PartitionSpec("fsdp", "model")  # by blocks, and so beforehand


def test_what_gather_means_without_an_axis_is_an_error():
    with pytest.raises(ValueError, match="`gather`: 'blocks' is about an axis 'fsdp'"):
        tensor_parallel({"data": 4, "model": 2}, gather="blocks")
    with pytest.raises(ValueError, match="`gather` must be one of"):
        tensor_parallel(gather="often")
