"""Rows put together to a batch as torch's collation does, in a third of the time."""

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

PIPE_BYTES = 2**20
"""Arrays up to so large cross from a worker faster in its pipe than in shared memory,
which has to be set up and mapped each time."""

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def collation(loader: Any) -> Callable[[Any], Any]:
    """The loader's, or what gives the same arrays as torch's in a third of the time."""
    from torch.utils.data import default_collate

    return _collate if loader.collate_fn is default_collate else loader.collate_fn


def _collate(rows: Any) -> Any:
    """torch's collation, but that NumPy arrays and numbers are stacked by NumPy."""
    from torch.utils.data import get_worker_info
    from torch.utils.data._utils import collate as torchs

    stacked = (
        torchs.collate_numpy_array_fn,
        torchs.collate_numpy_scalar_fn,
        torchs.collate_float_fn,
        torchs.collate_int_fn,
    )
    functions: dict[Any, Any] = {
        kind: functools.partial(_stack, function) if function in stacked else function
        for kind, function in torchs.default_collate_fn_map.items()
    }
    batch = torchs.collate(rows, collate_fn_map=functions)
    return batch if get_worker_info() is None else jax.tree.map(_to_send, batch)


def _stack(torchs: Callable[..., Any], rows: Any, **options: Any) -> Any:
    """What `torchs` function gives, as an array; it has the word where rows differ."""
    first = rows[0]
    # Counted and not compared one by one in Python, which would take as long again.
    alike = [*map(type, rows)].count(type(first)) == len(rows)
    if alike and isinstance(first, np.ndarray):
        if first.dtype.isnative and first.dtype.kind in "biufc":
            shapes, dtypes = [*map(_SHAPE, rows)], [*map(_DTYPE, rows)]
            if shapes.count(first.shape) == dtypes.count(first.dtype) == len(rows):
                return np.stack(rows)
    elif alike and not isinstance(first, np.object_):
        return np.asarray(rows)
    return torchs(rows, **options)


def _to_send(leaf: Any) -> Any:
    """A leaf as it crosses fastest from a worker."""
    import torch

    if isinstance(leaf, np.ndarray) and leaf.nbytes > PIPE_BYTES:
        return torch.from_numpy(leaf).share_memory_()
    if type(leaf) is torch.Tensor and leaf.nbytes <= PIPE_BYTES:
        with contextlib.suppress(TypeError):  # bfloat16
            return leaf.numpy()
    return leaf
