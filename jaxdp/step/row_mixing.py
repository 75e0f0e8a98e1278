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

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree
from numpy import ndarray

from .jaxprs import ROW_BY_ROW, calls_python, equations_in, opened, programs_in
from .row_origins import (
    NO_ROW,
    SEVERAL,
    Known,
    Use,
    folded,
    joined,
    known_of,
    uniform,
)
from .row_rules import RULES, known_of_result

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
    if not _has_values(jaxpr):
        return False
    inputs = [None] * len(opened(jaxpr).invars)
    return _Follower().follow(jaxpr, inputs).mixed_values


def check_constant(weights_of: Callable[[PyTree], Array], params: PyTree) -> None:
    """Raises if weights depend on `params`, but for what is under `stop_gradient`.

    Integers and booleans of predictions have no gradient, and depend on them.
    """
    config: Any = jax.config
    if config.jax_disable_jit:  # what a user debugs should not run twice
        return
    traced = jax.make_jaxpr(weights_of)(params)
    trained = [Known(uniform(0, len(var.aval.shape))) for var in traced.jaxpr.invars]
    (weights,) = _Follower(through_stops=False).follow(traced, trained).results
    if weights is not None and (weights.rows != NO_ROW).any():
        raise ValueError(
            "the loss is a pair, whose second is the weight of the first, and this"
            " weight depends on the model's parameters. If it is to be a metric, put it"
            " into a dict: (loss, {'name': value}). If it is a weight, make it a"
            " constant: jax.lax.stop_gradient(weight.astype(float))."
        )


class _Followed(NamedTuple):
    results: list[Known | None]
    mixed_values: bool


_Numbers = dict[bytes, int]
"""What stands in one loop for the rows of its turns."""


