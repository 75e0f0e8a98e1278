"""nanoGPT's setting for a CPU, letters of tinyshakespeare: 4 layers of width 128.

2,000 steps of AdamW over 12 windows of 64 letters; the README of nanoGPT says that the
loss on held-out text is then 1.88. Takes tinyshakespeare.txt from the folder in
JAXDP_DATA_DIR.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import Trainer

CONTEXT, WIDTH, HEADS, DEPTH, ROWS = 64, 128, 4, 4, 12


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        def linear(inputs, outputs, scale, key):
            layer = eqx.nn.Linear(inputs, outputs, use_bias=False, key=key)
            weight = scale * jax.random.normal(key, (outputs, inputs))
            return eqx.tree_at(lambda layer: layer.weight, layer, weight)

        keys, last = jax.random.split(key, 4), 0.02 / np.sqrt(2 * DEPTH)
        self.norms = [eqx.nn.LayerNorm(WIDTH, use_bias=False) for _ in range(2)]
        self.qkv = linear(WIDTH, 3 * WIDTH, 0.02, keys[0])
        self.out = linear(WIDTH, WIDTH, last, keys[1])
        self.up = linear(WIDTH, 4 * WIDTH, 0.02, keys[2])
        self.down = linear(4 * WIDTH, WIDTH, last, keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.qkv)(jax.vmap(self.norms[0])(x))
        q, k, v = jnp.moveaxis(h.reshape(len(x), 3, HEADS, -1), 1, 0)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jax.vmap(self.out)(h.reshape(x.shape))
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(h)


class GPT(eqx.Module):
    letters: jax.Array  # which also make the logits
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, vocabulary: int, key: jax.Array):
        keys = jax.random.split(key, DEPTH + 2)
        self.letters = 0.02 * jax.random.normal(keys[0], (vocabulary, WIDTH))
        self.places = 0.02 * jax.random.normal(keys[1], (CONTEXT, WIDTH))
        self.blocks = [Block(key) for key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(WIDTH, use_bias=False)

    def __call__(self, letters: jax.Array) -> jax.Array:
        x = self.letters[letters] + self.places
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x) @ self.letters.T


def text() -> tuple[np.ndarray, np.ndarray, int]:
    """Training text, held-out text and how many letters there are."""
    path = Path(os.environ.get("JAXDP_DATA_DIR", "data"), "tinyshakespeare.txt")
    letters, numbers = np.unique(list(path.read_text()), return_inverse=True)
    cut = int(0.9 * len(numbers))
    return numbers[:cut].astype(np.int32), numbers[cut:].astype(np.int32), len(letters)


def windows(numbers: np.ndarray, count: int, seed: int) -> Iterator[Any]:
    """Random windows, and the same one letter later."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        starts = draw.integers(0, len(numbers) - CONTEXT, (ROWS, 1))
        rows = numbers[starts + np.arange(CONTEXT + 1)]
        yield rows[:, :-1], rows[:, 1:]


def make_optimizer() -> optax.GradientTransformation:
    def is_matrix(params):
        return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)

    rate = optax.warmup_cosine_decay_schedule(0, 1e-3, 100, 2000, 1e-4)
    adamw = optax.adamw(rate, 0.9, 0.99, weight_decay=0.1, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1), adamw)


def by_hand(steps: int = 2000, every: int = 250) -> dict[str, list[float]]:
    train, held_out, vocabulary = text()
    model, optimizer = GPT(vocabulary, jax.random.key(0)), make_optimizer()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state = optimizer.init(params)

    def loss_of(params, x, y):
        logits = jax.vmap(eqx.combine(params, static))(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step, evaluate = jax.jit(step, donate_argnums=(0, 1)), jax.jit(loss_of)
    history, losses = {"loss": [], "val_loss": []}, []
    for number, (x, y) in enumerate(windows(train, steps, seed=0), 1):
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(loss)
        if number % every == 0:
            history["loss"].append(float(np.mean(losses)))
            values = [evaluate(params, *pair) for pair in windows(held_out, 100, 1)]
            history["val_loss"].append(float(np.mean(values)))
            losses = []
    return history


def with_jaxdp(steps: int = 2000, every: int = 250) -> dict[str, list[float]]:
    train, held_out, vocabulary = text()
    model = GPT(vocabulary, jax.random.key(0))
    trainer = Trainer(model, make_optimizer(), loss="cross_entropy")
    return dict(
        trainer.fit(
            windows(train, steps, seed=0),
            list(windows(held_out, 100, seed=1)),
            limit_train_batches=every,
            max_steps=steps,
        )
    )
