"""Do rows interact? Follows the rows of a batch through a traced program.

`loss_fn` may return a value per row that other rows had a part in: a contrastive loss,
a batch standardised by its own mean, the next row as a negative. Then rows can be
neither padded nor worked on apart, and only the operations between `mark_rows` and
`mark_values` tell: which row does each entry of each array come from, and do some come
from several? See `row_origins`. An operation that no rule is for joins rows along the
axes that its parameters name. It is taken to work element by element on the others if
shapes let it, and nothing is claimed of its results if not. Places that the program
does not contain (`x[i]` in a loop, `x[jnp.argsort(y)]`) may be those of any row.

To evaluate the values twice, a row exchanged, needs no rules. But it needs values, as
plans have not, and a second compilation, and misses what this batch does not show: rows
that are equal, a hinge that is not reached, rows that interact in gradients alone.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree
from numpy import ndarray

from .jaxprs import ROW_BY_ROW, calls_python, equations_in, opened, programs_in
from .row_origins import (
    NO_ROW,
    RULES,
    SEVERAL,
    Known,
    folded,
    joined,
    known_of,
    known_of_results,
    slim,
    uniform,
)

_ROWS: Final = "jaxdp: rows"
_VALUES: Final = "jaxdp: values of rows"


def mark_rows(batch: PyTree) -> PyTree:
    """The batch, its leaves `(rows, ...)` named in the program that is traced.

    If they are one row, nothing could be said: axes of 1 are added and removed freely.
    """
    return jax.tree.map(
        lambda leaf: checkpoint_name(leaf, _ROWS) if len(leaf) > 1 else leaf, batch
    )


def mark_values(values: PyTree) -> PyTree:
    """Values `(rows,)`, each to depend on its own row."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _VALUES), values)


def values_mix_rows(jaxpr: Any) -> bool:
    """Whether in a traced program some value of a row depends on other rows."""
    follower = _Follower()
    if _has_values(jaxpr):
        follower.follow(jaxpr, [*map(_nothing_of, opened(jaxpr).invars)])
    return follower.has_mixed_values


def check_constant(weights_of: Callable[[PyTree], Array], params: PyTree) -> None:
    """Raises if weights depend on `params`, but for what is under `stop_gradient`.

    Integers and booleans of predictions have no gradient, and depend on them.
    """
    config: Any = jax.config
    if config.jax_disable_jit:  # what a user debugs should not run twice
        return
    traced = jax.make_jaxpr(weights_of)(params)
    trained = [uniform(0, len(var.aval.shape)) for var in traced.jaxpr.invars]
    (weights,) = _Follower(through_stops=False).follow(traced, trained)
    if weights.has_rows:
        raise ValueError(
            "the loss is a pair, whose second is the weight of the first, and this"
            " weight depends on the model's parameters. If it is to be a metric, put it"
            " into a dict: (loss, {'name': value}). If it is a weight, make it a"
            " constant: jax.lax.stop_gradient(weight.astype(float))."
        )


class _Turns:
    """Rows in the turns of a loop, of which a turn may have one.

    A number stands for those that an entry has in all turns, so that the body is
    followed once.
    """

    _numbers = itertools.count(2**24)

    def __init__(self):
        self._columns: dict[int, ndarray] = {}

    def sliced(self, rows: ndarray) -> ndarray:
        """What a turn has of `(turns, ...)`."""
        if len(rows) == 1:
            return rows[0]
        columns = np.unique(rows.reshape(len(rows), -1), axis=1)
        turn = rows[0].copy()
        for column in columns.T:
            if (column != column[0]).any():
                here = (rows.reshape(len(rows), -1) == column[:, None]).all(axis=0)
                turn[here.reshape(turn.shape)] = self._number(column)
        return turn

    def _number(self, column: ndarray) -> int:
        for number, rows in self._columns.items():
            if np.array_equal(rows, column):
                return number
        number = next(self._numbers) % 2**30
        self._columns[number] = column
        return number

    def stacked(self, rows: ndarray, turns: int) -> ndarray:
        """What all turns have, from what one has."""
        numbers = [number for number in self._columns if (rows == number).any()]
        stack = rows[None]
        if numbers:
            stack = np.broadcast_to(stack, (turns, *rows.shape)).copy()
        for number in numbers:
            stack[:, rows == number] = self._columns[number][:, None]
        return stack

    def carried(self, known: Known) -> Known:
        """What is left of a carry when the next turn has another row."""
        rows = known.rows.copy()
        for number, column in self._columns.items():
            rows[rows == number] = folded(column, [0])[0]
        return Known(rows, known.values)


