"""A neural ODE: a network is the speed of a point, and learns it from trajectories.

First from the beginnings of the trajectories, then from the whole ones.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import Trainer, Whole, per_example

PHASES = ((10, 20), (61, 40))
"""How many times of a trajectory are learned from, and for how many epochs."""


def trajectories() -> tuple[np.ndarray, np.ndarray]:
    times = np.linspace(0, 6, 61).astype(np.float32)
    start = np.random.default_rng(0).uniform(-1, 1, (256, 2))
    turn = np.array([[np.cos(times), np.sin(times)], [-np.sin(times), np.cos(times)]])
    paths = np.exp(-0.2 * times)[:, None] * np.einsum("ijt,ni->ntj", turn, start)
    return times, paths.astype(np.float32)


class NeuralODE(eqx.Module):
    speed: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        self.speed = eqx.nn.MLP(2, 2, 32, 2, jnp.tanh, key=key)

    def __call__(self, start: jax.Array, times: jax.Array) -> jax.Array:
        def step(y, dt):  # of Runge and Kutta
            k1 = self.speed(y)
            k2 = self.speed(y + dt / 2 * k1)
            k3 = self.speed(y + dt / 2 * k2)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + self.speed(y + dt * k3))
            return y, y

        _, after = jax.lax.scan(step, start, jnp.diff(times))
        return jnp.concatenate([start[None], after])


def loss_of_row(model: NeuralODE, path: jax.Array, times: jax.Array) -> jax.Array:
    return ((model(path[0], times) - path) ** 2).mean()


def by_hand(shorter: int = 1) -> dict[str, list[float]]:
    times, paths = trajectories()
    model, optimizer = NeuralODE(jax.random.key(0)), optax.adabelief(3e-3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state, times, paths):
        @eqx.filter_value_and_grad
        def loss_of(model):
            return jax.vmap(loss_of_row, (None, 0, None))(model, paths, times).mean()

        loss, grads = loss_of(model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    history = {"loss": []}
    for horizon, epochs in PHASES:
        for _ in range(epochs // shorter):
            losses = []
            for first in range(0, len(paths), 64):
                batch = paths[first : first + 64, :horizon]
                model, opt_state, loss = step(model, opt_state, times[:horizon], batch)
                losses.append(loss)
            history["loss"].append(float(np.mean(losses)))
    return history


def with_jaxdp(shorter: int = 1) -> dict[str, list[float]]:
    times, paths = trajectories()
    model = NeuralODE(jax.random.key(0))
    trainer = Trainer(model, optax.adabelief(3e-3), loss_fn=per_example(loss_of_row))
    done = 0
    for horizon, epochs in PHASES:
        cuts = [paths[first : first + 64, :horizon] for first in range(0, 256, 64)]
        batches = [(cut, Whole(times[:horizon])) for cut in cuts]
        done += epochs // shorter
        trainer.fit(batches, max_epochs=done)
    return dict(trainer.history)
