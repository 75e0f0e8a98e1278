"""Models of as many kinds, tiny, with batches and losses."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from toys import Mlp, batches

from jaxdp import Stack


class Case(NamedTuple):
    """A model, eight batches, and how it is trained."""

    make: Callable[..., Any]
    data: list[Any]
    options: dict[str, Any] = {"loss": "cross_entropy"}
    split: tuple[Any, ...] = ()
    """Rules for `TensorParallel`."""
    has_stack: bool = False
    """Whether there is something for `Pipeline`."""


def noise(rows, count, *, shape=(64,), seed=0):
    """`count` batches of floats, and labels that can only be learned by heart."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, rows, *shape)).astype(np.float32)
    return [*zip(x, generator.integers(0, 10, (count, rows)), strict=True)]


def words(rows, count, length=16):
    """`count` batches of numbers of words, and labels."""
    generator = np.random.default_rng(0)
    x = generator.integers(0, 50, (count, rows, length)).astype(np.int32)
    return [*zip(x, generator.integers(0, 10, (count, rows)), strict=True)]


def wide(key):
    return eqx.nn.MLP(64, 10, 512, 4, key=key)


class Block(eqx.Module):
    """Causal attention and a perceptron, both behind a norm."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key, width=16):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x, *, key=None):
        h = jax.vmap(self.norms[0])(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Gpt(eqx.Module):
    """(length,) tokens -> (length, words) logits, by a stack or a list of blocks."""

    embedding: eqx.nn.Embedding
    places: jax.Array
    blocks: Stack | list[Block]
    last: eqx.nn.Linear

    def __init__(self, key, width=16, words=50, length=16, depth=4, in_stack=True):
        keys = jax.random.split(key, 3 + depth)
        self.embedding = eqx.nn.Embedding(words, width, key=keys[0])
        self.places = 0.1 * jax.random.normal(keys[1], (length, width))
        blocks = [Block(key, width) for key in keys[3:]]
        self.blocks = Stack(blocks) if in_stack else blocks
        self.last = eqx.nn.Linear(width, words, key=keys[2])

    def __call__(self, tokens, *, key=None):
        x = jax.vmap(self.embedding)(tokens) + self.places
        for block in [self.blocks] if isinstance(self.blocks, Stack) else self.blocks:
            x = block(x, key=key)
        return jax.vmap(self.last)(x)


def next_word(model, x, y):
    """The mean loss of a row's words, of which each but the first is to be guessed."""

    def of_row(tokens):
        logs = jax.nn.log_softmax(model(tokens)[:-1])
        return -jnp.take_along_axis(logs, tokens[1:, None], axis=1).mean()

    return jax.vmap(of_row)(x)


class ResNet(eqx.Module):
    first: eqx.nn.Conv2d
    convs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        kernel = {"kernel_size": 3, "padding": 1, "use_bias": False}
        self.first = eqx.nn.Conv2d(1, 8, **kernel, key=keys[0])
        self.convs = [eqx.nn.Conv2d(8, 8, **kernel, key=key) for key in keys[1:3]]
        self.norms = [eqx.nn.BatchNorm(8, "batch", mode="batch") for _ in keys[1:3]]
        self.last = eqx.nn.Linear(8, 10, key=keys[3])

    def __call__(self, x, state):
        x = self.first(x.reshape(1, 8, 8))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h, state = norm(conv(x), state)
            x = x + jax.nn.relu(h)
        return self.last(x.mean(axis=(1, 2))), state


class Gru(eqx.Module):
    cell: eqx.nn.GRUCell
    last: eqx.nn.Linear

    def __init__(self, key, width=16):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, width, key=keys[0])
        self.last = eqx.nn.Linear(width, 10, key=keys[1])

    def __call__(self, x):
        def step(hidden, at):
            return self.cell(at, hidden), None

        start = jnp.zeros(self.cell.hidden_size)
        return self.last(jax.lax.scan(step, start, x.reshape(-1, 8))[0])


class Reads(eqx.Module):
    """Embeddings, of which the largest of each word is taken."""

    embedding: eqx.nn.Embedding
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.embedding = eqx.nn.Embedding(50, 16, key=keys[0])
        self.last = eqx.nn.Linear(16, 10, key=keys[1])

    def __call__(self, tokens):
        return self.last(jax.vmap(self.embedding)(tokens).max(axis=0))


def contrastive(model, x, y):
    """A scalar: each row is to be nearest to itself, a little moved."""
    here, moved = (jax.vmap(model)(x * scale) for scale in (1.0, 1.1))
    logits = here @ moved.T / 4
    return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()


ROWS = P("model", None)
CASES = {
    "small MLP, dropout, a ragged batch": Case(Mlp, batches(*[16] * 7, 13)),
    "wide MLP": Case(wide, noise(128, 8), split=(("layers[1].weight", ROWS),)),
    "GPT": Case(Gpt, words(16, 8), {"loss_fn": next_word}, has_stack=True),
    "ResNet with BatchNorm": Case(eqx.nn.make_with_state(ResNet), noise(24, 8)),
    "GRU": Case(Gru, noise(24, 8), split=(("last.weight", P(None, "model")),)),
    "embeddings": Case(Reads, words(24, 8)),
    "contrastive loss": Case(wide, noise(24, 8), {"loss_fn": contrastive}),
}
