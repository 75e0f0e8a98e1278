"""Do rows interact? Follows the rows of a batch through a traced program.

`loss_fn` may return a value per row that other rows had a part in: a contrastive loss,
a batch standardised by its own mean. Then rows can be neither padded nor worked on
apart, and only the operations tell. `mark_rows` and `mark_values` name where rows go in
and where values come out; `values_mix_rows` looks at what lies between them.

What it says is true of the program's structure: some operation that joins rows (a sum
over them, a product of rows with rows) is on the way to the values. It makes no claim
about operations it does not know, and takes those that pick rows (`x[i]`) for a loop
over rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from .collectives import DATA
from .jaxprs import programs_in

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
    """Whether in a traced program some value of a row depends on other rows.

    Args:
        jaxpr: with `mark_rows` and `mark_values` called in the same function.
    """
    jaxpr = _open(jaxpr)
    if any(_is_mark(equation, _VALUES) for equation in jaxpr.eqns):
        return _follow(jaxpr, [None] * len(jaxpr.invars)).mixed_values
    return any(
        values_mix_rows(inner)
        for equation in jaxpr.eqns
        for inner in programs_in(equation)
    )


class _Along(NamedTuple):
    """An array with rows along an axis, entry `i` of it belonging to row `i // each`.

    With `each` None it does so in another order.
    """

    axis: int
    each: int | None


class _Mixed(NamedTuple):
    """An array in which rows were joined."""


_State = _Along | _Mixed | None
"""What is known of an array; None where that is nothing, as of parameters."""

_MIXED: Final = _Mixed()


class _Followed(NamedTuple):
    results: list[_State]
    mixed_values: bool


def _follow(jaxpr: Any, inputs: Sequence[_State]) -> _Followed:
    """What is known of a program's results if that is what is known of its inputs."""
    known: dict[Any, _State] = dict(zip(jaxpr.invars, inputs, strict=True))
    mixed_values = False

    def state_of(var: Any) -> _State:
        return None if hasattr(var, "val") else known.get(var)

    for equation in jaxpr.eqns:
        states = [state_of(var) for var in equation.invars]
        if _is_mark(equation, _ROWS):
            known[equation.outvars[0]] = _Along(0, 1)
            continue
        mixed_values |= _is_mark(equation, _VALUES) and states[0] == _MIXED
        if any(state is not None for state in states):
            try:
                known |= zip(equation.outvars, _results(equation, states), strict=True)
            except Exception:
                # JAX may describe an operation otherwise some day. Nothing is claimed
                # of it then, and no training fails for it.
                continue
    return _Followed([state_of(var) for var in jaxpr.outvars], mixed_values)


def _is_mark(equation: Any, name: str) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == name


def _results(equation: Any, states: list[_State]) -> list[_State]:
    name = equation.primitive.name
    if name in _OF_SEVERAL:
        return _OF_SEVERAL[name](equation, states)
    rule = _RULES.get(name) or (_reduction if name.startswith("reduce") else None)
    inside = [] if rule else programs_in(equation)
    if len(inside) == 1 and len(_open(inside[0]).invars) == len(states):
        return _follow(_open(inside[0]), states).results
    if _MIXED in states:
        return [_MIXED] * len(equation.outvars)
    rule = rule or _alike
    return [rule(equation, states, out.aval.shape) for out in equation.outvars]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _cond(equation: Any, states: list[_State]) -> list[_State]:
    branches = [
        _follow(_open(branch), states[1:]).results for branch in programs_in(equation)
    ]
    return [_either(*found) for found in zip(*branches, strict=True)]


