"""A batch that several processes have between them: each has some of its rows.

A batch's rows are cut into equal blocks, in order; which of them a process loads, its
devices decide (`processes.RowBlocks`). A block has real rows first, then its padding.
"""

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np

from ..distributed import Processes, RowBlocks
from ..step import Batch, Group
from .conversion import rows_of
from .padding import Packed, Packer, pad

_AT_ONCE: Final = 8
"""Batches that processes with loaders of their own read before they tell each other."""


class Portion:
    """What one process has of a batch.

    Attributes:
        own: the rows of its own blocks. If it has none, one row to fill them with.
        counts: how many real rows each block has, of all processes.
    """

    __slots__ = ("counts", "own")

    def __init__(self, own: Batch, counts: tuple[int, ...]):
        self.own = own
        self.counts = counts


def shown(batch: Any) -> Batch:
    """What of a batch is here, as callbacks see it."""
    return batch.own if type(batch) is Portion else batch


def inputs_of(batch: Any) -> Any:
    """What is predicted from: `x` of an `(x, y)` batch."""
    if type(batch) is Portion:
        return Portion(inputs_of(batch.own), batch.counts)
    return batch[0] if isinstance(batch, tuple) else batch


class PortionPacker(Packer):
    """Packs portions: every block is padded to one size, on the process that has it.

    Args:
        num_shards: as for `Packer`, of all processes together.
        what: which batches, for messages: "training".
        blocks: the blocks that this process loads.
        in_order: whether portions fill the blocks in turn, so that all padding is at
            the end. The compiled step is then that of one process.
        collect: from leaves `(micro_batches, rows of own blocks, ...)` to the same on
            the host with the rows of all blocks; all processes call it.
    """

    def __init__(
        self,
        num_shards: int,
        what: str,
        blocks: RowBlocks,
        in_order: bool,
        collect: Callable[[list[np.ndarray]], list[np.ndarray]],
    ):
        super().__init__(num_shards, what)
        self.blocks = blocks
        self._in_order = in_order
        self._collect = collect

    def pack(
        self, micro_batches: Sequence[Any], slots: int = 1, steps: int = 1
    ) -> Packed:
        micros = [self._checked_leaves(portion.own) for portion in micro_batches]
        counts = [portion.counts for portion in micro_batches]
        sizes = [sum(each) for each in counts]
        each = slots // steps
        rows = [sum(sizes[start : start + each]) for start in range(0, slots, each)]
        if not self.rows_interact:
            self.pad_to(max(map(max, counts)) * self.blocks.count)
            size = self.size // self.blocks.count
            micros = [
                self._with_padding(leaves, each, size)
                for leaves, each in zip(micros, counts, strict=True)
            ]
            missing = slots - len(micros)
            micros += micros[-1:] * missing  # of the step that lacks some
            counts += [(0,) * self.blocks.count] * missing
            groups = [self._group(micros, counts)]
            return Packed(groups, True, rows, (True, steps, ((slots, self.size),)))
        split = all(map(self._can_split, counts))
        if not split:
            micros = [self._whole(m, c) for m, c in zip(micros, counts, strict=True)]
            counts = [(size,) for size in sizes]
        groups, shapes = [], []
        for size, run in itertools.groupby(range(len(micros)), sizes.__getitem__):
            places = list(run)
            groups.append(
                self._group([micros[i] for i in places], [counts[i] for i in places])
            )
            shapes.append((len(places), size))
        return Packed(groups, split, rows, (split, steps, tuple(shapes)))

    def real_rows(self, leaf: Any, portion: Portion, *, own: bool) -> np.ndarray:
        """Values of the rows that are no padding, on the host.

        Args:
            leaf: values for all rows of the packed `portion`, on the devices.
            portion: what was packed.
            own: whether those of this process's blocks are enough.
        """
        each = len(leaf) // self.blocks.count
        blocks = self.blocks.own if own else range(self.blocks.count)
        if own and not leaf.is_fully_replicated:
            shards = {s.index[0].start or 0: s.data for s in leaf.addressable_shards}
            found = np.concatenate([np.asarray(shards[at]) for at in sorted(shards)])
            starts = range(0, len(found), each)
        else:
            found, starts = np.asarray(leaf), [block * each for block in blocks]
        return np.concatenate(
            [
                found[start : start + portion.counts[block]]
                for start, block in zip(starts, blocks, strict=True)
            ]
        )

    def can_stack(self, micro_batches: Sequence[Any], slots: int, first: int) -> bool:
        counts = [portion.counts for portion in micro_batches]
        if not self.rows_interact:
            return self._pads_alike(
                [max(each) * self.blocks.count for each in counts], first
            )
        return len({*counts}) == 1 and len(micro_batches) == slots

    def _can_split(self, counts: tuple[int, ...]) -> bool:
        """Whether blocks of so many rows need no padding."""
        shards = self.num_shards // self.blocks.count
        return len(set(counts)) == 1 and counts[0] % shards == 0

    def _with_padding(
        self, leaves: list[np.ndarray], counts: tuple[int, ...], size: int
    ) -> list[np.ndarray]:
        own = [counts[block] for block in self.blocks.own]
        if own == [size] * len(own):
            return leaves
        parts, start = [], 0
        for count in own:
            part = [leaf[start : start + count] for leaf in leaves]
            parts.append(pad(part, size, [leaf[:1] for leaf in leaves]))
            start += count
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    def _whole(
        self, leaves: list[np.ndarray], counts: tuple[int, ...]
    ) -> list[np.ndarray]:
        """The real rows of all processes: where rows interact and do not divide."""
        shards = self.num_shards // self.blocks.count
        size = math.ceil(max(counts) / shards) * shards
        local = self._with_padding(leaves, counts, size)
        collected = self._collect([leaf[None] for leaf in local])
        starts = range(0, self.blocks.count * size, size)
        real = [slice(s, s + c) for s, c in zip(starts, counts, strict=True)]
        return [np.concatenate([leaf[0, r] for r in real]) for leaf in collected]

    def _group(
        self, micros: list[list[np.ndarray]], counts: list[tuple[int, ...]]
    ) -> Group:
        if len(micros) == 1:
            stacked = [leaf[None] for leaf in micros[0]]
        else:
            stacked = [np.stack(leaves) for leaves in zip(*micros, strict=True)]
        batch = jax.tree.unflatten(self._expected[0], stacked)
        real = np.asarray(counts, np.int32)
        if self._in_order:
            real = real.sum(axis=1, keepdims=True, dtype=np.int32)
        return Group(batch, real)


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
        packer: gives the `PortionPacker` of the batches, when an epoch begins.
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

    def __init__(self, packer: PortionPacker):
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
