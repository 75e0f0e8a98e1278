"""The partition of a loader's batches over processes: each process reads some rows."""

import collections
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import numpy as np

from ..basics.console import join_numbers
from ..distributed import ProcessGroup
from ..step import Batch, map_row_leaves
from .batches import LocalBatch, count_rows, format_key, make_spec_key, select_rows

_MAX_BATCHES_PER_EXCHANGE: Final = 8
"""Batches that processes with loaders of their own read between two exchanges."""

_Peek = Callable[[], list[Batch]]
_ListsAndBatches = tuple[Iterator[Any], Callable[[Iterator[Any]], Iterator[Any]]]


class RowPartition:
    """The partition of a source's batches. This class is that of a single process.

    Attributes:
        sampler_seed: part of the seed of samplers.
        augmentation_seed: part of the seed of augmentations.
    """

    sampler_seed: tuple[int, ...] = ()
    augmentation_seed: tuple[int, ...] = ()

    def split(self, batches: Iterator[Batch], peek: _Peek | None) -> Iterator[Any]:
        """Yields this process's rows of each batch.

        `peek` returns the loader's first batch in a list; None if it can't be read
        twice.
        """
        return batches

    def split_lists(self, lists: Iterator[Any]) -> _ListsAndBatches:
        """Returns this process's part of index lists, and a function that prepares the
        batches fetched by them for `split`."""
        return lists, iter

    def count_batches(self, argument: str, local: int | None) -> int | None:
        """Returns the batches per epoch, if this process's loader has `local`."""
        return local

    def gather_states(self, local: Any) -> Any:
        """Returns the states of all processes' loaders; this one's is `local`."""
        return local

    def select_state(self, states: Any) -> Any:
        """Inverts `gather_states`; returns None for the states of other processes."""
        of_each = _get_list(states, "of_each")
        if of_each is not None:
            return of_each[0]
        return None if _get_list(states, "by_process") is not None else states


class GlobalPartition(RowPartition):
    """Every process has the same loader, and takes its rows of every batch."""

    def __init__(self, processes: ProcessGroup, get_packer: Callable[[], Any]):
        self._processes = processes
        self._get_packer = get_packer  # called at the start of an epoch

    def split(self, batches: Iterator[Batch], peek: Any) -> Iterator[LocalBatch]:
        splitter = _RowSplitter(self._get_packer())
        for batch in batches:
            if isinstance(batch, LocalBatch):  # by `split_lists`
                yield batch
                continue
            spec = format_key(make_spec_key(batch))
            counts, ranges = splitter.split(count_rows(batch), spec)
            select = functools.partial(_select_ranges, ranges=ranges)
            yield LocalBatch(map_row_leaves(select, batch), counts)

    def split_lists(self, lists: Iterator[Any]) -> _ListsAndBatches:
        splitter = _RowSplitter(self._get_packer())
        local_blocks = splitter.blocks.local
        self.augmentation_seed = local_blocks[:1] if local_blocks[0] else ()
        waiting: collections.deque[tuple[int, ...]] = collections.deque()

        def split() -> Iterator[Any]:
            for indices in lists:
                indices = list(indices)
                counts, ranges = splitter.split(len(indices), "")
                waiting.append(counts)
                yield [indices[i] for numbers in ranges for i in numbers]

        def add_counts(batches: Iterator[Batch]) -> Iterator[LocalBatch]:
            for batch in batches:
                yield LocalBatch(batch, waiting.popleft())

        return split(), add_counts

    def count_batches(self, argument: str, local: int | None) -> int | None:
        self._processes.check_equal(f"`{argument}`", {"its number of batches": local})
        return local


