"""Computing alone: the expert's loop with augmented rows fetched beforehand."""

from collections.abc import Callable

from ..works import Weights, Work
from . import expert


def train(work: Work, clock: Callable[[], None]) -> Weights:
    batches = work.batches()
    return expert.train(work, clock, lambda: batches)
