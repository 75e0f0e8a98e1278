"""Which row each entry of an array comes from, and what operations make of that.

Two things are known of an array, each as one of NumPy with the same axes, where an axis
along which nothing changes has size 1: the number of the row that an entry depends on
(`NO_ROW`, or `SEVERAL`), and the entries themselves, as far as they are numbers that
the program contains, as those by which a permutation picks rows.

There are four kinds of operations. Some move entries, and do the same to numbers
(`_moving`). Some look entries up, or write them, by their places (`_spots`). Some have
axes that come from those of an operand, whose others they join rows along (`_joining`).
All others are taken to join rows along the axes that their parameters name.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy import ndarray

from .collectives import DATA

NO_ROW: Final = -1
SEVERAL: Final = np.iinfo(np.int32).max
_UNKNOWN: Final = math.nan
_MOST_VALUES: Final = 2**20
"""So many numbers are looked at."""


class Known(NamedTuple):
    """What is known of an array."""

    rows: ndarray
    values: ndarray | None = None

    @property
    def has_rows(self) -> bool:
        return bool((self.rows != NO_ROW).any())

    @property
    def without_rows(self) -> "Known":
        return Known(uniform(NO_ROW, self.rows.ndim).rows, self.values)

    def moved(self, move: Callable[[ndarray], ndarray]) -> "Known":
        """The same of the array that `move` makes of an array."""
        return Known(*[None if array is None else move(array) for array in self])


@functools.lru_cache
def uniform(row: int, ndim: int) -> Known:
    """What is known of an array all of whose entries have the same origin."""
    return Known(np.full((1,) * ndim, row, np.int32))


def joined(*origins: ndarray) -> ndarray:
    """The origins of what is made of these entry by entry, or by a choice."""
    return functools.reduce(
        lambda one, other: _between(np.minimum(one, other), np.maximum(one, other)),
        origins,
    )


def folded(rows: ndarray, axes: Sequence[int]) -> ndarray:
    """The origins of what is made of all entries along these axes, of size 1 then."""
    for axis in axes:
        if rows.shape[axis] > 1:
            first = np.where(rows == NO_ROW, SEVERAL, rows).min(axis, keepdims=True)
            rows = _between(first, rows.max(axis, keepdims=True))
    return rows


def _between(first: ndarray, last: ndarray) -> ndarray:
    return np.where((first == last) | (first == NO_ROW) | (last == NO_ROW), last, SEVERAL)


def slim(array: ndarray) -> ndarray:
    """The same with size 1 where nothing changes."""
    for axis, size in enumerate(array.shape):
        first = array.take([0], axis)
        if size > 1 and (array == first).all():
            array = first
    return array


def known_of(value: Any) -> Known:
    """What is known of a constant: the numbers in it."""
    nothing = uniform(NO_ROW, np.ndim(value))
    dtype = getattr(value, "dtype", np.dtype(type(value)))
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iubf":
        return nothing
    if np.size(value) > _MOST_VALUES or isinstance(value, Tracer):
        return nothing
    # A constant of the program: if it is on a device, this waits for the device.
    return Known(nothing.rows, np.asarray(value).astype(float))


class _Use:
    """An operation, what is known of its operands, and which result is asked for."""

    def __init__(self, equation: Any, known: Sequence[Known], number: int):
        self.name, self.params = equation.primitive.name, equation.params
        self.known, self.number = known, number
        self.rows = [operand.rows for operand in known]
        self.before = [tuple(var.aval.shape) for var in equation.invars]
        self.after = tuple(equation.outvars[number].aval.shape)
        self.dtype = equation.outvars[number].aval.dtype

    @property
    def axes(self) -> Sequence[Any]:
        """The axes, by number or name, that the operation says it goes along."""
        given = [self.params[name] for name in _NAMES_OF_AXES if name in self.params]
        if not given and self.name in _GOING_ALONG:
            raise LookupError(f"the axes of {self.name}")
        axes = given[0] if given else ()
        return axes if isinstance(axes, tuple | list) else (axes,)


_NAMES_OF_AXES: Final = (
    "axis_name", "axes", "axis", "dimensions", "dimension", "reduction_dimension"
)  # fmt: skip
"""What operations call the axes that they go along."""

_GOING_ALONG: Final = frozenset(
    "all_gather all_to_all argmax argmin cumlogsumexp cummax cummin cumprod cumsum pmax"
    " pmin ppermute psum reduce_and reduce_max reduce_min reduce_or reduce_prod"
    " reduce_scatter reduce_sum rev sort split squeeze top_k unstack".split()
)
"""Those that must name some: if one does not, JAX calls them otherwise."""


def known_of_results(equation: Any, known: Sequence[Known]) -> list[Known]:
    """What is known of the results of an operation that has no programs.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: if JAX describes the
            operation otherwise than its rule reads it.
    """
    results = []
    for number in range(len(equation.outvars)):
        use = _Use(equation, known, number)
        result = RULES.get(use.name, _along_its_axes)(use)
        is_small = result.values is None or result.values.size <= _MOST_VALUES
        results.append(result if is_small else Known(result.rows))
    return results


def _values(use: _Use) -> ndarray | None:
    """The numbers that a result has which is made of others entry by entry."""
    if use.name == "iota":
        axis, shape = use.params["dimension"], use.after
        if use.params["dtype"].kind not in "iuf" or shape[axis] > _MOST_VALUES:
            return None
        return _along(np.arange(shape[axis], dtype=float), axis, len(shape))
    given = [operand.values for operand in use.known if operand.values is not None]
    if use.name not in _FUNCTIONS or len(given) < len(use.known):
        return None
    with np.errstate(all="ignore"):
        values = _FUNCTIONS[use.name](*given)
    if jnp.issubdtype(use.dtype, jnp.integer):
        values = np.trunc(values)
    is_unknown: Any = sum(np.isnan(values) for values in given)
    return np.where(is_unknown, _UNKNOWN, values)


def _tells_rows_apart(use: _Use, rows: ndarray) -> bool:
    """Whether rows meet numbers by which one differs from another: their own.

    Positions of tokens, say, are the same in each row, and do not.
    """
    for values, operand in ((k.values, k) for k in use.known if not k.has_rows):
        if values is None or values.ndim != rows.ndim:
            continue
        sizes = [*zip(values.shape, rows.shape, strict=True)]
        is_along = any(a > 1 and b > 1 for a, b in sizes)
        if not is_along or any(a != b and 1 not in (a, b) for a, b in sizes):
            continue
        numbers, owners = map(np.ravel, np.broadcast_arrays(values, rows))
        is_owned = (owners != NO_ROW) & (owners != SEVERAL)
        numbers, owners = numbers[is_owned], owners[is_owned]
        num_rows = len(np.unique(owners))
        if num_rows > 1 and len(owners) % num_rows == 0:
            of_rows = numbers[np.argsort(owners, kind="stable")].reshape(num_rows, -1)
            if not (of_rows == of_rows[:1]).all():
                return True
    return False


# Operations that move entries: what they make of an array.


def _moving(move: Callable[[_Use, ndarray], ndarray]) -> Callable[[_Use], Known]:
    return lambda use: use.known[0].moved(functools.partial(move, use))


def _along(entries: ndarray, axis: int, ndim: int) -> ndarray:
    """Entries as those of an array along an axis."""
    return entries.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _spread(array: ndarray, axes: Sequence[int], ndim: int) -> ndarray:
    """The array with its axes at these places among more."""
    shape = [1] * ndim
    for axis, size in zip(axes, array.shape, strict=True):
        shape[axis] = size
    return array.reshape(shape)


def _picked(array: ndarray, axis: int, places: Any) -> ndarray:
    return array if array.shape[axis] == 1 else array.take(places, axis)


def _sliced(use: _Use, array: ndarray) -> ndarray:
    starts, limits = use.params["start_indices"], use.params["limit_indices"]
    strides = use.params["strides"] or [1] * len(starts)
    for axis, cut in enumerate(zip(starts, limits, strides, strict=True)):
        array = _picked(array, axis, np.arange(*cut))
    return array


def _split(use: _Use, array: ndarray) -> ndarray:
    sizes, (axis,) = use.params["sizes"], use.axes
    start = sum(sizes[: use.number])
    return _picked(array, axis, np.arange(start, start + sizes[use.number]))


def _tiled(use: _Use, array: ndarray) -> ndarray:
    for axis, (before, after) in enumerate(zip(use.before[0], use.after, strict=True)):
        array = _picked(array, axis, np.arange(after) % before)
    return array


def _unstacked(use: _Use, array: ndarray) -> ndarray:
    (axis,) = use.axes
    return _picked(array, axis, [use.number]).squeeze(axis)


def _reshaped(use: _Use, array: ndarray) -> ndarray:
    """Axes that are joined or split are told apart in groups of equal sizes."""
    if array.size == 1 or 0 in use.after:
        return array.ravel()[:1].reshape((1,) * len(use.after))
    before, after = np.cumprod(use.before[0]), np.cumprod(use.after)
    group_ends = np.intersect1d(before, after)
    old, new = np.searchsorted(group_ends, before), np.searchsorted(group_ends, after)
    changing = old[np.array(array.shape) > 1]
    expanded = np.where(np.isin(old, changing), use.before[0], 1)
    shape = np.where(np.isin(new, changing), use.after, 1)
    return slim(np.broadcast_to(array, expanded).reshape(shape))


def _put_together(use: _Use) -> Known:
    """Concatenations and stacks."""
    (axis,), known, shapes = use.axes, use.known, use.before
    if use.name == "stack":
        known = [one.moved(lambda array: np.expand_dims(array, axis)) for one in known]
        shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]

    def together(arrays: Sequence[ndarray]) -> ndarray:
        common = np.broadcast_shapes(*(np.take(a, [0], axis).shape for a in arrays))
        sizes = [(*common[:axis], s[axis], *common[axis + 1 :]) for s in shapes]
        return slim(np.concatenate([*map(np.broadcast_to, arrays, sizes)], axis))

    rows = together([one.rows for one in known])
    if all(one.values is None for one in known):
        return Known(rows)
    unknown = np.full((1,) * rows.ndim, _UNKNOWN)
    values = [unknown if one.values is None else one.values for one in known]
    return Known(rows, together(values))


def _padded(use: _Use) -> Known:
    array, beside = use.rows[0], use.rows[1].flat[0]
    for axis, (low, _, inside) in enumerate(use.params["padding_config"]):
        size, after = use.before[0][axis], use.after[axis]
        if size == after or size > 1 and array.shape[axis] == 1:
            continue
        places, rest = np.divmod(np.arange(after) - low, inside + 1)
        is_real = (rest == 0) & (places >= 0) & (places < size)
        taken = array.take(np.where(is_real, places, 0), axis)
        array = np.where(_along(is_real, axis, array.ndim), taken, beside)
    return Known(array)


# Operations that look entries up, or write them, by their places.


def _places(use: _Use, number: int) -> tuple[Known, tuple[Any, ...]]:
    """Places `(..., coordinates)` from operand `number` on, and what they mean.

    The dimension numbers of lookups and of writing have the same order.
    """
    if "dimension_numbers" in use.params:
        return use.known[number], tuple(use.params["dimension_numbers"])
    starts, every = use.known[number:], range(len(use.before[0]))
    values = [_UNKNOWN if one.values is None else one.values.item() for one in starts]
    rows = joined(*[one.rows for one in starts]).reshape(1)
    return Known(rows, np.array(values)), (every, (), every, (), ())


def _spots(
    shape: Sequence[int],
    window: Sequence[int],
    places: Known,
    numbers: tuple[Any, ...],
    ndim: int,
) -> tuple[list[ndarray | None], ndarray]:
    """Where entries of a result, or of what is written, are along axes of an operand.

    Each with the axes of those; None where that is anywhere. And the origins of places.

    Args:
        shape: of the operand.
        window: the shape of what is at a place of it.
        places, numbers: as from `_places`.
        ndim: how many axes the result has, or what is written.
    """
    of_window, gone, starting, batched, pairs = numbers
    of_places = [axis for axis in range(ndim) if axis not in of_window]
    origins = folded(places.rows, [-1])[..., 0]
    offsets, spots = iter(of_window), []
    for axis, (size, length) in enumerate(zip(shape, window, strict=True)):
        spot: Any = np.zeros((1,) * ndim, int)
        if axis in batched:
            pair = of_places[pairs[[*batched].index(axis)]]
            spot = _along(np.arange(size), pair, ndim)
        elif axis not in gone:
            spot = _along(np.arange(length), next(offsets), ndim)
        if axis in starting and length < size:
            starts = _coordinates(places, [*starting].index(axis))
            if starts is None:
                spot = None
            else:
                starts = np.clip(starts, 0, size - length)
                spot = spot + _spread(starts, of_places, ndim)
        spots.append(spot)
    return spots, _spread(origins, of_places, ndim)


def _coordinates(places: Known, number: int) -> ndarray | None:
    """One coordinate of all places, if the program contains it."""
    if places.values is None:
        return None
    values = places.values[..., min(number, places.values.shape[-1] - 1)]
    return None if np.isnan(values).any() else values.astype(int)


def _looked_up(use: _Use) -> Known:
    rows, window = use.rows[0], use.params["slice_sizes"]
    spots, origins = _spots(use.before[0], window, *_places(use, 1), len(use.after))
    nowhere = np.zeros((1,) * len(use.after), int)
    for axis, spot in enumerate(spots):
        if spot is None:
            rows = folded(rows, [axis])
        spots[axis] = nowhere if rows.shape[axis] == 1 else spot
    entries = rows[tuple(np.broadcast_arrays(*spots))]
    return Known(slim(joined(entries, origins)))


def _written(use: _Use) -> Known:
    """What was there before may still be there."""
    number = 1 if use.name == "dynamic_update_slice" else 2
    places, numbers = _places(use, 3 - number)
    shape, sizes = use.before[number], [*use.after]
    offsets, without = iter(numbers[0]), {*numbers[1], *numbers[3]}
    window = [
        1 if axis in without else shape[next(offsets)] for axis in range(len(sizes))
    ]
    spots, origins = _spots(sizes, window, places, numbers, len(shape))
    updates = joined(use.rows[number], origins)
    if (updates == NO_ROW).all():
        return Known(use.rows[0])

    for axis, spot in enumerate(spots):
        # All along an axis, if the same is written there or no one knows where.
        if spot is None or spot.size == sizes[axis] and 1 == math.prod(
            n for n, at in zip(updates.shape, spot.shape, strict=True) if at > 1
        ):
            spots[axis], sizes[axis] = np.zeros((1,) * len(shape), int), 1
    *spots, updates = np.broadcast_arrays(*spots, updates)
    first, last = np.full(sizes, SEVERAL, np.int32), np.full(sizes, NO_ROW, np.int32)
    np.minimum.at(first, tuple(spots), np.where(updates == NO_ROW, SEVERAL, updates))
    np.maximum.at(last, tuple(spots), updates)
    return Known(joined(use.rows[0], _between(first, last)))


# Operations that join rows along some axes of their operands.

_Axes = Sequence[int | None]
"""For each axis of an operand that of the result; None if rows are joined along it."""


def _sent(rows: ndarray, axes: _Axes, ndim: int) -> ndarray:
    rows = folded(rows, [axis for axis, to in enumerate(axes) if to is None])
    kept = sorted((to, axis) for axis, to in enumerate(axes) if to is not None)
    order = [axis for _, axis in kept]
    rows = rows.transpose([*{*range(rows.ndim)} - {*order}, *order])
    shape = rows.shape[rows.ndim - len(order) :]
    return _spread(rows.reshape(shape), [to for to, _ in kept], ndim)


def _joining(axes_of: Callable[[_Use], Sequence[_Axes]]) -> Callable[[_Use], Known]:
    def rule(use: _Use) -> Known:
        pairs = zip(use.rows, axes_of(use), strict=True)
        return Known(joined(*[_sent(*pair, len(use.after)) for pair in pairs]))

    return rule


def _of_product(use: _Use) -> Sequence[_Axes]:
    contracted, batched = use.params["dimension_numbers"]
    free, results = iter(range(len(batched[0]), len(use.after))), []
    for shape, joins, both in zip(use.before, contracted, batched, strict=True):
        places = {axis: place for place, axis in enumerate(both)}
        for axis in range(len(shape)):
            if axis not in (*joins, *both):
                places[axis] = next(free)
        results.append([places.get(axis) for axis in range(len(shape))])
    return results


def _first_axes(use: _Use) -> Sequence[_Axes]:
    """Fourier transforms, of so many last axes, decompositions, of two, and keys.

    What is drawn from each key has its own axes behind those of the keys.
    """
    count = len(use.after)
    if not use.name.startswith("random"):
        count = len(use.before[0]) - len(use.params.get("fft_lengths", "mn"))
    return [
        [axis if axis < count else None for axis in range(len(shape))]
        for shape in use.before
    ]


def _of_solve(use: _Use) -> Sequence[_Axes]:
    """Triangular systems, a column, or a row, of the right-hand side apart."""
    *batch, row, column = range(len(use.after))
    side = [None, column] if use.params["left_side"] else [row, None]
    return [[*batch, None, None], [*batch, *side]]


def _convolution(use: _Use) -> Known:
    """Each operand as `(batch, features)` of the result, then along its axes."""
    numbers, groups = use.params["dimension_numbers"], use.params["feature_group_count"]
    batches, features = use.params["batch_group_count"], use.after[numbers.out_spec[1]]
    images = use.rows[0].transpose(numbers.lhs_spec)
    images = folded(images, range(2, images.ndim))
    images = images.reshape(images.shape[:2])
    if groups > 1 and images.shape[1] > 1:
        apart = images.reshape(len(images), groups, -1)
        images = folded(apart, [2])[..., 0].repeat(features // groups, axis=1)
    else:
        images = folded(images, [1])
    if batches > 1 and len(images) > 1:
        images = images[:, 0].reshape(batches, -1).T
        images = images.repeat(features // batches, axis=1)
    kernels = folded(use.rows[1], numbers.rhs_spec[1:]).reshape(1, -1)
    rows = joined(images, kernels)
    return Known(_sent(rows, numbers.out_spec[:2], len(use.after)))


def _entry_by_entry(use: _Use) -> Known:
    """Where shapes let it, and nothing is claimed if not."""
    parts, ndim = [uniform(NO_ROW, len(use.after)).rows], len(use.after)
    for rows in use.rows:
        if rows.size == 1:
            parts.append(rows.reshape((1,) * ndim))
        elif rows.ndim == ndim and all(
            size in (1, after) for size, after in zip(rows.shape, use.after, strict=True)
        ):
            parts.append(rows)
        elif (rows == SEVERAL).any():
            parts.append(uniform(SEVERAL, ndim).rows)
    rows = joined(*parts)
    if use.name not in ("eq", "ne") and _tells_rows_apart(use, rows):
        # But for what JAX compares to differentiate `x.at[places].set(...)`.
        rows = uniform(SEVERAL, ndim).rows
    return Known(rows, _values(use))


def _along_its_axes(use: _Use) -> Known:
    """The rule for any operation: it joins rows if it goes along their axis or devices.

    Examples are sums, also so far, sorting and collectives. Axes that are gone from
    the result are those that it goes along.
    """
    axes, windows, ndim = use.axes, use.params.get("window_dimensions"), len(use.after)
    if DATA in axes:
        is_mixed = any(operand.has_rows for operand in use.known)
        return uniform(SEVERAL if is_mixed else NO_ROW, ndim)
    # `vmap` leaves the numbers of axes in a sum over the axis that it names.
    numbers = [int(axis) for axis in axes if hasattr(axis, "__index__")]
    if windows:
        numbers = [axis for axis, size in enumerate(windows) if size > 1]
    for place, rows in enumerate(use.rows):
        along = [axis for axis in numbers if axis < rows.ndim]
        use.rows[place] = folded(rows, along)
        if not windows and along and ndim < rows.ndim:
            use.rows[place] = use.rows[place].squeeze(tuple(along))
    return _entry_by_entry(use)


def _one_by_one(use: _Use) -> Known:
    """Several arrays, each of which has a result of its own."""
    use.known, use.rows = [use.known[use.number]], [use.rows[use.number]]
    return _along_its_axes(use)


def _chosen(which: ndarray, *cases: ndarray) -> ndarray:
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
    "select_n": _chosen,
    "sign": np.sign,
    "sub": np.subtract,
}
"""What becomes of numbers; nothing is claimed of bits."""

RULES: Final[dict[str, Callable[[_Use], Known]]] = {
    "broadcast_in_dim": _moving(
        lambda use, array: _spread(
            array, use.params["broadcast_dimensions"], len(use.after)
        )
    ),
    "reshape": _moving(_reshaped),
    "rev": _moving(lambda use, array: np.flip(array, tuple(use.axes))),
    "slice": _moving(_sliced),
    "split": _moving(_split),
    "squeeze": _moving(lambda use, array: array.squeeze(tuple(use.axes))),
    "tile": _moving(_tiled),
    "transpose": _moving(lambda use, a: a.transpose(use.params["permutation"])),
    "unstack": _moving(_unstacked),
    **dict.fromkeys(["concatenate", "stack"], _put_together),
    "pad": _padded,
    **dict.fromkeys(["dynamic_slice", "gather"], _looked_up),
    **dict.fromkeys(
        ["scatter" + how for how in ("", "-add", "-max", "-min", "-mul", "-sub")]
        + ["dynamic_update_slice"],
        _written,
    ),
    "dot_general": _joining(_of_product),
    "triangular_solve": _joining(_of_solve),
    **dict.fromkeys(
        "cholesky eigh fft lu qr svd random_bits random_split random_unwrap"
        " random_wrap".split(),
        _joining(_first_axes),
    ),
    "conv_general_dilated": _convolution,
    **dict.fromkeys(["optimization_barrier", "pmax", "pmin", "psum"], _one_by_one),
    "pvary": _entry_by_entry,  # names axes of devices, and sends nothing over them
}
"""By the names of operations; for all others there is `_along_its_axes`."""
