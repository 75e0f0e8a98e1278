"""The expert's loop, fed by a plain torch `DataLoader`."""

from collections.abc import Callable

from ..works import Weights, Work
from . import expert


def train(work: Work, clock: Callable[[], None]) -> Weights:
    loader = work.loader()
    return expert.train(
        work, clock, lambda: ((x.numpy(), y.numpy()) for x, y in loader)
    )
