"""What worker processes are sent as they are started.

A process that is no fork is sent what it works on through a pipe, all of it to each:
0.2 s for 30 MB. Here large arrays are copied once, as they are when the first process
is started, into memory that all map, if the system has such (`memfd_create`). What a
process writes into them it alone sees, as if it were a fork. Of a `np.memmap` nothing
is copied: its file is mapped anew.

And workers import by name what they are sent, but a class that was defined in the cell
of a notebook can be imported from nowhere. A fork would have it. But JAX's threads run
by then, and whatever lock one of them holds at that moment stays locked in the child.
CPython and JAX warn of that; 1,566 forks beside a busy CPU went well here, and others
report hangs in one of a dozen to one of some hundred, by what else is loaded. So
definitions are sent along, by cloudpickle.
"""

import collections
import contextlib
import io
import mmap
import multiprocessing
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any, Final

import numpy as np

_LEAST_BYTES: Final = 2**16
"""Of an array that is shared."""
_MOST_BYTES: Final = 2**24
"""Of a tensor that is sent as an array is: torch would send an open file for each, of
which there may be 256. It moves larger ones to memory that all map, once for all."""
_ALIGNMENT: Final = 64


@contextlib.contextmanager
def context_of_workers() -> Iterator[Any]:
    """A context of `multiprocessing` whose processes, started in here, share arrays."""
    usual: Any = multiprocessing.get_context("forkserver")
    memory = _Memory()

    class Process(usual.Process):
        def __reduce__(self) -> Any:
            return _received, memory.sent(vars(self))

    class Context(type(usual)):
        pass

    Context.Process = Process
    try:
        yield Context()
    finally:
        memory.close()  # the processes have it open


class _Memory:
    """A file of no name with arrays, one after the other; it arrives mapped."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.size = 0
        # By address and size, with what is there, so that nothing else can be.
        self._starts: dict[tuple[int, int], tuple[int, memoryview]] = {}

    def sent(self, value: Any) -> tuple[Any, ...]:
        """`value` for `_received`, its large arrays apart."""
        spans: list[tuple[int, int, bool]] = []

        def take(buffer: pickle.PickleBuffer) -> bool:
            content = buffer.raw()
            if content.nbytes < _LEAST_BYTES or not hasattr(os, "memfd_create"):
                return True  # it is pickled like all else
            spans.append((self._start(content), content.nbytes, content.readonly))
            return False

        file, classes = io.BytesIO(), list[type]()
        pickler = _pickler(file, take, classes)
        pickler.dump(value)
        pickler.dump(classes)  # as they are known by now
        return file.getvalue(), self if spans else None, spans

    def _start(self, content: memoryview) -> int:
        """Where the copy of an array begins."""
        if self.file is None:
            self.file = os.memfd_create("arrays of jaxdp's workers")
        key = np.frombuffer(content, np.uint8).ctypes.data, content.nbytes
        if key not in self._starts:
            start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
            self.size = start + content.nbytes
            left = content
            while left:  # a call writes 2 GB at most
                left = left[os.pwrite(self.file, left, self.size - len(left)) :]
            self._starts[key] = start, content
        return self._starts[key][0]

    def __reduce__(self) -> Any:
        assert self.file is not None
        return _mapped, (reduction.DupFd(self.file),)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file, self.size, self._starts = None, 0, {}


def _mapped(file: Any) -> mmap.mmap:
    file = file.detach()
    try:
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)


def _received(
    content: bytes, memory: mmap.mmap | None, spans: list[tuple[int, int, bool]]
) -> Any:
    """The process that was sent."""
    shared = memoryview(memory or b"")
    views = [shared[start : start + size] for start, size, _ in spans]
    fixed = [is_fixed for *_, is_fixed in spans]
    buffers = [v.toreadonly() if f else v for v, f in zip(views, fixed, strict=True)]
    process = object.__new__(multiprocessing.get_context("forkserver").Process)
    unpickler = pickle.Unpickler(io.BytesIO(content), buffers=buffers)
    vars(process).update(unpickler.load())
    for each in unpickler.load():  # named tuples, say, that it sends back by name
        setattr(sys.modules["__main__"], each.__name__, each)
    return process


def _pickler(
    file: io.BytesIO, take: Callable[[pickle.PickleBuffer], bool], classes: list[type]
) -> pickle.Pickler:
    """As `multiprocessing` pickles, and a session's definitions by value.

    `take` says of every buffer whether it goes into the file; those of the session's
    `classes` that do are listed.
    """
    reducers: Any = reduction.ForkingPickler(file).dispatch_table  # pyright: ignore
    reducers[np.memmap] = _reduce_memmap
    if "torch" in sys.modules:
        from torch import Tensor

        reducers[Tensor] = _reduce_tensor
    if not has_no_file():
        pickler = pickle.Pickler(file, 5, buffer_callback=take)
        pickler.dispatch_table = reducers
        return pickler
    try:
        from cloudpickle import Pickler as Usual
    except ImportError:
        Usual: Any = _Refusing

    class Pickler(Usual):
        dispatch_table = collections.ChainMap(reducers, Usual.dispatch_table)

        def reducer_override(self, value: Any) -> Any:
            if _is_of_session(value) and isinstance(value, type):
                classes.append(value)
            return super().reducer_override(value)

    return Pickler(file, protocol=5, buffer_callback=take)


class _Refusing(pickle.Pickler):
    dispatch_table: Any = {}

    def reducer_override(self, value: Any) -> Any:
        if not _is_of_session(value):
            return NotImplemented
        raise pickle.PicklingError(
            f"{value.__qualname__} is defined in this session, which no other process"
            " can import, and cloudpickle, which could send it, is not installed. Run"
            " `pip install cloudpickle`, or put the definition into a module"
        )


def has_no_file() -> bool:
    """Whether what is being run can't be imported by another process."""
    main = sys.modules["__main__"]
    return not getattr(main, "__file__", None) and not getattr(main, "__spec__", None)


def _is_of_session(value: Any) -> bool:
    is_definition = isinstance(value, type | types.FunctionType)
    return is_definition and value.__module__ == "__main__"


def _reduce_memmap(array: np.memmap) -> Any:
    """How a part of a file is pickled for another process."""
    name, mode = array.filename, array.mode
    # With "c", what was written is in no file.
    is_file = name is not None and os.path.exists(name) and mode in ("r", "r+", "w+")
    if not is_file or not array.flags.forc:
        return array.__reduce_ex__(5)
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

    # Not those of bfloat16, with a gradient, sparse, or elsewhere.
    with contextlib.suppress(TypeError, RuntimeError):
        if not tensor.is_shared() and tensor.nbytes <= _MOST_BYTES:
            return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)
