"""Values per row of one batch after another, on their way to the host."""

import collections
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..data import Packer
from ..step import IN_FLIGHT, Batch
from ..strategies.placing import replicated


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
