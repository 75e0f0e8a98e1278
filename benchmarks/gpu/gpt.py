"""A GPT of 0.35 billion parameters: its blocks in a scan, recomputed going back."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

Sizes = tuple[int, int, int, int, int]
"""Width, blocks, heads, words, tokens."""

FULL, TOY = (1024, 24, 16, 50304, 1024), (32, 2, 2, 64, 16)


class Block(eqx.Module):
    """Causal attention and a perceptron, behind norms."""

    norms: list[eqx.nn.LayerNorm]
    inwards: eqx.nn.Linear
    outwards: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.inwards = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.outwards = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])
        self.heads = heads

    def __call__(self, x: jax.Array) -> jax.Array:
        length, width = x.shape
        h = jax.vmap(self.inwards)(jax.vmap(self.norms[0])(x))
        parts = h.reshape(length, 3, self.heads, width // self.heads)
        q, k, v = (parts[:, part] for part in range(3))
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jax.vmap(self.outwards)(h.reshape(length, width))
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(h)


class Gpt(eqx.Module):
    """Tokens to the logarithms of odds of the next."""

    words: jax.Array
    places: jax.Array
    blocks: Block

    def __init__(self, sizes: Sizes, key: jax.Array):
        width, number, heads, words, tokens = sizes
        keys = jax.random.split(key, number + 2)
        self.words = 0.02 * jax.random.normal(keys[0], (words, width))
        self.places = 0.02 * jax.random.normal(keys[1], (tokens, width))
        self.blocks = eqx.filter_vmap(lambda key: Block(width, heads, key))(keys[2:])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def block(x, arrays):
            return eqx.combine(arrays, static)(x), None

        x = self.words[tokens] + self.places[: len(tokens)]
        x, _ = jax.lax.scan(block, x, arrays)
        return x @ self.words.T


def loss_of_rows(model: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of each row's next tokens."""
    logits = jax.vmap(model)(tokens)[:, :-1].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(axis=1)


def batches(sizes: Sizes, rows: int, steps: int) -> list[tuple[np.ndarray]]:
    """Tokens at random."""
    shape = steps, rows, sizes[4]
    drawn = np.random.default_rng(0).integers(0, sizes[3], shape, dtype=np.int32)
    return [(batch,) for batch in drawn]


def operations(sizes: Sizes, rows: int) -> float:
    """Of a step's products, what is recomputed not counted: three times forward."""
    width, number, _, words, tokens = sizes
    products = number * 12 * width**2 + words * width
    attention = number * 2 * width * tokens / 2  # of the tokens so far
    return 3 * 2 * rows * tokens * (products + attention)
