"""Ways to give a step its batch: does the transfer run while the step before computes?

Batches are 154 MB of images, and a step computes about as long as their transfer takes.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer

REPEATS = 4
"""How often each way is timed; the first time compiles, and does not count."""


class Net(eqx.Module):
    """The same layer many times, on as many pixels as it is wide."""

    weight: jax.Array
    depth: int = eqx.field(static=True)

    def compute_loss(self, images: jax.Array) -> jax.Array:
        x = images.reshape(len(images), -1)

        def apply(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ self.weight), None

        h, _ = jax.lax.scan(apply, x[:, : len(self.weight)], None, self.depth)
        return h.mean() + x.mean()  # of all pixels, so all are transferred


def measure(toy: bool) -> Iterator[tuple[str, Any]]:
    """Yields the milliseconds of a step for each way."""
    rows, side, steps = (4, 16, 3) if toy else (256, 224, 20)
    width, depth = (64, 2) if toy else (4096, 50)
    batches = [
        np.random.default_rng(n).random((rows, side, side, 3), np.float32)
        for n in range(3)
    ]
    yield "megabytes", batches[0].nbytes / 1e6
    on_device = [jax.device_put(batch) for batch in batches]
    net = Net(jnp.eye(width), depth)
    for name, put_early, source in (
        ("by hand, NumPy into the call", False, batches),
        ("by hand, put before the call", True, batches),
        ("by hand, on the device already", False, on_device),
    ):
        yield name, _time(_make_loop(net, source, put_early), steps)
    for name, source in (
        ("jaxdp, NumPy", batches),
        ("jaxdp, on the device already", on_device),
    ):
        yield name, _time(_make_fit(net, source), steps)


def _time(run: Callable[[int], None], steps: int) -> float:
    """Returns the milliseconds of a step, the median of several runs."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run(steps)
        seconds.append((time.perf_counter() - begin) / steps)
    return 1e3 * statistics.median(seconds[1:])


def _make_loop(net: Net, source: Any, put_early: bool) -> Callable[[int], None]:
    """Returns a loop by hand, which trains so many steps."""
    optimizer = optax.sgd(1e-6)

    @jax.jit
    def step(weight: jax.Array, batch: jax.Array) -> jax.Array:
        grads = jax.grad(lambda w: Net(w, net.depth).compute_loss(batch))(weight)
        updates, _ = optimizer.update(grads, optimizer.init(weight))
        return optax.apply_updates(weight, updates)

    def run(steps: int) -> None:
        weight, batch = net.weight, source[0]
        for number in range(1, steps + 1):
            following = source[number % 3]
            if put_early:
                following = jax.device_put(following)
            weight, batch = step(weight, batch), following
        weight.block_until_ready()

    return run


def _make_fit(net: Net, source: Any) -> Callable[[int], None]:
    """Returns a fit of a Trainer, which trains so many steps."""
    trainer = Trainer(
        net,
        optax.sgd(1e-6),
        loss_fn=lambda net, images: net.compute_loss(images),
        strategy=SingleDevice(),
        enable_progress_bar=False,
    )

    def run(steps: int) -> None:
        data = [(source[number % 3],) for number in range(steps)]
        trainer.fit(data, max_epochs=trainer.current_epoch + 1)
        jax.block_until_ready(trainer.state)

    return run


def format_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a row for each way."""
    for name, value in found.items():
        if name != "megabytes":
            yield f"{name}, {found['megabytes']:.0f} MB", f"{value:.2f} ms a step"
