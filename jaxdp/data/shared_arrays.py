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
from collections.abc import Sequence
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
        self.file = -1
        self.size = 0
        self._places: dict[tuple[int, int], slice] = {}
        # They stay alive, so that no other array gets the same address.
        self._arrays: list[np.ndarray] = []

    def add(self, buffer: pickle.PickleBuffer) -> slice:
        """Returns the place of a buffer's bytes, which are copied at the first call."""
        array = np.frombuffer(buffer.raw(), np.uint8)
        key = array.ctypes.data, array.nbytes
        if self.file < 0:
            self.file = os.memfd_create("arrays")
        if key not in self._places:
            start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
            self.size = start + array.nbytes
            self._places[key] = slice(start, self.size)
            self._arrays.append(array)
            while start < self.size:  # a call writes 2 GiB at most
                start += os.pwrite(self.file, array[start - self.size :].data, start)
        return self._places[key]

    def close(self) -> None:
        """Closes the file, whose memory is freed as soon as no worker maps it."""
        if self.file >= 0:
            os.close(self.file)


class _Worker(ForkServerProcess):
    """A process to which large arrays are sent in a file.

    It is pickled as a whole: a dataset and a `collate_fn` that refers to it still do.
    """

    arrays: SharedArrays

    def __reduce__(self) -> Any:
        places = []

        def is_pickled(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _MIN_BYTES or not hasattr(os, "memfd_create"):
                return True
            places.append(self.arrays.add(buffer))
            return False

        pickled = io.BytesIO()
        ForkingPickler(pickled, 5, True, is_pickled).dump(
            {name: value for name, value in vars(self).items() if name != "arrays"}
        )
        file = DupFd(self.arrays.file) if places else None
        return _unpickle_worker, (pickled.getvalue(), file, self.arrays.size, places)


def _unpickle_worker(
    pickled: bytes, file: Any, size: int, places: Sequence[slice]
) -> _Worker:
    # A garbage collection would write to, and so copy, all pages with objects that the
    # fork server has imported: half a second.
    gc.freeze()
    buffers = []
    if file is not None:
        fd = file.detach()
        memory = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
        os.close(fd)
        buffers = [memory[place] for place in places]
    worker = _Worker.__new__(_Worker)
    vars(worker).update(pickle.loads(pickled, buffers=buffers))
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
        self._arrays = SharedArrays()
