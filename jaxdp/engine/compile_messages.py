"""Says what is compiled, how long it takes, and why it is compiled again."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

import jax

from ..basics.console import say
from ..data import Packed, leaf_name

_LONG: Final = 2.0
"""Seconds after which somebody at a screen wants to know what is going on."""

_MANY: Final = 3
"""Sizes from which on they are a trouble of the data's."""


class Compilations:
    """The compilations of a trainer so far.

    The first one of a step is spoken of if it takes long. Another one for other sizes
    always is, with the first leaf that has changed: it is time that was not asked for.

    Args:
        quiet: whether nothing is said.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.seconds = 0.0
        self._say = _nothing if quiet else say
        self._sizes: dict[str, list[Packed]] = {}

    @contextlib.contextmanager
    def timed(self, kind: str, packed: Packed) -> Iterator[None]:
        """Around the compilation of a `kind` of step for batches like `packed`."""
        before = self._sizes.setdefault(kind, [])
        alike = [one for one in before if _sizes(one) == _sizes(packed)]
        steps = f", {len(packed.rows)} at a time" if len(packed.rows) > 1 else ""
        what = f"the {kind} step{steps}"
        timer = threading.Timer(_LONG, self._say, [f"compiling {what} ..."])
        timer.daemon = True
        timer.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        if before and not alike:
            self._say_why(kind, packed, before, seconds)
        elif seconds > _LONG:
            self._say(f"{what} was compiled in {seconds:.1f} s")
        if not alike:
            before.append(packed)

    def _say_why(
        self, kind: str, packed: Packed, before: list[Packed], seconds: float
    ) -> None:
        (name, was), (_, now) = _first_leaf(before[-1]), _first_leaf(packed)
        split = "" if packed.split else ", which the devices do not divide"
        self._say(
            f"the {kind} step was compiled again, in {seconds:.1f} s, because"
            f" {name} was {was} and is {now}{split};"
            f" {self.seconds:.1f} s of compilation so far"
        )
        if len(before) == _MANY:
            self._say(
                f"the {kind} step has been compiled for {_MANY + 1} batch sizes. A loss"
                " that returns one value per row is padded to one size; a scalar loss,"
                " or BatchNorm, needs batches of few sizes, such as `drop_last=True`"
                " gives."
            )


def _nothing(message: str) -> None:
    pass


def _sizes(packed: Packed) -> tuple[bool, tuple[int, ...]]:
    """Rows of the micro-batches, however many steps and slots there are."""
    shapes = [jax.tree.leaves(group.batch)[0].shape for group in packed.groups]
    return packed.split, tuple(sorted({shape[1] for shape in shapes}))


def _first_leaf(packed: Packed) -> tuple[str, tuple[int, ...]]:
    """A name, and the shape in the batch that differs most from the usual."""
    batch = packed.groups[-1].batch
    return leaf_name(batch, 0), jax.tree.leaves(batch)[0].shape[1:]
