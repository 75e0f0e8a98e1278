"""Worker processes of torch's `DataLoader` that fetch the index lists they are told.

They put rows together as torch's collation does, in a third of the time.
"""

import collections
import contextlib
import functools
import io
import multiprocessing
import operator
import os
import pickle
import signal
import sys
import sysconfig
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any

import jax
import numpy as np

from ..basics.process import refuse_to_train_in_a_worker
from .random_states import seed_generators

PIPE_BYTES = 2**20
"""Arrays up to so large cross from a worker faster in its pipe than in shared memory,
which has to be set up and mapped each time."""

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")

WORKER_RULES = (
    "Workers are started by 'forkserver', since a fork of JAX's threads can deadlock."
    " So the dataset, `collate_fn` and `worker_init_fn` must be importable: no"
    " lambdas, nothing defined in a function (in a notebook they may be, with"
    " cloudpickle); files and locks must be opened in the worker, when first used; and"
    " a script must train"
    ' under `if __name__ == "__main__":`. Otherwise use num_workers=0 or, if no worker'
    ' touches JAX, multiprocessing_context="fork". Workers that run out of memory are'
    " killed, too."
)


def started(loader: Any, argument: str) -> Iterator[Any]:
    """`iter(loader)`, with help where its parts can't be sent to workers."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # ours says more
            batches = iter(loader)
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
            f"`{argument}` can't be sent to its workers: {error}. {WORKER_RULES}"
        ) from error
    _widen_pipe(batches)
    return batches


def _widen_pipe(batches: Any) -> None:
    """Has whole batches fit into the pipe that they come through, where this is Linux.

    By default 64 KB fit; loading batches of 400 KB took 1.6 times as long.
    """
    queue: Any = getattr(batches, "_worker_result_queue", None)
    with contextlib.suppress(ImportError, AttributeError, OSError):  # may be forbidden
        import fcntl

        fcntl.fcntl(queue._reader.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class SeededLists:
    """A batch sampler that gives what it is told, with the seed of each batch."""

    lists: Iterator[tuple[int, Any]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self.lists


class Seeded:
    """A dataset whose random draws are decided by the batch, in whichever worker."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitem__(self, seeded: tuple[int, Any]) -> Any:
        seed, index = seeded
        seed_generators(seed)
        return self.dataset[index]

    def __getitems__(self, seeded: tuple[int, Any]) -> Any:
        seed, indices = seeded
        seed_generators(seed)
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[i] for i in indices]


def _init_worker(users: Any, worker_id: int) -> None:
    """Runs the user's `worker_init_fn`, which sees the user's dataset, unwrapped."""
    jax.config.update("jax_platforms", "cpu")  # it must not open a GPU
    from torch.utils.data import get_worker_info

    # Ctrl-C and, from SLURM for one, SIGTERM go to the whole process group; they are
    # the trainer's to answer, which may need a batch more to come to a stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))  # to end soon
    _end_with_the_trainer()

    info: Any = get_worker_info()
    if isinstance(info.dataset, Seeded):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
    if users is not None:
        users(worker_id)


def _end_with_the_trainer() -> None:
    """Has this process end when the one that it works for is gone, however that died.

    torch's workers look whether they have another parent, but theirs is the fork
    server, which stays. A pipe that only the trainer holds open tells at once.
    """
    trainer = multiprocessing.parent_process()
    if trainer is None:
        return

    def watch() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=watch, name="jaxdp watch", daemon=True).start()


