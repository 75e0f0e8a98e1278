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
from jax.core import Tracer
from jaxtyping import Array, PyTree
from numpy import ndarray

from .jaxprs import ROW_BY_ROW, calls_python, is_mark, opened, programs_in
from .row_origins import (
    MOST_VALUES,
    NO_ROW,
    RULES,
    SEVERAL,
    Known,
    folded,
    joined,
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
    if follower.find_values(jaxpr):
        follower.follow(jaxpr, _nothing_of(opened(jaxpr).invars))
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

    _new_numbers = itertools.count(2**24)

    def __init__(self):
        self._columns: dict[bytes, tuple[int, ndarray]] = {}

    def sliced(self, stack: ndarray) -> ndarray:
        """What a turn has of the rows of `(turns, ...)`."""
        columns = stack.reshape(len(stack), -1)
        columns, which = np.unique(columns, axis=1, return_inverse=True)
        numbers = np.fromiter(map(self._number, columns.T), np.int32)
        return numbers[which].reshape(stack.shape[1:])

    def _number(self, column: ndarray) -> int:
        if (column == column[0]).all():
            return column[0]
        new = next(self._new_numbers), column
        return self._columns.setdefault(column.tobytes(), new)[0]

    def stacked(self, rows: ndarray, turns: int) -> ndarray:
        """What all turns have, from what one has."""
        stack = np.broadcast_to(rows, (turns, *rows.shape)).copy()
        for number, column in self._columns.values():
            stack[:, rows == number] = column[:, None]
        return stack

    def carried(self, known: Known) -> Known:
        """What is left of a carry when the next turn has another row."""
        rows = known.rows.copy()
        for number, column in self._columns.values():
            rows[rows == number] = folded(column, [0])[0]
        return Known(rows, known.values)


class _Follower:
    """Goes through programs with what is known of their arrays.

    Args:
        through_stops: whether what is under `stop_gradient` depends on anything.
    """

    def __init__(self, *, through_stops: bool = True):
        self._through_stops = through_stops
        self._last: dict[Any, int] = {}
        """The last operation with values of rows, in programs with some."""
        self.has_mixed_values = False

    def find_values(self, program: Any) -> bool:
        """Whether values of rows are marked in a program, at any depth."""
        jaxpr = opened(program)
        for place, equation in enumerate(jaxpr.eqns):
            programs = programs_in(equation)
            if is_mark(equation, _VALUES) or any([*map(self.find_values, programs)]):
                self._last[jaxpr] = place
        return jaxpr in self._last

    def _has_values(self, equation: Any) -> bool:
        return any(opened(one) in self._last for one in programs_in(equation))

    def follow(self, program: Any, inputs: Sequence[Known]) -> list[Known]:
        """What is known of a program's results if this is what is known of its inputs.

        Nothing, if values of rows are in it.
        """
        jaxpr = opened(program)
        last, has_values = self._last.get(jaxpr), False
        known: dict[Any, Known] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(
            jaxpr.constvars, getattr(program, "consts", ()), strict=False
        ):
            known[var] = _known_of(value)

        def find(var: Any) -> Known:
            if hasattr(var, "val"):
                return _known_of(var.val)
            return known.get(var) or uniform(NO_ROW, len(var.aval.shape))

        for place, equation in enumerate(jaxpr.eqns):
            operands, results = [*map(find, equation.invars)], []
            if last is not None and self._has_values(equation):  # rows begin anew
                self._results(equation, [*map(_without_rows, operands)])
            elif is_mark(equation, _ROWS):
                if has_values:
                    # The loss is computed once more, for another part or by an
                    # optimizer that evaluates it. All rows had a part in where it is
                    # computed.
                    known = {var: _without_rows(one) for var, one in known.items()}
                    has_values = False
                results = [Known(_own_rows(*equation.outvars[0].aval.shape))]
            elif equation.primitive.name == "iota" or any(
                one is not uniform(NO_ROW, one.rows.ndim) for one in operands
            ):
                results = self._results(equation, operands)

            if is_mark(equation, _VALUES):
                has_values = True
                self.has_mixed_values |= _is_mixed(operands[0].rows)
            if place == last:
                return _nothing_of(jaxpr.outvars)
            known |= {
                var: one
                for var, one in zip(equation.outvars, results, strict=False)
                if one.values is not None or one.has_rows
            }
        return [*map(find, jaxpr.outvars)]

    def _results(self, equation: Any, operands: list[Known]) -> list[Known]:
        name = equation.primitive.name
        if name == "stop_gradient" and not self._through_stops:
            return _nothing_of(equation.outvars)
        rules = {"cond": self._cond, "scan": self._scan, "while": self._while}
        rules["shard_map"] = self._shard_map
        is_whole = name in RULES or name.startswith("reduce")
        programs = [] if is_whole else programs_in(equation)
        try:
            if name in rules:
                return rules[name](equation, operands)
            for program in programs:
                sizes = len(opened(program).invars), len(opened(program).outvars)
                if sizes == (len(operands), len(equation.outvars)):  # it is called
                    return self.follow(program, operands)
                if self._has_values(equation):
                    self.follow(program, _nothing_of(opened(program).invars))
            return known_of_results(equation, operands)
        except (AttributeError, LookupError, TypeError, ValueError):
            # JAX describes the operation otherwise than a rule reads it. Taken to
            # mix rows, it costs time at most; no training has wrong numbers.
            self.has_mixed_values |= self._has_values(equation)
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

        return self._loop(equation, turn, carry, _Turns())

    def _scan(self, equation: Any, operands: list[Known]) -> list[Known]:
        body, length = equation.params["jaxpr"], equation.params["length"]
        # Told by shapes: what else tells has changed between versions of JAX.
        first_x = len(operands) - _count_unlike(equation.invars, opened(body).invars)
        num_ys = _count_unlike(equation.outvars, opened(body).outvars)
        num_carry = len(equation.outvars) - num_ys
        turns, consts = _Turns(), operands[: first_x - num_carry]
        xs = [Known(turns.sliced(stack.rows)) for stack in operands[first_x:]]

        def turn(carry: list[Known]) -> list[Known]:
            return self.follow(body, [*consts, *carry, *xs])

        start = operands[first_x - num_carry : first_x]
        results = self._loop(equation, turn, start, turns)
        ys = [Known(slim(turns.stacked(y.rows, length))) for y in results[num_carry:]]
        return [*results[:num_carry], *ys]

    def _loop(
        self,
        equation: Any,
        turn: Callable[[list[Known]], list[Known]],
        carry: list[Known],
        turns: _Turns,
    ) -> list[Known]:
        """What is known of the carry after any number of turns, and of the rest."""
        if self._has_values(equation):
            carry = [uniform(NO_ROW, one.rows.ndim) for one in carry]
        while True:
            results = turn(carry)
            taken_up = map(turns.carried, results[: len(carry)])
            after = [*map(_either, carry, taken_up)]
            if all(map(_are_equal, after, carry)):
                return [*carry, *results[len(carry) :]]
            # Each turn of this, too, moves on: from nothing, to a row, to several.
            carry = after

    def _shard_map(self, equation: Any, operands: list[Known]) -> list[Known]:
        """Devices are turns: each has a part of what is split over them."""
        program, turns = equation.params["jaxpr"], _Turns()
        if ROW_BY_ROW in str(equation.source_info.name_stack):
            rows = [one.rows for one in operands if one.rows.size > 1]
            order = [r.ravel() for r in rows if r.size == len(r)]
            order = joined(uniform(NO_ROW, 1).rows, *order)
            ndims = [len(out.aval.shape) for out in equation.outvars]
            return [Known(order.reshape(-1, *[1] * (ndim - 1))) for ndim in ndims]

        def split(known: Known, outside: Any, inside: Any) -> Known:
            rows = known.rows
            for axis, num_parts, length in _unlike_axes(outside, inside):
                if rows.shape[axis] > 1:
                    shape = rows.shape[:axis], rows.shape[axis + 1 :]
                    rows = rows.reshape(*shape[0], num_parts, length, *shape[1])
                    rows = turns.sliced(np.moveaxis(rows, axis, 0))
            return Known(rows)

        def whole(known: Known, outside: Any, inside: Any) -> Known:
            for axis, num_parts, length in _unlike_axes(outside, inside):
                stack = np.moveaxis(turns.stacked(known.rows, num_parts), 0, axis)
                shape = stack.shape[:axis], stack.shape[axis + 2 :]
                stack = np.broadcast_to(
                    stack, (*shape[0], num_parts, length, *shape[1])
                )
                return Known(slim(stack.reshape(*shape[0], -1, *shape[1])))
            return turns.carried(known)

        inside = opened(program)
        given = map(split, operands, equation.invars, inside.invars)
        results = self.follow(program, [*given])
        return [*map(whole, results, equation.outvars, inside.outvars)]


def _known_of(value: Any) -> Known:
    """What is known of a constant: the numbers in it."""
    nothing = uniform(NO_ROW, np.ndim(value))
    dtype = getattr(value, "dtype", np.dtype(type(value)))
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iubf":
        return nothing
    if np.size(value) > MOST_VALUES or isinstance(value, Tracer):
        return nothing
    # A constant of the program: if it is on a device, this waits for the device.
    return Known(nothing.rows, np.asarray(value).astype(float))


def _nothing_of(variables: Sequence[Any]) -> list[Known]:
    return [uniform(NO_ROW, len(var.aval.shape)) for var in variables]


def _without_rows(known: Known) -> Known:
    return Known(uniform(NO_ROW, known.rows.ndim).rows, known.values)


def _own_rows(size: int, *others: int) -> ndarray:
    """The rows of an array `(rows, ...)`."""
    return np.arange(size, dtype=np.int32).reshape(-1, *[1] * len(others))


def _is_mixed(rows: ndarray) -> bool:
    """Whether values `(rows, ...)` come from others than their own rows."""
    own = _own_rows(*rows.shape) if len(rows) > 1 else NO_ROW
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
    return Known(
        joined(rows.reshape(*rows.shape, *[1] * (ndim - rows.ndim)), known.rows)
    )


def _are_equal(after: Known, before: Known) -> bool:
    """Whether the next turn of a loop has told no more; see `_either`."""
    is_same = after.values is before.values
    return is_same and np.array_equal(after.rows, before.rows)


def _unlike_axes(outside: Any, inside: Any) -> list[tuple[int, int, int]]:
    """The axes of an array that are split over devices: in how many parts, how long."""
    pairs = enumerate(zip(outside.aval.shape, inside.aval.shape, strict=True))
    return [(axis, size // part, part) for axis, (size, part) in pairs if size != part]


def _count_unlike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many arrays are stacks of what a turn has of them."""
    pairs = zip(outside, inside, strict=True)
    return sum(stack.aval.shape != turn.aval.shape for stack, turn in pairs)
