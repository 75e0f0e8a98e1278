"""GPT-2 in Equinox, without torch, which a GPU's machine may not have."""

import equinox as eqx
import jax

from jaxdp import Stack, fuse_attention


class Block(eqx.Module):
    """Causal attention, then an MLP for each token."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: jax.Array):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class GPT(eqx.Module):
    """Tokens `(context,)` to logits `(context, words)` of the token after each."""

    words: eqx.nn.Embedding
    places: jax.Array
    blocks: Stack
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, words: int, context: int, width: int, depth: int, heads: int):
        keys = jax.random.split(jax.random.key(0), depth + 3)
        self.words = eqx.nn.Embedding(words, width, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (context, width))
        self.blocks = Stack([Block(width, heads, key) for key in keys[3:]])
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, words, use_bias=False, key=keys[2])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.words)(tokens) + self.places
        return jax.vmap(self.head)(jax.vmap(self.norm)(self.blocks(x)))


def make_gpt(*sizes: int) -> GPT:
    """Makes a GPT whose attention is computed by cuDNN, where that can."""
    return fuse_attention(GPT(*sizes), causal=True)
