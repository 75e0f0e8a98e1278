"""Objectives: the user's loss and metrics, as one value per row of a batch.

`CriterionObjective` serves `Trainer(loss=..., metrics=...)`, `LossFnObjective`
`Trainer(loss_fn=...)`; both are called inside the compiled step.
"""

import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .. import losses
from ..basics.tracebacks import NoteOnError
from ..basics.tree import find_nodes, is_key
from .loss_output import (
    LossOutput,
    check_output,
    describe,
    is_pair,
    make_notes,
    zero_ignored_rows,
)
from .mask_and_keys import MaskAndKeys
from .model_call import call_model, copy_state
from .per_example import Arguments, PerExample
from .whole import is_whole, to_user_batch, unwrap_whole


class ObjectiveOutput(NamedTuple):
    """The values of an objective for one batch."""

    by_name: dict[str, LossOutput]
    """`"loss"` first; values are `(rows,)`, or `()` for a mean over the batch."""
    model_state: PyTree
    num_classes: int | None
    """How many labels targets may have, if the loss or a metric says so."""
    notes: tuple[str, ...] = ()
    """Notes on the values, each of which is logged once."""
    outputs: PyTree = None
    """`(predictions, targets)` if they are kept; leaves are `(rows, ...)`."""


class CriterionObjective:
    """`loss(prediction, target)` and metrics over a `(x, y)` or `(x, y, weight)` batch.

    Args:
        loss: a criterion, see `jaxdp.losses`.
        metrics: criteria by name.
        keeps_outputs: whether it returns predictions and targets, too.
    """

    is_per_example: bool
    """Whether all criteria are ours or optax's, which work on rows one by one."""
    knows_padding = False

    def __init__(
        self,
        loss: losses.Criterion,
        metrics: Mapping[str, losses.Criterion],
        *,
        keeps_outputs: bool = False,
    ):
        self.keeps_outputs = keeps_outputs
        self.criteria = {"loss": loss, **metrics}
        self.is_per_example = all(map(losses.is_per_row, self.criteria.values()))

    def __call__(
        self,
        model: PyTree,
        model_state: PyTree,
        batch: PyTree,
        mask_and_keys: MaskAndKeys,
    ) -> ObjectiveOutput:
        x, y, weight = split_batch(batch)
        num_rows = len(mask_and_keys.mask)
        target = unwrap_whole(y)
        prediction, model_state = call_model(model, model_state, x, mask_and_keys)

        by_name = {
            name: _evaluate_criterion(
                name, criterion, prediction, target, weight, num_rows
            )
            for name, criterion in self.criteria.items()
        }
        notes = make_notes(by_name, num_rows)
        if not self.is_per_example:
            notes = *notes, *_make_shape_notes(prediction, target)
        if weight is not None:
            note = "batches are (x, y, weight): the loss and metrics are weighted means"
            notes = note, *notes

        num_classes = losses.num_classes(self.criteria, prediction, target)
        outputs = None
        if self.keeps_outputs:
            both = {"predictions": prediction, "targets": y}
            outputs = _check_outputs(both, num_rows)
        return ObjectiveOutput(by_name, model_state, num_classes, notes, outputs)