def _scan(equation: Any, states: list[_State]) -> list[_State]:
    body = _open(equation.params["jaxpr"])
    # Told by shapes: what else tells has changed between versions of JAX.
    first_x = len(states) - _unlike(equation.invars, body.invars)
    num_ys = _unlike(equation.outvars, body.outvars)
    num_consts = first_x - (len(equation.outvars) - num_ys)
    xs = [_moved(state, -1) for state in states[first_x:]]

    def turns(xs: list[_State]) -> tuple[list[_State], list[_State]]:
        return _loop(
            lambda carry: _follow(body, [*states[:num_consts], *carry, *xs]).results,
            states[num_consts:first_x],
        )

    carry, ys = turns(xs)
    ys = [_moved(state, 1) for state in ys]
    rows = [s if isinstance(s, _Along) and s.axis == 0 else None for s in states]
    rows = rows[first_x:]
    if any(rows):
        # A row a turn: what the carry takes up of one, it brings to those after it.
        # Followed twice: from the rows, and from what of them is in the carry.
        marked = [_MIXED if row else x for row, x in zip(rows, xs, strict=True)]
        carry, from_rows = turns(marked)
        results = _follow(body, [*states[:num_consts], *carry, *xs]).results
        from_carry = results[len(carry) :]
        for place, state in enumerate(from_rows):
            if from_carry[place] == _MIXED:
                ys[place] = _MIXED
            elif state == _MIXED:
                ys[place] = next(row for row in rows if row)
    return [*carry, *ys]


