"""Which row each entry of an array comes from, and what operations make of that.

Two things are known of an array, each as one of NumPy with the same axes, where an axis
along which nothing changes has size 1: the number of the row that an entry depends on
(`NO_ROW`, or `SEVERAL`), and the entries themselves, as far as they are numbers that
the program contains, as those by which a permutation picks rows.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from jax.core import Tracer
from numpy import ndarray

NO_ROW: Final = -1
SEVERAL: Final = -2
LAST: Final = np.iinfo(np.int32).max
UNKNOWN: Final = math.nan
MOST_VALUES: Final = 2**20
"""So many numbers are looked at."""


class Known(NamedTuple):
    """What is known of an array; there is None instead where that is nothing."""

    rows: ndarray
    values: ndarray | None = None


def uniform(number: int, ndim: int) -> ndarray:
    """The origins of an array all of whose entries have the same."""
    return np.full((1,) * ndim, number, np.int32)


def joined(*origins: ndarray) -> ndarray:
    """The origins of what is made of these entry by entry, or by a choice."""
    first, *others = {id(rows): rows for rows in origins}.values()
    for rows in others:
        alone = np.where((rows == NO_ROW) | (first == rows), first, SEVERAL)
        first = np.where(first == NO_ROW, rows, alone)
    return first


def folded(rows: ndarray, axes: Sequence[int]) -> ndarray:
    """The origins of what is made of all entries along these axes, of size 1 then."""
    for axis in axes:
        if rows.shape[axis] > 1:
            last = rows.max(axis=axis, keepdims=True)
            first = np.where(rows == NO_ROW, LAST, rows).min(axis=axis, keepdims=True)
            rows = between(first, last)
    return rows


def between(first: ndarray, last: ndarray) -> ndarray:
    one = np.where(first == last, last, SEVERAL)
    return np.where(first == LAST, NO_ROW, one).astype(np.int32)


def slim(array: ndarray) -> ndarray:
    """The same with size 1 where nothing changes."""
    for axis, size in enumerate(array.shape):
        first = array.take([0], axis)
        if size > 1 and (array == first).all():
            array = first
    return array


def known_of(value: Any) -> Known | None:
    """What is known of a constant: the numbers in it."""
    dtype, size = getattr(value, "dtype", np.dtype(type(value))), np.size(value)
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iubf":
        return None
    if size > MOST_VALUES or isinstance(value, Tracer):
        return None
    # A constant of the program: if it is on a device, this waits for the device.
    values = np.asarray(value).astype(float)
    return Known(uniform(NO_ROW, values.ndim), values)


AXES: Final = (
    "axis_name", "axes", "axis", "dimensions", "dimension", "reduction_dimension"
)  # fmt: skip
"""What operations call the axes that they go along."""

GOING_ALONG: Final = frozenset(
    "all_gather all_to_all argmax argmin cumlogsumexp cummax cummin cumprod cumsum pmax"
    " pmin ppermute psum reduce_and reduce_max reduce_min reduce_or reduce_prod"
    " reduce_scatter reduce_sum rev sort split squeeze top_k unstack".split()
)
"""Those that must name some: if one does not, JAX calls them otherwise."""


class Use:
    """An operation, what is known of its operands, and which result is asked for.

    Attributes:
        arrays: what there is of each operand, None where that is nothing: `rows`, or,
            for operations that only move entries, `values`.
        nothing: stands for an entry of which nothing is known.
    """

    nothing: float = NO_ROW

    def __init__(self, equation: Any, known: Sequence[Known | None], number: int):
        self.name, self.params = equation.primitive.name, equation.params
        self.known, self.number = known, number
        self.arrays: list[Any] = [None if k is None else k.rows for k in known]
        self.before = [tuple(var.aval.shape) for var in equation.invars]
        self.after = tuple(equation.outvars[number].aval.shape)
        self.dtype = equation.outvars[number].aval.dtype

    def of_values(self) -> "Use":
        """The same, of the values of operands."""
        use = object.__new__(Use)
        use.__dict__ |= self.__dict__
        use.arrays = [None if one is None else one.values for one in self.known]
        use.nothing = UNKNOWN
        return use

    def alone(self, place: int) -> "Use":
        """The same with nothing known of all operands but one."""
        use = object.__new__(Use)
        use.__dict__ |= self.__dict__
        use.known = [k if i == place else None for i, k in enumerate(self.known)]
        use.arrays = [a if i == place else None for i, a in enumerate(self.arrays)]
        return use

    @property
    def rows(self) -> list[tuple[int, ndarray]]:
        """The operands of which something is known, with their places."""
        return [(i, rows) for i, rows in enumerate(self.arrays) if rows is not None]

    @property
    def axes(self) -> Sequence[Any]:
        """The axes, by number or name, that the operation says it goes along."""
        given = [self.params[name] for name in AXES if name in self.params]
        if not given and self.name in GOING_ALONG:
            raise LookupError(f"the axes of {self.name}")
        axes = given[0] if given else ()
        return axes if isinstance(axes, tuple | list) else (axes,)