class LossFnObjective:
    """The user's `loss_fn(model, *batch)`, called with the arguments that it names.

    Args:
        loss_fn: the user's function, possibly a `per_example`.
        keeps_outputs: whether it returns predictions and targets, too.
        is_part: whether it is the loss of one of several parts; then other parts may
            return predictions and targets instead.

    Attributes:
        is_per_example: whether it is written for one example.
        names: the parameters of the user's function, without the model.
        takes_state: whether it takes the state of the model.
        knows_padding: whether it takes the mask of real rows.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        *,
        keeps_outputs: bool = False,
        is_part: bool = False,
    ):
        self.loss_fn, self.keeps_outputs, self.is_part = loss_fn, keeps_outputs, is_part
        self._arguments = Arguments(loss_fn)
        is_one = self.is_per_example = isinstance(loss_fn, PerExample)
        self.names = loss_fn.names if is_one else self._arguments.names
        self.takes_state = "state" in self.names
        self.knows_padding = "mask" in self.names

    def __call__(
        self,
        model: PyTree,
        model_state: PyTree,
        batch: PyTree,
        mask_and_keys: MaskAndKeys,
    ) -> ObjectiveOutput:
        # `per_example` vmaps the rows, so it must know which leaves have none.
        batch = batch if self.is_per_example else unwrap_whole(batch)
        elements = batch if isinstance(batch, tuple) else (batch,)

        # A micro-batch may have no real row. Its weight is 0, but a mean that the user
        # computes with the mask must not be 0 / 0.
        mask = mask_and_keys.mask
        offered = mask_and_keys._replace(mask=mask | ~mask.any())._asdict()
        if model_state is not None:
            offered["state"] = copy_state(model_state)
        arguments, keywords = self._arguments.bind(elements, offered)
        is_one = self.is_per_example
        with contextlib.nullcontext() if is_one else _note_on_batch(elements):
            result = self.loss_fn(model, *arguments, **keywords)

        notes: tuple[str, ...] = ()
        if self.takes_state and model_state is not None:
            result, state = _split_state(result)
            if mask_and_keys.training and not self.is_part:
                notes = _make_state_notes(model, model_state, state)
            model_state = state
        loss, metrics = _loss_and_metrics(result)
        num_rows, outputs = len(mask), None
        is_other_part = self.is_part and not {*_OUTPUTS} & {*metrics}
        if self.keeps_outputs and not is_other_part:
            outputs = _check_outputs(metrics, num_rows)
            metrics = {n: v for n, v in metrics.items() if n not in _OUTPUTS}
        for name in metrics:
            losses.check_metric_name("`loss_fn`", name)
        by_name = {}
        for name, value in {"loss": loss, **metrics}.items():
            argument = "the loss" if name == "loss" else f"metric {name!r}"
            by_name[name] = check_output(
                f"`loss_fn`: {argument}", name, value, num_rows, None, ((), (num_rows,))
            )
        notes = *notes, *make_notes(by_name, num_rows)
        return ObjectiveOutput(by_name, model_state, None, notes, outputs)


Objective = CriterionObjective | LossFnObjective


def _note_on_batch(batch: PyTree) -> NoteOnError:
    """Returns a context that notes how a `loss_fn` was called on errors."""
    return NoteOnError(
        "`loss_fn` was called with (model, *batch) and the whole batch, of shapes"
        f" {jax.tree.map(jnp.shape, batch)}; pass one that is written for one example"
        " as jaxdp.per_example(loss_fn)"
    )


def split_batch(batch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Returns `(x, y, weight)` of a batch; `weight` is None if the batch has none."""
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        raise TypeError(
            "`loss` and `metrics` need batches (x, y), or (x, y, weight); got"
            f" {describe(to_user_batch(batch))}. Of arrays x and y, pass"
            " jaxdp.Arrays(x, y, batch_size=32); of dicts, [(b['x'], b['y']) for b in"
            " loader]; or, instead of `loss`, pass `loss_fn(model, *batch)`, or"
            " `loss_fn(model, batch)` of a batch that is no tuple."
        )
    x, y, weight = batch if len(batch) == 3 else (*batch, None)
    is_weight = weight is None or eqx.is_array_like(weight) and not is_key(weight)
    if is_whole(y) or not is_weight:
        raise TypeError(
            "of a batch (x, y, weight), `loss` and `metrics` compare y with the"
            " predictions row by row, so it can't be a Whole, and the weight must be an"
            f" array (rows,) or (rows, ...); got {describe(to_user_batch(batch))}. For"
            " other batches pass `loss_fn(model, *batch)`."
        )
    return x, y, weight


def _split_state(result: Any) -> tuple[Any, eqx.nn.State]:
    """Splits the result of a `loss_fn` that takes `state` into the rest and the new
    state, its last element.
    """
    is_long = isinstance(result, tuple) and len(result) in (2, 3)
    if not is_long or not isinstance(result[-1], eqx.nn.State):
        got = map(describe, result if is_long else [result])
        is_state = lambda node: isinstance(node, eqx.nn.State)  # noqa: E731
        nodes = jax.tree_util.tree_leaves_with_path(result, is_leaf=is_state)
        paths = [jax.tree_util.keystr(p) for p, node in nodes if is_state(node)]
        where = f" The State is result{paths[0]}." if paths else ""
        raise TypeError(
            "`loss_fn` takes `state`, so it must return (loss, state) or"
            " (loss, metrics, state), with the new eqx.nn.State last and not"
            f" inside of another element; got {', '.join(got)}.{where}"
        )
    *rest, state = result
    return rest[0] if len(rest) == 1 else tuple(rest), state


