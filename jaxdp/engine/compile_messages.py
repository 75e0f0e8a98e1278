"""Says what is compiled, how long it takes, and why it is compiled again."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import jax

from ..basics.console import say
from ..data import Dispatch, leaf_name

_LONG: Final = 2.0
"""Seconds after which somebody at a screen wants to know what is going on."""

_MANY: Final = 3
"""Sizes from which on they are a trouble of the data's."""


class _Form(NamedTuple):
    """What a step was compiled for; the batches themselves are not kept."""

    split: bool
    rows: tuple[int, ...]
    """Of the micro-batches, however many steps and slots there are."""
    leaf: str
    """A name, and the shape in the batch that differs most from the usual."""
    shape: tuple[int, ...]


class Compilations:
    """The compilations of a trainer so far.

    The first one of a step is spoken of if it takes long. Another one for other sizes
    always is, with the first leaf that has changed: it is time that was not asked for.

    Args:
        quiet: whether nothing is said.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.seconds = 0.0
        self._say = (lambda _: None) if quiet else say
        self._forms: dict[str, list[_Form]] = {}

    @contextlib.contextmanager
    def timed(self, kind: str, packed: Dispatch) -> Iterator[None]:
        """Around the compilation of a `kind` of step for batches like `packed`."""
        before, form = self._forms.setdefault(kind, []), _form(packed)
        is_new = all(one[:2] != form[:2] for one in before)
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

        if is_new and before:
            self._say_why(kind, form, before, seconds)
        elif seconds > _LONG:
            self._say(f"{what} was compiled in {seconds:.1f} s")
        if is_new:
            before.append(form)

    def _say_why(
        self, kind: str, form: _Form, before: list[_Form], seconds: float
    ) -> None:
        split = "" if form.split else ", which the devices do not divide"
        self._say(
            f"the {kind} step was compiled again, in {seconds:.1f} s, because"
            f" {before[-1].leaf} was {before[-1].shape} and is {form.shape}{split};"
            f" {self.seconds:.1f} s of compilation so far"
        )
        if len(before) == _MANY:
            self._say(
                f"the {kind} step has been compiled for {_MANY + 1} batch sizes. A loss"
                " that returns one value per row is padded to one size; a scalar loss,"
                " or BatchNorm, needs batches of few sizes, such as `drop_last=True`"
                " gives."
            )


def _form(packed: Dispatch) -> _Form:
    batches = [group.batch for group in packed.groups]
    shapes = [jax.tree.leaves(batch)[0].shape[1:] for batch in batches]
    rows = tuple(sorted({shape[0] for shape in shapes}))
    return _Form(packed.split, rows, leaf_name(batches[-1], 0), shapes[-1])
