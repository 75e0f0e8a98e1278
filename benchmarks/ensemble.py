"""Compares many models in one step with one fit per model.

python -m benchmarks.ensemble [--members 8] [--repeats 3] [--only W1,W4]

For each work, measures the seconds of an epoch of `Trainer(ensemble=n)`, and of an
epoch of each of n trainers. They run in turn, in one process, on one device. Prints
medians over the repeats, and the ratio of the ensemble's time to the sum of the others.
"32 steps" is `steps_per_execution=32`.
"""

import argparse
import statistics
import time
from typing import Any

import equinox as eqx
import jax
import optax

from jaxdp import Callback, SingleDevice, Trainer

from .models import build
from .works import WORKS, Work


class Clock(Callback):
    """The seconds of every epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def members(work: Work, count: int) -> list[Any]:
    """Makes models of a work, each with other weights."""
    arrays, static = eqx.partition(build(work), eqx.is_array)
    return [
        eqx.combine(jax.tree.map(lambda leaf: leaf * (1 + n / 100), arrays), static)  # noqa: B023
        for n in range(count)
    ]


def trainer_of(work: Work, model: Any, clock: Clock, **options: Any) -> Trainer:
    return Trainer(
        model,
        optax.adam(work.rate),
        loss=work.criterion,
        strategy=SingleDevice(),
        callbacks=[clock],
        enable_progress_bar=False,
        **options,
    )


def measure(work: Work, count: int, repeats: int, steps: int) -> tuple[float, float]:
    """Returns the seconds of an epoch of all models at once, and one after the
    other.
    """
    models, batches = members(work, count), work.batches()
    stack = jax.tree.map(
        lambda *each: jax.numpy.stack(each) if eqx.is_array(each[0]) else each[0],
        *models,
    )
    clocks = [Clock() for _ in range(count + 1)]
    together = trainer_of(
        work, stack, clocks[0], ensemble=count, steps_per_execution=steps
    )
    alone = [
        trainer_of(work, *pair, steps_per_execution=steps)
        for pair in zip(models, clocks[1:], strict=True)
    ]
    for epoch in range(1, repeats + 2):  # the first compiles
        for each in (together, *alone):
            each.fit(batches, max_epochs=epoch)

    # The losses must be equal, or else the times are not comparable.
    for index, each in enumerate(alone):
        ours = together.history[f"loss[{index}]"][0]
        assert abs(ours / each.history["loss"][0] - 1) < 1e-3, (work.name, index)
    first, *others = (statistics.median(clock.seconds[1:]) for clock in clocks)
    return first, sum(others)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="W1,W4", help="works, by comma")
    args = parser.parse_args()
    print(f"| work | {args.members} models at once, s | one by one, s | ratio |")
    print("|---|---|---|---|")
    for name in args.only.split(","):
        for steps in (1, 32):
            work = WORKS[name]
            found = measure(work, args.members, args.repeats, steps)
            title = f"{name}, {work.title}" + (f", {steps} steps" if steps > 1 else "")
            ratio = found[0] / found[1]
            print(f"| {title} | {found[0]:.3f} | {found[1]:.3f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
