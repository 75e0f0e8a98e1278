"""Worker processes of torch's `DataLoader` that fetch our index lists."""

import contextlib
import functools
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Final

import jax
import numpy as np

from ..basics.process import refuse_to_train_in_a_worker
from .random_states import seed_generators

WORKER_RULES = (
    "Workers are started by 'forkserver', since a fork of JAX's threads can deadlock."
    " So the dataset, `collate_fn` and `worker_init_fn` must be importable: no"
    " lambdas, nothing defined in a function or a notebook (put it into a module);"
    " files and locks must be opened in the worker, when first used; and a script"
    ' must train under `if __name__ == "__main__":`. Otherwise use num_workers=0 or,'
    ' if no worker touches JAX, multiprocessing_context="fork". Workers that run out'
    " of memory are killed, too."
)


_ALIGNMENT: Final = 64
"""Bytes at a multiple of which an array begins in the memory of workers."""


class SeededBatchSampler:
    """A batch sampler that yields `lists` of indices, each with a seed."""

    lists: Iterator[tuple[int, Any]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self.lists


class SeededDataset:
    """A dataset whose random draws depend on the batch, and not on the worker.

    On Linux its NumPy arrays reach the workers in memory that all of them map. Through
    a pipe they would take 2 ms per MB, for each worker and in each epoch.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self._arrays: list[np.ndarray] = []
        self._memory: Any = None  # a copy of the arrays, while workers are started

    def __reduce__(self) -> Any:
        stream, buffers = io.BytesIO(), []
        keep = buffers.append if hasattr(os, "memfd_create") else None
        ForkingPickler(stream, 5, True, keep).dump(self.dataset)
        if not buffers:
            return _unpickle_dataset, (stream.getvalue(), None, [])
        arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        places, known = (
            [(array.ctypes.data, array.size) for array in several]
            for several in (arrays, self._arrays)
        )
        if self._memory is None or places != known:  # once for all workers
            self.close()
            self._arrays, self._memory = arrays, _copy_to_memory(arrays)
        memory = DupFd(self._memory.fileno())
        sizes = [array.size for array in arrays]
        return _unpickle_dataset, (stream.getvalue(), memory, sizes)

    def close(self) -> None:
        """Frees this process's copy of the arrays; workers keep theirs."""
        if self._memory is not None:
            self._memory.close()
        self._arrays, self._memory = [], None

    def __getitem__(self, seeded: tuple[int, Any]) -> Any:
        seed, index = seeded
        seed_generators(seed)
        return self.dataset[index]

    def __getitems__(self, seeded: tuple[int, Any]) -> Any:
        seed, indices = seeded
        seed_generators(seed)
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[i] for i in indices]


def _copy_to_memory(arrays: list[np.ndarray]) -> Any:
    """Returns a file in memory with the bytes of all arrays."""
    memory = open(os.memfd_create("dataset"), "w+b", buffering=0)
    for array in arrays:
        memory.seek(-memory.tell() % _ALIGNMENT, os.SEEK_CUR)
        memory.write(array.data)
    return memory


def _unpickle_dataset(data: bytes, memory: Any, sizes: list[int]) -> SeededDataset:
    jax.config.update("jax_platforms", "cpu")  # a worker must not open a GPU
    buffers, start = [], 0
    if memory is not None:
        # A page that a worker writes to is copied, as after a fork.
        with open(memory.detach(), "rb") as file:
            shared = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        for size in sizes:
            start += -start % _ALIGNMENT
            buffers.append(shared[start : start + size])
            start += size
    return SeededDataset(pickle.loads(data, buffers=buffers))


def make_worker_loader(loader: Any, lists: SeededBatchSampler) -> Any:
    """Returns a loader like `loader` that fetches the index lists of `lists`."""
    from torch.utils.data import DataLoader

    sampling: dict[str, Any] = {"batch_sampler": lists}
    if not loader._auto_collation:
        sampling = {"sampler": lists, "batch_size": None}
    # pin_memory is left out: it serves torch's own copies to a GPU.
    return DataLoader(
        SeededDataset(loader.dataset),  # type: ignore[arg-type]
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def start_iterator(loader: Any, argument: str) -> Iterator[Any]:
    """Returns `iter(loader)`, whose workers are not forked from this process.

    A fork of JAX's threads can deadlock. A loader with a context of its own keeps it.
    """
    if not loader.num_workers:
        return iter(loader)
    refuse_to_train_in_a_worker()
    users = loader.multiprocessing_context, loader.worker_init_fn
    default = multiprocessing.get_start_method(allow_none=True) or "fork"
    if users[0] is None and default in ("fork", "forkserver"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch.utils.data"])
        loader.multiprocessing_context = context
    loader.worker_init_fn = functools.partial(_init_worker, users[1])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # our note says more
            return iter(loader)
    except Exception as error:  # pickling runs code of the user
        for frame, _ in traceback.walk_tb(error.__traceback__):
            # An incomplete iterator is ended now. The garbage collector would close its
            # pipes twice, and their descriptors may belong to another file by then.
            shut_down = getattr(frame.f_locals.get("self"), "_shutdown_workers", None)
            if shut_down is not None:
                with contextlib.suppress(AttributeError):  # it lacks some parts
                    shut_down()
        note = f"while the workers of `{argument}` were being started"
        error.add_note(f"{note}. {WORKER_RULES}")
        raise
    finally:
        loader.worker_init_fn = users[1]
        if isinstance(loader.dataset, SeededDataset):
            loader.dataset.close()
        if not loader.persistent_workers:
            loader.multiprocessing_context = users[0]


def _init_worker(users: Any, worker_id: int) -> None:
    """Runs the user's `worker_init_fn`, which gets the user's dataset."""
    jax.config.update("jax_platforms", "cpu")
    from torch.utils.data import get_worker_info

    # Ctrl-C and, from SLURM, SIGTERM go to the full process group. The trainer handles
    # them, and may need one more batch to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))  # it ends within 20 s
    threading.Thread(target=_exit_with_trainer, name="jaxdp watch", daemon=True).start()

    info: Any = get_worker_info()
    if isinstance(info.dataset, SeededDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
    if users is not None:
        users(worker_id)


def _exit_with_trainer() -> None:
    """Ends this process when the trainer has ended, for any reason.

    torch's workers check for another parent, but theirs is the fork server, which lives
    as long as they do.
    """
    if (trainer := multiprocessing.parent_process()) is not None:
        trainer.join()
        os._exit(1)