class _Follower:
    """Goes through programs with what is known of their arrays.

    Args:
        through_stops: whether what is under `stop_gradient` depends on anything.
    """

    def __init__(self, *, through_stops: bool = True):
        self._through_stops = through_stops
        self.has_mixed_values = False

    def follow(self, jaxpr: Any, inputs: Sequence[Known]) -> list[Known]:
        """What is known of a program's results if this is what is known of its inputs.

        Nothing, if values of rows are in it.
        """
        constants = map(known_of, getattr(jaxpr, "consts", ()))
        jaxpr = opened(jaxpr)
        known: dict[Any, Known] = {
            **dict(zip(jaxpr.constvars, constants, strict=False)),
            **dict(zip(jaxpr.invars, inputs, strict=True)),
        }

        def find(var: Any) -> Known:
            if hasattr(var, "val"):
                return known_of(var.val)
            return known.get(var) or _nothing_of(var)

        last, has_values = _last_with_values(jaxpr), False
        for place, equation in enumerate(jaxpr.eqns):
            operands = [*map(find, equation.invars)]
            if _is_mark(equation, _ROWS):
                if has_values:
                    # The loss is computed once more, for another part or by an
                    # optimizer that evaluates it. All rows had a part in where it is
                    # computed.
                    known = {var: one.without_rows for var, one in known.items()}
                    has_values = False
                rows = np.arange(equation.outvars[0].aval.shape[0], dtype=np.int32)
                rows = rows.reshape(-1, *[1] * (operands[0].rows.ndim - 1))
                results = [Known(rows)]
            elif any(map(_has_values, programs_in(equation))):
                # Rows begin anew.
                self._results(equation, [one.without_rows for one in operands])
                results = []
            elif equation.primitive.name == "iota" or any(
                one is not _nothing_of(var)
                for one, var in zip(operands, equation.invars, strict=True)
            ):
                results = self._results(equation, operands)
            else:
                results = []
            if _is_mark(equation, _VALUES):
                has_values = True
                self.has_mixed_values |= _is_mixed(operands[0])
            if place == last:
                return [*map(_nothing_of, jaxpr.outvars)]
            known |= {
                var: one
                for var, one in zip(equation.outvars, results, strict=False)
                if one.values is not None or one.has_rows
            }
        return [*map(find, jaxpr.outvars)]

    def _results(self, equation: Any, operands: list[Known]) -> list[Known]:
        name = equation.primitive.name
        if name == "stop_gradient" and not self._through_stops:
            return [*map(_nothing_of, equation.outvars)]
        try:
            special = {"cond": self._cond, "scan": self._scan, "while": self._while}
            special["shard_map"] = self._shard_map
            if name in special:
                return special[name](equation, operands)
            programs = programs_in(equation)
            if name in RULES or name.startswith("reduce"):
                programs = []
            if len(programs) == 1 and _is_called_by(equation, opened(programs[0])):
                return self.follow(programs[0], operands)
            for program in filter(_has_values, programs):
                self.follow(program, [*map(_nothing_of, opened(program).invars)])
            return known_of_results(equation, operands)
        except (AttributeError, LookupError, TypeError, ValueError):
            # JAX describes the operation otherwise than a rule reads it. Taken to
            # mix rows, it costs time at most; no training has wrong numbers.
            ndims = [len(out.aval.shape) for out in equation.outvars]
            return [uniform(SEVERAL, ndim) for ndim in ndims]

    def _cond(self, equation: Any, operands: list[Known]) -> list[Known]:
        index, *others = operands
        branches = programs_in(equation)
        results = [self.follow(branch, others) for branch in branches]
        chosen = [_either(*of_branches) for of_branches in zip(*results, strict=True)]
        # What raises an error for some row changes no value.
        if any(map(calls_python, branches)):
            return chosen
        return [_by(index, one) for one in chosen]

    def _while(self, equation: Any, operands: list[Known]) -> list[Known]:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, operands = operands[:num_cond], operands[num_cond:]
        consts, carry = operands[:num_body], operands[num_body:]

        def turn(carry: list[Known]) -> list[Known]:
            results = self.follow(params["body_jaxpr"], [*consts, *carry])
            (goes_on,) = self.follow(params["cond_jaxpr"], [*cond_consts, *carry])
            return [_by(goes_on, one) for one in results]

        return self._loop(equation, turn, carry, _Turns())[0]

    def _scan(self, equation: Any, operands: list[Known]) -> list[Known]:
        body = equation.params["jaxpr"]
        inside = opened(body)
        # Told by shapes: what else tells has changed between versions of JAX.
        first_x = len(operands) - _count_unlike(equation.invars, inside.invars)
        num_ys = _count_unlike(equation.outvars, inside.outvars)
        num_consts = first_x - (len(equation.outvars) - num_ys)
        turns, consts = _Turns(), operands[:num_consts]
        xs = [Known(turns.sliced(stack.rows)) for stack in operands[first_x:]]

        def turn(carry: list[Known]) -> list[Known]:
            return self.follow(body, [*consts, *carry, *xs])

        carry, ys = self._loop(equation, turn, operands[num_consts:first_x], turns)
        length = equation.params["length"]
        return [*carry, *(Known(turns.stacked(y.rows, length)) for y in ys)]

    def _loop(
        self,
        equation: Any,
        turn: Callable[[list[Known]], list[Known]],
        carry: list[Known],
        turns: _Turns,
    ) -> tuple[list[Known], list[Known]]:
        """What is known of the carry after any number of turns, and of the rest."""
        if any(map(_has_values, programs_in(equation))):
            carry = [uniform(NO_ROW, one.rows.ndim) for one in carry]
        while True:
            results = turn(carry)
            after = [
                _either(one, turns.carried(next_one))
                for one, next_one in zip(carry, results, strict=False)
            ]
            if all(map(_are_equal, after, carry)):
                return carry, results[len(carry) :]
            # Each turn of this, too, moves on: from nothing, to a row, to several.
            carry = after

    def _shard_map(self, equation: Any, operands: list[Known]) -> list[Known]:
        """Devices are turns: each has a part of what is split over them."""
        program, turns = equation.params["jaxpr"], _Turns()
        body = opened(program)
        if ROW_BY_ROW in str(equation.source_info.name_stack):
            rows = [one.rows for one in operands]
            order = joined(*[r.ravel() for r in rows if r.size == len(r) > 1])
            ndims = [len(out.aval.shape) for out in equation.outvars]
            return [Known(order.reshape(-1, *[1] * (ndim - 1))) for ndim in ndims]

        def split(known: Known, outside: Any, inside: Any) -> Known:
            rows = known.rows
            for axis, size, local in _unlike_axes(outside, inside):
                if rows.shape[axis] > 1:
                    shape = [*rows.shape]
                    shape[axis : axis + 1] = size // local, local
                    parts = np.moveaxis(rows.reshape(shape), axis, 0)
                    rows = turns.sliced(parts)
            return Known(rows)

        def whole(known: Known, outside: Any, inside: Any) -> Known:
            for axis, size, local in _unlike_axes(outside, inside):
                stack = turns.stacked(known.rows, size // local)
                stack = np.moveaxis(stack, 0, axis)
                shape = [*stack.shape]
                shape[axis : axis + 2] = size // local, local
                stack = np.broadcast_to(stack, shape)
                shape[axis : axis + 2] = [size]
                return Known(slim(stack.reshape(shape)))
            return turns.carried(known)

        given = map(split, operands, equation.invars, body.invars)
        results = self.follow(program, [*given])
        return [*map(whole, results, equation.outvars, body.outvars)]


def _nothing_of(var: Any) -> Known:
    """What is known of an array that nothing is known of."""
    return uniform(NO_ROW, len(var.aval.shape))


def _last_with_values(jaxpr: Any) -> int:
    """The last operation that is, or contains, a mark of values; -1 if none does."""
    for place in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[place]
        if _is_mark(equation, _VALUES) or any(map(_has_values, programs_in(equation))):
            return place
    return -1


def _has_values(program: Any) -> bool:
    return any(_is_mark(equation, _VALUES) for equation in equations_in(program))


def _is_mixed(known: Known) -> bool:
    """Whether a value of a row comes from others, where they are `(rows, ...)`."""
    rows = known.rows
    own = NO_ROW  # if all are from one row
    if len(rows) > 1:
        own = np.arange(len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
    return bool(((rows != NO_ROW) & (rows != own)).any())


def _either(*options: Known) -> Known:
    """What is known of an array that is one of these."""
    first, *others = [one.values for one in options]
    are_alike = first is not None and all(
        other is not None and np.array_equal(first, other) for other in others
    )
    rows = joined(*[one.rows for one in options])
    return Known(rows, first if are_alike else None)


def _by(choice: Known, known: Known) -> Known:
    """What is known of a result that depends on a choice, too, or a choice a row."""
    if not choice.has_rows:
        return known
    rows, ndim = choice.rows, known.rows.ndim
    rows = folded(rows, range(ndim, rows.ndim)).reshape(rows.shape[:ndim])
    rows = rows.reshape(rows.shape + (1,) * (ndim - rows.ndim))
    return Known(joined(rows, known.rows))


def _are_equal(one: Known, other: Known) -> bool:
    is_same = (one.values is None) == (other.values is None)
    return is_same and all(
        np.array_equal(*pair, equal_nan=True)
        for pair in zip(one, other, strict=True)
        if pair[0] is not None
    )


def _unlike_axes(outside: Any, inside: Any) -> list[tuple[int, int, int]]:
    """The axes of an array that are split over devices, with the sizes of both."""
    pairs = zip(outside.aval.shape, inside.aval.shape, strict=True)
    return [(axis, *pair) for axis, pair in enumerate(pairs) if pair[0] != pair[1]]


def _count_unlike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many arrays are stacks of what a turn has of them."""
    pairs = zip(outside, inside, strict=True)
    return sum(stack.aval.shape != turn.aval.shape for stack, turn in pairs)


def _is_called_by(equation: Any, inside: Any) -> bool:
    """Whether an operation's program takes its operands and gives its results."""
    counts = len(equation.invars), len(equation.outvars)
    return (len(inside.invars), len(inside.outvars)) == counts


def _is_mark(equation: Any, name: str) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == name