def _unlike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many arrays are stacks of what a turn has of them."""
    pairs = zip(outside, inside, strict=True)
    return sum(stack.aval.shape != turn.aval.shape for stack, turn in pairs)


def _while(equation: Any, states: list[_State]) -> list[_State]:
    params = equation.params
    skipped, num_consts = params["cond_nconsts"], params["body_nconsts"]
    consts = states[skipped : skipped + num_consts]
    body = _open(params["body_jaxpr"])
    carry, _ = _loop(
        lambda carry: _follow(body, [*consts, *carry]).results,
        states[skipped + num_consts :],
    )
    return carry


def _loop(
    body: Callable[[list[_State]], list[_State]], carry: list[_State]
) -> tuple[list[_State], list[_State]]:
    """What is known of the carry after any number of turns, and of the rest."""
    while True:
        results = body(carry)
        found = list(map(_either, carry, results))
        if found == carry:
            return carry, results[len(carry) :]
        # Each turn of this, too, moves a state on: unknown, along an axis, mixed.
        carry = found


def _moved(state: _State, by: int) -> _State:
    """What is known of the slices of a stack (-1), or of the stack of slices (1)."""
    if not isinstance(state, _Along):
        return state
    return None if state.axis + by < 0 else state._replace(axis=state.axis + by)


def _either(*states: _State) -> _State:
    """Of an array that is one of these, or made of all of them element by element."""
    known = {state for state in states if state is not None}
    if len(known) > 1:
        axes = {state.axis for state in known if isinstance(state, _Along)}
        if _MIXED in known or len(axes) > 1:
            return _MIXED
        return _Along(axes.pop(), None)
    return known.pop() if known else None


def _alike(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    """Element by element, for all that is known, with axes of one repeated."""
    found: list[_State] = []
    for var, state in zip(equation.invars, states, strict=True):
        before = var.aval.shape
        fits = len(before) == len(shape) and all(
            old in (1, new) for old, new in zip(before, shape, strict=True)
        )
        if (
            fits
            and isinstance(state, _Along)
            and before[state.axis] == shape[state.axis]
        ):
            found.append(state)
    return _either(*found)


def _reduction(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    for axes in ("axes", "dimensions"):
        if axes in equation.params:
            return _without(states[0], equation.params[axes])
    windows = equation.params.get("window_dimensions")
    if windows is None:
        return _alike(equation, states, shape)
    state = states[0]
    alone = isinstance(state, _Along) and windows[state.axis] == 1
    return state if alone else None


def _without(state: _State, axes: Sequence[int]) -> _State:
    if not isinstance(state, _Along):
        return state
    if state.axis in axes:
        return _MIXED
    return state._replace(axis=state.axis - sum(axis < state.axis for axis in axes))


def _squeeze(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    (state,), axes = states, equation.params["dimensions"]
    assert isinstance(state, _Along)
    return None if state.axis in axes else _without(state, axes)


def _along(parameter: str) -> Callable[..., _State]:
    """The rule of operations that go along an axis, as sums so far, and sorting."""

    def rule(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
        axes = equation.params[parameter]
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        rows = [state.axis for state in states if isinstance(state, _Along)]
        if any(axis in axes for axis in rows):
            return _MIXED
        return _alike(equation, states, shape)

    return rule


def _sum_over_mapped_axis(equation: Any, states: list[_State]) -> list[_State]:
    """`psum` and the like, which `vmap` leaves with the numbers of axes."""
    axes = equation.params["axes"]
    if DATA in axes:
        return _with_other_devices(equation, states)
    axes = [axis for axis in axes if isinstance(axis, int)]
    return [_without(state, axes) for state in states]


def _exchange(equation: Any, states: list[_State]) -> list[_State]:
    """Collectives that put together or exchange what devices have."""
    names = equation.params["axis_name"]
    if DATA in (names if isinstance(names, tuple) else (names,)):
        return _with_other_devices(equation, states)
    # Over another axis: of layers, or of stages.
    return [_alike(equation, states, out.aval.shape) for out in equation.outvars]


def _with_other_devices(equation: Any, states: list[_State]) -> list[_State]:
    """Joined with what the devices of other rows have."""
    return [_MIXED] * len(equation.outvars)


def _top_k(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    (state,) = states
    assert isinstance(state, _Along)
    axis = equation.params.get("axis", len(shape) - 1) % len(shape)
    return _MIXED if state.axis == axis else state


def _of_last(axes: int | None) -> Callable[..., _State]:
    """The rule of transforms and decompositions of the last axes."""

    def rule(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
        state = states[0]
        last = len(equation.params["fft_lengths"]) if axes is None else axes
        before = equation.invars[0].aval.ndim
        if not isinstance(state, _Along):
            return None
        return _MIXED if state.axis >= before - last else state

    return rule


def _scatter(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    """Rows put together in fewer or more places than there are rows.

    As many places as rows may be a place for each.
    """
    for var, state in zip(equation.invars[1:], states[1:], strict=True):
        if isinstance(state, _Along) and var.aval.shape[state.axis] not in shape:
            return _MIXED if states[0] is None else None
    return _same_axis(equation, states, shape)


def _concatenate(equation: Any, states: list[_State], shape: Any) -> _State:
    joined = _either(*states)
    if isinstance(joined, _Along) and joined.axis == equation.params["dimension"]:
        return joined._replace(each=None)
    return joined


def _stack(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    joined = _either(*states)
    before = isinstance(joined, _Along) and equation.params["axis"] <= joined.axis
    return _moved(joined, 1) if before else joined


def _unstack(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    (state,), axis = states, equation.params["axis"]
    assert isinstance(state, _Along)
    return None if state.axis == axis else _without(state, (axis,))


def _tile(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    (state,) = states
    assert isinstance(state, _Along)
    again = equation.params["reps"][state.axis] > 1
    return state._replace(each=None) if again else state


def _same_axis(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    """Slices and padding: rows are where they were, if there are as many."""
    state, before = states[0], equation.invars[0].aval.shape
    if not isinstance(state, _Along) or before[state.axis] != shape[state.axis]:
        return None
    return state


def _transpose(equation: Any, states: list[_State], shape: Any) -> _State:
    (state,) = states
    assert isinstance(state, _Along)
    permutation = list(map(int, equation.params["permutation"]))
    return state._replace(axis=permutation.index(state.axis))


def _broadcast(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    state, before = states[0], equation.invars[0].aval.shape
    if not isinstance(state, _Along):
        return state
    axis = int(equation.params["broadcast_dimensions"][state.axis])
    return state._replace(axis=axis) if shape[axis] == before[state.axis] else None


def _reshape(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    """Rows stay together where axes after theirs are joined to it, or split off."""
    state, before = states[0], equation.invars[0].aval.shape
    assert isinstance(state, _Along)
    if shape[: state.axis + 1] == before[: state.axis + 1]:
        return state
    outside, size = math.prod(before[: state.axis]), before[state.axis]
    for axis, entries in enumerate(shape):
        if entries > 1 and math.prod(shape[:axis]) == outside:
            if state.each is None:
                return state._replace(axis=axis) if entries == size else None
            rows = size // state.each
            return None if entries % rows else _Along(axis, entries // rows)
    return None


def _dot(equation: Any, states: list[_State], shape: Any) -> _State:
    contracted, batched = equation.params["dimension_numbers"]
    found: list[_State] = []
    free_before = len(batched[0])
    for side, (var, state) in enumerate(zip(equation.invars, states, strict=True)):
        taken = {*contracted[side], *batched[side]}
        free = [axis for axis in range(var.aval.ndim) if axis not in taken]
        if isinstance(state, _Along):
            if state.axis in contracted[side]:
                return _MIXED
            if state.axis in batched[side]:
                place = list(batched[side]).index(state.axis)
            else:
                place = free_before + free.index(state.axis)
            found.append(state._replace(axis=place))
        free_before += len(free)
    return _either(*found)


def _convolution(equation: Any, states: list[_State], shape: Any) -> _State:
    numbers, (images, kernel) = equation.params["dimension_numbers"], states
    if kernel is not None or not isinstance(images, _Along):
        return None
    if images.axis != numbers.lhs_spec[0]:
        return None
    return images._replace(axis=numbers.out_spec[0])


def _gather(equation: Any, states: list[_State], shape: tuple[int, ...]) -> _State:
    """Lookups: by indices of rows, or in each row."""
    numbers, (table, indices) = equation.params["dimension_numbers"], states[:2]
    # The result's axes that stand for those of the indices, in order.
    looked_up = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
    found: list[_State] = []
    if isinstance(indices, _Along):
        found.append(indices._replace(axis=looked_up[indices.axis]))
    if isinstance(table, _Along):
        if table.axis in numbers.operand_batching_dims:
            place = list(numbers.operand_batching_dims).index(table.axis)
            place = looked_up[numbers.start_indices_batching_dims[place]]
        else:
            gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
            size = equation.invars[0].aval.shape[table.axis]
            if table.axis in gone or equation.params["slice_sizes"][table.axis] < size:
                return None
            kept = [i for i in range(equation.invars[0].aval.ndim) if i not in gone]
            place = numbers.offset_dims[kept.index(table.axis)]
        found.append(table._replace(axis=place))
    return _either(*found)


_OF_SEVERAL: Final[dict[str, Callable[..., list[_State]]]] = {
    "all_gather": _exchange,
    "all_to_all": _exchange,
    "cond": _cond,
    "optimization_barrier": lambda equation, states: states,
    "pmax": _sum_over_mapped_axis,
    "pmin": _sum_over_mapped_axis,
    "ppermute": _exchange,
    "psum": _sum_over_mapped_axis,
    "reduce_scatter": _exchange,
    "scan": _scan,
    "while": _while,
}

_RULES: Final[dict[str, Callable[..., _State]]] = {
    "argmax": _reduction,
    "argmin": _reduction,
    "broadcast_in_dim": _broadcast,
    "cholesky": _of_last(2),
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumprod": _along("axis"),
    "cumsum": _along("axis"),
    "dot_general": _dot,
    "dynamic_slice": _same_axis,
    "eigh": _of_last(2),
    "fft": _of_last(None),
    "gather": _gather,
    "pad": _same_axis,
    "qr": _of_last(2),
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter-max": _scatter,
    "scatter-min": _scatter,
    "scatter-mul": _scatter,
    "slice": _same_axis,
    "sort": _along("dimension"),
    "split": _same_axis,
    "squeeze": _squeeze,
    "stack": _stack,
    "svd": _of_last(2),
    "tile": _tile,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
