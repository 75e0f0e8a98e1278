"""How the batches of a loader come to several processes: each has some of the rows."""

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import numpy as np

from ..distributed import Processes
from ..step import Batch
from .batches import Portion, rows_of
from .padding import Packer

_AT_ONCE: Final = 8
"""Batches that processes with loaders of their own read before they tell each other."""


class Share:
    """How a source's batches come to the processes. Here: there is one, with all rows.

    Attributes:
        sampling: folded into the seed of what samplers draw.
        drawing: folded into the seed of what augmentations draw.
    """

    sampling: tuple[int, ...] = ()
    drawing: tuple[int, ...] = ()

    def of(
        self, batches: Iterator[Batch], peek: Callable[[], Batch] | None
    ) -> Iterator[Any]:
        """Batches as this process gets them, of those that its loader gives.

        Args:
            batches: on the host.
            peek: gives some batch of the loader; None if they come but once.
        """
        return batches

    def of_lists(
        self, lists: Iterator[Any], passed: int = 0
    ) -> tuple[Iterator[Any], Callable[..., Iterator[Any]]]:
        """The indices that this process is to fetch, and `of` for what it fetched.

        Args:
            lists: of all batches.
            passed: how many of the first ones are fetched, but not wanted.
        """
        return lists, self.of

    def length(self, argument: str, own: int | None) -> int | None:
        """Batches per epoch, of which this process's loader has `own`."""
        return own

    def states(self, own: Any) -> Any:
        """What a checkpoint keeps of the loaders' own states, of which one is `own`."""
        return own

    def state(self, states: Any) -> Any:
        """The inverse of `states`; None if these are those of other processes."""
        if isinstance(states, dict) and "of_each" in states:
            return states["of_each"][0]
        return None if _is_by_process(states) else states


class GlobalShare(Share):
    """Every process has the same loader, and takes its rows of every batch.

    Args:
        processes: all of them.
        packer: gives the `Packer` of the batches, when an epoch begins.
    """

    def __init__(self, processes: Processes, packer: Callable[[], Any]):
        self._processes = processes
        self._packer = packer

    def of(self, batches: Iterator[Batch], peek: Any) -> Iterator[Portion]:
        cut = _Cut(self._packer())
        for batch in batches:
            counts, places = cut(rows_of(batch))
            own = functools.partial(_taken, places=places)
            yield Portion(jax.tree.map(own, batch), counts)

    def of_lists(
        self, lists: Iterator[Any], passed: int = 0
    ) -> tuple[Iterator[Any], Callable[..., Iterator[Any]]]:
        cut = _Cut(self._packer())
        self.drawing = cut.blocks.own[:1] if cut.blocks.own[0] else ()
        waiting: collections.deque[tuple[int, ...]] = collections.deque()

        def own_lists() -> Iterator[Any]:
            for indices in lists:
                indices = list(indices)
                counts, places = cut(len(indices))
                waiting.append(counts)
                yield [indices[i] for place in places for i in place]

        def portions(batches: Iterator[Batch], peek: Any) -> Iterator[Portion]:
            for _ in range(min(passed, len(waiting))):
                waiting.popleft()
            for batch in batches:
                yield Portion(batch, waiting.popleft())

        return own_lists(), portions

    def length(self, argument: str, own: int | None) -> int | None:
        self._processes.same(f"`{argument}`", {"its number of batches": own})
        return own

    def states(self, own: Any) -> Any:
        # They differ where a dataset draws as it is asked for a process's rows.
        told = self._processes.all("the loaders' states", own)
        return own if all(each == own for each in told) else {"of_each": told}

    def state(self, states: Any) -> Any:
        if isinstance(states, dict) and "of_each" in states:
            found, index = states["of_each"], self._processes.index
            return found[index] if len(found) == self._processes.count else found[0]
        return super().state(states)


class LocalShare(Share):
    """Every process's loader has rows of its own; a batch is what all give in turn.

    Before the next batch they tell each other how many rows they have. One that has run
    out goes on with no rows until the last one has.

    Args:
        processes: all of them; each has one block of the rows, in their order.
    """

    def __init__(self, processes: Processes):
        self._processes = processes
        index = processes.index
        self.sampling = self.drawing = (index,) if index else ()

    def of(
        self, batches: Iterator[Batch], peek: Callable[[], Batch] | None
    ) -> Iterator[Portion]:
        at_once, filler = 1, None
        while True:
            taken = list(itertools.islice(batches, at_once))
            sizes = [rows_of(batch) for batch in taken] + [0] * (at_once - len(taken))
            if taken:
                filler = _first_row(taken[0])
            elif filler is None and peek is not None:
                with contextlib.suppress(ValueError):  # it has none at all
                    filler = _first_row(peek())
            told = self._processes.all("the next batches", [sizes, filler is not None])
            if not any(any(sizes) for sizes, _ in told):
                return
            if not all(has_rows for _, has_rows in told):
                empty = [i for i, (_, has_rows) in enumerate(told) if not has_rows]
                raise ValueError(
                    "`data`='local': there are no batches in the loader of process"
                    f" {', '.join(map(str, empty))}, while others have some. Each needs"
                    " one at least."
                )
            for place, own in enumerate(taken + [filler] * (at_once - len(taken))):
                counts = tuple([sizes[place] for sizes, _ in told])
                if not any(counts):
                    return
                yield Portion(own, counts)
            # An iterator must not be asked for more than is trained on.
            at_once = 1 if peek is None else min(2 * at_once, _AT_ONCE)

    def length(self, argument: str, own: int | None) -> int | None:
        lengths = self._processes.all(f"the length of {argument}", own)
        return None if None in lengths else max(lengths)

    def states(self, own: Any) -> Any:
        return {"by_process": self._processes.all("the loaders' states", own)}

    def state(self, states: Any) -> Any:
        if not _is_by_process(states):
            return states
        found = states["by_process"]
        same = len(found) == self._processes.count
        return found[self._processes.index] if same else None


def _is_by_process(states: Any) -> bool:
    return isinstance(states, dict) and "by_process" in states


class _Cut:
    """Where batches are cut: as one process would have padded them at the end."""

    def __init__(self, packer: Packer):
        self.blocks = packer.blocks
        self._packer = packer
        self._size = packer.size

    def __call__(self, rows: int) -> tuple[tuple[int, ...], list[range]]:
        """Real rows of every block, and this process's rows, one at least."""
        shards = self._packer.num_shards
        self._size = max(self._size, math.ceil(rows / shards) * shards)
        each = self._size // self.blocks.count
        if self._packer.rows_interact:
            each = math.ceil(rows / self.blocks.count)
        places = self.blocks.own_rows(rows, each)
        if not any(places):
            places = [range(1)]
        return self.blocks.counts(rows, each), places


def _first_row(batch: Batch) -> Batch:
    return jax.tree.map(lambda leaf: np.array(leaf[:1]), batch)


def _taken(leaf: np.ndarray, places: list[range]) -> np.ndarray:
    if len(places) == 1:
        return leaf[places[0].start : places[0].stop]
    return np.concatenate([leaf[place.start : place.stop] for place in places])
