"""Do rows interact? Follows the rows of a batch through a traced program.

`loss_fn` may return a value per row that other rows had a part in: a contrastive loss,
a batch standardised by its own mean. Then rows can be neither padded nor worked on
apart, and only the operations between `mark_rows` and `mark_values` tell: does one of
them join rows, as a sum over them, or a product of rows with rows? What no rule here is
for joins those along the axes that its parameters name. It is taken to work element by
element on the others if shapes let it, and nothing is claimed of its results if not.
Operations that pick rows (`x[i]`) are taken for a loop.

To evaluate the values twice, a row exchanged, needs no rules. But it needs values, as
plans have not, and a second compilation, and misses what this batch does not show: rows
that are equal, a hinge that is not reached, rows that interact in gradients alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from .collectives import DATA
from .jaxprs import opened, programs_in

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
    jaxpr = opened(jaxpr)
    if any(_is_mark(equation, _VALUES) for equation in jaxpr.eqns):
        if _follow(jaxpr, [None] * len(jaxpr.invars)).mixed_values:
            return True
    # There may be others inside: a part of a model that not every step trains.
    return any(
        values_mix_rows(inner)
        for equation in jaxpr.eqns
        for inner in programs_in(equation)
    )


def check_constant(weights_of: Callable[[PyTree], Array], params: PyTree) -> None:
    """Raises if weights depend on `params`, but for what is under `stop_gradient`.

    Integers and booleans of predictions have no gradient, and depend on them.
    """
    config: Any = jax.config
    if config.jax_disable_jit:  # what a user debugs should not run twice
        return
    traced = opened(jax.make_jaxpr(weights_of)(params))
    if _TRAINED in _follow(traced, [_TRAINED] * len(traced.invars)).results:
        raise ValueError(
            "the loss is a pair, whose second is the weight of the first, and this"
            " weight depends on the model's parameters. If it is to be a metric, put it"
            " into a dict: (loss, {'name': value}). If it is a weight, make it a"
            " constant: jax.lax.stop_gradient(weight.astype(float))."
        )


class _Along(NamedTuple):
    """An array with rows along an axis, entry `i` of it belonging to row `i // each`.

    With `each` None it does so in another order.
    """

    axis: int
    each: int | None


_MIXED: Final = "rows were joined"
"""What is known of an array in which they were."""

_TRAINED: Final = "from parameters"
"""What is known of an array, where they are followed instead of rows."""

_Known = _Along | str | None
"""None where that is nothing, as of parameters."""


def _either(*arrays: _Known) -> _Known:
    """What is known of an array made of these, element by element or by choice."""
    known = {array for array in arrays if array is not None}
    if len(known) > 1:
        axes = {array.axis for array in known if isinstance(array, _Along)}
        if _MIXED in known or len(axes) > 1:
            return _MIXED
        return _Along(axes.pop(), None)
    return known.pop() if known else None


def _moved(known: _Known, by: int) -> _Known:
    """What is known of the slices of a stack (-1), or of the stack of slices (1)."""
    if not isinstance(known, _Along):
        return known
    return None if known.axis + by < 0 else known._replace(axis=known.axis + by)


# Programs, and operations that have programs.


class _Followed(NamedTuple):
    results: list[_Known]
    mixed_values: bool


def _follow(jaxpr: Any, inputs: Sequence[_Known]) -> _Followed:
    """What is known of a program's results if this is what is known of its inputs."""
    known: dict[Any, _Known] = dict(zip(jaxpr.invars, inputs, strict=True))
    mixed_values = has_values = False

    def find(var: Any) -> _Known:
        return None if hasattr(var, "val") else known.get(var)

    for equation in jaxpr.eqns:
        operands = [find(var) for var in equation.invars]
        if _is_mark(equation, _ROWS):
            if has_values:
                # The loss is computed once more, for another part or by an optimizer
                # that evaluates it. All rows had a part in where it is computed.
                known, has_values = {}, False
            known[equation.outvars[0]] = _Along(0, 1)
            continue

        if _is_mark(equation, _VALUES):
            has_values = True
            mixed_values |= operands[0] == _MIXED
        if any(operand is not None for operand in operands):
            try:
                results = _results(equation, operands)
            except (AttributeError, LookupError, TypeError, ValueError):
                # JAX describes the operation otherwise than a rule reads it. Taken to
                # mix rows, it costs time at most; no training has wrong numbers.
                results = [_MIXED] * len(equation.outvars)
            known |= zip(equation.outvars, results, strict=True)
    return _Followed([find(var) for var in jaxpr.outvars], mixed_values)