def _make_state_notes(model: PyTree, *states: PyTree) -> tuple[str, ...]:
    """Returns a note if two states are the same, and the model has norms to train."""
    is_frozen = all(one.inference for one in find_nodes(eqx.nn.BatchNorm, model))
    if is_frozen or any(map(operator.is_not, *map(jax.tree.leaves, states))):
        return ()
    note = "`loss_fn` returns the `state` that it was given, so BatchNorm's statistics"
    return (f"{note} stay; to move them, return the state that the model returned",)


def _loss_and_metrics(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Splits what a `loss_fn` returned, without a state, into loss and metrics."""
    if not isinstance(result, tuple) or is_pair(result) and jnp.ndim(result[0]):
        result = result, {}
    if len(result) != 2 or not isinstance(result[1], Mapping):
        raise TypeError(
            "`loss_fn` must return the loss or (loss, metrics) with metrics a dict of"
            " named values, where each may be a pair (values, weights); got a tuple of"
            f" {', '.join(map(describe, result))}. (Pass a function unwrapped, without"
            " `filter_value_and_grad`.)"
        )
    return result


def _evaluate_criterion(
    name: str,
    criterion: losses.Criterion,
    prediction: Any,
    target: Any,
    weight: Array | None,
    rows: int,
) -> LossOutput:
    """Returns the values of a criterion, weighted if the batch is."""
    argument = "`loss`" if name == "loss" else f"`metrics`: {name!r}"
    is_per_row = losses.is_per_row(criterion)
    if is_per_row and not all(hasattr(x, "shape") for x in (prediction, target)):
        raise TypeError(
            f"{argument} compares one array of predictions with one of targets; got"
            f" {describe(prediction)} and {describe(target)}. Return one array from the"
            " model, or pass a callable (prediction, target), or `loss_fn`."
        )
    prediction, target = losses.match_shapes(criterion, prediction, target)
    if weight is not None and is_per_row:
        # NaN makes gradients NaN, even where `where` does not select its value.
        prediction, target = zero_ignored_rows(weight, prediction, target)
    got = f"predictions ({describe(prediction)}) and targets ({describe(target)})"
    with NoteOnError(f"in {argument}, called with {got}"):
        value = criterion(prediction, target)

    shapes = None
    if not is_per_row:
        shapes = (), (rows,), jnp.shape(target) if eqx.is_array_like(target) else ()
    return check_output(argument, name, value, rows, weight, shapes)


def _make_shape_notes(prediction: Any, target: Any) -> tuple[str, ...]:
    """Returns a note if shapes differ by a last axis of one: a criterion of the user's
    may broadcast them, and so compare each row with all others.
    """
    if not eqx.is_array(prediction) or not eqx.is_array(target):
        return ()
    shapes = prediction.shape, target.shape
    if (*shapes[0], 1) != shapes[1] and shapes[0] != (*shapes[1], 1):
        return ()
    of_rows = " and ".join(str(shape[1:]) for shape in shapes)
    return (
        f"predictions and targets have the shapes {of_rows} for each row: arithmetic"
        " broadcasts them, and compares every row with every other, unless your loss"
        " or metric makes them equal",
    )


_OUTPUTS = "predictions", "targets"


def _check_outputs(named: Mapping[str, Any], rows: int) -> tuple[PyTree, PyTree]:
    """Returns the predictions and targets among named values; raises if one is
    missing, or its first axis is not `rows` long.
    """
    if missing := [name for name in _OUTPUTS if name not in named]:
        raise ValueError(
            f"`metrics` has a PassMetric, and `loss_fn` does not return {missing}; it"
            " must return (loss, {'predictions': ..., 'targets': ...}), with whatever"
            f" else, and has returned metrics {list(named)}."
        )
    for name in _OUTPUTS:
        for leaf in jax.tree.leaves(named[name], is_leaf=is_whole):
            if is_whole(leaf) or jnp.shape(leaf)[:1] != (rows,):
                raise ValueError(
                    f"`metrics` has a PassMetric, and the {name} have"
                    f" {describe(leaf)} for a batch of {rows} rows; it must have the"
                    f" rows, ({rows}, ...)."
                )
    return named["predictions"], named["targets"]
