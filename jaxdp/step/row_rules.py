"""What operations make of what is known of their operands; see `row_origins`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from numpy import ndarray

from .collectives import DATA
from .row_lookups import gather, scatter
from .row_origins import (
    MOST_VALUES,
    NO_ROW,
    SEVERAL,
    UNKNOWN,
    Known,
    Use,
    folded,
    joined,
    slim,
    uniform,
)

_Rule = Callable[[Use], ndarray | None]


def known_of_result(use: Use) -> Known | None:
    """What is known of a result of an operation that has no programs."""
    if use.name in _ONE_TO_ONE:
        use = use.alone(use.number)
    rule = RULES.get(use.name, _along_its_axes)
    rows = rule(use) if any(a is not None for a in use.arrays) else None
    values = _values(use, rule)
    if rows is None and values is None:
        return None
    if rows is None:
        rows = uniform(NO_ROW, len(use.after))
    if rule in _BY_ENTRY and _tells_rows_apart(use, rows):
        rows = uniform(SEVERAL, rows.ndim)
    return Known(rows, values)


def _values(use: Use, rule: _Rule) -> ndarray | None:
    """The numbers that a result has."""
    if use.name == "iota":
        axis, shape = use.params["dimension"], use.after
        if use.params["dtype"].kind not in "iuf" or shape[axis] > MOST_VALUES:
            return None
        places = [size if i == axis else 1 for i, size in enumerate(shape)]
        return np.arange(shape[axis], dtype=float).reshape(places)
    given = [None if one is None else one.values for one in use.known]
    if all(values is None for values in given):
        return None
    if rule in _MOVING:
        values = rule(use.of_values())
    elif use.name in _FUNCTIONS and all(values is not None for values in given):
        unknown: Any = sum(np.isnan(values) for values in given if values is not None)
        with np.errstate(all="ignore"):
            values = _FUNCTIONS[use.name](*given)
        if jnp.issubdtype(use.dtype, jnp.integer):
            values = np.trunc(values)
        values = np.where(unknown, UNKNOWN, values)
    else:
        return None
    is_small = values is not None and values.size <= MOST_VALUES
    return values if is_small else None


def _tells_rows_apart(use: Use, rows: ndarray) -> bool:
    """Whether rows meet numbers by which one differs from another: their own.

    Positions of tokens, say, are the same in each row, and do not. Nor does what JAX
    compares with numbers to differentiate `x.at[places].set(...)`.
    """
    if use.name in ("eq", "ne"):
        return False
    for one in use.known:
        if one is None or one.values is None or one.values.ndim != rows.ndim:
            continue
        if (one.rows != NO_ROW).any():  # numbers of rows, put beside what is of them
            continue
        sizes = [*zip(one.values.shape, rows.shape, strict=True)]
        is_along = any(a > 1 and b > 1 for a, b in sizes)
        if not is_along or any(a != b and 1 not in (a, b) for a, b in sizes):
            continue
        both = np.broadcast_arrays(one.values, rows)
        values, owners = (array.ravel() for array in both)
        values, owners = values[owners >= 0], owners[owners >= 0]
        num_rows = len(np.unique(owners))
        if num_rows < 2 or len(owners) % num_rows:
            continue
        of_rows = values[np.argsort(owners, kind="stable")].reshape(num_rows, -1)
        if not (of_rows == of_rows[:1]).all():
            return True
    return False


# Rules: the origins of a result.


def _alike(use: Use) -> ndarray | None:
    """Entry by entry, where shapes let it, and nothing is claimed if not."""
    parts = []
    for _, rows in use.rows:
        if rows.size == 1:
            parts.append(rows.reshape((1,) * len(use.after)))
        elif rows.ndim == len(use.after) and all(
            size in (1, after)
            for size, after in zip(rows.shape, use.after, strict=True)
        ):
            parts.append(rows)
        elif (rows == SEVERAL).any():
            parts.append(uniform(SEVERAL, len(use.after)))
    return joined(*parts) if parts else None


def _along_its_axes(use: Use) -> ndarray | None:
    """The rule for any operation: it joins rows if it goes along their axis or devices.

    Examples are sums, also so far, sorting and collectives. Axes that are gone from
    the result are those that it goes along.
    """
    axes, windows = use.axes, use.params.get("window_dimensions")
    # `vmap` leaves the numbers of axes in a sum over the axis that it names.
    numbers = [int(axis) for axis in axes if hasattr(axis, "__index__")]
    if windows:
        numbers = [axis for axis, size in enumerate(windows) if size > 1]
    if DATA in axes:
        mixed = any((rows != NO_ROW).any() for _, rows in use.rows)
        return uniform(SEVERAL if mixed else NO_ROW, len(use.after))
    for place, rows in use.rows:
        along = [axis for axis in numbers if axis < rows.ndim]
        folds = folded(rows, along)
        if not windows and along and len(use.after) < rows.ndim:
            folds = folds.squeeze(tuple(along))
        use.arrays[place] = folds
    return _alike(use)


def _of_last_axes(use: Use) -> ndarray | None:
    """Fourier transforms, of so many last axes, and decompositions, of two."""
    last = len(use.params.get("fft_lengths", ("rows", "columns")))
    (_, rows), *_ = use.rows
    apart = folded(rows, range(rows.ndim - last, rows.ndim))[(..., *[0] * last)]
    return apart.reshape(apart.shape + (1,) * (len(use.after) - apart.ndim))


def _solve(use: Use) -> ndarray | None:
    """Triangular systems, a column, or a row, of the right-hand side apart."""
    for place, rows in use.rows:
        side = -2 if use.params["left_side"] else -1
        axes = [-2, -1] if place == 0 else [side]
        use.arrays[place] = folded(rows, axes)
    return _alike(use)


def _concatenate(use: Use) -> ndarray | None:
    return _put_together(use, use.arrays, use.before, use.params["dimension"])


def _stack(use: Use) -> ndarray | None:
    axis = use.params["axis"]
    apart = [None if a is None else np.expand_dims(a, axis) for a in use.arrays]
    shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in use.before]
    return _put_together(use, apart, shapes, axis)


def _put_together(
    use: Use, arrays: Sequence[Any], shapes: Sequence[Any], axis: int
) -> ndarray:
    blank = np.full((1,) * len(use.after), use.nothing)
    arrays = [blank if array is None else array for array in arrays]
    if len({id(array) for array in arrays}) == 1 and arrays[0].shape[axis] == 1:
        return arrays[0]
    common = np.broadcast_shapes(*(np.take(a, [0], axis).shape for a in arrays))
    sizes = [(*common[:axis], s[axis], *common[axis + 1 :]) for s in shapes]
    parts = map(np.broadcast_to, arrays, sizes)
    return slim(np.concatenate([*parts], axis).astype(arrays[0].dtype))


def _broadcast(use: Use) -> ndarray | None:
    (array,) = use.arrays[:1]
    shape = [1] * len(use.after)
    if array is None:
        return None
    for axis, size in zip(use.params["broadcast_dimensions"], array.shape, strict=True):
        shape[int(axis)] = size
    return array.reshape(shape)


def _reshape(use: Use) -> ndarray | None:
    """Axes that are joined or split are told apart in groups of equal sizes."""
    array, before, after = use.arrays[0], list(use.before[0]), list(use.after)
    if array is None or array.size == 1 or 0 in before:
        return None if array is None else array.ravel()[:1].reshape([1] * len(after))
    old, new, i, j = [], [], 0, 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (a := math.prod(before[start_i:i])) != (b := math.prod(after[start_j:j])):
            if a < b:
                i += 1
            else:
                j += 1
        changes = max(array.shape[start_i:i], default=1) > 1
        old += before[start_i:i] if changes else [1] * (i - start_i)
        new += after[start_j:j] if changes else [1] * (j - start_j)
    return slim(np.broadcast_to(array, old).reshape(new))


def _transpose(use: Use) -> ndarray | None:
    (array,) = use.arrays
    return None if array is None else array.transpose(use.params["permutation"])


def _squeeze(use: Use) -> ndarray | None:
    (array,) = use.arrays
    return None if array is None else array.squeeze(tuple(use.axes))


def _picked(array: ndarray | None, axis: int, places: Any) -> ndarray | None:
    if array is None or array.shape[axis] == 1:
        return array
    return array.take(places, axis)


def _slice(use: Use) -> ndarray | None:
    array, params = use.arrays[0], use.params
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or [1] * len(starts)
    for axis, cut in enumerate(zip(starts, limits, strides, strict=True)):
        array = _picked(array, axis, np.arange(*cut))
    return array


def _reverse(use: Use) -> ndarray | None:
    (array,) = use.arrays
    return None if array is None else np.flip(array, tuple(use.axes))


def _split(use: Use) -> ndarray | None:
    sizes, (axis,) = use.params["sizes"], use.axes
    start = sum(sizes[: use.number])
    return _picked(use.arrays[0], axis, np.arange(start, start + sizes[use.number]))


def _unstack(use: Use) -> ndarray | None:
    (array,), (axis,) = use.arrays, use.axes
    array = _picked(array, axis, [use.number])
    return None if array is None else array.squeeze(axis)


def _tile(use: Use) -> ndarray | None:
    (array,), (before,) = use.arrays, use.before
    times = [after // size for after, size in zip(use.after, before, strict=True)]
    times = [1 if size == 1 else n for size, n in zip(array.shape, times, strict=True)]
    return np.tile(array, times)


def _pad(use: Use) -> ndarray | None:
    array, padding = use.arrays
    if array is None:
        return None if padding is None else padding.reshape((1,) * len(use.after))
    beside = NO_ROW if padding is None else padding.flat[0]
    for axis, (low, _, inside) in enumerate(use.params["padding_config"]):
        size, after = use.before[0][axis], use.after[axis]
        if size == after or size > 1 and array.shape[axis] == 1:
            continue
        places, rest = np.divmod(np.arange(after) - low, inside + 1)
        is_real = (rest == 0) & (places >= 0) & (places < size)
        taken = array.take(np.where(is_real, places, 0) % array.shape[axis], axis)
        shape = [after if i == axis else 1 for i in range(array.ndim)]
        array = np.where(is_real.reshape(shape), taken, beside)
    return array


def _start(known: Known | None) -> int | None:
    """Where a slice starts, if the program tells."""
    if known is None or known.values is None or np.isnan(known.values).any():
        return None
    return int(known.values.flat[0])


def _with_places(use: Use, first: int, array: ndarray) -> ndarray:
    """The array, which the origins of the places from operand `first` on have made."""
    places = [rows.reshape((1,) * array.ndim) for i, rows in use.rows if i >= first]
    return joined(array, *places)


def _dynamic_slice(use: Use) -> ndarray | None:
    array = use.arrays[0]
    if array is None:
        array = uniform(NO_ROW, len(use.after))
    for axis, (size, after) in enumerate(zip(use.before[0], use.after, strict=True)):
        if size == after or array.shape[axis] == 1:
            continue
        start = _start(use.known[1 + axis])
        if start is None:
            array = folded(array, [axis])
        else:
            array = array.take(
                min(max(start, 0), size - after) + np.arange(after), axis
            )
    return _with_places(use, 1, array)


def _dynamic_update_slice(use: Use) -> ndarray | None:
    blank = uniform(NO_ROW, len(use.after))
    array, update = (blank if a is None else a for a in use.arrays[:2])
    is_there = np.ones((1,) * array.ndim, bool)
    for axis, (size, of_update) in enumerate(zip(*use.before[:2], strict=True)):
        if size == of_update:
            continue
        start = _start(use.known[2 + axis])
        if start is None:
            update = folded(update, [axis])
            continue
        places = np.arange(size) - min(max(start, 0), size - of_update)
        shape = [size if i == axis else 1 for i in range(array.ndim)]
        inside = (places >= 0) & (places < of_update)
        is_there = is_there & inside.reshape(shape)
        update = update.take(np.where(inside, places, 0) % update.shape[axis], axis)
    added = joined(array, update)
    exact = all(
        size == n or _start(use.known[2 + axis]) is not None
        for axis, (size, n) in enumerate(zip(*use.before[:2], strict=True))
    )
    array = np.where(is_there, update if exact else added, array)
    return _with_places(use, 2, array)


def _dot(use: Use) -> ndarray | None:
    contracted, batched = use.params["dimension_numbers"]
    free = [
        [axis for axis in range(len(shape)) if axis not in (*taken, *both)]
        for shape, taken, both in zip(use.before, contracted, batched, strict=True)
    ]
    parts = []
    for place, rows in use.rows:
        taken, both, own = contracted[place], batched[place], free[place]
        rows = folded(rows, taken).transpose([*both, *own, *taken])
        shared, alone = rows.shape[: len(both)], rows.shape[len(both) :][: len(own)]
        others = (1,) * len(free[1 - place])
        whole = shared + (alone + others if place == 0 else others + alone)
        parts.append(rows.reshape(whole))
    return joined(*parts)


def _convolution(use: Use) -> ndarray | None:
    """Each as `(batch, features)` of the result, then along its axes."""
    numbers, params = use.params["dimension_numbers"], use.params
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    features = use.after[numbers.out_spec[1]]
    images, kernel = use.arrays
    parts = []
    if images is not None:
        rows = folded(images, numbers.lhs_spec[2:]).transpose(numbers.lhs_spec)
        rows = rows.reshape(rows.shape[:2])
        if groups > 1 and rows.size > len(rows):
            apart = rows.reshape(len(rows), groups, -1)
            rows = folded(apart, [2])[..., 0].repeat(features // groups, axis=1)
        else:
            rows = folded(rows, [1])
        if batches > 1 and len(rows) > 1:
            apart = rows[:, 0].reshape(batches, -1).T
            rows = apart.repeat(features // batches, axis=1)
        parts.append(rows)
    if kernel is not None:
        rows = folded(kernel, numbers.rhs_spec[1:])
        parts.append(rows.reshape(1, -1))
    rows = joined(*parts)
    rows = rows.reshape(rows.shape + (1,) * (len(use.after) - 2))
    return np.moveaxis(rows, range(rows.ndim), numbers.out_spec)


def _bits(use: Use) -> ndarray | None:
    """What is drawn from each key has its own axes behind those of the keys."""
    (rows,) = use.arrays
    return rows.reshape(rows.shape + (1,) * (len(use.after) - rows.ndim))


def _wrap(use: Use) -> ndarray | None:
    (rows,) = use.arrays
    ndim = len(use.after)
    return folded(rows, range(ndim, rows.ndim)).reshape(rows.shape[:ndim])


def _which(which: ndarray, *cases: ndarray) -> ndarray:
    arrays = np.broadcast_arrays(which, *cases)
    return np.choose(np.nan_to_num(arrays[0]).astype(int), arrays[1:], mode="clip")


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": np.add,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert_element_type": np.positive,
    "copy": np.positive,
    "div": np.divide,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "rem": np.fmod,
    "select_n": _which,
    "sign": np.sign,
    "sub": np.subtract,
}
"""What becomes of numbers; nothing is claimed of bits."""

_SCATTERS: Final = [
    "scatter" + how for how in ("", "-add", "-max", "-min", "-mul", "-sub")
]
_ONE_TO_ONE: Final = {"optimization_barrier", "pmax", "pmin", "psum"}
"""Operations of several arrays, each of which has a result of its own."""

RULES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(["cholesky", "eigh", "fft", "lu", "qr", "svd"], _of_last_axes),
    **dict.fromkeys(["random_bits", "random_split", "random_unwrap"], _bits),
    **dict.fromkeys(_SCATTERS, scatter),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": gather,
    "pad": _pad,
    "pvary": _alike,  # names axes of devices, and sends nothing over them
    "random_wrap": _wrap,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "triangular_solve": _solve,
    "unstack": _unstack,
}
"""By the names of operations; for all others there is `_along_its_axes`."""

_MOVING: Final = {
    _broadcast, _concatenate, _reshape, _reverse, _slice, _split, _squeeze, _stack,
    _transpose, _unstack,
}  # fmt: skip
"""Rules that are the same for values."""

_BY_ENTRY: Final = {_alike, _along_its_axes}