def _results(equation: Any, operands: list[_Known]) -> list[_Known]:
    name = equation.primitive.name
    if name == "stop_gradient":
        return [None if program == _TRAINED else program for program in operands]
    if name in _WITH_PROGRAMS:
        return _WITH_PROGRAMS[name](equation, operands)

    is_whole = name in _RULES or name.startswith("reduce")
    inside = [] if is_whole else [opened(program) for program in programs_in(equation)]
    if len(inside) == 1 and _is_called_by(equation, inside[0]):
        return _follow(inside[0], operands).results

    rule = _RULES.get(name, _along_its_axes)
    results: list[_Known] = []
    for number, out in enumerate(equation.outvars):
        # A result made of all operands, or of its own one.
        places = [number] if name in _ONE_TO_ONE else range(len(operands))
        outcomes = [
            rule(_Use(equation, operands, place, out.aval.shape))
            if isinstance(operands[place], _Along)
            else operands[place]
            for place in places
        ]
        results.append(_either(*outcomes))
    return results


def _is_called_by(equation: Any, inside: Any) -> bool:
    """Whether an operation's program takes its operands and gives its results."""
    counts = len(equation.invars), len(equation.outvars)
    return (len(inside.invars), len(inside.outvars)) == counts


def _is_mark(equation: Any, name: str) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == name


def _cond(equation: Any, operands: list[_Known]) -> list[_Known]:
    branches = map(opened, programs_in(equation))
    results = [_follow(branch, operands[1:]).results for branch in branches]
    return [_either(*of_branches) for of_branches in zip(*results, strict=True)]


def _while(equation: Any, operands: list[_Known]) -> list[_Known]:
    skipped, num_consts = (equation.params[f"{n}_nconsts"] for n in ("cond", "body"))
    consts, carry = operands[skipped:][:num_consts], operands[skipped + num_consts :]
    body = opened(equation.params["body_jaxpr"])
    return _loop(lambda carry: _follow(body, [*consts, *carry]).results, carry)[0]


def _scan(equation: Any, operands: list[_Known]) -> list[_Known]:
    body = opened(equation.params["jaxpr"])
    # Told by shapes: what else tells has changed between versions of JAX.
    first_x = len(operands) - _count_unlike(equation.invars, body.invars)
    num_ys = _count_unlike(equation.outvars, body.outvars)
    num_consts = first_x - (len(equation.outvars) - num_ys)
    consts, start = operands[:num_consts], operands[num_consts:first_x]

    def turns(xs: list[_Known]) -> tuple[list[_Known], list[_Known]]:
        return _loop(lambda carry: _follow(body, [*consts, *carry, *xs]).results, start)

    stacks = operands[first_x:]
    xs = [_moved(stack, -1) for stack in stacks]
    carry, ys = turns(xs)
    ys = [_moved(stack, 1) for stack in ys]

    rows = [s for s in stacks if isinstance(s, _Along) and s.axis == 0]
    if rows:
        # A row a turn: what the carry takes up of one, it brings to those after it.
        marked = [_MIXED if s in rows else x for s, x in zip(stacks, xs, strict=True)]
        carry, outputs = turns(marked)
        row = _MIXED if _MIXED in carry else rows[0]
        ys = [
            row if stack == _MIXED and y != _MIXED else y
            for y, stack in zip(ys, outputs, strict=True)
        ]
    return [*carry, *ys]


