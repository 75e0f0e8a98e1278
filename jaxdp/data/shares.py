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

from ..basics.console import join_numbers
from ..distributed import ProcessGroup
from ..step import Batch, find_batched_leaves, map_row_leaves
from .batches import Key, Portion, key_of, rows_at, rows_of, shapes_of
from .loader_state import checksum

_AT_ONCE: Final = 8
"""Batches that processes with loaders of their own read before they tell each other."""

_Fetched = tuple[Iterator[Any], Callable[[Iterator[Any]], Iterator[Any]]]


class Share:
    """How a source's batches come to the processes. Here: all to the only one."""

    sampling: tuple[int, ...] = ()  # folded into the seed of what samplers draw
    drawing: tuple[int, ...] = ()  # and of what augmentations draw

    def of(
        self, batches: Iterator[Batch], peek: Callable[[], Batch] | None
    ) -> Iterator[Any]:
        """Batches as this process gets them; `peek` gives some, if they come again."""
        return batches

    def of_lists(self, lists: Iterator[Any]) -> _Fetched:
        """The indices that this process is to fetch, and what `of` takes of them."""
        return lists, iter

    def length(self, argument: str, own: int | None) -> int | None:
        """Batches per epoch, of which this process's loader has `own`."""
        return own

    def states(self, own: Any) -> Any:
        """What a checkpoint keeps of the loaders' own states, of which one is `own`."""
        return own

    def state(self, states: Any) -> Any:
        """The inverse of `states`; None if these are those of other processes."""
        of_each = _by_process(states, "of_each")
        if of_each is not None:
            return of_each[0]
        return None if _by_process(states, "by_process") is not None else states


class GlobalShare(Share):
    """Every process has the same loader, and takes its rows of every batch."""

    def __init__(self, processes: ProcessGroup, packer: Callable[[], Any]):
        self._processes = processes
        self._packer = packer  # asked for when an epoch begins

    def of(self, batches: Iterator[Batch], peek: Any) -> Iterator[Portion]:
        cut = _Cut(self._packer())
        for batch in batches:
            if isinstance(batch, Portion):  # fetched by `of_lists`
                yield batch
                continue
            counts, places = cut(rows_of(batch), key_of(batch))
            rows_here = functools.partial(_taken, places=places)
            yield Portion(map_row_leaves(rows_here, batch), counts)

    def of_lists(self, lists: Iterator[Any]) -> _Fetched:
        cut = _Cut(self._packer())
        self.drawing = cut.blocks.local[:1] if cut.blocks.local[0] else ()
        waiting: collections.deque[tuple[int, ...]] = collections.deque()

        def own_lists() -> Iterator[Any]:
            for indices in lists:
                indices = list(indices)
                # What they will be like is not known yet.
                counts, places = cut(len(indices), None)
                waiting.append(counts)
                yield [indices[i] for place in places for i in place]

        def portions(batches: Iterator[Batch]) -> Iterator[Portion]:
            for batch in batches:
                yield Portion(batch, waiting.popleft())

        return own_lists(), portions

    def length(self, argument: str, own: int | None) -> int | None:
        self._processes.check_equal(f"`{argument}`", {"its number of batches": own})
        return own


class LocalShare(Share):
    """Every process's loader has rows of its own; a batch is what all give in turn.

    Before the next batch they tell each other how many rows they have. One that has run
    out goes on with no rows until the last one has. All batches of a turn have one
    shape, and the same in a `Whole`.
    """

    def __init__(self, processes: ProcessGroup):
        self._processes = processes
        index = processes.index
        self.sampling = self.drawing = (index,) if index else ()

    def of(
        self, batches: Iterator[Batch], peek: Callable[[], Batch] | None
    ) -> Iterator[Portion]:
        at_once, filler = 1, None
        while True:
            # What this process has.
            taken = list(itertools.islice(batches, at_once))
            missing = at_once - len(taken)
            sizes = [rows_of(batch) for batch in taken] + [0] * missing
            if taken:
                filler = _first_row(taken[0])
            elif filler is None and peek is not None:
                with contextlib.suppress(ValueError):  # it has none at all
                    filler = _first_row(peek())

            # What all have.
            here = taken + [filler] * missing
            mine = [
                sizes,
                list(map(shapes_of, taken)),
                filler is not None,
                list(map(_sum_of_whole, here)),
            ]
            announced = self._processes.all_gather("the next batches", mine)
            if not any(any(sizes) for sizes, *_ in announced):
                return
            if empty := [i for i, forms in enumerate(announced) if not forms[2]]:
                raise ValueError(
                    "`data`='local': there are no batches in the loader of"
                    f" {join_numbers('process', empty)}, while others have some. Each"
                    " loader needs at least one."
                )
            for place, one_batch in enumerate(here):
                counts = tuple([sizes[place] for sizes, *_ in announced])
                if not any(counts):
                    return
                shapes = _only_shapes(
                    [forms[place : place + 1] for _, forms, *_ in announced]
                )
                if len({sums[place] for *_, sums in announced}) > 1:
                    raise ValueError(_WHOLES_DIFFER)
                yield Portion(
                    one_batch if sizes[place] else _like(one_batch, shapes), counts
                )

            # An iterator must not be asked for more than is trained on.
            at_once = 1 if peek is None else min(2 * at_once, _AT_ONCE)

    def length(self, argument: str, own: int | None) -> int | None:
        lengths = self._processes.all_gather(f"the length of {argument}", own)
        return None if None in lengths else max(lengths)

    def states(self, own: Any) -> Any:
        return {"by_process": self._processes.all_gather("the loaders' states", own)}

    def state(self, states: Any) -> Any:
        if (by_process := _by_process(states, "by_process")) is None:
            return states
        same = len(by_process) == self._processes.count
        return by_process[self._processes.index] if same else None


