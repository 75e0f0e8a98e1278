"""Score-based diffusion: a network learns to undo noise of every strength.

The variance-preserving equation of Song et al., "Score-Based Generative Modeling
through Stochastic Differential Equations" (2021), on points of a spiral. Each row's
time and noise follow from a key that comes with it.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import Trainer, per_example


def spiral(rows: int = 8192) -> np.ndarray:
    draw = np.random.default_rng(0)
    angle = draw.uniform(2, 10, (rows, 1))
    points = angle / 5 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    return (points + 0.02 * draw.normal(size=points.shape)).astype(np.float32)


def epoch_of(points: np.ndarray, seed: int) -> list[tuple[np.ndarray, jax.Array]]:
    order = np.random.default_rng(seed).permutation(len(points)).reshape(-1, 512)
    keys = jax.random.split(jax.random.key(seed), order.shape)
    return [(points[rows], keys[batch]) for batch, rows in enumerate(order)]


class Score(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        self.mlp = eqx.nn.MLP(3, 2, 128, 3, jax.nn.silu, key=key)

    def __call__(self, y: jax.Array, t: jax.Array) -> jax.Array:
        return self.mlp(jnp.append(y, t))


def loss_of_row(model: Score, point: jax.Array, own: jax.Array) -> jax.Array:
    for_time, for_noise = jax.random.split(own)  # the key of this row, from the batch
    t = jax.random.uniform(for_time, minval=1e-3, maxval=5.0)
    variance = 1 - jnp.exp(-t)
    noise = jax.random.normal(for_noise, point.shape)
    noisy = point * jnp.exp(-t / 2) + jnp.sqrt(variance) * noise
    return variance * ((model(noisy, t) + noise / jnp.sqrt(variance)) ** 2).mean()


def by_hand(epochs: int = 40) -> dict[str, list[float]]:
    model, optimizer = Score(jax.random.key(0)), optax.adam(3e-3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    points = spiral()

    @eqx.filter_jit
    def step(model, opt_state, x, keys):
        @eqx.filter_value_and_grad
        def loss_of(model):
            return jax.vmap(loss_of_row, (None, 0, 0))(model, x, keys).mean()

        loss, grads = loss_of(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    history = {"loss": []}
    for epoch in range(epochs):
        losses = []
        for x, keys in epoch_of(points, epoch):
            model, opt_state, loss = step(model, opt_state, x, keys)
            losses.append(loss)
        history["loss"].append(float(np.mean(losses)))
    return history


def with_jaxdp(epochs: int = 40) -> dict[str, list[float]]:
    points = spiral()
    model = Score(jax.random.key(0))
    trainer = Trainer(model, optax.adam(3e-3), loss_fn=per_example(loss_of_row))
    for epoch in range(epochs):
        trainer.fit(epoch_of(points, epoch), max_epochs=epoch + 1)
    return dict(trainer.history)
