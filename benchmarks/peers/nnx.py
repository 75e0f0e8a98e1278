"""Flax NNX with the loop of its tutorials: `nnx.jit`, a `DataLoader`."""

from collections.abc import Callable

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..works import Weights, Work


class Residual(flax.nnx.Module):
    def __init__(self, width: int, num_layers: int, rngs: flax.nnx.Rngs):
        self.layers = flax.nnx.List(
            [flax.nnx.Linear(width, width, rngs=rngs) for _ in range(num_layers)]
        )

    def __call__(self, x):
        for layer in self.layers:
            x = x + jax.nn.relu(layer(x))
        return x


class MLP(flax.nnx.Module):
    def __init__(self, sizes: tuple[int, ...], rngs: flax.nnx.Rngs):
        pairs = zip(sizes[:-1], sizes[1:], strict=True)
        self.layers = flax.nnx.List(
            [flax.nnx.Linear(a, b, rngs=rngs) for a, b in pairs]
        )

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class LeNet(flax.nnx.Module):
    """Images are channels last, as everywhere in Flax."""

    def __init__(self, rngs: flax.nnx.Rngs):
        convolution = {"padding": "VALID", "rngs": rngs}
        self.layers = flax.nnx.List(
            [
                flax.nnx.Conv(1, 20, (3, 3), **convolution),
                flax.nnx.Conv(20, 50, (5, 5), **convolution),
                flax.nnx.Linear(50 * 4 * 4, 128, rngs=rngs),
                flax.nnx.Linear(128, 10, rngs=rngs),
            ]
        )

    def __call__(self, x):
        for layer in self.layers[:2]:
            x = flax.nnx.avg_pool(jax.nn.relu(layer(x)), (2, 2), (2, 2))
        x = jax.nn.relu(self.layers[2](x.reshape(len(x), -1)))
        return self.layers[3](x)


def build(work: Work) -> flax.nnx.Module:
    rngs = flax.nnx.Rngs(0)
    if work.kind == "lenet":
        model = LeNet(rngs)
    elif work.kind == "residual":
        model = Residual(*work.sizes, rngs=rngs)
    else:
        model = MLP(work.sizes, rngs)
    weights = work.weights()
    pairs = zip(weights[::2], weights[1::2], strict=True)
    for layer, (weight, bias) in zip(model.layers, pairs, strict=True):
        if weight.ndim == 4:
            kernel = weight.transpose(2, 3, 1, 0)
        elif weight.shape == (128, 50 * 4 * 4):  # after a flattening, channels last
            kernel = weight.reshape(128, 50, 4, 4).transpose(2, 3, 1, 0)
            kernel = kernel.reshape(800, 128)
        else:
            kernel = weight.T
        layer.kernel[...] = jnp.array(kernel)
        layer.bias[...] = jnp.array(bias)
    return model


def weights_of(model: flax.nnx.Module) -> Weights:
    found = []
    for layer in model.layers:
        kernel, bias = np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])
        if kernel.ndim == 4:
            weight = kernel.transpose(3, 2, 0, 1)
        elif kernel.shape == (50 * 4 * 4, 128):
            weight = kernel.reshape(4, 4, 50, 128).transpose(3, 2, 0, 1)
            weight = weight.reshape(128, 800)
        else:
            weight = kernel.T
        found += [weight, bias]
    return found


def train(work: Work, clock: Callable[[], None]) -> Weights:
    model = build(work)
    optimizer = flax.nnx.Optimizer(model, optax.adam(work.rate), wrt=flax.nnx.Param)

    def loss_of(model, x, y):
        outputs = model(x)
        if work.criterion == "mse":
            return jnp.mean((outputs - y) ** 2)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
        return losses.mean()

    @flax.nnx.jit
    def train_step(model, optimizer, x, y):
        loss, grads = flax.nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, grads)
        return loss

    loader = work.loader()
    for _ in range(work.epochs):
        for x, y in loader:
            x, y = x.numpy(), y.numpy()
            if work.kind == "lenet":
                x = np.moveaxis(x, 1, -1)
            loss = train_step(model, optimizer, x, y)
        float(loss)
        jax.block_until_ready(flax.nnx.state(model))
        clock()
    return weights_of(model)