class LocalPartition(RowPartition):
    """Each process's loader has its own rows; a batch has the rows of all processes.

    Before the next batch, the processes exchange their numbers of rows. A process whose
    loader is exhausted continues without rows until all loaders are exhausted. The
    batches of all processes have one shape, and equal arrays in a `Whole`.
    """

    def __init__(self, processes: ProcessGroup):
        self._processes = processes
        index = processes.index
        self.sampler_seed = self.augmentation_seed = (index,) if index else ()

    def split(
        self, batches: Iterator[Batch], peek: _Peek | None
    ) -> Iterator[LocalBatch]:
        count, filler = 1, None
        while True:
            window = list(itertools.islice(batches, count))
            for batch in window[-1:] or (peek() if peek and filler is None else []):
                filler = _copy_first_row(batch)
            missing = count - len(window)
            rows = [*map(count_rows, window), *[0] * missing]
            window += [filler] * missing

            message = [*zip(rows, map(_describe, window), strict=True)]
            messages = self._processes.all_gather("the next batches", message)
            for batch, *of_each in zip(window, *messages, strict=True):
                counts = tuple([rows for rows, _ in of_each])
                if not any(counts):
                    return
                _check_equal([facts for _, facts in of_each])
                yield LocalBatch(batch, counts)

            # An iterator must not be read further than the steps.
            count = 1 if peek is None else min(2 * count, _MAX_BATCHES_PER_EXCHANGE)

    def count_batches(self, argument: str, local: int | None) -> int | None:
        lengths = self._processes.all_gather(f"the length of {argument}", local)
        return None if None in lengths else max(lengths)

    def gather_states(self, local: Any) -> Any:
        return {"by_process": self._processes.all_gather("the loaders' states", local)}

    def select_state(self, states: Any) -> Any:
        if (by_process := _get_list(states, "by_process")) is None:
            return states
        is_same = len(by_process) == self._processes.count
        return by_process[self._processes.index] if is_same else None


class _RowSplitter:
    """Splits batches at the rows where a single process would split the padded batches.

    Args:
        packer: of the batches of one epoch, whose sizes are remembered.
    """

    def __init__(self, packer: Any):
        self.blocks, self._packer = packer.blocks, packer
        self._sizes = {"": packer.size, **packer.sizes}

    def split(self, rows: int, spec: str) -> tuple[tuple[int, ...], list[range]]:
        """Returns the real rows of every block, and this process's row numbers.

        This process gets at least one row, to fill its blocks with.

        Args:
            rows: the number of rows of the batch.
            spec: the text of its spec; "" if that is not known yet.
        """
        size = max(self._sizes.get(spec, 0), self._packer.round_up(rows))
        self._sizes[spec] = size
        per_block = size // self.blocks.count
        if not self._packer.pads:
            per_block = math.ceil(rows / self.blocks.count)
        ranges = self.blocks.get_local_rows(rows, per_block)
        counts = self.blocks.count_rows(rows, per_block)
        return counts, ranges if any(ranges) else [range(1)]


def _get_list(states: Any, name: str) -> list[Any] | None:
    return states.get(name) if isinstance(states, dict) else None


def _describe(batch: Batch | None) -> Any:
    """Returns the shape of each leaf without its rows, and a checksum of the arrays in
    `Whole`s; JSON. None if there is no batch.
    """
    if batch is None:
        return None
    checksum = 0
    for leaf in jax.tree.leaves(map_row_leaves(lambda _: None, batch)):
        checksum = zlib.crc32(np.asarray(leaf).tobytes(), checksum)
    return [list(shape) for shape, _ in make_spec_key(batch)[1]], checksum


def _check_equal(of_each: list[Any]) -> None:
    """Raises unless the processes' batches for a step have equal shapes and `Whole`s.

    Args:
        of_each: the result of `_describe` in each process.
    """
    if empty := [process for process, facts in enumerate(of_each) if not facts]:
        raise ValueError(
            "`data`='local': there are no batches in the loader of"
            f" {join_numbers('process', empty)}, while others have some. Each loader"
            " needs at least one."
        )
    first, _ = of_each[0]
    for process, facts in enumerate(of_each):
        if facts == of_each[0]:
            continue
        which = "different values in a jaxdp.Whole, which is the same for every row"
        if facts[0] != first:
            which = (
                f"batches of different shapes, rows of {first} in process 0, of"
                f" {facts[0]} in process {process}, but a step is compiled for one"
            )
        raise ValueError(
            f"`data`='local': at the same step, the processes have {which}. Have each"
            " draw shapes and Wholes by a generator that has the same seed in all, and"
            " give all equally many batches: a process that has no more repeats those"
            " of its last one."
        )


def _copy_first_row(batch: Batch) -> Batch:
    def copy(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else np.array(leaf)  # on the host

    first = map_row_leaves(lambda leaf: select_rows(leaf, np.zeros(1, np.int32)), batch)
    return jax.tree.map(copy, first)


def _select_ranges(leaf: Any, ranges: list[range]) -> Any:
    if isinstance(leaf, jax.Array):
        index = np.concatenate([*map(np.asarray, ranges)])  # on the host
        return select_rows(leaf, index)
    if len(ranges) == 1:
        return leaf[ranges[0].start : ranges[0].stop]
    return np.concatenate([leaf[part.start : part.stop] for part in ranges])
