"""Runs one peer on one work, in its own process; `python -m benchmarks` starts it.

python -m benchmarks.worker W1 expert result.json
"""

import argparse
import itertools
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from .peers import PEERS, Skip
from .works import WORKS


def measure(work_name: str, peer_name: str, toy: bool = False) -> dict[str, Any]:
    """Trains; returns seconds per step of the median epoch, losses, and peak memory."""
    work = WORKS[work_name].toy() if toy else WORKS[work_name]
    marks: list[float] = []
    try:
        weights = PEERS[peer_name].train(
            work, lambda: marks.append(time.perf_counter())
        )
    except Skip as skip:
        return {"skipped": str(skip)}
    if len(marks) != work.epochs:
        raise RuntimeError(f"{len(marks)} epochs were trained, not {work.epochs}")
    # Measure from the end of an epoch to the end of the next, which includes all its
    # costs.
    epochs = [b - a for a, b in itertools.pairwise(marks[work.warm - 1 :])]
    return {
        "seconds_per_step": statistics.median(epochs) / work.steps,
        "loss": None if weights is None else work.loss(weights),
        "start_loss": work.loss(work.weights()),
        "peak_mib": peak_mib(),
    }


def peak_mib() -> float:
    """Returns the largest resident memory of this process so far, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args(argv)
    result = measure(args.work, args.peer, args.toy)
    args.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
