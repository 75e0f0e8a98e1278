"""Batches from a torch `DataLoader`, as iterating it gives them.

A loader over a map-style dataset is not iterated itself. Its sampler is asked for the
epoch's index lists, in the order and with the random draws of torch's own iteration,
and the lists are fetched here, or by workers of a loader like it. So an epoch is
decided by the trainer's seed, random augmentations do not depend on the number of
workers, and the global generators of torch, NumPy and Python are given back as they
were when the pass ends.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ..basics.console import log_info_once, warn
from ..step import Batch
from .batches import taken
from .conversion import as_numpy, fetch, to_host
from .loader_state import LoaderState, Position, has_state_dict
from .random_states import seed_of, seeded, torch_generators
from .shares import Share
from .source import ALL, IterableSource, Source
from .torch_workers import (
    WORKER_RULES,
    Seeded,
    SeededLists,
    start,
    with_workers,
)

_DRAW_AT_ONCE = 64
"""Index lists drawn from a sampler per change of generators."""

_GOLDEN = 0x9E3779B97F4A7C15
"""Keeps the seeds of neighbouring batches far apart (2**64 / golden ratio, odd)."""


class _OfTorch(Source):
    """What all torch `DataLoader`s have in common, which are not changed."""

    def __init__(
        self, loader: Any, argument: str, share: Share = ALL, seed: int | None = None
    ):
        super().__init__(loader, argument, share, seed)
        from torch.utils.data import default_collate

        self._samplers = _samplers_of(loader)
        # If there are none, index lists do not depend on when they are drawn.
        self._users_samplers = [s for s in self._samplers if not _is_torchs(s)]
        # Whether rows are put together by torch alone.
        is_torchs = loader.collate_fn is default_collate
        self._has_torchs_collation = loader._auto_collation and is_torchs
        # torch's collation makes new tensors, and what crosses from a worker is new.
        is_new = self._has_torchs_collation or loader.num_workers
        self._copies = not (_iterates_as_torch(loader) and is_new)

    def first(self, count: int | None) -> list[Batch]:
        ordered = _unshuffled(self.loader)
        if ordered is None:
            return super().first(count)
        return torch_source(ordered, self.argument, self.share, self.seed).first(count)

    @property
    def shuffles(self) -> bool:
        from torch.utils import data

        random = (
            data.RandomSampler,
            data.SubsetRandomSampler,
            data.WeightedRandomSampler,
        )
        return any(
            isinstance(sampler, random) or getattr(sampler, "shuffle", False) is True
            for sampler in self._samplers
        )

    def _parts(self) -> list[Any]:
        return [*self._samplers, self.loader.dataset, self.loader]

    def _explain(self, exception: Exception) -> None:
        # A worker that dies may have sent tensors which the next reader asks it for.
        is_broken = isinstance(exception, ConnectionError | EOFError)
        if "exited unexpectedly" in str(exception) or (
            is_broken and self.loader.num_workers
        ):
            exception.add_note(f"a worker of `{self.argument}` ended. {WORKER_RULES}")
        if "jaxdp.step.whole" in str(exception):  # torch's collation met it
            exception.add_note(
                "A Whole is a part of a batch, not of one of its rows: leave it"
                " out of the dataset's items, and add it in the loader's"
                " `collate_fn`."
            )

    def _generators(self) -> dict[str, Any]:
        return torch_generators(self.loader)


class _IteratedByTorch(_OfTorch, IterableSource):
    """A loader over an iterable dataset, or one that iterates in its own way."""

    @property
    def sure_batches(self) -> int | None:
        # Each of several workers makes a last batch of its own.
        is_a_guess = _is_iterable(self.loader) and self.loader.num_workers > 1
        return None if is_a_guess else self.num_batches

    def _started(self) -> Iterator[Any]:
        return start(self.loader, self.argument)


class TorchSource(_OfTorch):
    """A `DataLoader` whose batches are what its sampler's index lists say.

    The seed decides, with the epoch, what augmentations draw, and the sampler, unless
    the loader has a generator of its own.
    """

    seed: int  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, loader: Any, argument: str, share: Share = ALL, seed: int = 0):
        super().__init__(loader, argument, share, seed)
        self._workers: Any = None
        self._seeded_lists = SeededLists()

    def begin_training(self) -> None:
        super().begin_training()
        from torch import Generator

        held = getattr(self.loader.dataset, "__dict__", {})
        for name, value in held.items() if self.loader.num_workers else ():
            if isinstance(value, np.random.Generator | np.random.RandomState):
                warn(
                    f"`{self.argument}`: each of its workers has a copy of the"
                    f" dataset's `{name}`, a {type(value).__name__}, and all draw the"
                    " same from it. Draw from np.random, random or torch instead,"
                    " which are seeded for each batch."
                )
        for sampler in self._users_samplers:
            is_known = has_state_dict(sampler) or hasattr(sampler, "set_epoch")
            if not (
                is_known or isinstance(getattr(sampler, "generator", None), Generator)
            ):
                log_info_once(
                    f"`{self.argument}`: if its sampler {type(sampler).__name__} draws"
                    " from a generator of its own, as one of NumPy, or counts epochs,"
                    " no checkpoint contains that, and a resumed run takes other rows."
                    " Make it a torch.Generator that is the sampler's attribute"
                    " `generator`, or give the sampler `state_dict` and"
                    " `load_state_dict`, or a `set_epoch` that seeds it"
                )

    def _read(self, position: Position) -> Iterator[Batch]:
        self._set_epoch(position.epoch)
        is_torchs = self._has_torchs_collation
        whole_rows = self._whole_rows() if is_torchs else None
        lists = self._drawn_lists(position.epoch)
        lists = itertools.islice(lists, position.batches, None)
        portions: Callable[[Iterator[Any]], Iterator[Any]] = iter
        if is_torchs:  # each process need only fetch its own rows
            lists, portions = self.share.of_lists(lists)
        if whole_rows is not None:
            return portions(whole_rows(lists))
        batches = self._by_index(lists, position.epoch, position.batches)
        return portions(map(partial(to_host, copy=self._copies), batches))

    def _whole_rows(self) -> Callable[[Iterator[Any]], Iterator[Batch]] | None:
        """What gives batches of index lists, if rows need not be taken apart for it."""
        columns = None if self.loader.num_workers else _columns(self.loader.dataset)
        if columns is None:
            return None
        return partial(fetch, *columns, ahead=not self._users_samplers)

    @property
    def is_at_hand(self) -> bool:
        # A dataset of the user's may draw from generators of its own, which training
        # draws from, too.
        runs_nothing = self._has_torchs_collation and not self._users_samplers
        return runs_nothing and self._whole_rows() is not None

    def _sampler_states(self) -> list[LoaderState]:
        publishing = filter(has_state_dict, self._users_samplers)
        return [LoaderState(sampler, self.argument) for sampler in publishing]

    def close(self) -> None:
        super().close()
        # Both lead to each other, and workers that last are ended by what frees them.
        self._seeded_lists.lists, self._workers = iter(()), None

    def _by_index(self, lists: Iterator[Any], epoch: int, skip: int) -> Iterator[Any]:
        start = seed_of(self.seed, epoch, *self.share.drawing)
        seeded = (
            ((start + batch_idx * _GOLDEN) % 2**63, indices)
            for batch_idx, indices in enumerate(lists, skip)
        )
        if self.loader.num_workers:
            return self._from_workers(seeded, epoch)
        return self._from_here(seeded)

    def _drawn_lists(self, epoch: int) -> Iterator[Any]:
        """What the sampler draws, as `iter(loader)` has it draw: its own seed last."""
        import torch

        if _is_in_order(self.loader):  # nothing is drawn
            yield from self.loader._index_sampler
            return
        numbers = self.seed, epoch, *self.share.sampling
        torchs = not self._users_samplers
        most = _DRAW_AT_ONCE if torchs else 1  # it may listen to how training goes
        with seeded(*numbers, torch_alone=torchs):
            lists = iter(self.loader._index_sampler)
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            drawn, error = taken(lists, most)
        for number in itertools.count(1):
            yield from drawn
            if error is not None:
                raise error
            if len(drawn) < most:
                return
            with seeded(*numbers, number, torch_alone=torchs):
                drawn, error = taken(lists, most)

    def _from_here(self, lists: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        dataset, collate = Seeded(self.loader.dataset), self.loader.collate_fn
        many = self.loader._auto_collation
        rows = dataset.__getitems__ if many else dataset.__getitem__
        # The user's generators come back at the end of the pass: to swap them around
        # every batch would cost 150 us, more than many a step.
        with seeded():
            # No `map`, which a StopIteration of the dataset's would end silently.
            for one_list in lists:
                yield collate(rows(one_list))

    def _from_workers(self, seeded: Iterator[tuple[int, Any]], epoch: int) -> Any:
        import torch

        if self._workers is None:
            self._workers = with_workers(self.loader, self._seeded_lists)
        self._seeded_lists.lists = seeded
        self._workers.generator = torch.Generator().manual_seed(
            seed_of(self.seed, epoch)
        )
        return start(self._workers, self.argument)


def torch_source(
    loader: Any, argument: str, share: Share = ALL, seed: int | None = None
) -> Source:
    """The source of a torch `DataLoader`."""
    if _iterates_as_torch(loader) and not _is_iterable(loader):
        return TorchSource(loader, argument, share, seed or 0)
    return _IteratedByTorch(loader, argument, share, seed)


def _is_iterable(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _iterates_as_torch(loader: Any) -> bool:
    """Whether it does; torchdata's differs in that it publishes its state, which over
    index lists is not needed."""
    from torch.utils.data import DataLoader

    is_torchdatas = type(loader).__module__.startswith("torchdata.stateful_dataloader")
    return type(loader).__iter__ is DataLoader.__iter__ or is_torchdatas


def _columns(dataset: Any) -> tuple[tuple[np.ndarray, ...], list[np.ndarray]] | None:
    """The columns of a `TensorDataset`, whose rows need not be taken apart, and indices
    of subsets of it, outer first."""
    from torch.utils.data import Subset, TensorDataset

    subsets = []
    while type(dataset) is Subset:
        subsets.append(np.asarray(dataset.indices))
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or len(dataset) == 0:
        return None
    columns = [as_numpy(tensor) for tensor in dataset.tensors]
    if any(column is None for column in columns):
        return None
    return tuple([column for column in columns if column is not None]), subsets


def _unshuffled(loader: Any) -> Any:
    """A loader of the same rows in their order; None if it does not shuffle, or in a
    way of the user's."""
    from torch.utils.data import DataLoader, RandomSampler, Subset, SubsetRandomSampler

    dataset, sampler = loader.dataset, loader.sampler
    if loader.batch_size is None or not isinstance(
        sampler, RandomSampler | SubsetRandomSampler
    ):
        return None
    if isinstance(sampler, SubsetRandomSampler):
        dataset = Subset(dataset, sampler.indices)
    return DataLoader(
        dataset,
        loader.batch_size,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
    )


def _is_in_order(loader: Any) -> bool:
    """Returns True if torch's own samplers return the rows in their order."""
    from torch.utils.data import BatchSampler, SequentialSampler

    return (
        type(loader.sampler) is SequentialSampler
        and type(loader.batch_sampler) is BatchSampler
        and loader.generator is None  # else an epoch draws a seed from it
    )


def _samplers_of(loader: Any) -> list[Any]:
    """A loader's samplers, and those that they sample from."""
    found: list[Any] = []
    waiting = [loader.sampler, loader.batch_sampler]
    while waiting:
        each = waiting.pop(0)
        if each is not None and all(each is not other for other in found):
            found.append(each)
            waiting.append(getattr(each, "sampler", None))
    return found


def _is_torchs(sampler: Any) -> bool:
    kind = type(sampler)
    is_of_torch = kind.__module__.startswith(("torch.utils.data.", "torchdata."))
    return is_of_torch or kind in (list, tuple, range)
