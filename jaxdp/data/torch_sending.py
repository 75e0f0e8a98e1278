"""Large arrays for worker processes: one copy for all that are started together."""

import contextlib
import mmap
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any, Final

import numpy as np

_LEAST_BYTES: Final = 2**16
_MOST_BYTES: Final = 2**24
"""Of tensors. torch moves larger ones to memory that all map, once and for all."""
_ALIGNMENT: Final = 64
_HERE: Final = threading.local()
"""`memory`, where this thread is `sharing_arrays`."""


@contextlib.contextmanager
def sharing_arrays() -> Iterator[None]:
    """Processes that are started in here share the large NumPy arrays they are given.

    One that is no fork is sent what it works on through a pipe, all of it to each: 0.2
    s for 30 MB. In here arrays are copied once, as they are when the first process is
    started, into memory that all map, if the system has such (`memfd_create`). What a
    process writes into them it alone sees, as if it were a fork. Of a `np.memmap`
    nothing is copied: its file is mapped anew. torch's tensors are sent as arrays, but
    for the largest: torch would send an open file for each, of which there may be 256.
    """
    reduction.ForkingPickler.register(np.ndarray, _reduce)
    reduction.ForkingPickler.register(np.memmap, _reduce_memmap)
    if "torch" in sys.modules:
        from torch import Tensor

        reduction.ForkingPickler.register(Tensor, _reduce_tensor)
    memory = _HERE.memory = _Memory()
    try:
        yield
    finally:
        _HERE.memory = None
        memory.close()  # the processes have it open


class _Memory:
    """A file of no name with arrays, one after the other; it arrives mapped."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.size = 0
        # By address and size, with what is there, so that nothing else can be.
        self._places: dict[tuple[int, int], tuple[int, np.ndarray]] = {}

    def place(self, array: np.ndarray) -> int:
        """Where the copy of an array is."""
        if self.file is None:
            self.file = os.memfd_create("arrays of jaxdp's workers")
        key = array.ctypes.data, array.nbytes
        if key not in self._places:
            start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
            self.size = start + array.nbytes
            flat = (array if array.flags.c_contiguous else array.T).reshape(-1)
            left = flat.view(np.uint8).data
            while left:  # a call writes 2 GB at most
                left = left[os.pwrite(self.file, left, self.size - len(left)) :]
            self._places[key] = start, array
        return self._places[key][0]

    def __reduce__(self) -> Any:
        # Once for each process, which then opens the file once.
        assert self.file is not None
        return _mapped, (reduction.DupFd(self.file),)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)


def _memory(array: np.ndarray) -> _Memory | None:
    """Where an array is shared, if it is large, and sent to a process being started."""
    is_one_piece = array.flags.forc and not array.dtype.hasobject
    if get_spawning_popen() is None or not is_one_piece or array.nbytes < _LEAST_BYTES:
        return None
    return getattr(_HERE, "memory", None)


def _reduce(array: np.ndarray) -> Any:
    """How an array is pickled for another process."""
    memory = _memory(array)
    if memory is None or not hasattr(os, "memfd_create"):
        return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    order = "C" if array.flags.c_contiguous else "F"
    form = array.shape, array.dtype, memory, memory.place(array), order
    return _received, (array.flags.writeable, *form)


def _reduce_memmap(array: np.memmap) -> Any:
    """How a part of a file is pickled for another process."""
    name, mode = array.filename, array.mode
    # With "c", what was written is in no file.
    is_file = name is not None and os.path.exists(name) and mode in ("r", "r+", "w+")
    if not is_file or _memory(array) is None:
        return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    # Parts of a `np.memmap` have the offset of the whole, which maps whole pages.
    mapped = np.frombuffer(array._mmap, np.uint8)  # type: ignore[attr-defined]
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    start += array.ctypes.data - mapped.ctypes.data
    order = "C" if array.flags.c_contiguous else "F"
    mode = "r+" if array.flags.writeable else "r"
    return np.memmap, (name, array.dtype, mode, start, array.shape, order)


def _reduce_tensor(tensor: Any) -> Any:
    """How a tensor of torch's is pickled for another process: most as arrays are."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    if get_spawning_popen() is not None and getattr(_HERE, "memory", None) is not None:
        # Not those of bfloat16, with a gradient, sparse, or elsewhere.
        with contextlib.suppress(TypeError, RuntimeError):
            if not tensor.is_shared() and tensor.nbytes <= _MOST_BYTES:
                return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)


def _mapped(file: Any) -> mmap.mmap:
    file = file.detach()
    try:
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)


def _received(writeable: bool, *form: Any) -> np.ndarray:
    shape, dtype, memory, start, order = form
    array = np.ndarray(shape, dtype, memory, start, order=order)
    array.flags.writeable = writeable
    return array
