"""Passes over data that train nothing: validation and prediction."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.tracebacks import noted
from ..data import Dispatch, Packer
from ..step import IN_FLIGHT, Batch
from ..strategies.placing import replicated
from .engine import Engine
from .program import Program
from .step import Kind


class Ready(NamedTuple):
    """A batch of a pass, packed, and the step that takes it."""

    batch: Batch
    dispatch: Dispatch
    program: Program


class Fetching:
    """Fetches the real rows of what steps give, a few batches late.

    Args:
        packer: of the batches.
        gather: whether, of several processes, each gets all rows, not its own alone.
    """

    def __init__(self, packer: Packer, *, gather: bool = True):
        self._packer, self._gather = packer, gather
        self._waiting: collections.deque[tuple[PyTree, Batch]] = collections.deque()
        self._done: list[PyTree] = []

    def add(self, values: PyTree, batch: Batch) -> None:
        """Takes the values of the rows of `batch`, padding included, on the device."""
        self._waiting.append((replicated(values) if self._gather else values, batch))
        if len(self._waiting) > IN_FLIGHT:
            self._fetch()

    def rows(self) -> PyTree:
        """NumPy arrays of the rows of all batches, or None if there were none."""
        while self._waiting:
            self._fetch()
        if not self._done:
            return None
        return jax.tree.map(lambda *parts: np.concatenate(parts), *self._done)

    def _fetch(self) -> None:
        values, batch = self._waiting.popleft()

        def real(leaf: Any) -> np.ndarray:
            return self._packer.real_rows(leaf, batch, own=not self._gather)

        # Waits for the device, `IN_FLIGHT` batches late.
        rows = jax.tree.map(real, values)
        self._check(rows)
        self._done.append(rows)

    def _check(self, found: PyTree) -> None:
        """Raises unless the rows of a batch can be joined to those of the first."""
        first, number = self._done[0] if self._done else found, len(self._done)
        for one, other in zip(
            jax.tree.leaves(first), jax.tree.leaves(found), strict=True
        ):
            if one.shape[1:] != other.shape[1:]:
                raise ValueError(
                    f"in {self._packer.what} the model returns {one.shape[1:]} for"
                    f" a row of batch 0 and {other.shape[1:]} for one of batch"
                    f" {number}, and one array can't hold both. Predict batches of"
                    " one shape at a time, or let the model return one shape for"
                    " all."
                )


def ready(engine: Engine, kind: Kind, batches: Iterable[Batch]) -> Iterator[Ready]:
    """The batches of a pass, each packed and with its step; on accelerators once
    the next one is on its way there."""
    waiting: collections.deque[Ready] = collections.deque()
    for number, batch in enumerate(batches):
        with noted(f"in batch {number}"):
            dispatch, program = prepare(engine, kind, batch)
        if engine.puts_ahead:
            dispatch = engine.steps[kind].put(dispatch)
        waiting.append(Ready(batch, dispatch, program))
        if len(waiting) > engine.puts_ahead:
            yield waiting.popleft()
    yield from waiting


def prepare(engine: Engine, kind: Kind, batch: Batch) -> tuple[Dispatch, Program]:
    """`batch` packed, and the step for its shape, compiled if it is a new one."""
    step = engine.steps[kind]
    dispatch = step.packer.pack([[batch]])
    program = engine.compiled_for(kind, dispatch)
    if step.facts.rows_interact > step.packer.rows_interact:
        step.packer.rows_interact = True
        dispatch = step.packer.pack([[batch]])
        program = engine.compiled_for(kind, dispatch)
    return dispatch, program


def evaluate(
    engine: Engine,
    weights: list[Array],
    of: Ready,
    totals: Any,
    batch_idx: int,
    outputs: Fetching,
) -> Any:
    """`totals` with those of a batch added; start from `Steps.new_totals()`.

    Predictions and targets, if they are kept, are added to `outputs`.
    """
    batch, dispatch, program = of
    with noted(f"in batch {batch_idx}"):
        given = weights, totals, np.int32(batch_idx)
        placed, results = engine.run("evaluate", dispatch, program, *given)
        totals, means, *kept = results
    engine.in_flight.add(means, placed.nbytes, placed.checks)
    for values in kept:
        outputs.add(values, batch)
    return totals


def predict(
    engine: Engine,
    inputs: Iterable[PyTree],
    weights: list[Array] | None = None,
    *,
    gather: bool = True,
) -> PyTree:
    """Predictions of `inputs` as NumPy arrays, without padding; None if no batches.

    With several processes of all their rows, or without `gather` of this one's.
    """
    predictions = Fetching(engine.steps["predict"].packer, gather=gather)
    weights = engine.held.weights() if weights is None else weights
    batches = ready(engine, "predict", inputs)
    for number, (x, dispatch, program) in enumerate(batches):
        with noted(f"in batch {number}"):
            placed, predicted = engine.run("predict", dispatch, program, weights)
        if placed.nbytes:
            engine.in_flight.add(jax.tree.leaves(predicted)[0], placed.nbytes)
        predictions.add(predicted, x)
    return predictions.rows()
