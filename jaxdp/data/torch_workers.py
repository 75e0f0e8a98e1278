"""Worker processes of torch's `DataLoader` that fetch given index lists."""

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
from multiprocessing import reduction
from typing import Any

import jax

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


class SeededLists:
    """A batch sampler that yields the index lists it is given, each with a seed."""

    lists: Iterator[tuple[int, Any]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self.lists


class Seeded:
    """A dataset whose random draws are decided by the batch, in whichever worker."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __reduce__(self) -> Any:
        # The function is called before the dataset is unpickled, which may hold arrays
        # of JAX's.
        return _unpickle_seeded, (), vars(self)

    def __getitem__(self, seeded: tuple[int, Any]) -> Any:
        seed, index = seeded
        seed_generators(seed)
        return self.dataset[index]

    def __getitems__(self, seeded: tuple[int, Any]) -> Any:
        seed, indices = seeded
        seed_generators(seed)
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if many else [self.dataset[i] for i in indices]


def _unpickle_seeded() -> Seeded:
    jax.config.update("jax_platforms", "cpu")  # a worker must not open a GPU
    return Seeded(None)


def with_workers(loader: Any, lists: SeededLists) -> Any:
    """Returns a loader like `loader` that fetches the index lists of `lists`."""
    from torch.utils.data import DataLoader

    sampling: dict[str, Any] = {"batch_sampler": lists}
    if not loader._auto_collation:
        sampling = {"sampler": lists, "batch_size": None}
    # pin_memory is left out: it serves torch's own copies to a GPU.
    return DataLoader(
        Seeded(loader.dataset),  # type: ignore[arg-type]
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def start(loader: Any, argument: str) -> Iterator[Any]:
    """Returns `iter(loader)`, whose workers are not forked from this process.

    A fork of JAX's threads can deadlock. A loader that names its own context keeps it.
    """
    if not loader.num_workers:
        return iter(loader)
    refuse_to_train_in_a_worker()
    users = loader.multiprocessing_context, loader.worker_init_fn
    default = multiprocessing.get_start_method(allow_none=True) or "fork"
    if users[0] is None and default in ("fork", "forkserver"):
        _check_is_importable(loader, argument)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch.utils.data"])  # once for all
        loader.multiprocessing_context = context
    loader.worker_init_fn = functools.partial(_init_worker, users[1])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error")  # ours says more
            return iter(loader)
    except Exception as error:
        # Pickling runs code of the user's; a sampler's errors come through here, too.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for frame in frames:
            # A half-begun iterator is ended now: left to the garbage collector, its
            # queues close their pipes twice, by then maybe another file's.
            end = getattr(frame.f_locals.get("self"), "_shutdown_workers", None)
            if end is not None:
                with contextlib.suppress(AttributeError):  # of parts not made yet
                    end()
        if isinstance(error, BrokenPipeError | ConnectionResetError | EOFError):
            raise RuntimeError(
                f"`{argument}`: its workers ended when they were started. They import"
                ' the script, which must train under `if __name__ == "__main__":`; what'
                " they have said is above."
            ) from error
        if all(frame.f_code is not reduction.dump.__code__ for frame in frames):
            raise
        raise TypeError(
            f"`{argument}` can't be sent to its workers: {error}. {WORKER_RULES}"
        ) from error
    finally:
        loader.worker_init_fn = users[1]
        if not loader.persistent_workers:
            loader.multiprocessing_context = users[0]


def _check_is_importable(loader: Any, argument: str) -> None:
    """Raises for what is defined in a notebook, which no other process can import."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) or getattr(main, "__spec__", None):
        return
    dataset = getattr(loader.dataset, "dataset", loader.dataset)  # of `Seeded`
    for part in (type(dataset), loader.collate_fn, loader.worker_init_fn):
        if getattr(part, "__module__", None) == "__main__":
            raise TypeError(
                f"`{argument}` has {part.__qualname__}, which is defined in this"
                " session, where its workers can't import it: put it into a module, or"
                " use num_workers=0."
            )


def _init_worker(users: Any, worker_id: int) -> None:
    """Runs the user's `worker_init_fn`, which sees the user's dataset, unwrapped."""
    jax.config.update("jax_platforms", "cpu")
    from torch.utils.data import get_worker_info

    # Ctrl-C and, from SLURM for one, SIGTERM go to the whole process group; they are
    # the trainer's to answer, which may need a batch more to come to a stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(20))  # to end soon
    threading.Thread(target=_end_with_trainer, name="jaxdp watch", daemon=True).start()

    info: Any = get_worker_info()
    if isinstance(info.dataset, Seeded):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
    if users is not None:
        users(worker_id)


def _end_with_trainer() -> None:
    """Ends this process with the trainer, however that ended.

    torch's workers look whether they have another parent, but theirs is the fork
    server, which stays as long as they do.
    """
    if (trainer := multiprocessing.parent_process()) is not None:
        trainer.join()
        os._exit(1)
