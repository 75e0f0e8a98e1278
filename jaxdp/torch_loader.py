"""Batches from a torch `DataLoader`, as iterating it gives them.

A loader over a map-style dataset is not iterated itself. Its sampler is asked for the
epoch's index lists, in the order and with the random draws of torch's own iteration,
and the lists are fetched here, or by workers of a loader like it. So an epoch is
decided by the trainer's seed, random augmentations do not depend on the number of
workers, and the global generators of torch, NumPy and Python are given back as they
were when the pass ends.
"""

import base64
import contextlib
import functools
import itertools
import multiprocessing
import operator
import random
import signal
import sys
import sysconfig
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any

import jax
import numpy as np

from .data import as_numpy, taken, to_host
from .own_state import OwnState
from .portions import Share
from .sending import sharing_arrays
from .source import ALL, END, Source
from .step import Batch

_DRAW_AT_ONCE = 64
"""Index lists drawn from a sampler per change of generators."""

_FETCH_AT_ONCE = 2**18
"""Bytes of small batches that are fetched together."""

_PIPE_BYTES = 2**20
"""Arrays up to so large cross from a worker faster in its pipe than in shared memory,
which has to be set up and mapped each time."""

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")

_GOLDEN = 0x9E3779B97F4A7C15
"""Keeps the seeds of neighbouring batches far apart (2**64 / golden ratio, odd)."""


class SeededSource(Source):
    """An `IterableDataset` that gives batches, such as WebDataset's loader.

    Args:
        loader: what to iterate.
        argument: how the user calls it, for messages.
        seed: decides, with the epoch, what the global generators draw in it.
        share: how its batches come to several processes.
    """

    def __init__(self, loader: Any, argument: str, seed: int, share: Share = ALL):
        super().__init__(loader, argument, share)
        self.seed = seed

    def _explain(self, exception: Exception) -> None:
        if isinstance(exception, TypeError | ValueError):
            exception.add_note(
                f"`{self.argument}` is a {type(self.loader).__name__}, each item of"
                " which is taken as a batch; if it gives single examples, wrap it:"
                " torch.utils.data.DataLoader(dataset, batch_size)."
            )

    def _own_generators(self) -> list[Any]:
        """The generators that the user gave the loader or its sampler."""
        return []

    def _begun(self) -> Iterator[Any]:
        return iter(self.loader)

    def _iterate(self, epoch: int, generators: Any = None) -> Iterator[Any]:
        started = _Generators(_seed_of(self.seed, epoch, *self.share.sampling))
        with started.active():
            batches = self._begun()
        self._goes_on = batches is self.loader
        own = self._own_generators()
        if generators is not None:
            # torchdata's loader sets its sampler's generator to where an epoch began,
            # and the next epoch would not have the order that it should.
            started.states = generators[0]
            for generator, state in zip(own, generators[1], strict=False):
                generator.set_state(state)
        if self._own is not None:
            self._own.generators = lambda: (
                started.states,
                [generator.get_state() for generator in own],
            )
        return self._as_it_is(batches, started)

    def _as_it_is(self, batches: Iterator[Any], generators: Any) -> Iterator[Any]:
        """Iterable datasets and loaders that iterate in their own way."""
        while True:
            with generators.active():
                batch = next(batches, END)
            if batch is END:
                return
            yield batch


