"""Three ways to give a step its batch: in the call, before the call, there already."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer


def measure(toy: bool) -> dict[str, Any]:
    """Milliseconds of a step for each way, with images of 154 MB a batch."""
    rows, side, steps = (4, 16, 3) if toy else (256, 224, 5)
    batches = [
        np.random.default_rng(n).random((rows, side, side, 3), np.float32)
        for n in range(3)
    ]
    # As much work as a transfer takes time, so that one can hide the other.
    times = 2 if toy else 100

    @jax.jit
    def step(weight, x):
        rows = x.reshape(len(x), -1)[:, : weight.shape[0]]
        grow = jax.lax.fori_loop(0, times, lambda _, h: jnp.tanh(h @ weight), rows)
        return weight + 1e-6 * (grow.mean() + x.mean())

    size = 64 if toy else 4096
    first = jnp.eye(size)

    def in_the_call(weight, number):
        return step(weight, batches[number % 3])

    ready = {}

    def before_the_call(weight, number):
        here = ready.pop(number, None)
        here = jax.device_put(batches[number % 3]) if here is None else here
        ready[number + 1] = jax.device_put(batches[(number + 1) % 3])
        return step(weight, here)

    there = [jax.device_put(batch) for batch in batches]

    def on_the_device(weight, number):
        return step(weight, there[number % 3])

    found: dict[str, Any] = {"megabytes": batches[0].nbytes / 1e6}
    ways = {
        "NumPy into the call": in_the_call,
        "put before the call": before_the_call,
        "on the device already": on_the_device,
    }
    for name, way in ways.items():
        times_of = []
        for _ in range(4):
            ready.clear()
            weight, begin = way(first, 0), time.perf_counter()
            for number in range(1, steps + 1):
                weight = way(weight, number)
            weight.block_until_ready()
            times_of.append((time.perf_counter() - begin) / steps)
        found[name] = 1e3 * statistics.median(times_of[1:])  # the first compiles
    found |= _ours(batches, steps)
    return found


def _ours(batches: list[np.ndarray], steps: int) -> dict[str, float]:
    """The same for a Trainer with a model that does next to nothing."""

    class Mean(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x.mean()

    def fit(data: list[Any]) -> float:
        model = Mean(jnp.ones(()))
        trainer = Trainer(
            model,
            optax.sgd(1e-3),
            loss_fn=lambda model, x: jax.vmap(model)(x) ** 2,
            strategy=SingleDevice(),
            enable_progress_bar=False,
        )
        trainer.fit(data, max_epochs=1)
        begin = time.perf_counter()
        trainer.fit(data, max_epochs=1 + steps)
        jax.block_until_ready(trainer.state)
        return 1e3 * (time.perf_counter() - begin) / (steps * len(data))

    there = [(jax.device_put(batch),) for batch in batches]
    return {
        "jaxdp, NumPy": fit([(batch,) for batch in batches]),
        "jaxdp, on the device already": fit(there),
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each way."""
    for name, value in found.items():
        if name != "megabytes":
            yield f"{name}, {found['megabytes']:.0f} MB", f"{value:.2f} ms a step"
