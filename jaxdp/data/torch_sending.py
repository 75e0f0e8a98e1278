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
        # By id or address, with what it is of: no other gets its key.
        self._places: dict[int, tuple[int, np.ndarray]] = {}
        self._bytes: dict[int, np.ndarray] = {}

    def place(self, array: np.ndarray) -> int:
        """Where the copy of an array is."""
        if self.file is None:
            self.file = os.memfd_create("arrays of jaxdp's workers")
        if id(array) not in self._places:
            start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
            self.size = start + array.nbytes
            flat = (array if array.flags.c_contiguous else array.T).reshape(-1)
            left = flat.view(np.uint8).data
            while left:  # a call writes 2 GB at most
                left = left[os.pwrite(self.file, left, self.size - len(left)) :]
            self._places[id(array)] = start, array
        return self._places[id(array)][0]

    def bytes_of(self, storage: Any) -> np.ndarray:
        """The memory of torch's tensors, one array for all that are views of it."""
        import torch

        key = storage.data_ptr()
        if key not in self._bytes:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._bytes[key] = whole.numpy()
        return self._bytes[key]

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
    """How a tensor of torch's is pickled for another process: as an array is."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    memory = None if get_spawning_popen() is None else getattr(_HERE, "memory", None)
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    is_plain = is_plain and not (tensor.requires_grad or tensor.is_quantized)
    if memory is None or not is_plain or tensor.is_conj() or tensor.is_neg():
        return reduce_tensor(tensor)
    storage = tensor.untyped_storage()
    if storage.is_shared() or not 0 < storage.nbytes() <= _MOST_BYTES:
        return reduce_tensor(tensor)
    form = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
    return _received_tensor, (memory.bytes_of(storage), *form)


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


def _received_tensor(every_byte: np.ndarray, dtype: Any, *form: Any) -> Any:
    import torch

    storage = torch.from_numpy(every_byte).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, *form)
