"""Loading alone: a torch `DataLoader` iterated, nothing trained."""

from collections.abc import Callable

from ..works import Work


def train(work: Work, clock: Callable[[], None]) -> None:
    loader = work.loader()
    for _ in range(work.epochs):
        for _ in loader:
            pass
        clock()
