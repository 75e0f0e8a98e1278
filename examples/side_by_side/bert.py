"""A small encoder like BERT's that classifies sentences, from a Hugging Face dataset.

Does a line end with a question mark, or with another one? The lines are those of
tinyshakespeare.txt in the folder in JAXDP_DATA_DIR; a `datasets.Dataset` of your own
with the columns `ids` and `label` takes their place.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import Trainer

LENGTH, WIDTH, HEADS, DEPTH, WORDS = 16, 64, 4, 2, 2000
STEPS = 250
MARKS = (".", "!", ";", ",", "?")


def lines(rows: int) -> datasets.Dataset:
    """Lines without their marks, of which half were questions."""
    path = Path(os.environ.get("JAXDP_DATA_DIR", "data"), "tinyshakespeare.txt")
    text = [
        line for line in path.read_text().lower().splitlines() if line[-1:] in MARKS
    ]
    questions = [line for line in text if line.endswith("?")][: rows // 2]
    others = [line for line in text if not line.endswith("?")][: len(questions)]
    words = [re.findall("[a-z']+", line) for line in questions + others]

    names, counts = np.unique(np.concatenate(words), return_counts=True)
    common = names[np.argsort(-counts, kind="stable")[: WORDS - 3]]
    number = {word: place + 3 for place, word in enumerate(common)}  # 0 is padding
    ids = np.zeros((len(words), LENGTH), np.int32)
    for row, line in enumerate(words):
        numbers = [1, *(number.get(word, 2) for word in line)]  # 1 starts a line
        ids[row, : len(numbers)] = numbers[:LENGTH]
    label = [1] * len(questions) + [0] * len(others)
    return datasets.Dataset.from_dict({"ids": ids, "label": label})


def data(rows: int) -> tuple[Any, Any]:
    parts = lines(rows).with_format("numpy").train_test_split(0.2, seed=0)
    return parts["train"], parts["test"]


class Layer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[1])
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = jax.vmap(self.norms[0])(x + self.attention(x, x, x, mask))
        return jax.vmap(self.norms[1])(x + jax.vmap(self.mlp)(x))


class Encoder(eqx.Module):
    words: eqx.nn.Embedding
    places: jax.Array
    layers: list[Layer]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, DEPTH + 3)
        self.words = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.layers = [Layer(key) for key in keys[3:]]
        self.head = eqx.nn.Linear(WIDTH, 2, key=keys[2])

    def __call__(self, ids: jax.Array) -> jax.Array:
        mask = jnp.broadcast_to(ids != 0, (LENGTH, LENGTH))
        x = jax.vmap(self.words)(ids) + self.places
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[0])


def make_optimizer() -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0, 1e-3, STEPS // 10, STEPS)
    return optax.adamw(rate, weight_decay=0.01)


class Batches:
    """The rows of a dataset, in another order in each epoch."""

    def __init__(self, dataset: Any, size: int):
        self.dataset, self.size = dataset, size
        self.draw = np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in self.dataset.shuffle(generator=self.draw).iter(self.size):
            yield batch["ids"], batch["label"]


def by_hand(epochs: int = 4, rows: int = 6000) -> dict[str, list[float]]:
    train, test = data(rows)
    model, optimizer = Encoder(jax.random.key(0)), make_optimizer()
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_of(model, ids, labels):
        logits = jax.vmap(model)(ids)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), (logits.argmax(axis=1) == labels).mean()

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        gradient = eqx.filter_value_and_grad(loss_of, has_aux=True)
        (loss, accuracy), grads = gradient(model, *batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, (loss, accuracy)

    evaluate, batches = eqx.filter_jit(loss_of), Batches(train, 64)
    history = {name: [] for name in ("loss", "accuracy", "val_loss", "val_accuracy")}
    for _ in range(epochs):
        values, sizes = [], []
        for ids, labels in batches:
            model, opt_state, pair = step((ids, labels), model, opt_state)
            values.append(pair)
            sizes.append(len(ids))
        means = list(np.average(values, axis=0, weights=sizes))

        values, sizes = [], []
        for batch in test.iter(64):
            values.append(evaluate(model, batch["ids"], batch["label"]))
            sizes.append(len(batch["ids"]))
        means += list(np.average(values, axis=0, weights=sizes))
        for name, mean in zip(history, means, strict=True):
            history[name].append(float(mean))
    return history


def with_jaxdp(epochs: int = 4, rows: int = 6000) -> dict[str, list[float]]:
    train, test = data(rows)
    trainer = Trainer(
        Encoder(jax.random.key(0)),
        make_optimizer(),
        loss="cross_entropy",
        metrics=["accuracy"],
    )
    val = [(batch["ids"], batch["label"]) for batch in test.iter(64)]
    return dict(trainer.fit(Batches(train, 64), val, max_epochs=epochs))
