"""The batches of a torch `DataLoader`, as an iteration over it yields them.

A loader over a map-style dataset is not iterated itself. Its sampler yields the epoch's
index lists, in the order and with the random draws of torch's own iteration, and they
are fetched here, or by workers of a similar loader. So the trainer's seed decides an
epoch, random augmentations do not depend on the number of workers, and the global
generators of torch, NumPy and Python are restored after the epoch.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from types import FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch.utils import data

from ..basics.console import add_article, log_info_once, warn
from ..step import Batch
from .conversion import as_numpy, fetch_rows, normalize_batch
from .loader_state import Position, has_state_dict, is_torchdatas
from .partition import RowPartition
from .random_states import make_seed, seed_globally
from .source import ALL_ROWS, IterableSource, Source
from .torch_workers import (
    WORKER_RULES,
    SeededBatchSampler,
    SeededDataset,
    make_worker_loader,
    start_iterator,
)

_LISTS_PER_DRAW: Final = 64
"""Index lists drawn from a sampler per change of generators."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
"""Keeps the seeds of neighbouring batches far apart (2**64 / golden ratio, odd)."""


class _TorchSource(Source):
    """The base of the sources of torch `DataLoader`s, which it never changes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        random = data.RandomSampler | data.SubsetRandomSampler
        random |= data.WeightedRandomSampler
        self.shuffles = any(
            isinstance(sampler, random) or getattr(sampler, "shuffle", False) is True
            for sampler in self.state.samplers
        )
        is_torchs = self.loader.collate_fn is data.default_collate
        self._has_torchs_collation = self.loader._auto_collation and is_torchs
        # torch's collation makes new tensors, and a worker sends new ones.
        is_new = self._has_torchs_collation or self.loader.num_workers
        self._copies = not (is_new and _iterates_as_torch(self.loader))

    def _add_notes(self, exception: Exception) -> None:
        # A worker that dies may have sent tensors that the reader would still request
        # from it.
        is_broken = isinstance(exception, ConnectionError | EOFError)
        is_broken = is_broken or "exited unexpectedly" in str(exception)
        if is_broken and self.loader.num_workers:
            exception.add_note(f"a worker of `{self.argument}` ended. {WORKER_RULES}")


class _TorchIterableSource(_TorchSource, IterableSource):
    """A loader over an iterable dataset, or one with an iteration of its own."""

    @property
    def num_batches(self) -> int | None:
        # If there are several workers, each makes its own last batch, so more batches
        # than the length may come.
        is_stream = isinstance(self.loader.dataset, data.IterableDataset)
        is_estimate = is_stream and self.loader.num_workers > 1
        return None if is_estimate else super().num_batches

    def _iterate(self) -> Iterator[Any]:
        return start_iterator(self.loader, self.argument)


class TorchMapSource(_TorchSource):
    """A `DataLoader` over a map-style dataset, whose sampler yields index lists.

    The seed and the epoch decide the draws of augmentations, and of the sampler unless
    the loader has a generator of its own.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._worker_loader: Any = None
        self._worker_sampler = SeededBatchSampler()
        # Index lists of torch's samplers do not depend on the time of their drawing. A
        # custom sampler may depend on the training so far.
        self._draws_ahead = not self.state.custom_samplers
        # A custom dataset may draw from generators of its own, as training does.
        self.is_in_memory = self._draws_ahead and self._find_columns() is not None

    def start_training(self) -> None:
        super().start_training()
        parts = {"dataset": self.loader.dataset, "collate_fn": self.loader.collate_fn}
        for part, node in parts.items() if self.loader.num_workers else ():
            for name, kind in _find_copied_generators(node):
                warn(
                    f"`{self.argument}`: each of its workers has a copy of the {part}'s"
                    f" `{name}`, {add_article(kind)}, and all draw the same from it."
                    " Draw from np.random, random or torch instead, which are seeded"
                    " for each batch."
                )
        for sampler in self.state.custom_samplers:
            is_saved = has_state_dict(sampler) or hasattr(sampler, "set_epoch")
            generator = getattr(sampler, "generator", None)
            if not (is_saved or isinstance(generator, torch.Generator)):
                log_info_once(
                    f"`{self.argument}`: no checkpoint contains what its sampler"
                    f" {type(sampler).__name__} draws from or counts, so a resumed run"
                    " takes other rows, if it does either. Let it draw from a"
                    " torch.Generator in its attribute `generator`, or give it"
                    " `state_dict` and `load_state_dict`, or a `set_epoch` that seeds"
                    " it"
                )

    def _read(self, position: Position) -> Iterator[Batch]:
        epoch, first = position.epoch, position.batches
        self.state.set_epoch(epoch)
        lists = self._draw_lists(epoch)
        # Now, since a generator must move even if no batch is then taken.
        collections.deque(itertools.islice(lists, first), maxlen=0)
        add_counts: Callable[[Iterator[Any]], Iterator[Any]] = iter
        if self._has_torchs_collation:  # so that each process fetches only its rows
            lists, add_counts = self.partition.split_lists(lists)
        if (columns := self._find_columns()) is not None:
            return add_counts(fetch_rows(*columns, lists, self._draws_ahead))
        batches = self._fetch(lists, epoch, first)
        return add_counts(map(partial(normalize_batch, copy=self._copies), batches))

    def _find_columns(self) -> tuple[Sequence[Any], list[np.ndarray]] | None:
        """Returns the tensors of a `TensorDataset`, and the indices of the `Subset`s
        around it, outer first. None for datasets with other indexing, and for workers.
        """
        if self.loader.num_workers or not self._has_torchs_collation:
            return None
        dataset, subsets = self.loader.dataset, []
        while type(dataset) is data.Subset:
            subsets.append(np.asarray(dataset.indices))
            dataset = dataset.dataset
        if type(dataset) is not data.TensorDataset or len(dataset) == 0:
            return None
        if any([as_numpy(tensor) is None for tensor in dataset.tensors]):
            return None
        return dataset.tensors, subsets

    def close(self) -> None:
        super().close()
        # The loader and the index lists refer to each other. Freeing them ends
        # persistent workers.
        self._worker_sampler.lists, self._worker_loader = iter(()), None

    def _draw_lists(self, epoch: int) -> Iterator[Any]:
        """Yields the sampler's index lists, drawn as by `iter(loader)`.

        Like it, this draws a base seed after the sampler has started.
        """
        numbers = self.seed, epoch, *self.partition.sampler_seed
        torch_only = self._draws_ahead
        count = _LISTS_PER_DRAW if self._draws_ahead else 1
        with seed_globally(*numbers, torch_only=torch_only):
            lists = iter(self.loader._index_sampler)
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            drawn = [*itertools.islice(lists, count)]
        for number in itertools.count(1):
            yield from drawn
            if len(drawn) < count:
                return
            with seed_globally(*numbers, number, torch_only=torch_only):
                drawn = [*itertools.islice(lists, count)]

    def _fetch(self, lists: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        """Yields the collated batches of index lists, each with a seed of its own."""
        start = make_seed(self.seed, epoch, *self.partition.augmentation_seed)
        seeded = (
            ((start + batch_idx * _GOLDEN) % 2**63, indices)
            for batch_idx, indices in enumerate(lists, first)
        )
        if self.loader.num_workers:
            return self._fetch_in_workers(seeded, epoch)
        return self._fetch_in_process(seeded)

    def _fetch_in_process(self, lists: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        dataset, collate = SeededDataset(self.loader.dataset), self.loader.collate_fn
        is_batched = self.loader._auto_collation
        fetch = dataset.__getitems__ if is_batched else dataset.__getitem__
        # The user's generators are restored after the epoch: to swap them around every
        # batch would cost 150 us, more than many a step.
        with seed_globally():
            # `map` would silently end at a StopIteration of the dataset.
            for indices in lists:
                yield collate(fetch(indices))

    def _fetch_in_workers(self, lists: Iterator[tuple[int, Any]], epoch: int) -> Any:
        if self._worker_loader is None:
            self._worker_loader = make_worker_loader(self.loader, self._worker_sampler)
        self._worker_sampler.lists = lists
        self._worker_loader.generator = torch.Generator().manual_seed(
            make_seed(self.seed, epoch)
        )
        return start_iterator(self._worker_loader, self.argument)


def make_torch_source(
    loader: Any, argument: str, partition: RowPartition = ALL_ROWS, seed: int = 0
) -> Source:
    """Returns the source of a torch `DataLoader`."""
    is_stream = isinstance(loader.dataset, data.IterableDataset)
    is_map = _iterates_as_torch(loader) and not is_stream
    kind = TorchMapSource if is_map else _TorchIterableSource
    return kind(loader, argument, partition, seed)


def _iterates_as_torch(loader: Any) -> bool:
    """Returns whether a loader has torch's iteration.

    torchdata's loader only adds its state to that, which index lists do not need.
    """
    return type(loader).__iter__ is data.DataLoader.__iter__ or is_torchdatas(loader)


def _find_copied_generators(
    node: Any, levels: int = 3, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yields the names and classes of generators of NumPy and Python among the
    attributes of a dataset, and some levels inside of these: `dataset.transforms.0.rng`
    of a `Subset`.
    """
    held = getattr(node, "__dict__", {}).items()
    if isinstance(node, dict | list | tuple):
        held = node.items() if isinstance(node, dict) else enumerate(node)
    for name, value in itertools.islice(held, 100):  # not all rows of a dataset
        if isinstance(value, np.random.Generator | np.random.RandomState | Random):
            yield f"{prefix}{name}", type(value).__name__
        elif levels and not isinstance(value, type | ModuleType | FunctionType):
            yield from _find_copied_generators(value, levels - 1, f"{prefix}{name}.")