def _count_unlike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many arrays are stacks of what a turn has of them."""
    pairs = zip(outside, inside, strict=True)
    return sum(stack.aval.shape != turn.aval.shape for stack, turn in pairs)


def _loop(
    body: Callable[[list[_Known]], list[_Known]], carry: list[_Known]
) -> tuple[list[_Known], list[_Known]]:
    """What is known of the carry after any number of turns, and of the rest."""
    while True:
        results = body(carry)
        after = list(map(_either, carry, results))
        if after == carry:
            return carry, results[len(carry) :]
        # Each turn of this, too, moves on: from nothing, to an axis, to mixed.
        carry = after


# Rules: what is known of a result by one operand that has rows.


class _Use:
    """An operation, one of its operands, which has rows, and one of its results."""

    def __init__(self, equation: Any, operands: list[_Known], place: int, after: Any):
        self.name, self.params = equation.primitive.name, equation.params
        self.operands = operands
        self.place = place
        self.before: tuple[int, ...] = equation.invars[place].aval.shape
        self.after: tuple[int, ...] = after
        known = operands[place]
        assert isinstance(known, _Along)
        self.known = known
        self.axis = known.axis

    @property
    def axes(self) -> Sequence[Any]:
        """The axes, by number or name, that the operation says it goes along."""
        given = [self.params[name] for name in _AXES if name in self.params]
        if not given and self.name in _GOING_ALONG:
            raise LookupError(f"the axes of {self.name}")
        axes = given[0] if given else ()
        return axes if isinstance(axes, tuple | list) else (axes,)

    def along(self, axis: int) -> _Along:
        """A result with the same rows along another axis."""
        return self.known._replace(axis=axis)

    def without(self, axes: Sequence[int]) -> _Along:
        """A result that has no axes such as these, none of which is the rows'."""
        return self.along(self.axis - sum(axis < self.axis for axis in axes))


_Rule = Callable[[_Use], _Known]


def _alike(use: _Use) -> _Known:
    """Element by element, slices, padding: rows are where they were, if as many."""
    if len(use.before) != len(use.after):
        return None
    before, after = use.before[use.axis], use.after[use.axis]
    if before == after:
        return use.known
    return _Along(use.axis, None) if before < after else None


def _along_its_axes(use: _Use) -> _Known:
    """The rule for any operation: it joins rows if it goes along their axis or devices.

    Examples are sums, also so far, sorting and collectives. Axes that are gone from
    the result are those that it goes along.
    """
    axes, windows = use.axes, use.params.get("window_dimensions")
    if use.axis in axes or DATA in axes or windows and windows[use.axis] > 1:
        return _MIXED
    # `vmap` leaves the numbers of axes in a sum over the axis that it names.
    numbers = [axis for axis in axes if isinstance(axis, int)]
    are_gone = numbers and len(use.after) < len(use.before)
    return use.without(numbers) if are_gone else _alike(use)


def _apart(use: _Use) -> _Known:
    """Operations that take an array apart along an axis, and join nothing."""
    return None if use.axis in use.axes else _along_its_axes(use)


def _of_last_axes(use: _Use) -> _Known:
    """Fourier transforms, of so many last axes, and decompositions, of two."""
    last = len(use.params.get("fft_lengths", ("rows", "columns")))
    return _MIXED if use.axis >= len(use.before) - last else use.known


def _concatenate(use: _Use) -> _Known:
    joined = use.axis == use.params["dimension"]
    return _Along(use.axis, None) if joined else use.known


def _broadcast(use: _Use) -> _Known:
    axis = int(use.params["broadcast_dimensions"][use.axis])
    return use.along(axis) if use.after[axis] == use.before[use.axis] else None


