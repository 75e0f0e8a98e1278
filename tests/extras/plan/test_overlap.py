"""Large steps by the compiler for GPUs that are not here: overlap and memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned import installed

from jaxdp import FSDP, Stack, Trainer

TOKENS = 512

pytestmark = pytest.mark.skipif(
    not installed("jax_cuda12_plugin"), reason="no GPU compiler"
)


class Block(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, key):
        sizes = (1, 3), (1, 1), (1, 4), (4, 1)
        self.qkv, self.out, self.up, self.down = (
            eqx.nn.Linear(a * width, b * width, use_bias=False, key=k)
            for (a, b), k in zip(sizes, jax.random.split(key, 4), strict=True)
        )

    def __call__(self, x):
        parts = jnp.split(jax.vmap(self.qkv)(x), 3, axis=-1)
        heads = (part.reshape(TOKENS, 8, -1) for part in parts)
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + jax.vmap(self.out)(mixed.reshape(x.shape))
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class Transformer(eqx.Module):
    blocks: Stack

    def __init__(self, width, blocks, key):
        keys = jax.random.split(key, blocks)
        self.blocks = Stack([Block(width, key) for key in keys])

    def __call__(self, x):
        return self.blocks(x)


def planned(width, blocks, options=None, gather="auto", loss_fn=None):
    """Of a transformer made of shapes, recomputed and gathered block by block."""
    loss = {"loss": "mse"} if loss_fn is None else {"loss_fn": loss_fn}
    trainer = Trainer(
        eqx.filter_eval_shape(Transformer, width, blocks, jax.random.key(0)),
        strategy=FSDP(gather=gather),
        precision="bf16-mixed",
        remat="blocks.stacked",
        compiler_options=options,
        **loss,
    )
    batch = np.zeros((16, TOKENS, width), np.float32)
    return trainer.plan([(batch, batch)], topology="h100x8")


def hidden(options):
    """Which part of the bytes of the blocks' parameters matrix products hide."""
    traffic = planned(1024, 8, options).traffic
    of_blocks = [each for each in traffic if "parameters" in each.part]
    sent = sum(each.wire_bytes for each in of_blocks)
    return sum(each.wire_bytes for each in of_blocks if each.hidden) / sent


def test_an_effort_level_hides_the_gathering_of_blocks_behind_matrix_products():
    with_level = hidden("O1")
    assert with_level >= 0.5
    assert with_level > hidden(None)


def test_thirteen_billion_parameters_fit_on_eight_cards():
    memory = planned(5120, 42).memory
    parameters = 8 * memory.parameters / 4  # a share of float32 each
    assert parameters > 13e9
    assert memory.peak < 60e9
    assert memory.temporary < 2 * parameters  # what they take whole, in bfloat16


def of_rows(model, x, y):
    return ((jax.vmap(model)(x) - y) ** 2).mean(axis=(1, 2))


def scalar(model, x, y):
    return of_rows(model, x, y).mean()


def penalized(model, x, y):
    weights = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    squares = [jnp.sum(weight.astype(jnp.float32) ** 2) for weight in weights]
    return of_rows(model, x, y) + 1e-4 * sum(squares)


@pytest.mark.parametrize("loss_fn", [scalar, penalized])
def test_blocks_are_gathered_by_xla_where_rows_interact_or_weights_are_read(loss_fn):
    apart = planned(1024, 16, loss_fn=of_rows)
    by_blocks = planned(1024, 16, loss_fn=loss_fn)
    once = planned(1024, 16, gather="once", loss_fn=loss_fn)
    assert by_blocks.memory.temporary <= 1.1 * apart.memory.temporary
    assert by_blocks.memory.temporary < 0.5 * once.memory.temporary
    assert by_blocks.wire_bytes <= once.wire_bytes
    assert by_blocks.wire_bytes == pytest.approx(apart.wire_bytes, rel=1e-6)
