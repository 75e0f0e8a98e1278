"""Worker processes of torch's `DataLoader` that fetch our index lists."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, Final

import jax

from ..basics.process import refuse_to_train_in_a_worker
from .conversion import as_numpy
from .random_states import seed_generators
from .shared_arrays import WorkerContext

WORKER_RULES = (
    "Workers are started by 'forkserver', since a fork of JAX's threads can deadlock."
    " So the dataset, `collate_fn` and `worker_init_fn` must be importable: no"
    " lambdas, nothing defined in a function or a notebook (put it into a module);"
    " files and locks must be opened in the worker, when first used; and a script"
    ' must train under `if __name__ == "__main__":`. Otherwise use num_workers=0 or,'
    ' if no worker touches JAX, multiprocessing_context="fork". Workers that run out'
    " of memory are killed, too."
)


_SMALL_BATCH: Final = 2**19
_SMALL_TENSOR: Final = 2**16
"""The bytes up to which copies of a batch, or of a tensor of a larger one, are faster
than shared memory."""


class SeededBatchSampler:
    """A batch sampler that yields `lists` of indices, each with a seed."""

    lists: Iterator[tuple[int, Any]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self.lists


class SeededDataset:
    """A dataset whose random draws depend on the batch, and not on the worker."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __reduce__(self) -> Any:
        # A worker calls the function first, and unpickles the dataset after that. JAX
        # must be on the CPU by then, since the dataset may contain JAX's arrays.
        return _unpickle_dataset, (), vars(self)

    def __getitem__(self, seeded: tuple[int, Any]) -> Any:
        seed, index = seeded
        seed_generators(seed)
        return self.dataset[index]

    def __getitems__(self, seeded: tuple[int, Any]) -> Any:
        seed, indices = seeded
        seed_generators(seed)
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[i] for i in indices]


class SmallArrays:
    """A `collate_fn` whose batches have their small tensors as NumPy arrays.

    torch sends a tensor as a file of shared memory, and the trainer has to ask the
    worker for each. A copy of 400 kB through the pipe took 1.7 ms instead of 2.2, and
    an eighth less processor time.
    """

    def __init__(self, collate: Any):
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        is_small = sum(map(_count_bytes, jax.tree.leaves(batch))) <= _SMALL_BATCH
        limit = _SMALL_BATCH if is_small else _SMALL_TENSOR

        def convert(leaf: Any) -> Any:
            is_copied = 0 < _count_bytes(leaf) <= limit
            array = as_numpy(leaf) if is_copied else None
            return leaf if array is None else array

        return jax.tree.map(convert, batch)


def _count_bytes(leaf: Any) -> int:
    """Returns the bytes of a tensor; 0 for other leaves."""
    is_tensor = isinstance(leaf, sys.modules["torch"].Tensor)
    return leaf.numel() * leaf.element_size() if is_tensor else 0


def _unpickle_dataset() -> SeededDataset:
    jax.config.update("jax_platforms", "cpu")  # a worker must not open a GPU
    return SeededDataset(None)


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
        collate_fn=SmallArrays(loader.collate_fn),
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
    context, users = None, (loader.multiprocessing_context, loader.worker_init_fn)
    default = multiprocessing.get_start_method(allow_none=True) or "fork"
    if users[0] is None and default in ("fork", "forkserver"):
        context = WorkerContext()
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
        if context is not None:
            context.close()
        loader.multiprocessing_context, loader.worker_init_fn = users


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
