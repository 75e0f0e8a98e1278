"""Messages about compilations, and JAX's settings for debugging."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import jax

from ..basics.console import join_some, log_info, warn
from ..basics.hardware import describe_mixed_kinds
from ..data import Dispatch, leaf_name
from ..step import (
    BY_DEFAULT,
    SingleRowBatch,
    Steps,
    merge_leaves,
    note_on_products,
)

_LONG: Final = 2.0
"""Seconds after which somebody at a screen wants to know what is going on."""

_MANY: Final = 9
"""Shapes from which on they are a trouble of the data's."""

_Form = tuple[bool, list[tuple[int, dict[str, tuple[int, ...]]]]]
"""What a step was compiled for: whether rows are split, and of each group how many
micro-batches it has and the shapes of their leaves. Of a single group no number, since
it is of one form however many steps and slots there are."""


class Compilations:
    """The compilations of a trainer so far.

    The first one of a step is spoken of if it takes long. Another one for other sizes
    always is, with the leaves that have changed: it is time that was not asked for. If
    `quiet`, nothing is said.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._say = (lambda _: None) if quiet else log_info
        self._forms: dict[str, list[_Form]] = {}
        self._told: set[str] = set()
        self._has_told_of_whole = False

    @contextlib.contextmanager
    def timed(self, kind: str, packed: Dispatch) -> Iterator[None]:
        """Around the compilation of a `kind` of step for batches like `packed`."""
        before, form = self._forms.setdefault(kind, []), _form(packed)
        is_new = form not in before
        steps = f", {len(packed.rows)} at a time" if len(packed.rows) > 1 else ""
        what = f"the {kind} step{steps}"
        timer = threading.Timer(_LONG, self._say, [f"compiling {what} ..."])
        timer.daemon = True

        with contextlib.suppress(RuntimeError):  # there can't be more threads
            timer.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started

        if is_new and before and not self._quiet:
            self._say_why(kind, form, before, seconds)
        elif seconds > _LONG:
            self._say(f"{what} was compiled in {seconds:.1f} s")
        if is_new:
            before.append(form)

    def tell_of_program(self, devices: list[Any], program: Any, steps: Steps) -> None:
        """Says what products are computed in, and warns of devices that differ."""
        if self._quiet:
            return
        if (note := describe_mixed_kinds(devices)) and note not in self._told:
            self._told.add(note)
            warn(note)
        if program.products and program.products[BY_DEFAULT]:
            if note := note_on_products(steps.precision, devices[0]):
                self.tell(note)

    def tell(self, note: str) -> None:
        """Says it, unless it was said before."""
        if note not in self._told and not self._quiet:
            log_info(note)
        self._told.add(note)

    def tell_of_whole(self, packed: Dispatch, num_shards: int) -> None:
        """Says, for the first batch that is not split over the devices, why not."""
        batches = [group.batch for group in packed.groups]
        sizes = [jax.tree.leaves(batch)[0].shape[1] for batch in batches]
        rows = next((size for size in sizes if size % num_shards), None)
        has_rows = not any(isinstance(batch, SingleRowBatch) for batch in batches)
        # Processes may have different numbers of rows, and shards divide each.
        if packed.split or rows is None or not has_rows or self._has_told_of_whole:
            return
        self._has_told_of_whole = True
        self._say(
            f"a batch of {rows} rows is computed in full on each device, since"
            f" something in the step is written for a batch, and the {num_shards}"
            " shards of the strategy do not divide it"
        )

    def _say_why(
        self, kind: str, form: _Form, before: list[_Form], seconds: float
    ) -> None:
        text = (
            f"the {kind} step was compiled again, in {seconds:.1f} s, because"
            f" {_why(form, before)}"
        )
        if (count := len(before) + 1) < _MANY:
            self._say(text)
        else:
            warn(
                f"{text}. It is compiled once for each shape, of which there were"
                f" {count} so far: docs/shapes.md shows how to have few."
            )


def _form(packed: Dispatch) -> _Form:
    groups = []
    for group in packed.groups:
        batch = merge_leaves(group.batch, group.whole)
        shapes = {
            leaf_name(batch, place): leaf.shape[1:]
            for place, leaf in enumerate(jax.tree.leaves(batch))
        }
        groups.append((len(group.counts) if len(packed.groups) > 1 else 0, shapes))
    return packed.split, groups


def _why(form: _Form, before: list[_Form]) -> str:
    """What differs from what the step was compiled for last, leaf by leaf."""
    known = [shapes for _, groups in before for _, shapes in groups]
    new = [shapes for _, shapes in form[1] if shapes not in known]
    if not new and len(form[1]) > 1:
        return (
            "its micro-batches are a new combination of shapes: give a step batches of"
            " one shape"
        )
    was, now = known[-1], (new or [form[1][-1][1]])[-1]
    return join_some(
        f"{name} was {was.get(name)} and is {shape}"
        for name, shape in now.items()
        if was.get(name) != shape
    )


def debug_settings() -> tuple[bool, bool]:
    """Returns whether JAX's jit is disabled, and whether JAX looks for NaN."""
    config: Any = jax.config
    return config.jax_disable_jit, config.jax_debug_nans or config.jax_debug_infs
