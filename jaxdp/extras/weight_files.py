"""Safetensors files, one or several with an index, read by slices and written."""

import contextlib
import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from ..basics.arguments import check_is_local
from ..basics.extras import import_extra
from ..basics.files import absolute
from ..checkpoint import CheckpointCorrupt
from .weight_names import Operation

INDEX: Final = ".safetensors.index.json"

_DTYPES: Final = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}

Region = tuple[tuple[int, int], ...]
"""The first number along each axis, and the one behind the last."""


class View(Protocol):
    """An array that is not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def read(self, region: Region) -> np.ndarray:
        """A part of it, from the disk."""
        ...


class InFile(NamedTuple):
    """A tensor of an open file."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: Any

    def read(self, region: Region) -> np.ndarray:
        """Reads a part."""
        if 0 in self.shape or not self.shape:  # of which no slice can be taken
            whole = self.file.get_tensor(self.name)
            return whole[tuple(slice(*ends) for ends in region)]
        part = self.file.get_slice(self.name)
        return part[tuple(slice(*ends) for ends in region)]


class Seen(NamedTuple):
    """A view with its numbers in other places."""

    of: View
    shape: tuple[int, ...]
    before: Callable[[Region], Region]
    """Which part of the other view a part of this one is made of."""
    after: Callable[[np.ndarray], np.ndarray] = lambda part: part
    """What makes it of that."""

    @property
    def dtype(self) -> Any:
        return self.of.dtype

    def read(self, region: Region) -> np.ndarray:
        """Reads a part."""
        return self.after(self.of.read(self.before(region)))


class Stacked(NamedTuple):
    """Views of one shape by their index in axes before their own."""

    of: Mapping[tuple[int, ...], View]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return next(iter(self.of.values())).dtype

    def read(self, region: Region) -> np.ndarray:
        """Reads a part."""
        count = len(next(iter(self.of)))
        sizes = [stop - start for start, stop in region[:count]]
        firsts = [start for start, _ in region[:count]]
        parts = [
            self.of[tuple(np.add(index, firsts).tolist())].read(region[count:])
            for index in np.ndindex(*sizes)
        ]
        return np.stack(parts).reshape(*sizes, *parts[0].shape)


def seen_through(view: View, operation: Operation) -> View:
    """The view after an operation.

    Raises:
        ValueError: if its shape does not allow it; the message says why.
    """
    kind, numbers = operation
    shape, rank = view.shape, len(view.shape)
    if kind == "T":
        axes = numbers or tuple(reversed(range(rank)))
        if sorted(axes) != list(range(rank)):
            raise ValueError(f"has {rank} axes")
        return Seen(
            view,
            tuple(shape[axis] for axis in axes),
            lambda region: tuple(region[axes.index(i)] for i in range(rank)),
            lambda part: part.transpose(axes),
        )
    if kind == "split":
        count, index, axis = (*numbers, 0)[:3]
        axis = axis + rank if axis < 0 else axis
        if not 0 <= axis < rank or shape[axis] % count:
            raise ValueError(f"can't be split into {count} along axis {axis}")
        size = shape[axis] // count

        def moved(region: Region) -> Region:
            start, stop = region[axis]
            ends = (start + size * index, stop + size * index)
            return (*region[:axis], ends, *region[axis + 1 :])

        return Seen(view, (*shape[:axis], size, *shape[axis + 1 :]), moved)

    # Axes of size 1, more or fewer.
    after = rank + (len(numbers) if kind == "expand" else 0)
    axes = tuple(axis + after if axis < 0 else axis for axis in numbers)
    if len({*axes}) < len(axes) or not all(0 <= axis < after for axis in axes):
        raise ValueError(f"has {rank} axes")
    if kind == "expand":
        return Seen(
            view,
            _with_axes(shape, axes, 1),
            lambda region: _without_axes(region, axes),
            lambda part: np.expand_dims(part, axes),
        )
    if any(shape[axis] != 1 for axis in axes):
        raise ValueError("has more than one number along such an axis")
    return Seen(
        view,
        _without_axes(shape, axes),
        lambda region: _with_axes(region, axes, (0, 1)),
        lambda part: part.squeeze(axes),
    )


def _with_axes(items: Sequence[Any], axes: Sequence[int], item: Any) -> tuple[Any, ...]:
    """An item for each axis, and this one for those in `axes`, which come in."""
    others = iter(items)
    count = len(items) + len(axes)
    return tuple(item if i in axes else next(others) for i in range(count))


def _without_axes(items: Sequence[Any], axes: Sequence[int]) -> tuple[Any, ...]:
    return tuple(item for i, item in enumerate(items) if i not in axes)


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """An index of slices, as JAX gives it, by its ends."""
    pairs = zip(index, shape, strict=True)
    return tuple(part.indices(size)[:2] for part, size in pairs)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[dict[str, View]]:
    """The tensors of a file, of files with an index, or of a folder of either.

    Raises:
        FileNotFoundError: if there is none.
        CheckpointCorrupt: if a file can't be read, or is not what the index says.
    """
    check_is_local("path", path)
    safetensors = import_extra("safetensors", "`load_weights`", "safetensors")
    files, index = _files(absolute(path))
    with contextlib.ExitStack() as stack:
        views: dict[str, View] = {}
        for name in files:
            try:
                file = stack.enter_context(safetensors.safe_open(name, "np"))
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"`path`: there is no file {name}, which the index names."
                ) from None
            except Exception as error:
                raise CheckpointCorrupt(
                    f"`path`: {name} can't be read: {error}."
                ) from error
            views |= {tensor: _view(file, tensor) for tensor in file.keys()}
        if index is not None and (gone := sorted({*index} - {*views})):
            raise CheckpointCorrupt(
                f"`path`: {absolute(path)} names {len(gone)} tensors that no file has,"
                f" such as {gone[0]}."
            )
        yield views


def _view(file: Any, name: str) -> InFile:
    part = file.get_slice(name)
    kind = part.get_dtype()
    if kind not in _DTYPES:
        raise ValueError(
            f"`path`: {name} is of dtype {kind}; {', '.join(_DTYPES)} can be read."
        )
    return InFile(file, name, tuple(part.get_shape()), jnp.dtype(_DTYPES[kind]))


def _files(path: str) -> tuple[list[str], Mapping[str, str] | None]:
    """The files of weights that a path means, and the index, if there is one."""
    if os.path.isdir(path):
        indices = glob.glob(os.path.join(glob.escape(path), "*" + INDEX))
        files = glob.glob(os.path.join(glob.escape(path), "*.safetensors"))
        if len(indices) != 1 and len(files) != 1:
            raise FileNotFoundError(
                f"`path`: {path} has {len(files)} files *.safetensors and"
                f" {len(indices)} *{INDEX}; name the one to read."
            )
        path = (indices if len(indices) == 1 else files)[0]
    if not os.path.exists(path):
        raise FileNotFoundError(f"`path`: there is no file {path}.")
    if not path.endswith(".json"):
        return [path], None
    with open(path) as file:
        try:
            index = json.load(file)["weight_map"]
            names = sorted({*index.values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(
                f"`path`: {path} is no index of safetensors files: it has no"
                " `weight_map`."
            ) from error
    return [os.path.join(os.path.dirname(path), name) for name in names], index