def _reshape(use: _Use) -> _Known:
    """Rows stay together where axes after theirs are joined to it, or split off."""
    axis, per_row = use.known
    if use.after[: axis + 1] == use.before[: axis + 1]:
        return use.known
    outside, size = math.prod(use.before[:axis]), use.before[axis]
    for place, entries in enumerate(use.after):
        if entries > 1 and math.prod(use.after[:place]) == outside:
            if per_row is None:
                return use.along(place) if entries == size else None
            rows = size // per_row
            return None if entries % rows else _Along(place, entries // rows)
    return None


def _dot(use: _Use) -> _Known:
    contracted, batched = (axes[use.place] for axes in use.params["dimension_numbers"])
    if use.axis in contracted:
        return _MIXED
    if use.axis in batched:
        return use.along(list(batched).index(use.axis))
    # Of the result, the first axes are those in both; the last, the second operand's.
    taken = [*contracted, *batched]
    free = len(use.before) - len(taken)
    first = len(batched) if use.place == 0 else len(use.after) - free
    return use.along(first + use.without(taken).axis)


def _convolution(use: _Use) -> _Known:
    numbers, (images, kernel) = use.params["dimension_numbers"], use.operands
    if kernel is not None or images is None or use.axis != numbers.lhs_spec[0]:
        return None
    return use.along(numbers.out_spec[0])


def _gather(use: _Use) -> _Known:
    """Lookups: by indices of rows, or in each row."""
    numbers = use.params["dimension_numbers"]
    offsets, paired = numbers.offset_dims, numbers.operand_batching_dims
    # The result's axes that stand for those of the indices, in order.
    looked_up = [axis for axis in range(len(use.after)) if axis not in offsets]
    if use.place == 1:
        return use.along(looked_up[use.axis])
    if use.axis in paired:
        place = list(paired).index(use.axis)
        return use.along(looked_up[numbers.start_indices_batching_dims[place]])

    gone = {*numbers.collapsed_slice_dims, *paired}
    if use.axis in gone or use.params["slice_sizes"][use.axis] < use.before[use.axis]:
        return None
    return use.along(offsets[use.without([*gone]).axis])


def _scatter(use: _Use) -> _Known:
    """Rows put together in fewer or more places than there are rows.

    As many places as rows may be a place for each.
    """
    if use.place == 0:
        return _alike(use)
    fits = use.before[use.axis] in use.after or use.operands[0] is not None
    return None if fits else _MIXED


def _stack(use: _Use) -> _Known:
    return use.along(use.axis + (use.params["axis"] <= use.axis))


def _transpose(use: _Use) -> _Known:
    return use.along(list(use.params["permutation"]).index(use.axis))


_WITH_PROGRAMS: Final = {"cond": _cond, "scan": _scan, "while": _while}

_SCATTERS: Final = [
    "scatter" + how for how in ("", "-add", "-max", "-min", "-mul", "-sub")
]
_ONE_TO_ONE: Final = {"optimization_barrier", "pmax", "pmin", "psum"}
"""Operations of several arrays, each of which has a result of its own."""

_AXES: Final = "axis_name", "axes", "axis", "dimensions", "dimension"
"""What operations call the axes that they go along."""

_GOING_ALONG: Final = frozenset(
    "all_gather all_to_all argmax argmin cumlogsumexp cummax cummin cumprod cumsum pmax"
    " pmin ppermute psum reduce_and reduce_max reduce_min reduce_or reduce_prod"
    " reduce_scatter reduce_sum rev sort split squeeze top_k unstack".split()
)
"""Those that must name some: if one does not, JAX calls them otherwise."""

_RULES: Final[dict[str, _Rule]] = {
    **dict.fromkeys(["cholesky", "eigh", "fft", "qr", "svd"], _of_last_axes),
    **dict.fromkeys(["split", "squeeze", "unstack"], _apart),
    **dict.fromkeys(_SCATTERS, _scatter),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "gather": _gather,
    "pvary": _alike,  # names axes of devices, and sends nothing over them
    "reshape": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}
"""By the names of operations; for all others there is `_along_its_axes`."""
