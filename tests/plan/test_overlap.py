"""What compiler options do to a step, by the compiler for GPUs that are not here."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import FSDP, Stack, Trainer
from jaxdp.plan import device_compilers

WIDTH, BLOCKS, TOKENS = 1024, 8, 512

pytestmark = pytest.mark.skipif(
    device_compilers._version("jax-cuda12-plugin") is None, reason="no GPU compiler"
)


class Block(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        sizes = (1, 3), (1, 1), (1, 4), (4, 1)
        self.qkv, self.out, self.up, self.down = (
            eqx.nn.Linear(a * WIDTH, b * WIDTH, use_bias=False, key=k)
            for (a, b), k in zip(sizes, jax.random.split(key, 4), strict=True)
        )

    def __call__(self, x):
        parts = jnp.split(jax.vmap(self.qkv)(x), 3, axis=-1)
        heads = (part.reshape(TOKENS, 8, -1) for part in parts)
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + jax.vmap(self.out)(mixed.reshape(TOKENS, WIDTH))
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class Transformer(eqx.Module):
    blocks: Stack

    def __init__(self, key):
        self.blocks = Stack([Block(key) for key in jax.random.split(key, BLOCKS)])

    def __call__(self, x):
        return self.blocks(x)


def hidden(options):
    """Which part of the bytes of the blocks' parameters matrix products hide."""
    trainer = Trainer(
        eqx.filter_eval_shape(Transformer, jax.random.key(0)),
        strategy=FSDP(),
        loss="mse",
        precision="bf16-mixed",
        remat="blocks.stacked",
        compiler_options=options,
    )
    batch = np.zeros((16, TOKENS, WIDTH), np.float32)
    traffic = trainer.plan([(batch, batch)], topology="h100x8").traffic
    of_blocks = [each for each in traffic if "parameters" in each.part]
    sent = sum(each.wire_bytes for each in of_blocks)
    return sum(each.wire_bytes for each in of_blocks if each.hidden) / sent


def test_an_effort_level_hides_the_gathering_of_blocks_behind_matrix_products():
    assert hidden("O1") >= 0.5
    assert hidden("O1") > hidden(None)
