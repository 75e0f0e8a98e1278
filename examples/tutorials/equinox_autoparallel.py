"""Equinox's autoparallelism tutorial: a small MLP learns the sine of its input.

    python examples/tutorials/equinox_autoparallel.py

The tutorial places the model and every batch by hand and compiles its own step. Here
its loss is handed to the trainer as it is, and `Sharded()` does the placing.
"""

import argparse
import itertools
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import Sharded, Trainer


def compute_loss(model, x, y):
    pred_y = jax.vmap(model)(x)
    return jnp.mean((y - pred_y) ** 2)


def make_data(rows: int = 64, channels: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Normal inputs and their sines, shaped `(rows, channels)`."""
    x = np.random.default_rng(0).normal(size=(rows, channels)).astype(np.float32)
    return x, np.sin(x)


def make_model() -> eqx.nn.MLP:
    """4 -> 32 -> 4."""
    return eqx.nn.MLP(4, 4, width_size=32, depth=1, key=jax.random.key(6789))


def batches(
    arrays: tuple[np.ndarray, ...], batch_size: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """Shuffled batches of equal size, for ever."""
    shuffle = np.random.default_rng(1)
    rows = len(arrays[0])
    while True:
        order = shuffle.permutation(rows)
        for start in range(0, rows - batch_size + 1, batch_size):
            yield tuple(array[order[start : start + batch_size]] for array in arrays)


def main(argv: list[str] | None = None) -> tuple[Trainer, list[float]]:
    """Trains, and returns the trainer and the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to fake")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args(argv)

    jax.config.update("jax_num_cpu_devices", args.devices)
    trainer = Trainer(
        make_model(),
        optax.adam(3e-4),
        loss_fn=compute_loss,
        strategy=Sharded(args.devices),
        enable_progress_bar=False,
    )
    # `steps` is the loop under `fit`, for those who want to own it. A metric is
    # fetched from the devices when it is read, so they are all read at the end.
    steps = trainer.steps(batches(make_data(), args.batch_size))
    metrics = list(itertools.islice(steps, args.steps))
    losses = [float(of_step["loss"]) for of_step in metrics]
    for step in range(0, args.steps, max(1, args.steps // 10)):
        print(f"step {step + 1:5}  loss {losses[step]:.5f}")
    print(f"step {args.steps:5}  loss {losses[-1]:.5f}  on {trainer.strategy}")
    return trainer, losses


if __name__ == "__main__":
    main()