class _Cut:
    """Where batches are cut: as one process would have padded them at the end.

    Args:
        packer: of the batches of one epoch, whose sizes are remembered.
    """

    def __init__(self, packer: Any):
        self.blocks, self._packer = packer.blocks, packer
        self._sizes: dict[Key | None, int] = {None: packer.size}

    def __call__(
        self, rows: int, key: Key | None
    ) -> tuple[tuple[int, ...], list[range]]:
        """Real rows of every block, and this process's rows, one at least."""
        forms = self._packer.forms
        if key is not None and key not in self._sizes:
            self._sizes[key] = forms.size_of(key)
        self._sizes[key] = max(self._sizes[key], forms.rounded(rows))
        per_block = self._sizes[key] // self.blocks.count
        if not self._packer.pads:
            per_block = math.ceil(rows / self.blocks.count)
        places = self.blocks.get_local_rows(rows, per_block)
        counts = self.blocks.count_rows(rows, per_block)
        return counts, places if any(places) else [range(1)]


def _by_process(states: Any, name: str) -> list[Any] | None:
    return states.get(name) if isinstance(states, dict) else None


def _only_shapes(told: list[list[Any]]) -> list[list[int]]:
    """The shapes of the batches that some processes have, which must be the same."""
    known = [(process, *shapes) for process, shapes in enumerate(told) if shapes]
    first: Any = known[0]
    for other in known:
        if other[1] != first[1]:
            raise ValueError(
                "`data`='local': the processes have batches of different shapes for the"
                f" same step: rows of {first[1]} in process {first[0]}, of {other[1]}"
                f" in process {other[0]}. A step is compiled for one shape. Have each"
                " process draw from the same bucket at each step, by a generator that"
                " has the same seed in all, and pad to the bucket's length."
            )
    return first[1]


def _like(row: Batch, shapes: list[list[int]]) -> Batch:
    """A row of such shapes, with the values of `row`."""
    leaves, treedef = jax.tree.flatten(row)
    triples = zip(leaves, shapes, find_batched_leaves(treedef), strict=True)
    return treedef.unflatten(
        np.resize(leaf, (1, *shape) if has_rows else shape)
        for leaf, shape, has_rows in triples
    )


def _sum_of_whole(batch: Batch | None) -> int | None:
    """Tells what a batch has in `Whole`s from something else."""
    whole = jax.tree.leaves(map_row_leaves(lambda _: None, batch))
    return checksum(whole) if whole else None


_WHOLES_DIFFER: Final = (
    "`data`='local': the processes have different values in a jaxdp.Whole at the same"
    " step, but it must be the same for every row. Draw it by a generator that has the"
    " same seed in all. (A process that has run out of batches keeps its last Whole; if"
    " it changes from batch to batch, give all processes equally many batches.)"
)


def _first_row(batch: Batch) -> Batch:
    def copied(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else np.array(leaf)  # on the host

    first = map_row_leaves(lambda leaf: rows_at(leaf, np.zeros(1, np.int32)), batch)
    return jax.tree.map(copied, first)


def _taken(leaf: Any, places: list[range]) -> Any:
    if isinstance(leaf, jax.Array):
        return rows_at(leaf, np.concatenate([*map(np.asarray, places)]))  # on the host
    if len(places) == 1:
        return leaf[places[0].start : places[0].stop]
    return np.concatenate([leaf[place.start : place.stop] for place in places])
