"""Messages about compilations: each says its reason and its time in one sentence."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax

from ..basics.console import join_some, log_info, warn
from ..basics.hardware import describe_mixed_kinds
from ..data import Dispatch, leaf_name
from ..step import Precision, has_default_products, merge_leaves, note_on_products

_LONG_SECONDS: Final = 2.0
"""A compilation that takes longer is reported."""

_Shapes = dict[str, str]
"""The shapes of each leaf of a batch by its name."""


class CompileLog:
    """Reports the compilations of a trainer.

    The first compilation of a step is reported if it takes long. A later compilation
    for other shapes is always reported, with the leaves that differ, because the user
    did not ask for it. If `quiet`, nothing is reported.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._last: dict[str, _Shapes] = {}
        self._reported: set[str] = set()

    @contextlib.contextmanager
    def time_compile(self, kind: str, dispatch: Dispatch) -> Iterator[None]:
        """Reports the compilation in the block: of a `kind` of step for a dispatch."""
        step = f"the {kind} step"
        timer = threading.Timer(_LONG_SECONDS, self._say, [f"compiling {step} ..."])
        timer.daemon = True
        timer.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started
        shapes = _get_shapes(dispatch)
        last, self._last[kind] = self._last.get(kind, shapes), shapes
        if shapes != last:
            reason = join_some(
                f"{name} was {last.get(name)} and is {shape}"
                for name, shape in shapes.items()
                if last.get(name) != shape
            )
            text = f"{step} was compiled again, in {seconds:.1f} s, because {reason}"
            self._say(text)
        elif seconds > _LONG_SECONDS:
            self._say(f"{step} was compiled in {seconds:.1f} s")

    def log_once(self, note: str, report: Callable[[str], None] = log_info) -> None:
        """Reports a note unless it was reported before."""
        if not self._quiet and note not in self._reported:
            self._reported.add(note)
            report(note)

    def log_program(
        self, devices: list[Any], program: Any, precision: Precision
    ) -> None:
        """Reports the precision of products, and warns if devices are of different
        kinds.
        """
        if note := describe_mixed_kinds(devices):
            self.log_once(note, warn)
        note = note_on_products(precision, devices[0])
        if note and program.jaxpr and has_default_products(program.jaxpr):
            self.log_once(note)

    def log_unsplit(self, dispatch: Dispatch, num_shards: int) -> None:
        """Reports a batch that each device computes in full, and the reason."""
        shapes = [jax.tree.leaves(group.batch)[0].shape for group in dispatch.groups]
        # Processes may have different numbers of rows; the shards must divide each
        # number.
        rows = next((n for _, n, *_ in shapes if n % num_shards), 1)
        if rows > 1:
            self.log_once(
                f"a batch of {rows} rows is computed in full on each device, since"
                f" something in the step is written for a batch, and the {num_shards}"
                " shards of the strategy do not divide it"
            )

    def _say(self, text: str) -> None:
        if not self._quiet:
            log_info(text)


def _get_shapes(dispatch: Dispatch) -> _Shapes:
    """Returns the shapes of each leaf in all groups, rows included, as a text."""
    shapes: dict[str, list[str]] = {}
    for group in dispatch.groups:
        batch = merge_leaves(group.batch, group.whole)
        for index, leaf in enumerate(jax.tree.leaves(batch)):
            shapes.setdefault(leaf_name(batch, index), []).append(str(leaf.shape[1:]))
    return {name: ", ".join(each) for name, each in shapes.items()}