class TorchSource(SeededSource):
    """A torch `DataLoader`.

    Args:
        loader: the loader, which is not changed.
        argument: how the user calls it, for messages.
        seed: decides, with the epoch, what the sampler draws (unless the loader has a
            generator of its own) and what augmentations draw.
        share: how its batches come to several processes.
    """

    def __init__(self, loader: Any, argument: str, seed: int, share: Share = ALL):
        super().__init__(loader, argument, seed, share)
        self._workers: Any = None
        self._plan = _Plan()

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[Batch]:
        self._start(epoch)
        for each in (*self._samplers(), self.loader.dataset):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        plain, workers = self.is_plain(), self.loader.num_workers
        whole_rows, share = None, self.share.of
        lists = self._lists(epoch, skip)
        if plain and self.is_torchs_collation():  # which is row by row
            lists, share = self.share.of_lists(lists)
            whole_rows = self._whole_rows()
        if whole_rows is not None:
            batches = whole_rows(lists)
        elif plain:
            batches = self._by_index(lists, epoch, skip)
        else:
            batches = self._positioned(epoch, skip)
        # torch's collation makes new tensors, and what crosses from a worker is new.
        fresh = self._iterates_as_torch() and (self.is_torchs_collation() or workers)
        ready = whole_rows is not None
        converted = self._converted(batches, epoch, skip, copy=not fresh, ready=ready)
        return share(converted, self._peek_here)

    def _whole_rows(self) -> Callable[[Iterator[Any]], Iterator[Batch]] | None:
        """What gives the batches of index lists, if it can without taking rows apart.

        torch's own collation would, and stack them again.
        """
        found = None if self.loader.num_workers else table(self.loader.dataset)
        if found is None:
            return None
        return functools.partial(fetch, *found, ahead=self._has_torchs_samplers())

    def _explain(self, exception: Exception) -> None:
        if "exited unexpectedly" in str(exception):
            exception.add_note(_WORKER_RULES)

    def present_state(self) -> Any:
        if self.start_from is not None:
            return self.start_from
        generators = [_as_text(each.get_state()) for each in self._own_generators()]
        if self._own is None:
            return generators
        return {"generators": generators, "own": self._own.present()}

    def peek(self) -> Batch:
        before = self.present_state()
        try:
            return super().peek()
        finally:
            self._take_up(before)

    def _own_state(self) -> OwnState | None:
        return None if self.is_plain() else super()._own_state()

    def _take_up(self, start: Any) -> None:
        super()._take_up(start)
        state = getattr(self.loader, "next_iter_state", None)
        if state and state.get("_iterator_finished"):
            # From the end of an epoch, torchdata's loader starts two iterations, whose
            # draws would differ from those of one.
            with _Generators().active(), _safe_workers(self.loader):
                _started(self.loader, self.argument)
        texts = start["generators"] if isinstance(start, dict) else start
        for generator, text in zip(self._own_generators(), texts, strict=False):
            generator.set_state(_from_text(text))

    def sample(self) -> Batch | None:
        is_here = self.is_plain() and not self.loader.num_workers
        return self.peek() if is_here else None

    def _own_generators(self) -> list[Any]:
        owners = self.loader, *self._samplers()
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if g is not None}.values())

    def is_torchs_collation(self) -> bool:
        """Whether rows are put together by torch alone."""
        from torch.utils.data import default_collate

        return self.loader._auto_collation and self.loader.collate_fn is default_collate

    def is_plain(self) -> bool:
        """Whether batches are what the sampler's index lists say, and nothing else."""
        return self._iterates_as_torch() and not self._is_iterable_dataset()

    def _iterates_as_torch(self) -> bool:
        from torch.utils.data import DataLoader

        kind = type(self.loader)
        # torchdata's loader differs in that it can tell its state. By index lists it
        # needs none, but for parts of the user's that have one.
        return kind.__iter__ is DataLoader.__iter__ or (
            kind.__module__.startswith("torchdata.stateful_dataloader")
            and not any(map(_has_state, self._parts()))
        )

    def _is_iterable_dataset(self) -> bool:
        from torch.utils.data import IterableDataset

        return isinstance(self.loader.dataset, IterableDataset)

    @property
    def sure_batches(self) -> int | None:
        # Each of several workers makes a last batch of its own.
        is_a_guess = self._is_iterable_dataset() and self.loader.num_workers > 1
        return None if is_a_guess else self.num_batches

    def close(self) -> None:
        super().close()
        # Both lead to each other, and workers that last are ended by what frees them.
        self._plan.lists, self._workers = iter(()), None

    def _samplers(self) -> list[Any]:
        """The loader's samplers, and those that they sample from."""
        found: list[Any] = []
        waiting = [self.loader.sampler, self.loader.batch_sampler]
        while waiting:
            each = waiting.pop(0)
            if each is not None and all(each is not other for other in found):
                found.append(each)
                waiting.append(getattr(each, "sampler", None))
        return found

    def _has_torchs_samplers(self) -> bool:
        """Whether index lists do not depend on when they are drawn."""
        kinds = map(type, self._samplers())
        return all(
            kind in (list, tuple, range)
            or kind.__module__.startswith("torch.utils.data.")
            for kind in kinds
        )

    def _parts(self) -> tuple[Any, ...]:
        return self.loader.dataset, self.loader.sampler, self.loader.batch_sampler

    def _begun(self) -> Iterator[Any]:
        with _safe_workers(self.loader):
            return _started(self.loader, self.argument)

    def _by_index(self, lists: Iterator[Any], epoch: int, skip: int) -> Iterator[Any]:
        start = _seed_of(self.seed, epoch, *self.share.drawing)
        seeded = (
            ((start + batch_idx * _GOLDEN) % 2**63, indices)
            for batch_idx, indices in enumerate(lists, skip)
        )
        if self.loader.num_workers:
            return self._from_workers(seeded, epoch)
        return self._from_here(seeded)

    def _lists(self, epoch: int, skip: int) -> Iterator[Any]:
        return itertools.islice(self._index_lists(epoch), skip, None)

    def _index_lists(self, epoch: int) -> Iterator[Any]:
        """What the sampler draws, as `iter(loader)` has it draw: its own seed last."""
        import torch

        torchs = self._has_torchs_samplers()
        most = _DRAW_AT_ONCE if torchs else 1  # it may listen to how training goes
        seed = _seed_of(self.seed, epoch, *self.share.sampling)
        generators = _Generators(seed, torch_alone=torchs)
        with generators.active():
            lists = iter(self.loader._index_sampler)
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            drawn, error = taken(lists, most)
        while True:
            yield from drawn
            if error is not None:
                raise error
            if len(drawn) < most:
                return
            with generators.active():
                drawn, error = taken(lists, most)

    def _from_here(self, seeded: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        dataset = _Seeded(self.loader.dataset)
        fetch = dataset.fetch_many if self.loader._auto_collation else dataset.fetch
        collate = _collation(self.loader)
        # The user's generators come back at the end of the pass: to swap them around
        # every batch would cost 150 us, more than many a step.
        with _Generators().active():
            for seed, indices in seeded:
                _seed_generators(seed)
                yield collate(fetch(indices))

    def _from_workers(self, seeded: Iterator[tuple[int, Any]], epoch: int) -> Any:
        import torch

        if self._workers is None:
            self._workers = _with_workers(self.loader, self._plan)
        self._plan.lists = seeded
        self._workers.generator = torch.Generator().manual_seed(
            _seed_of(self.seed, epoch)
        )
        with _safe_workers(self._workers):
            return _started(self._workers, self.argument)


def _has_state(part: Any) -> bool:
    """Whether a part of a loader, not torchdata's own, can tell its state."""
    kind = type(part).__module__
    return hasattr(part, "load_state_dict") and not kind.startswith("torchdata.")


def table(dataset: Any) -> tuple[tuple[np.ndarray, ...], list[np.ndarray]] | None:
    """The columns of a `TensorDataset`, if it is one or a subset of one.

    And of subsets the indices, those of a subset of a subset first.
    """
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


def fetch(
    columns: tuple[np.ndarray, ...],
    subsets: list[np.ndarray],
    lists: Iterator[Any],
    ahead: bool = True,
) -> Iterator[tuple[np.ndarray, ...]]:
    """The rows of index lists, those of many small batches in one indexing operation.

    Args:
        columns: as `table` gives them.
        subsets: likewise.
        lists: of each batch.
        ahead: whether the lists of many batches may be asked for at once.
    """
    row_bytes = sum(column.nbytes for column in columns) // len(columns[0]) + 1
    lists = (each if hasattr(each, "__len__") else list(each) for each in lists)

    def split(parts: list[Any]) -> list[tuple[np.ndarray, ...]]:
        if not all(map(len, parts)):
            raise IndexError("the sampler gave an index list without indices")
        flat = itertools.chain.from_iterable(parts)
        indices = np.fromiter(map(operator.index, flat), np.int64)
        for subset in subsets:
            indices = subset.take(indices)
        rows = to_host(tuple([column.take(indices, axis=0) for column in columns]))
        batches, start = [], 0
        for part in parts:
            stop = start + len(part)
            batches.append(tuple([column[start:stop] for column in rows]))
            start = stop
        return batches

    for first in lists:
        many = max(1, _FETCH_AT_ONCE // (row_bytes * max(1, len(first))))
        parts, error = taken(lists, many - 1 if ahead else 0)
        try:
            yield from split([first, *parts])
        except (IndexError, TypeError, ValueError):  # at its own batch, others first
            for part in [first, *parts]:
                yield from split([part])
        if error is not None:
            raise error


def _collation(loader: Any) -> Callable[[Any], Any]:
    """The loader's, or what gives the same arrays as torch's in a third of the time."""
    from torch.utils.data import default_collate

    return _collate if loader.collate_fn is default_collate else loader.collate_fn


def _collate(rows: Any) -> Any:
    """torch's collation, but that NumPy arrays and numbers are stacked by NumPy."""
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils import collate as torchs

    stacked = (
        torchs.collate_numpy_array_fn,
        torchs.collate_numpy_scalar_fn,
        torchs.collate_float_fn,
        torchs.collate_int_fn,
    )
    functions: dict[Any, Any] = {
        kind: functools.partial(_stack, function) if function in stacked else function
        for kind, function in torchs.default_collate_fn_map.items()
    }
    batch = torchs.collate(rows, collate_fn_map=functions)
    return batch if get_worker_info() is None else jax.tree.map(_to_send, batch)


def _stack(torchs: Callable[..., Any], rows: Any, **options: Any) -> Any:
    """What `torchs` function gives, as an array; it has the word where rows differ."""
    first = rows[0]
    # Counted and not compared one by one in Python, which would take as long again.
    alike = [*map(type, rows)].count(type(first)) == len(rows)
    if alike and isinstance(first, np.ndarray):
        if first.dtype.isnative and first.dtype.kind in "biufc":
            shapes, dtypes = [*map(_SHAPE, rows)], [*map(_DTYPE, rows)]
            if shapes.count(first.shape) == dtypes.count(first.dtype) == len(rows):
                return np.stack(rows)
    elif alike and not isinstance(first, np.object_):
        return np.asarray(rows)
    return torchs(rows, **options)


def _to_send(leaf: Any) -> Any:
    """A leaf as it crosses fastest from a worker."""
    import torch

    if isinstance(leaf, np.ndarray) and leaf.nbytes > _PIPE_BYTES:
        return torch.from_numpy(leaf).share_memory_()
    if type(leaf) is torch.Tensor and leaf.nbytes <= _PIPE_BYTES:
        with contextlib.suppress(TypeError):  # bfloat16
            return leaf.numpy()
    return leaf


_WORKER_RULES = (
    "Workers are started by 'forkserver', since a fork of JAX's threads can deadlock."
    " So the dataset, `collate_fn` and `worker_init_fn` must be importable: no"
    " lambdas, nothing defined in a function or a notebook; files and locks must be"
    " opened in the worker, when first used; and a script must train"
    ' under `if __name__ == "__main__":`. Otherwise use num_workers=0 or, if no worker'
    ' touches JAX, multiprocessing_context="fork". Workers that run out of memory are'
    " killed, too."
)


def _started(loader: Any, argument: str) -> Iterator[Any]:
    """`iter(loader)`, with help where its parts can't be sent to workers."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # ours says more
            with sharing_arrays():
                return iter(loader)
    except Exception as error:
        # Any can come of pickling; a sampler's own errors come through here, too.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for frame in frames:
            # What is half begun must end now: the garbage collector would close its
            # pipes, and then have it close them again, or files that are not its own.
            end = getattr(frame.f_locals.get("self"), "_shutdown_workers", None)
            if end is not None:
                with contextlib.suppress(AttributeError):  # of parts it has not yet
                    end()
        if all(frame.f_code is not reduction.dump.__code__ for frame in frames):
            raise
        raise TypeError(
            f"`{argument}` can't be sent to its workers: {error}. {_WORKER_RULES}"
        ) from error


class _Plan:
    """A batch sampler that gives what it is told, with the seed of each batch."""

    lists: Iterator[tuple[int, Any]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self.lists


class _Seeded:
    """A dataset whose random draws are decided by the batch, in whichever worker."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitem__(self, seeded: tuple[int, Any]) -> Any:
        seed, index = seeded
        _seed_generators(seed)
        return self.fetch(index)

    def __getitems__(self, seeded: tuple[int, Any]) -> Any:
        seed, indices = seeded
        _seed_generators(seed)
        return self.fetch_many(indices)

    def fetch(self, index: Any) -> Any:
        return self.dataset[index]

    def fetch_many(self, indices: Any) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[i] for i in indices]


class _WorkerInit:
    """Runs the user's `worker_init_fn`, which sees the user's dataset, unwrapped."""

    def __init__(self, worker_init_fn: Any):
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        from torch.utils.data import get_worker_info

        # Ctrl-C and, from SLURM for one, SIGTERM go to the whole process group; they
        # are the trainer's to answer, which may need a batch more to come to a stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _end_soon)
        info: Any = get_worker_info()
        if isinstance(info.dataset, _Seeded):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _end_soon(number: int, frame: Any) -> None:
    signal.alarm(20)


class _Generators:
    """A set of states for the global generators of torch, NumPy and Python.

    Args:
        seed: where the set starts; without it, at the current states.
        torch_alone: whether nothing draws from the others, which take a while to save.
    """

    def __init__(self, seed: int | None = None, *, torch_alone: bool = False):
        self._seed = seed
        self._torch_alone = torch_alone
        self.states: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Puts this set in place, and the user's back afterwards."""
        users = _generator_states(self._torch_alone)
        if self.states is not None:
            _set_generator_states(self.states)
        elif self._seed is not None:
            _seed_generators(self._seed, self._torch_alone)
        try:
            yield
        finally:
            self.states = _generator_states(self._torch_alone)
            _set_generator_states(users)


def _as_text(state: Any) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _generator_states(torch_alone: bool = False) -> tuple[Any, ...]:
    import torch

    if torch_alone:
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_generator_states(states: tuple[Any, ...]) -> None:
    import torch

    torch.set_rng_state(states[0])
    if len(states) > 1:
        np.random.set_state(states[1])
        random.setstate(states[2])


def _seed_generators(seed: int, torch_alone: bool = False) -> None:
    import torch

    torch.default_generator.manual_seed(seed)
    if not torch_alone:
        np.random.seed(seed % 2**32)
        random.seed(seed)


def _seed_of(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def _with_workers(loader: Any, plan: _Plan) -> Any:
    """A loader like `loader` that fetches what `plan` says."""
    from torch.utils.data import DataLoader

    sampling: dict[str, Any] = {"batch_sampler": plan}
    if not loader._auto_collation:
        sampling = {"sampler": plan, "batch_size": None}
    # pin_memory is left out: it serves torch's own copies to a GPU.
    return DataLoader(
        _Seeded(loader.dataset),  # type: ignore[arg-type]
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=_collation(loader),
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


@contextlib.contextmanager
def _safe_workers(loader: Any) -> Iterator[None]:
    """Starts worker processes deaf to Ctrl-C, and not by "fork" where that is default.

    A fork of a process that runs JAX's threads can deadlock in the child. A loader that
    names its own `multiprocessing_context` keeps it. The fork server imports libraries
    once, so that workers start in tenths of a second.
    """
    if not loader.num_workers:
        yield
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a data loader worker is running the training script itself: worker"
            " processes import the script, so the part that trains must stand under"
            ' `if __name__ == "__main__":`.'
        )
    users = loader.multiprocessing_context, loader.worker_init_fn
    default = multiprocessing.get_start_method(allow_none=True) or "fork"
    available = "forkserver" in multiprocessing.get_all_start_methods()
    if users[0] is None and default == "fork" and available:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *_libraries(_modules(loader))])
        loader.multiprocessing_context = context
    loader.worker_init_fn = _WorkerInit(loader.worker_init_fn)
    try:
        yield
    finally:
        loader.worker_init_fn = users[1]
        if not loader.persistent_workers:
            loader.multiprocessing_context = users[0]


def _modules(loader: Any) -> frozenset[str]:
    """What a worker starts from: the script, the dataset and the loader's functions."""
    from torch.utils.data import Subset

    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    parts = dataset, loader.collate_fn, loader.worker_init_fn
    return frozenset(["__main__", *map(_module_of, parts)])


@functools.cache
def _libraries(modules: frozenset[str]) -> list[str]:
    """The installed modules that a worker would import, each epoch anew.

    Those of `modules`, and of the user's modules that these use. Not the user's modules
    themselves: they may compute as they are imported, and the server must have no
    threads when it is forked.
    """
    installed = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
    standard = sysconfig.get_path("stdlib")
    seen, waiting, found = set(), set(modules), set()
    while waiting := (waiting - seen) & set(sys.modules):
        name = waiting.pop()
        seen.add(name)
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(installed):
            found.add(name)
        elif not file.startswith(standard):
            values = list(vars(sys.modules[name]).values())
            waiting |= set(map(_module_of, values))
    return ["torch.utils.data", *sorted(found)]


def _module_of(value: Any) -> str:
    """The module that a value is, or that its function or class is from."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    named = isinstance(value, type | types.FunctionType)
    return str(getattr(value if named else type(value), "__module__", ""))
