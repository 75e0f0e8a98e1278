"""Where entries come from that are looked up, or written, by their places."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from .row_origins import LAST, NO_ROW, Use, between, folded, joined, slim, uniform


def gather(use: Use) -> ndarray | None:
    """Lookups: by numbers of rows that the program contains, or in each row."""
    numbers, sizes = use.params["dimension_numbers"], use.params["slice_sizes"]
    ndim, (rows, places) = len(use.after), use.arrays[:2]
    looked_up = [axis for axis in range(ndim) if axis not in numbers.offset_dims]
    if rows is None:
        rows = uniform(NO_ROW, len(use.before[0]))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offsets = iter(numbers.offset_dims)
    picked: list[Any] = []
    for axis, size in enumerate(use.before[0]):
        offset = None if axis in gone else next(offsets)
        if rows.shape[axis] == 1:
            picked.append(0)
            continue
        index = np.zeros((1,) * ndim, int)
        if offset is not None:
            index = _along(np.arange(sizes[axis]), offset, ndim)
        if axis in numbers.operand_batching_dims:
            of_pairs = [*numbers.operand_batching_dims].index(axis)
            pair = looked_up[numbers.start_indices_batching_dims[of_pairs]]
            index = _along(np.arange(size), pair, ndim)
        elif axis in numbers.start_index_map and sizes[axis] < size:
            start = _column(use, [*numbers.start_index_map].index(axis))
            if start is None:
                rows = folded(rows, [axis])
                index = np.zeros((1,) * ndim, int)
            else:
                start = np.clip(start, 0, size - sizes[axis])
                index = index + _spread(start, looked_up, ndim)
        picked.append(index)
    picks = np.broadcast_arrays(*picked, np.zeros((1,) * ndim, int))[:-1]
    result = rows[tuple(picks)].reshape(picks[0].shape if picks else (1,) * ndim)
    if places is not None:
        of_places = folded(places, [-1])[..., 0]
        result = joined(result, _spread(of_places, looked_up, ndim))
    return slim(result)


def _along(entries: ndarray, axis: int, ndim: int) -> ndarray:
    return entries.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _spread(array: ndarray, axes: Sequence[int], ndim: int) -> ndarray:
    """The array with its axes at these places among more."""
    shape = [1] * ndim
    for axis, size in zip(axes, array.shape, strict=True):
        shape[axis] = size
    return array.reshape(shape)


def _column(use: Use, number: int) -> ndarray | None:
    """One coordinate of all places of a lookup, if the program contains it."""
    known = use.known[1]
    if known is None or known.values is None:
        return None
    column = known.values[..., min(number, known.values.shape[-1] - 1)]
    return None if np.isnan(column).any() else column.astype(int)


def scatter(use: Use) -> ndarray | None:
    numbers = use.params["dimension_numbers"]
    array, places, updates = use.arrays
    ndim, shape = len(use.before[2]), use.before[2]
    if array is None:
        array = uniform(NO_ROW, len(use.after))
    if updates is None:
        updates = uniform(NO_ROW, ndim)
    windows = numbers.update_window_dims
    written = [axis for axis in range(ndim) if axis not in windows]
    if places is not None:
        of_places = folded(places, [-1])[..., 0]
        updates = joined(updates, _spread(of_places, written, ndim))
    if (updates == NO_ROW).all():
        return array

    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter(windows)
    spots: list[Any] = []
    for axis, size in enumerate(use.after):
        along = None if axis in gone else next(window)
        spot: Any = 0
        if along is not None:
            spot = _along(np.arange(shape[along]), along, ndim)
            if shape[along] == size and updates.shape[along] == 1:
                spot = 0  # all along this axis
        if axis in numbers.operand_batching_dims:
            of_pairs = [*numbers.operand_batching_dims].index(axis)
            pair = written[numbers.scatter_indices_batching_dims[of_pairs]]
            spot = _along(np.arange(size), pair, ndim)
        elif axis in numbers.scatter_dims_to_operand_dims:
            # A window as long as the axis has but one place.
            if along is None or shape[along] != size:
                number = [*numbers.scatter_dims_to_operand_dims].index(axis)
                start = _column(use, number)
                starts = None if start is None else _spread(start, written, ndim)
                spot = None if starts is None else spot + np.clip(starts, 0, size - 1)
        spots.append(spot)
    sizes = [
        1 if spot is None or np.ndim(spot) == 0 else size
        for spot, size in zip(spots, use.after, strict=True)
    ]
    spots = [
        np.zeros((1,) * ndim, int) if n == 1 else s
        for s, n in zip(spots, sizes, strict=True)
    ]
    *spots, updates = np.broadcast_arrays(*spots, updates)
    first, last = np.full(sizes, LAST, np.int32), np.full(sizes, NO_ROW, np.int32)
    np.minimum.at(first, tuple(spots), np.where(updates == NO_ROW, LAST, updates))
    np.maximum.at(last, tuple(spots), updates)
    return joined(array, between(first, last))
