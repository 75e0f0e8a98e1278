"""The models in Equinox, for the peers that train Equinox models."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .works import Weights, Work


class Residual(eqx.Module):
    """A stack of layers `x + relu(linear(x))`."""

    layers: list[eqx.nn.Linear]

    def __init__(self, width: int, num_layers: int, key: jax.Array):
        keys = jax.random.split(key, num_layers)
        self.layers = [eqx.nn.Linear(width, width, key=key) for key in keys]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jax.nn.relu(layer(x))
        return x


class LeNet(eqx.Module):
    """Two convolutions, each with an average pool, and two linear layers."""

    convolutions: list[eqx.nn.Conv2d]
    linears: list[eqx.nn.Linear]

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.convolutions = [
            eqx.nn.Conv2d(1, 20, 3, key=keys[0]),
            eqx.nn.Conv2d(20, 50, 5, key=keys[1]),
        ]
        self.linears = [
            eqx.nn.Linear(50 * 4 * 4, 128, key=keys[2]),
            eqx.nn.Linear(128, 10, key=keys[3]),
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        pool = eqx.nn.AvgPool2d(2, 2)
        for convolution in self.convolutions:
            x = pool(jax.nn.relu(convolution(x)))
        return self.linears[1](jax.nn.relu(self.linears[0](x.ravel())))


def build(work: Work) -> Any:
    """Builds the Equinox model of `work`, with its initial weights."""
    key = jax.random.key(0)
    if work.kind == "lenet":
        model = LeNet(key)
    elif work.kind == "residual":
        model = Residual(*work.sizes, key=key)
    else:
        first, width, *rest = work.sizes
        model = eqx.nn.MLP(first, rest[-1], width, len(rest), key=key)
    arrays, static = eqx.partition(model, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    pairs = zip(leaves, work.weights(), strict=True)
    leaves = [jnp.array(weight.reshape(leaf.shape)) for leaf, weight in pairs]
    return eqx.combine(jax.tree.unflatten(structure, leaves), static)


def weights_of(model: Any, work: Work) -> Weights:
    """Returns the weights of `model`, in the order and shapes of `work.weights()`."""
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    pairs = zip(leaves, work.shapes(), strict=True)
    return [np.asarray(leaf).reshape(shape) for leaf, shape in pairs]


def mean_loss(model: Any, x: jax.Array, y: jax.Array, criterion: str) -> jax.Array:
    """Returns the mean loss of a batch, by the criterion of a work."""
    outputs = jax.vmap(model)(x)
    if criterion == "mse":
        return jnp.mean((outputs - y) ** 2)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
    return jnp.mean(losses)
