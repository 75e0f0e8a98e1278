"""Which row each entry of an array comes from, and what operations make of that.

Two things are known of an array, each as one of NumPy with the same axes, where an axis
along which nothing changes has size 1: the number of the row that an entry depends on
(`NO_ROW`, or `SEVERAL`), and the entries themselves, as far as they are numbers that
the program contains, as those by which a permutation picks rows.

Some operations move entries, and numbers as well (`_MOVES`). Some look entries up, or
write them, by their places (`_spots`). All others make an entry of one entry of each
operand, or of all along some axes (`_sent`): along those that the parameters name, if
no rule is for an operation (`_along_its_axes`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy import ndarray

from .collectives import DATA

NO_ROW: Final = -1
SEVERAL: Final = np.iinfo(np.int32).max
MOST_VALUES: Final = 2**20
"""So many numbers are looked at."""


class Known(NamedTuple):
    """What is known of an array."""

    rows: ndarray
    values: ndarray | None = None

    @property
    def has_rows(self) -> bool:
        return bool((self.rows != NO_ROW).any())


@functools.lru_cache
def uniform(row: int, ndim: int) -> Known:
    """What is known of an array all of whose entries have the same origin."""
    return Known(np.full((1,) * ndim, row, np.int32))


def joined(*origins: ndarray) -> ndarray:
    """The origins of what is made of these entry by entry, or by a choice."""
    first, *others = {id(rows): rows for rows in origins}.values()
    for rows in others:
        first = _between(np.minimum(first, rows), np.maximum(first, rows))
    return first


def folded(rows: ndarray, axes: Sequence[int]) -> ndarray:
    """The origins of what is made of all entries along these axes, of size 1 then."""
    for axis in axes:
        if rows.shape[axis] > 1:
            first = np.where(rows == NO_ROW, SEVERAL, rows).min(axis, keepdims=True)
            rows = _between(first, rows.max(axis, keepdims=True))
    return rows


def _between(first: ndarray, last: ndarray) -> ndarray:
    is_one = (first == last) | (first == NO_ROW) | (last == NO_ROW)
    return np.where(is_one, last, SEVERAL)


def slim(array: ndarray) -> ndarray:
    """The same with size 1 where nothing changes."""
    for axis, size in enumerate(array.shape):
        first = array.take([0], axis)
        if size > 1 and (array == first).all():
            array = first
    return array


class _Use:
    """An operation, what is known of its operands, and which result is asked for."""

    def __init__(self, equation: Any, known: Sequence[Known], number: int):
        self.name, self.params = equation.primitive.name, equation.params
        self.known, self.number = known, number
        self.rows = [operand.rows for operand in known]
        self.before = [tuple(var.aval.shape) for var in equation.invars]
        self.after = tuple(equation.outvars[number].aval.shape)
        self.ndim = len(self.after)
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

_ONE_TO_ONE: Final = "optimization_barrier", "pmax", "pmin", "psum"
"""Operations of several arrays, each of which has a result of its own."""


def known_of_results(equation: Any, known: Sequence[Known]) -> list[Known]:
    """What is known of the results of an operation that has no programs.

    Raises whatever its rule fails with, if JAX describes it otherwise.
    """
    results = []
    for number in range(len(equation.outvars)):
        use = _Use(equation, known, number)
        if use.name in _ONE_TO_ONE:
            use.known, use.rows = known[number:][:1], use.rows[number:][:1]
        result = RULES.get(use.name, _along_its_axes)(use)
        is_small = result.values is None or result.values.size <= MOST_VALUES
        results.append(result if is_small else Known(result.rows))
    return results


# Operations that move entries: what they make of an array.


def _moved(use: _Use) -> Known:
    arrays = [array for array in use.known[0] if array is not None]
    return Known(*[_thin(_MOVES[use.name](use, array)) for array in arrays])


def _spread(array: ndarray, axes: Sequence[int], ndim: int) -> ndarray:
    """The array with its axes at these places among more, of size 1."""
    shape = [1] * ndim
    for axis, size in zip(axes, array.shape, strict=True):
        shape[axis] = size
    return array.reshape(shape)


def _whole(use: _Use, array: ndarray) -> ndarray:
    """The array with all its entries, which takes no memory."""
    return np.broadcast_to(array, use.before[0])


def _thin(array: ndarray) -> ndarray:
    """The inverse of that, also after such an array was cut or turned."""
    return array[tuple([slice(None) if step else slice(1) for step in array.strides])]


def _cut(use: _Use, array: ndarray) -> ndarray:
    starts, limits = use.params["start_indices"], use.params["limit_indices"]
    strides = use.params["strides"] or [1] * len(starts)
    return _whole(use, array)[tuple(map(slice, starts, limits, strides))]


def _split(use: _Use, array: ndarray) -> ndarray:
    ends = np.cumsum(use.params["sizes"])[:-1]
    return np.split(_whole(use, array), ends, *use.axes)[use.number]


def _tiled(use: _Use, array: ndarray) -> ndarray:
    sizes = zip(array.shape, use.before[0], use.after, strict=True)
    return np.tile(array, [1 if n == 1 else after // size for n, size, after in sizes])


def _reshaped(use: _Use, array: ndarray) -> ndarray:
    """Axes that are joined or split are told apart in groups of equal sizes."""
    if array.size == 1 or 0 in use.after:
        return array.ravel()[:1].reshape((1,) * use.ndim)
    before, after = np.cumprod(use.before[0]), np.cumprod(use.after)
    group_ends = np.intersect1d(before, after)
    old, new = np.searchsorted(group_ends, before), np.searchsorted(group_ends, after)
    changing = {group for group, size in zip(old, array.shape, strict=True) if size > 1}
    expanded, shape = (
        [size if group in changing else 1 for group, size in zip(*axes, strict=True)]
        for axes in ((old, use.before[0]), (new, use.after))
    )
    return slim(np.broadcast_to(array, expanded).reshape(shape))


_MOVES: Final[dict[str, Callable[[_Use, ndarray], ndarray]]] = {
    "broadcast_in_dim": lambda use, array: _spread(
        array, use.params["broadcast_dimensions"], use.ndim
    ),
    "reshape": _reshaped,
    "rev": lambda use, array: np.flip(array, tuple(use.axes)),
    "slice": _cut,
    "split": _split,
    "squeeze": lambda use, array: array.squeeze(tuple(use.axes)),
    "tile": _tiled,
    "transpose": lambda use, array: array.transpose(use.params["permutation"]),
    "unstack": lambda use, array: np.moveaxis(_whole(use, array), use.axes[0], 0)[
        use.number
    ],
}


def _put_together(use: _Use) -> Known:
    """Concatenations and stacks."""
    (axis,), shapes, is_stack = use.axes, use.before, use.name == "stack"
    if is_stack:
        shapes = [(*shape[:axis], 1, *shape[axis:]) for shape in shapes]

    def together(arrays: Sequence[ndarray]) -> ndarray:
        arrays = [np.expand_dims(a, axis) if is_stack else a for a in arrays]
        common = np.broadcast_shapes(*(np.take(a, [0], axis).shape for a in arrays))
        sizes = [(*common[:axis], s[axis], *common[axis + 1 :]) for s in shapes]
        return slim(np.concatenate([*map(np.broadcast_to, arrays, sizes)], axis))

    values = [operand.values for operand in use.known]
    if all(one is None for one in values):
        return Known(together(use.rows))
    unknown = np.full((1,) * len(use.before[0]), np.nan)
    values = together([unknown if one is None else one for one in values])
    return Known(together(use.rows), values)


def _padded(use: _Use) -> Known:
    array, beside = use.rows[0], use.rows[1].flat[0]
    for axis, (low, _, inside) in enumerate(use.params["padding_config"]):
        size, after = use.before[0][axis], use.after[axis]
        if size == after or size > 1 and array.shape[axis] == 1:
            continue
        places, rest = np.divmod(np.arange(after) - low, inside + 1)
        is_real = (rest == 0) & (places >= 0) & (places < size)
        taken = array.take(np.where(is_real, places, 0), axis)
        array = np.where(_spread(is_real, [axis], array.ndim), taken, beside)
    return Known(array)


# Operations that look entries up, or write them.


def _spots(use: _Use, number: int, shape: Sequence[int]) -> tuple[list[Any], ndarray]:
    """Where in operand 0 entries are looked up, or written, and the origins of that.

    An array of places for each axis of the operand; None where that is anywhere.

    Args:
        use: the operation.
        number: of the operand with the places, `(..., coordinates)`, or scalars.
        shape: of what is looked up or written, whose axes the places have.
    """
    if "dimension_numbers" in use.params:  # which are in the same order for both
        of_window, gone, starting, batched, pairs = use.params["dimension_numbers"]
        starts = use.known[number]
    else:
        of_window = starting = range(len(shape))
        gone, batched, pairs, scalars = (), (), (), use.known[number:]
        values = [np.nan if one.values is None else one.values for one in scalars]
        rows = joined(*[one.rows for one in scalars])
        starts = Known(rows.reshape(1), np.array(values, float))  # on the host
    of_places = [axis for axis in range(len(shape)) if axis not in of_window]

    offsets, places = iter(of_window), []
    for axis, size in enumerate(use.before[0]):
        at: Any
        length, at = 1, np.zeros((1,) * len(shape), int)
        if axis in batched:
            pair = of_places[pairs[[*batched].index(axis)]]
            at = _spread(np.arange(size), [pair], len(shape))
        elif axis not in gone:
            offset = next(offsets)
            length = shape[offset]
            at = _spread(np.arange(length), [offset], len(shape))
        if axis in starting and length < size:
            start = np.full(1, np.nan) if starts.values is None else starts.values
            start = start[..., [*starting].index(axis) % start.shape[-1]]
            if np.isnan(start).any():
                at = None
            else:
                start = np.clip(start, 0, size - length).astype(int)
                at = at + _spread(start, of_places, len(shape))
        places.append(at)
    return places, _sent(starts.rows, [*of_places, None], len(shape))


def _looked_up(use: _Use) -> Known:
    rows, (places, origins) = use.rows[0], _spots(use, 1, use.after)
    index: list[Any] = [np.zeros((1,) * use.ndim, int)]
    for axis, at in enumerate(places):
        rows = folded(rows, [axis]) if at is None else rows
        index.append(index[0] if rows.shape[axis] == 1 else at)
    entries = rows[None][tuple(np.broadcast_arrays(*index))]
    return Known(slim(joined(entries, origins)))


def _written(use: _Use) -> Known:
    """What was there before may still be there."""
    number = 1 if use.name == "dynamic_update_slice" else 2
    shape, sizes = use.before[number], [*use.after]
    places, origins = _spots(use, 3 - number, shape)
    updates = joined(use.rows[number], origins)
    if (updates == NO_ROW).all():
        return Known(use.rows[0])

    for axis, at in enumerate(places):
        # All along an axis, if the same is written there or no one knows where.
        if (
            at is None
            or at.size == sizes[axis]
            and all(
                many == 1 or size == 1
                for many, size in zip(at.shape, updates.shape, strict=True)
            )
        ):
            places[axis], sizes[axis] = np.zeros((1,) * len(shape), int), 1
    *places, updates = np.broadcast_arrays(*places, updates)
    first, last = np.full(sizes, SEVERAL, np.int32), np.full(sizes, NO_ROW, np.int32)
    np.minimum.at(first, tuple(places), np.where(updates == NO_ROW, SEVERAL, updates))
    np.maximum.at(last, tuple(places), updates)
    return Known(joined(use.rows[0], _between(first, last)))


# Operations that make an entry of one entry of each operand, or of all along some axes.

_Axes = Sequence[Any]
"""For each axis of an operand that of the result; None if it is joined along it."""


def _sent(rows: ndarray, axes: _Axes, ndim: int) -> ndarray:
    rows = folded(rows, [axis for axis, to in enumerate(axes) if to is None])
    kept = sorted((to, axis) for axis, to in enumerate(axes) if to is not None)
    order = [axis for _, axis in kept]
    rows = rows.transpose([*order, *{*range(rows.ndim)} - {*order}])
    return _spread(rows.reshape(rows.shape[: len(kept)]), [to for to, _ in kept], ndim)


def _join(use: _Use, *axes: _Axes) -> Known:
    return Known(joined(*map(_sent, use.rows, axes, [use.ndim] * len(axes))))


def _product(use: _Use) -> Known:
    contracted, batched = use.params["dimension_numbers"]
    free, axes = iter(range(len(batched[0]), use.ndim)), []
    for shape, joins, both in zip(use.before, contracted, batched, strict=True):
        places = {axis: place for place, axis in enumerate(both)}
        left = {*range(len(shape))} - {*joins, *both}
        places |= zip(sorted(left), free, strict=False)
        axes.append([places.get(axis) for axis in range(len(shape))])
    return _join(use, *axes)


def _first_axes(use: _Use) -> Known:
    """Fourier transforms, of so many last axes, decompositions, of two, and keys.

    What is drawn from each key has its own axes behind those of the keys.
    """
    count = use.ndim
    if not use.name.startswith("random"):
        count = len(use.before[0]) - len(use.params.get("fft_lengths", "mn"))
    return _join(use, [i if i < count else None for i in range(len(use.before[0]))])


def _solved(use: _Use) -> Known:
    """Triangular systems, a column, or a row, of the right-hand side apart."""
    *batch, row, column = [*range(use.ndim)]
    side = [None, column] if use.params["left_side"] else [row, None]
    return _join(use, [*batch, None, None], [*batch, *side])


def _convolution(use: _Use) -> Known:
    numbers, groups = use.params["dimension_numbers"], use.params["feature_group_count"]
    batches, features = use.params["batch_group_count"], use.after[numbers.out_spec[1]]
    # Each as `(batch, features)` of the result, then along its axes.
    axes = [{0: 0, 1: 1}.get(place) for place in np.argsort(numbers.lhs_spec)]
    images = _sent(use.rows[0], axes, 2)
    if groups > 1 and images.shape[1] > 1:
        apart = images.reshape(len(images), groups, -1)
        images = folded(apart, [2])[..., 0].repeat(features // groups, axis=1)
    else:
        images = folded(images, [1])
    if batches > 1 and len(images) > 1:
        images = images[:, 0].reshape(batches, -1).T
        images = images.repeat(features // batches, axis=1)
    kernels = folded(use.rows[1], numbers.rhs_spec[1:]).reshape(1, -1)
    return Known(_sent(joined(images, kernels), numbers.out_spec[:2], use.ndim))


def _along_its_axes(use: _Use) -> Known:
    """The rule for any operation: it joins rows if it goes along their axis or devices.

    Examples are sums, also so far, sorting and collectives. Axes that are gone from
    the result are those that it goes along.
    """
    axes, windows = use.axes, use.params.get("window_dimensions")
    if DATA in axes:
        is_mixed = any(operand.has_rows for operand in use.known)
        return uniform(SEVERAL if is_mixed else NO_ROW, use.ndim)
    # `vmap` leaves the numbers of axes in a sum over the axis that it names.
    numbers = [int(axis) for axis in axes if hasattr(axis, "__index__")]
    if windows:
        numbers = [axis for axis, size in enumerate(windows) if size > 1]
    for place, rows in enumerate(use.rows):
        along = tuple([axis for axis in numbers if axis < rows.ndim])
        use.rows[place] = folded(rows, along)
        if rows.ndim > use.ndim and not windows:
            use.rows[place] = use.rows[place].squeeze(along)
    return _entry_by_entry(use)


def _entry_by_entry(use: _Use) -> Known:
    """Where shapes let it, and nothing is claimed if not."""
    parts = [uniform(NO_ROW, use.ndim).rows]
    for rows in use.rows:
        if rows.ndim == use.ndim and all(
            size in (1, after)
            for size, after in zip(rows.shape, use.after, strict=True)
        ):
            parts.append(rows)
        elif rows.size == 1 or (rows == SEVERAL).any():
            parts.append(np.full((1,) * use.ndim, rows.max()))
    rows = joined(*parts)
    if use.name not in ("eq", "ne") and _tells_rows_apart(use, rows):
        # But for what JAX compares to differentiate `x.at[places].set(...)`.
        rows = uniform(SEVERAL, use.ndim).rows
    return Known(rows, _values(use))


def _values(use: _Use) -> ndarray | None:
    """The numbers that a result has which is made of others entry by entry."""
    if use.name == "iota":
        axis, shape = use.params["dimension"], use.after
        if use.params["dtype"].kind not in "iuf" or shape[axis] > MOST_VALUES:
            return None
        return _spread(np.arange(shape[axis], dtype=float), [axis], use.ndim)
    given = [operand.values for operand in use.known if operand.values is not None]
    if use.name not in _FUNCTIONS or len(given) < len(use.known):
        return None
    with np.errstate(all="ignore"):
        values = _FUNCTIONS[use.name](*given)
    if np.issubdtype(use.dtype, np.integer):
        values = np.trunc(values)
    is_unknown: Any = sum(np.isnan(values) for values in given)
    return np.where(is_unknown, np.nan, values)


def _tells_rows_apart(use: _Use, rows: ndarray) -> bool:
    """Whether rows meet numbers by which one differs from another: their own.

    Positions of tokens, say, are the same in each row, and do not.
    """
    for operand in use.known:
        values = operand.values
        if values is None or values.ndim != rows.ndim or operand.has_rows:
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


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "max": np.maximum, "min": np.minimum,
    "neg": np.negative, "rem": np.fmod, "sign": np.sign,
    "convert_element_type": np.positive, "copy": np.positive,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(
        np.nan_to_num(which).astype(int), cases, mode="clip"
    ),
}  # fmt: skip
"""What becomes of numbers; nothing is claimed of bits."""

RULES: Final[dict[str, Callable[[_Use], Known]]] = {
    **dict.fromkeys(_MOVES, _moved),
    **dict.fromkeys(["concatenate", "stack"], _put_together),
    "pad": _padded,
    **dict.fromkeys(["dynamic_slice", "gather"], _looked_up),
    **dict.fromkeys(["dynamic_update_slice", "scatter"], _written),
    **{f"scatter-{how}": _written for how in ("add", "max", "min", "mul", "sub")},
    "dot_general": _product,
    "triangular_solve": _solved,
    **dict.fromkeys(
        "cholesky eigh fft lu qr svd random_bits random_split random_unwrap"
        " random_wrap".split(),
        _first_axes,
    ),
    "conv_general_dilated": _convolution,
    "pvary": _entry_by_entry,  # names axes of devices, and sends nothing over them
}
"""By the names of operations; for all others there is `_along_its_axes`."""
