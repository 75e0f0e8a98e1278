"""Pictures of 28 x 28 pixels, by a small convolutional net, from a `DataLoader`.

Takes the four files of MNIST or Fashion-MNIST from the folder in JAXDP_DATA_DIR.
"""

import os
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
import torch
from torch.utils.data import DataLoader, TensorDataset

from jaxdp import Trainer


def load(part: str, rows: int | None = None) -> TensorDataset:
    folder = next(Path(os.environ.get("JAXDP_DATA_DIR", "data")).glob("*MNIST/raw"))
    images = np.fromfile(folder / f"{part}-images-idx3-ubyte", np.uint8, offset=16)
    labels = np.fromfile(folder / f"{part}-labels-idx1-ubyte", np.uint8, offset=8)
    pixels = images.reshape(-1, 1, 28, 28)[:rows].astype(np.float32) / 255
    classes = labels[:rows].astype(np.int64)
    return TensorDataset(torch.from_numpy(pixels), torch.from_numpy(classes))


def loaders(rows: int | None) -> tuple[DataLoader, DataLoader]:
    order = torch.Generator().manual_seed(0)
    train = DataLoader(load("train", rows), 256, shuffle=True, generator=order)
    return train, DataLoader(load("t10k", rows), 256)


def make_model() -> eqx.nn.Sequential:
    keys = jax.random.split(jax.random.key(0), 4)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 16, 5, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(16, 32, 5, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Lambda(lambda x: x.ravel()),
            eqx.nn.Linear(512, 64, key=keys[2]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(64, 10, key=keys[3]),
        ]
    )


def by_hand(epochs: int = 3, rows: int | None = None) -> dict[str, list[float]]:
    train, test = loaders(rows)
    model, optimizer = make_model(), optax.adam(1e-3)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state = optimizer.init(params)

    def loss_of(params, x, y):
        logits = jax.vmap(eqx.combine(params, static))(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), (logits.argmax(axis=1) == y).mean()

    @jax.jit
    def step(params, opt_state, x, y):
        (loss, _), grads = jax.value_and_grad(loss_of, has_aux=True)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    evaluate = jax.jit(loss_of)
    history = {"loss": [], "val_loss": [], "val_accuracy": []}
    for _ in range(epochs):
        losses, sizes = [], []
        for x, y in train:
            x, y = x.numpy(), y.numpy()
            params, opt_state, loss = step(params, opt_state, x, y)
            losses.append(loss)
            sizes.append(len(x))
        history["loss"].append(float(np.average(losses, weights=sizes)))

        values, sizes = [], []
        for x, y in test:
            values.append(evaluate(params, x.numpy(), y.numpy()))
            sizes.append(len(x))
        loss, accuracy = np.average(values, axis=0, weights=sizes)
        history["val_loss"].append(float(loss))
        history["val_accuracy"].append(float(accuracy))
    return history


def with_jaxdp(epochs: int = 3, rows: int | None = None) -> dict[str, list[float]]:
    train, test = loaders(rows)
    trainer = Trainer(
        make_model(), optax.adam(1e-3), loss="cross_entropy", metrics=["accuracy"]
    )
    return dict(trainer.fit(train, test, max_epochs=epochs))
