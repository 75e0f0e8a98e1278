"""Checks that a long run keeps its memory flat, over 20,000 steps of W1.

python -m benchmarks.memory [--steps 20000] [--steps-per-execution 32]
python -m benchmarks.memory --trainers 300      # one after the other, ten steps each

Prints a table of the memory that the process holds (its resident set) and of the live
arrays of JAX, and fails if either grows after the first fifth of the run by more than
16 MiB or 20 arrays. One leaked array per step would exceed this hundreds of times.
"""

import argparse
import dataclasses
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import optax

from jaxdp import SingleDevice, Trainer
from jaxdp.callbacks import Callback

from .models import build
from .worker import peak_mib
from .works import WORKS, Work

WARM = 0.2
"""The part of the run in which memory may grow: compilation, allocator, caches."""
GROWTH_MIB = 16.0
GROWTH_ARRAYS = 20


def resident_mib() -> float:
    """Returns the memory of this process in MiB; if unknown, its peak so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return peak_mib()


@dataclasses.dataclass(frozen=True)
class Sample:
    count: int
    mib: float
    arrays: int


def take_sample(count: int) -> Sample:
    gc.collect()
    return Sample(count, resident_mib(), len(jax.live_arrays()))


class Watch(Callback):
    """Takes a sample at regular numbers of steps."""

    def __init__(self, every_n_steps: int):
        self.every_n_steps = every_n_steps
        self.samples: list[Sample] = []
        self._next = every_n_steps

    def on_train_batch_end(self, trainer: Any, metrics: Any, batch_idx: int) -> None:
        if trainer.global_step >= self._next:
            self._next = trainer.global_step + self.every_n_steps
            self.samples.append(take_sample(trainer.global_step))


def growth(samples: list[Sample]) -> tuple[float, int]:
    """Returns by how many MiB and arrays memory grew between the warm-up and the end.

    It compares medians of three samples, so that a single sample with much in flight
    does not decide.
    """
    warm = max(1, round(len(samples) * WARM))
    first, last = samples[warm - 1 : warm + 2], samples[-3:]

    def middle(values: Any) -> Any:
        return sorted(values)[len(last) // 2]

    return (
        middle(s.mib for s in last) - middle(s.mib for s in first),
        middle(s.arrays for s in last) - middle(s.arrays for s in first),
    )


def watch_steps(steps: int, steps_per_execution: int) -> list[Sample]:
    """Takes samples during one long fit."""
    work = dataclasses.replace(WORKS["W1"], steps=min(1000, steps))
    watch = Watch(max(1, steps // 20))
    fit(work, steps, callbacks=[watch], steps_per_execution=steps_per_execution)
    return watch.samples


def watch_trainers(trainers: int) -> list[Sample]:
    """Takes samples between short fits, each of a new trainer."""
    work, samples = dataclasses.replace(WORKS["W1"], steps=10), []
    for count in range(1, trainers + 1):
        fit(work, work.steps)
        if count % max(1, trainers // 20) == 0:
            samples.append(take_sample(count))
    return samples


def fit(work: Work, steps: int, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            build(work),
            optax.adam(work.rate),
            loss=work.criterion,
            strategy=SingleDevice(),
            default_root_dir=folder,
            **options,
        )
        trainer.fit(work.loader(), max_steps=steps)


def main(argv: list[str] | None = None) -> int:
    """Trains and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--steps-per-execution", type=int, default=1)
    parser.add_argument("--trainers", type=int, help="many short fits instead")
    args = parser.parse_args(argv)
    if args.steps < 20:
        parser.error(f"`--steps` is {args.steps}; at least 20 are needed.")
    if args.trainers is None:
        unit, samples = "step", watch_steps(args.steps, args.steps_per_execution)
    else:
        unit, samples = "trainer", watch_trainers(args.trainers)

    print(f"| {unit} | resident, MiB | live arrays |\n|---|---|---|")
    for sample in samples:
        print(f"| {sample.count} | {sample.mib:.1f} | {sample.arrays} |")
    mib, arrays = growth(samples)
    bad = mib > GROWTH_MIB or arrays > GROWTH_ARRAYS
    print(
        f"growth after the warm-up: {mib:.1f} MiB (limit {GROWTH_MIB:g}), {arrays}"
        f" arrays (limit {GROWTH_ARRAYS}): {'TOO MUCH' if bad else 'flat'}"
    )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