class _Follower:
    """Goes through programs with what is known of their arrays.

    Args:
        through_stops: whether what is under `stop_gradient` depends on anything.
    """

    def __init__(self, *, through_stops: bool = True):
        self._through_stops = through_stops
        self._rows_of: dict[int, ndarray] = {}
        """Numbers that stand in a loop for the row of each turn, and those rows."""

    def follow(self, jaxpr: Any, inputs: Sequence[Known | None]) -> _Followed:
        """What is known of a program's results if this is what is known of its inputs.

        Of a program with values of rows only whether they depend on other rows.
        """
        constants = map(known_of, getattr(jaxpr, "consts", ()))
        jaxpr = opened(jaxpr)
        known: dict[Any, Known | None] = {
            **dict(zip(jaxpr.constvars, constants, strict=False)),
            **dict(zip(jaxpr.invars, inputs, strict=True)),
        }
        last = _last_with_values(jaxpr)
        equations = jaxpr.eqns[: last + 1] if last >= 0 else jaxpr.eqns
        mixed_values = has_values = False

        def find(var: Any) -> Known | None:
            return known_of(var.val) if hasattr(var, "val") else known.get(var)

        for equation in equations:
            if _is_mark(equation, _ROWS):
                if has_values:
                    # The loss is computed once more, for another part or by an
                    # optimizer that evaluates it. All rows had a part in where it is
                    # computed.
                    known = {var: _without_rows(one) for var, one in known.items()}
                    has_values = False
                shape = equation.outvars[0].aval.shape
                numbers = np.arange(shape[0], dtype=np.int32)
                rows = numbers.reshape(-1, *[1] * (len(shape) - 1))
                known[equation.outvars[0]] = Known(rows)
                continue

            operands = [find(var) for var in equation.invars]
            if _is_mark(equation, _VALUES):
                has_values = True
                mixed_values |= _is_mixed(operands[0])
            if any(_has_values(program) for program in programs_in(equation)):
                has_values = True
                mixed_values |= self._has_mixed_values(equation, operands)
                continue
            is_known = any(operand is not None for operand in operands)
            if not is_known and equation.primitive.name != "iota":
                continue
            try:
                results = self._results(equation, operands)
            except (AttributeError, LookupError, TypeError, ValueError):
                # JAX describes the operation otherwise than a rule reads it. Taken to
                # mix rows, it costs time at most; no training has wrong numbers.
                results = [
                    Known(uniform(SEVERAL, len(out.aval.shape)))
                    for out in equation.outvars
                ]
            known |= zip(equation.outvars, results, strict=True)
        if last >= 0:
            return _Followed([None] * len(jaxpr.outvars), mixed_values)
        return _Followed([find(var) for var in jaxpr.outvars], mixed_values)

    def _has_mixed_values(
        self, equation: Any, operands: Sequence[Known | None]
    ) -> bool:
        """Whether some are in an operation's programs, where rows begin anew."""
        given = [_without_rows(operand) for operand in operands]
        name, mixed = equation.primitive.name, False
        for program in programs_in(equation):
            inside: list[Known | None] = [None] * len(opened(program).invars)
            if len(inside) == len(given) and name != "while":
                inside = given
                if name == "scan":  # the carry changes, and a turn has slices
                    consts = len(given) - _count_unlike(
                        equation.invars, opened(program).invars
                    )
                    consts -= len(opened(program).outvars) - _count_unlike(
                        equation.outvars, opened(program).outvars
                    )
                    inside = [*given[:consts], *[None] * (len(given) - consts)]
            elif name == "cond":
                inside = given[1:]
            mixed |= self.follow(program, inside).mixed_values
        return mixed

    def _results(
        self, equation: Any, operands: list[Known | None]
    ) -> list[Known | None]:
        name = equation.primitive.name
        if name == "stop_gradient" and not self._through_stops:
            return [None] * len(operands)
        special = {"cond": self._cond, "scan": self._scan, "while": self._while}
        if name in special:
            return special[name](equation, operands)
        if name == "shard_map":
            return self._shard_map(equation, operands)

        is_whole = name in RULES or name.startswith("reduce")
        programs = [] if is_whole else programs_in(equation)
        if len(programs) == 1 and _is_called_by(equation, opened(programs[0])):
            return self.follow(programs[0], operands).results
        numbers = range(len(equation.outvars))
        return [known_of_result(Use(equation, operands, number)) for number in numbers]

    def _cond(self, equation: Any, operands: list[Known | None]) -> list[Known | None]:
        index, *others = operands
        branches = programs_in(equation)
        results = [self.follow(branch, others).results for branch in branches]
        chosen = [_either(*of_branches) for of_branches in zip(*results, strict=True)]
        # What raises an error for some row changes no value.
        if any(map(calls_python, branches)):
            return chosen
        return [
            _by(index, one, out)
            for one, out in zip(chosen, equation.outvars, strict=True)
        ]

    def _while(self, equation: Any, operands: list[Known | None]) -> list[Known | None]:
        skipped, num_consts = (
            equation.params[f"{n}_nconsts"] for n in ("cond", "body")
        )
        cond_consts, operands = operands[:skipped], operands[skipped:]
        consts, carry = operands[:num_consts], operands[num_consts:]
        body, cond = equation.params["body_jaxpr"], equation.params["cond_jaxpr"]

        def turn(carry: list[Known | None]) -> list[Known | None]:
            results = self.follow(body, [*consts, *carry]).results
            (goes_on,) = self.follow(cond, [*cond_consts, *carry]).results
            pairs = zip(results, equation.outvars, strict=True)
            return [_by(goes_on, one, out) for one, out in pairs]

        return self._loop(turn, carry, {})[0]

    def _scan(self, equation: Any, operands: list[Known | None]) -> list[Known | None]:
        body = equation.params["jaxpr"]
        inside = opened(body)
        # Told by shapes: what else tells has changed between versions of JAX.
        first_x = len(operands) - _count_unlike(equation.invars, inside.invars)
        num_ys = _count_unlike(equation.outvars, inside.outvars)
        num_consts = first_x - (len(equation.outvars) - num_ys)
        consts, start = operands[:num_consts], operands[num_consts:first_x]
        own: _Numbers = {}
        stacks = operands[first_x:]
        xs = [None if s is None else self._slices(s.rows, own) for s in stacks]

        def turn(carry: list[Known | None]) -> list[Known | None]:
            return self.follow(body, [*consts, *carry, *xs]).results

        carry, ys = self._loop(turn, start, own)
        length = equation.params["length"]
        stacks = [None if y is None else self._stack(y, length, own) for y in ys]
        return [*carry, *stacks]

    def _loop(
        self,
        turn: Callable[[list[Known | None]], list[Known | None]],
        carry: list[Known | None],
        own: _Numbers,
    ) -> tuple[list[Known | None], list[Known | None]]:
        """What is known of the carry after any number of turns, and of the rest."""
        while True:
            results = turn(carry)
            taken_up = [self._over_turns(one, own) for one in results[: len(carry)]]
            after = list(map(_either, carry, taken_up))
            if all(map(_are_equal, after, carry)):
                return carry, results[len(carry) :]
            # Each turn of this, too, moves on: from nothing, to a row, to several.
            carry = after

    # A row a turn: a number stands for those that an entry has in all turns, so that
    # the body is followed once.

    def _slices(self, rows: ndarray, own: _Numbers) -> Known:
        """What is known of the slices of a stack."""
        if len(rows) == 1:
            return Known(rows[0])
        columns = rows.reshape(len(rows), -1).T
        numbers = [self._number(np.ascontiguousarray(one), own) for one in columns]
        return Known(np.reshape(numbers, rows.shape[1:]).astype(np.int32))

    def _number(self, column: ndarray, own: _Numbers) -> int:
        if (column == column[0]).all():
            return int(column[0])
        number = own.setdefault(column.tobytes(), _TURNS + len(self._rows_of))
        self._rows_of[number] = column
        return number

    def _over_turns(self, known: Known | None, own: _Numbers) -> Known | None:
        """What is left of a carry when the next turn has another row."""
        if known is None or not own:
            return known
        rows = known.rows.copy()
        for number in own.values():
            rows[rows == number] = folded(self._rows_of[number], [0])[0]
        return Known(rows, known.values)

    def _stack(self, known: Known, length: int, own: _Numbers) -> Known:
        """What is known of the stack of a turn's results."""
        numbers = {*own.values()} & {*np.unique(known.rows).tolist()}
        rows = known.rows[None]
        if numbers:
            rows = np.broadcast_to(rows, (length, *rows.shape[1:])).copy()
        for number in numbers:
            rows[:, known.rows == number] = self._rows_of[number][:, None]
        return Known(rows)

    def _shard_map(
        self, equation: Any, operands: list[Known | None]
    ) -> list[Known | None]:
        """Devices are turns: each has a part of what is split over them."""
        program = equation.params["jaxpr"]
        body = opened(program)
        if ROW_BY_ROW in str(equation.source_info.name_stack):
            rows = [one.rows for one in operands if one is not None]
            rows = [r.reshape(len(r), -1)[:, 0] for r in rows if r.size == len(r) > 1]
            order = joined(*rows) if rows else None
            return [
                None if order is None else Known(order.reshape(-1, *[1] * (n - 1)))
                for n in (len(out.aval.shape) for out in equation.outvars)
            ]

        own: _Numbers = {}

        def split(known: Known | None, outside: Any, inside: Any) -> Known | None:
            if known is None:
                return None
            rows, shapes = known.rows, (outside.aval.shape, inside.aval.shape)
            for axis, (size, local) in enumerate(zip(*shapes, strict=True)):
                if size != local and rows.shape[axis] > 1:
                    shape = rows.shape[:axis], rows.shape[axis + 1 :]
                    parts = rows.reshape(*shape[0], size // local, local, *shape[1])
                    rows = self._slices(np.moveaxis(parts, axis, 0), own).rows
            return Known(rows)

        def whole(known: Known | None, outside: Any, inside: Any) -> Known | None:
            if known is None:
                return None
            shapes = outside.aval.shape, inside.aval.shape
            for axis, (size, local) in enumerate(zip(*shapes, strict=True)):
                if size != local:
                    rows = self._stack(known, size // local, own).rows
                    rows = np.moveaxis(rows, 0, axis)
                    if rows.shape[axis] > 1 or rows.shape[axis + 1] > 1:
                        sizes = [*rows.shape]
                        sizes[axis : axis + 2] = size // local, local
                        rows = np.broadcast_to(rows, sizes)
                    shape = rows.shape[:axis], rows.shape[axis + 2 :]
                    return Known(rows.reshape(*shape[0], -1, *shape[1]))
            return self._over_turns(known, own)

        given = map(split, operands, equation.invars, body.invars)
        results = self.follow(program, [*given]).results
        return [*map(whole, results, equation.outvars, body.outvars)]


_TURNS: Final = 2**24


def _last_with_values(jaxpr: Any) -> int:
    """The last operation that is, or contains, a mark of values; -1 if none does."""
    for place in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[place]
        if _is_mark(equation, _VALUES) or any(map(_has_values, programs_in(equation))):
            return place
    return -1


def _has_values(program: Any) -> bool:
    return any(_is_mark(equation, _VALUES) for equation in equations_in(program))


def _is_mixed(known: Known | None) -> bool:
    """Whether a value of a row comes from others, where they are `(rows, ...)`."""
    if known is None:
        return False
    rows = known.rows
    own = np.arange(len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
    if len(rows) == 1:  # all from one row
        own = np.full_like(rows, NO_ROW)
    return bool(((rows != NO_ROW) & (rows != own)).any())


def _without_rows(known: Known | None) -> Known | None:
    if known is None or known.values is None:
        return None
    return Known(uniform(NO_ROW, known.rows.ndim), known.values)


def _either(*options: Known | None) -> Known | None:
    """What is known of an array that is one of these."""
    rows = [one.rows for one in options if one is not None]
    if not rows:
        return None
    values = [None if one is None else one.values for one in options]
    first, *others = values
    alike = first is not None and all(
        other is not None and np.array_equal(first, other) for other in others
    )
    return Known(joined(*rows), first if alike else None)


def _by(choice: Known | None, known: Known | None, out: Any) -> Known | None:
    """What is known of a result that depends on a choice, too, or a choice a row."""
    if choice is None or (choice.rows == NO_ROW).all():
        return known
    ndim = len(out.aval.shape)
    rows = choice.rows
    if rows.ndim > ndim:
        rows = uniform(folded(rows, range(rows.ndim)).flat[0], 0)
    rows = rows.reshape(rows.shape + (1,) * (ndim - rows.ndim))
    return Known(rows if known is None else joined(rows, known.rows))


def _are_equal(one: Known | None, other: Known | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = (one.rows, other.rows), (one.values, other.values)
    return all(a is b or _have_equal(a, b) for a, b in pairs)


def _have_equal(one: ndarray | None, other: ndarray | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other, True)


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
