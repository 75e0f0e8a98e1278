"""Keras 3 on its JAX backend: `fit` on arrays, or on a `DataLoader` if augmented."""

import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers

from ..works import Weights, Work


def build(work: Work) -> Any:
    """The model of `work` in Keras (images channels last), with its first weights."""
    if work.kind == "residual":
        width, num_layers = work.sizes
        inputs = outputs = keras.Input((width,))
        for _ in range(num_layers):
            change = layers.Dense(width, activation="relu")(outputs)
            outputs = layers.Add()([outputs, change])
        model = keras.Model(inputs, outputs)
    elif work.kind == "lenet":
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(20, 3, activation="relu"),
                layers.AveragePooling2D(2),
                layers.Conv2D(50, 5, activation="relu"),
                layers.AveragePooling2D(2),
                layers.Flatten(),
                layers.Dense(128, activation="relu"),
                layers.Dense(10),
            ]
        )
    else:
        first, *hidden, last = work.sizes
        dense = [layers.Dense(size, activation="relu") for size in hidden]
        model = keras.Sequential([keras.Input((first,)), *dense, layers.Dense(last)])
    model.set_weights([_turned(weight) for weight in work.weights()])
    return model


def _turned(weight: np.ndarray) -> np.ndarray:
    """From torch's order of axes to Keras's."""
    if weight.ndim == 4:
        return weight.transpose(2, 3, 1, 0)
    if weight.shape == (128, 50 * 4 * 4):  # after a flattening, channels last
        return weight.reshape(128, 50, 4, 4).transpose(2, 3, 1, 0).reshape(800, 128)
    return weight.T


def _turned_back(weight: np.ndarray) -> np.ndarray:
    if weight.ndim == 4:
        return weight.transpose(3, 2, 0, 1)
    if weight.shape == (50 * 4 * 4, 128):
        return weight.reshape(4, 4, 50, 128).transpose(3, 2, 0, 1).reshape(128, 800)
    return weight.T


def train(
    work: Work, clock: Callable[[], None], steps_per_execution: int = 1
) -> Weights:
    if work.devices > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = build(work)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=keras.optimizers.Adam(work.rate, epsilon=1e-8),
        loss="mse" if work.criterion == "mse" else crossentropy,
        steps_per_execution=steps_per_execution,
    )
    ticking = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: clock())
    options = {"epochs": work.epochs, "shuffle": False, "callbacks": [ticking]}
    if work.augmented:
        model.fit(work.loader(), **options)
    else:
        x, y = work.arrays()
        if work.kind == "lenet":
            x = np.moveaxis(x, 1, -1)
        model.fit(x, y, batch_size=work.batch, **options)
    return [_turned_back(weight) for weight in model.get_weights()]
