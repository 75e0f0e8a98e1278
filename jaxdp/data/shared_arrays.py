"""Workers that map the large NumPy arrays of their dataset, instead of copying them.

A process of the fork server gets its dataset through a pipe: each worker, in every
epoch, a copy of its own. Here the arrays are written once to a file in memory, and all
workers map it, copy-on-write, as processes that are forked share their parent's memory.
"""

import gc
import io
import mmap
import os
import pickle
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Final

import numpy as np

_MIN_BYTES: Final = 2**16
"""Smaller arrays are pickled."""

_ALIGNMENT: Final = 64


class SharedArrays:
    """A file in memory with copies of arrays."""

    def __init__(self) -> None:
        self._file = -1
        self._size = 0
        # The arrays stay alive until `close`, so that no other gets the same id.
        self._places: dict[int, tuple[np.ndarray, int]] = {}

    def add(self, array: np.ndarray) -> int:
        """Returns where in the file a contiguous array is; the first call copies it.

        Raises:
            OSError: if the file can't be made or written.
        """
        if id(array) not in self._places:
            if self._file < 0:
                self._file = os.memfd_create("arrays")
            data = array.ravel("K").view(np.uint8)
            start = -(-self._size // _ALIGNMENT) * _ALIGNMENT
            done = 0
            while done < data.size:  # a call writes 2 GiB at most
                done += os.pwrite(self._file, data[done:].data, start + done)
            self._size = start + done
            self._places[id(array)] = array, start
        return self._places[id(array)][1]

    def close(self) -> None:
        """Closes the file, whose memory is freed as soon as no worker maps it."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size = -1, 0
        self._places.clear()

    def __reduce__(self) -> Any:
        return _map_file, (DupFd(self._file),)


def _map_file(file: Any) -> mmap.mmap:
    """Maps the file in a worker. What a worker writes there, only it can see."""
    fd = file.detach()
    memory = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_COPY)
    os.close(fd)
    return memory


def _make_array(
    memory: mmap.mmap, start: int, shape: tuple[int, ...], dtype: np.dtype, order: Any
) -> np.ndarray:
    return np.ndarray(shape, dtype, memory, start, order=order)


class _Pickler(ForkingPickler):
    """Pickles as multiprocessing does, but puts large arrays into a file."""

    def __init__(self, file: io.BytesIO, arrays: SharedArrays):
        super().__init__(file)
        self._arrays = arrays

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not np.ndarray
            or value.nbytes < _MIN_BYTES
            or value.dtype.hasobject
            or not value.flags.forc
            or not hasattr(os, "memfd_create")
        ):
            return NotImplemented
        try:
            start = self._arrays.add(value)
        except OSError:
            return NotImplemented
        order = "C" if value.flags.c_contiguous else "F"
        parts = self._arrays, start, value.shape, value.dtype, order
        return _make_array, parts


class _Worker(ForkServerProcess):
    """A process to which large arrays are sent in a file.

    It is pickled as a whole: a dataset and a `collate_fn` that refers to it still do.
    """

    arrays: SharedArrays

    def __reduce__(self) -> Any:
        state, pickled = vars(self).copy(), io.BytesIO()
        _Pickler(pickled, state.pop("arrays")).dump(state)
        return _unpickle_worker, (pickled.getvalue(),)


def _unpickle_worker(pickled: bytes) -> _Worker:
    # A garbage collection would write to, and so copy, all pages with objects that the
    # fork server has imported: half a second.
    gc.freeze()
    worker = _Worker.__new__(_Worker)
    vars(worker).update(pickle.loads(pickled))
    return worker


class WorkerContext(ForkServerContext):
    """Starts the workers of a loader, by the fork server."""

    def __init__(self) -> None:
        self._arrays = SharedArrays()

    def Process(self, *args: Any, **options: Any) -> _Worker:  # type: ignore[override]
        """Returns a worker that is not started."""
        worker = _Worker(*args, **options)
        worker.arrays = self._arrays
        return worker

    def close(self) -> None:
        """Frees what the workers do not map."""
        self._arrays.close()