def with_workers(loader: Any, lists: SeededLists) -> Any:
    """A loader like `loader` that fetches the index lists of `lists`."""
    from torch.utils.data import DataLoader

    sampling: dict[str, Any] = {"batch_sampler": lists}
    if not loader._auto_collation:
        sampling = {"sampler": lists, "batch_size": None}
    # pin_memory is left out: it serves torch's own copies to a GPU.
    return DataLoader(
        Seeded(loader.dataset),  # type: ignore[arg-type]
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=collation(loader),
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


@contextlib.contextmanager
def safe_workers(loader: Any) -> Iterator[None]:
    """Starts worker processes deaf to Ctrl-C, and not by "fork" where that is default.

    A fork of JAX's threads can deadlock; a loader that names its own context keeps it.
    The fork server imports libraries once, so that workers start in tenths of a second.
    """
    if not loader.num_workers:
        yield
        return
    refuse_to_train_in_a_worker()
    users = loader.multiprocessing_context, loader.worker_init_fn
    default = multiprocessing.get_start_method(allow_none=True) or "fork"
    available = "forkserver" in multiprocessing.get_all_start_methods()
    if users[0] is None and default in ("fork", "forkserver") and available:
        dataset = getattr(loader.dataset, "dataset", loader.dataset)  # of `Seeded`
        parts = dataset, loader.collate_fn, loader.worker_init_fn
        modules = {*map(_module_of, parts)}
        context = _context("__main__" in modules)
        context.set_forkserver_preload(
            [__name__, *_libraries(frozenset({"__main__", *modules}))]
        )
        loader.multiprocessing_context = context
    loader.worker_init_fn = functools.partial(_init_worker, loader.worker_init_fn)
    try:
        yield
    finally:
        loader.worker_init_fn = users[1]
        if not loader.persistent_workers:
            loader.multiprocessing_context = users[0]


def _context(has_main: bool) -> Any:
    """A fork server whose workers leave GPUs alone before they unpack their dataset,
    which may hold arrays of JAX's.

    Args:
        has_main: whether they need what the session defines. In a notebook they are
            sent it.
    """
    context: Any = multiprocessing.get_context("forkserver")
    pickler = _by_value(has_main) if _has_no_file() else None

    class Process(context.Process):
        def __reduce__(self) -> Any:
            if pickler is None:
                return _empty_process, (), vars(self)
            file = io.BytesIO()
            by_value = pickler(file)
            by_value.dump(vars(self))
            by_value.dump(pickler.classes)
            return _received, (file.getvalue(),)

    return type("Context", (type(context),), {"Process": Process})()


def _empty_process() -> Any:
    """What a worker is unpacked into."""
    jax.config.update("jax_platforms", "cpu")
    return object.__new__(multiprocessing.get_context("forkserver").Process)


def _has_no_file() -> bool:
    """Whether what is being run can't be imported by another process."""
    main = sys.modules["__main__"]
    return not getattr(main, "__file__", None) and not getattr(main, "__spec__", None)


def _by_value(is_needed: bool) -> Any:
    """What pickles definitions of a notebook's cells; None if nothing does."""
    try:
        from cloudpickle import Pickler as ByValue
    except ImportError:
        if not is_needed:
            return None
        raise TypeError(
            "the dataset, `collate_fn` or `worker_init_fn` is defined in this session,"
            " which workers can't import, and cloudpickle, which could send it, is not"
            " installed. Run `pip install cloudpickle`, put the definition into a"
            " module, or use num_workers=0."
        ) from None

    class Pickler(ByValue):
        reducers: Any = reduction.ForkingPickler(io.BytesIO()).dispatch_table  # pyright: ignore
        others: Any = ByValue.dispatch_table
        dispatch_table = collections.ChainMap(reducers, others)
        classes: list[type] = []

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, type) and value.__module__ == "__main__":
                self.classes.append(value)
            return super().reducer_override(value)

    return Pickler


def _received(content: bytes) -> Any:
    """The process that was sent."""
    process = _empty_process()
    unpickler = pickle.Unpickler(io.BytesIO(content))
    vars(process).update(unpickler.load())
    for cls in unpickler.load():  # named tuples, say, that it sends back by name
        setattr(sys.modules["__main__"], cls.__name__, cls)
    return process


@functools.cache
def _libraries(modules: frozenset[str]) -> list[str]:
    """The installed modules that a worker would import, each epoch anew.

    Not the user's modules: they may compute as they are imported, and the server must
    have no threads when it is forked.
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
            with warnings.catch_warnings():  # what is deprecated may say so when asked
                warnings.simplefilter("ignore")
                waiting |= set(map(_module_of, values))
    return ["torch.utils.data", *sorted(found)]


def _module_of(value: Any) -> str:
    """The module that a value is, or that its function or class is from."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    named = isinstance(value, type | types.FunctionType)
    return str(getattr(value if named else type(value), "__module__", ""))


def collation(loader: Any) -> Callable[[Any], Any]:
    """The loader's `collate_fn`; for torch's own what gives the same arrays, sooner."""
    from torch.utils.data import default_collate

    return _collate if loader.collate_fn is default_collate else loader.collate_fn


def _collate(rows: Any) -> Any:
    """torch's collation, but that NumPy arrays and numbers are stacked by NumPy."""
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils import collate as torchs

    names = "numpy_array", "numpy_scalar", "float", "int"
    stacked = [getattr(torchs, f"collate_{name}_fn") for name in names]
    functions: dict[Any, Any] = {
        kind: functools.partial(_stack, function) if function in stacked else function
        for kind, function in torchs.default_collate_fn_map.items()
    }
    batch = torchs.collate(rows, collate_fn_map=functions)
    return batch if get_worker_info() is None else jax.tree.map(_to_send, batch)


def _stack(torchs: Callable[..., Any], rows: Any, **options: Any) -> Any:
    """What `torchs` function gives, as an array; it has the word where rows differ."""
    first = rows[0]
    # Counted, since to compare one by one in Python would take as long again.
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

    if isinstance(leaf, np.ndarray) and leaf.nbytes > PIPE_BYTES:
        return torch.from_numpy(leaf).share_memory_()
    if type(leaf) is torch.Tensor and leaf.nbytes <= PIPE_BYTES:
        with contextlib.suppress(TypeError):  # bfloat16
            return leaf.numpy()
    return leaf
