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
    started, into memory that all map. What a process writes into them it alone sees,
    as if it were a fork. Of a `np.memmap` nothing is copied: its file is mapped anew.

    So are torch's tensors, but for the largest: torch would send an open file for each,
    of which there may be 256, and one that was made only to be sent would be gone
    before it arrives.

    Where the system has no such memory (Linux has `memfd_create`), arrays of no file
    are sent as ever.
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
    """A file of no name with arrays, one after the other."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.size = 0
        self.placed: dict[int, tuple[int, Any]] = {}
        self._for: Any = None
        self._handle: Any = None

    def place(self, array: np.ndarray, owner: Any = None, key: int = 0) -> int:
        """Where the copy of an array is.

        Args:
            array: what to copy.
            owner: whose memory it is, if not its own.
            key: tells owners apart while they are there.
        """
        assert self.file is not None
        owner, key = (array, id(array)) if owner is None else (owner, key)
        if key not in self.placed:
            start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
            self.size = start + array.nbytes
            flat = (array if array.flags.c_contiguous else array.T).reshape(-1)
            left = flat.view(np.uint8).data
            while left:  # a call writes 2 GB at most
                left = left[os.pwrite(self.file, left, self.size - len(left)) :]
            # Kept, so that no other gets its key.
            self.placed[key] = start, owner
        return self.placed[key][0]

    def handle(self, process: Any) -> "_Handle":
        """One for each process, which then opens the file once."""
        if self.file is None:
            self.file = os.memfd_create("arrays of jaxdp's workers")
        if process is not self._for:
            self._for, self._handle = process, _Handle(reduction.DupFd(self.file))
        return self._handle

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)


class _Handle:
    """The file, as it is sent; it arrives mapped."""

    def __init__(self, file: Any):
        self.file = file

    def __reduce__(self) -> Any:
        return _mapped, (self.file,)


def _reduce(array: np.ndarray) -> Any:
    """How an array is pickled for another process."""
    memory, process = getattr(_HERE, "memory", None), get_spawning_popen()
    is_shared = hasattr(os, "memfd_create") and _is_plain(array)
    if memory is None or process is None or not is_shared:
        return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    form = array.shape, array.dtype, array.flags.c_contiguous, array.flags.writeable
    return _received, (memory.handle(process), memory.place(array), *form)


def _reduce_memmap(array: np.memmap) -> Any:
    """How a part of a file is pickled for another process."""
    name, mode = array.filename, array.mode
    # With "c", what was written is in no file.
    is_file = name is not None and os.path.exists(name) and mode in ("r", "r+", "w+")
    here = getattr(_HERE, "memory", None), get_spawning_popen()
    if not is_file or None in here or not _is_plain(array):
        return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    # Parts of a `np.memmap` have the offset of the whole, which maps whole pages.
    mapped = np.frombuffer(array._mmap, np.uint8)  # type: ignore[attr-defined]
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    start += array.ctypes.data - mapped.ctypes.data
    order = "C" if array.flags.c_contiguous else "F"
    mode = "r+" if array.flags.writeable else "r"
    return np.memmap, (name, array.dtype, mode, start, array.shape, order)


def _reduce_tensor(tensor: Any) -> Any:
    """How a tensor of torch's is pickled for another process."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    memory, process = getattr(_HERE, "memory", None), get_spawning_popen()
    if (
        memory is None
        or process is None
        or not hasattr(os, "memfd_create")
        or tensor.layout != torch.strided
        or tensor.device.type != "cpu"
        or tensor.requires_grad
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return reduce_tensor(tensor)
    storage = tensor.untyped_storage()
    if storage.is_shared() or not 0 < storage.nbytes() <= _MOST_BYTES:
        return reduce_tensor(tensor)
    every_byte = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    handle = memory.handle(process)
    start = memory.place(every_byte, storage, storage.data_ptr())
    form = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
    return _received_tensor, (handle, start, storage.nbytes(), *form)


def _is_plain(array: np.ndarray) -> bool:
    """Whether an array is large, and one piece of memory."""
    is_one_piece = array.flags.forc and not array.dtype.hasobject
    return is_one_piece and array.nbytes >= _LEAST_BYTES


def _mapped(file: Any) -> mmap.mmap:
    file = file.detach()
    try:
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)


def _received_tensor(
    memory: mmap.mmap, start: int, nbytes: int, dtype: Any, *form: Any
) -> Any:
    import torch

    every_byte = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)
    return torch.empty(0, dtype=dtype).set_(every_byte.untyped_storage(), *form)


def _received(
    memory: mmap.mmap,
    start: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    c_contiguous: bool,
    writeable: bool,
) -> np.ndarray:
    order = "C" if c_contiguous else "F"
    array = np.ndarray(shape, dtype, memory, start, order=order)
    array.flags.writeable = writeable
    return array
