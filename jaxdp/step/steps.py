"""The state of a run and the pure steps that change it. No devices, no jit.

A strategy compiles `Steps.train`, `Steps.evaluate` and `Steps.predict`, and hands
them the `Collectives` that fit how it splits the batch. Everything else that decides
the numbers is in this file and in `objective`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from ..basics.tree import leaf_path
from . import objective as objectives
from .collectives import Collectives
from .jaxprs import OWN_LOOP, has_convolutions
from .metrics import MAX_METRICS, Facts, Metrics, add_to_totals, new_totals, vector
from .objective import Objective, Rows
from .precision import (
    PRECISIONS,
    LossScale,
    Precision,
    cast_batch,
    computing,
    first_scale,
    next_scale,
    widen,
)
from .remat import Remat, remat_function, remat_submodules
from .row_mixing import mark_rows, mark_values

Batch = PyTree
"""Leaves shaped `(rows, ...)`, on the host."""

_RESERVED: Final = 0xFFFFFFFF
"""Folded into a key where no step or row number ever gets: for validation, and
downwards for the keys of whole micro-batches."""


class TrainState(NamedTuple):
    """All that training changes: the only thing placed, donated, saved, restored.

    A pytree of arrays; what `filter_spec` does not train is in `buffers`.
    """

    params: PyTree
    """The trained leaves of the model; None elsewhere."""
    buffers: PyTree
    """The other arrays of the model, which no step changes; None elsewhere."""
    model_state: PyTree
    """The `eqx.nn.State`, or None."""
    opt_state: PyTree
    key: Any
    """uint32, raw data of the seed's PRNG key. (A typed one takes jit's slow path.)"""
    step: Any
    """int32 `()`. Number of completed optimizer steps."""
    totals: Any
    """float32 `(2, metrics)`: sums over this epoch, first of real rows; see
    `metrics.add_to_totals`."""
    loss_scale: Any = None
    """`precision.LossScale` under "16-mixed", or None."""

    @property
    def weights(self) -> "Weights":
        """The part that evaluation needs."""
        return Weights(self.params, self.buffers, self.model_state, self.key)


class Weights(NamedTuple):
    """What of a `TrainState` evaluation and prediction read."""

    params: PyTree
    buffers: PyTree
    model_state: PyTree
    key: Any


class Group(NamedTuple):
    """Micro-batches of one shape, stacked."""

    batch: PyTree
    """Leaves `(micro_batches, rows, ...)`."""
    counts: Any
    """int32 `(micro_batches, blocks)`: real rows in each equal block of a micro-batch's
    rows. A block is what one process loaded, its real rows first, then its padding."""


class Steps(NamedTuple):
    """The pure steps of one trainer. Methods are `(collectives, arrays...)`."""

    static: PyTree
    """The leaves of the model that are not arrays."""
    objective: Objective | None
    """None until a batch shows which loss fits; prediction needs none."""
    optimizer: optax.GradientTransformationExtraArgs
    inside: tuple[Callable[..., dict[str, Array]], ...] = ()
    skip_nonfinite: bool = False
    remat: Remat = False
    precision: Precision = PRECISIONS["32-true"]
    unroll_convolutions: bool = False
    """Whether micro-batches with convolutions are no loop in the compiled step."""
    rows_interact: bool = False
    """Whether values of rows are known to depend on other rows; see `interaction`."""

    def train(
        self, collectives: Collectives, state: TrainState, groups: Sequence[Group]
    ) -> tuple[TrainState, Metrics]:
        """One optimizer step over all micro-batches of `groups`.

        The gradient is that of the mean loss over all real rows, however they are
        split into micro-batches and over devices.
        """
        grads, model_state, summed = collectives.over_rows(
            self._gradients,
            (state.weights, state.step, state.loss_scale),
            groups,
            ("gradients", "whole", "whole"),
        )
        if state.loss_scale is not None:
            unscale = 1 / state.loss_scale.scale  # a power of two: exact
            grads = jax.tree.map(lambda grad: grad * unscale, grads)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        total = _total(groups)
        # One by one: XLA turns a vector's division by a number into a product with the
        # reciprocal in some programs, which rounds otherwise.
        means = jnp.stack([s / total for s in vector(summed.sums, summed.facts)])

        state = state._replace(params=collectives.like_gradients(state.params))
        updates, opt_state = self._update(grads, state, loss=means[0])
        new = TrainState(
            params=_as(
                state.params, eqx.apply_updates(state.params, updates), "params"
            ),
            buffers=state.buffers,
            model_state=_as(state.model_state, model_state, "model state"),
            opt_state=_as(state.opt_state, opt_state, "optimizer state"),
            key=state.key,
            step=state.step + 1,
            totals=add_to_totals(state.totals, total, means * total),
            loss_scale=state.loss_scale,
        )
        inside: dict[str, Array] = {}
        for hook in self.inside:
            values = hook(grads, updates, new)
            if not isinstance(values, dict):
                owner = type(getattr(hook, "__self__", hook)).__name__
                raise TypeError(
                    f"{owner}.inside_step returned a {type(values).__name__}; it must"
                    " return a dict of named arrays."
                )
            inside = _with_names(inside, values, summed.facts)
        if self.skip_nonfinite or state.loss_scale is not None:
            finite = _all_finite((means[0], grads))
            kept = state._replace(step=new.step)
            if state.loss_scale is not None:
                # An overflow in the gradients alone leaves a loss that counts.
                is_loss = jnp.isfinite(means).all()
                totals = jnp.where(is_loss, new.totals, state.totals)
                scale = next_scale(state.loss_scale, finite)
                new, kept = (
                    each._replace(totals=totals, loss_scale=scale)
                    for each in (new, kept)
                )
                own = {"loss_scale": state.loss_scale.scale}
                inside = _with_names(inside, own, summed.facts)
            new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, kept)
            inside = _with_names(inside, {"skipped": ~finite}, summed.facts)
        return new, Metrics(summed.facts, means, inside)

    def evaluate(
        self,
        collectives: Collectives,
        weights: Weights,
        totals: Float[Array, "2 metrics"],
        batch_idx: Int[Array, ""],
        group: Group,
    ) -> tuple[Float[Array, "2 metrics"], Metrics]:
        """`totals` with the sums of one batch added, in inference mode."""
        summed = collectives.over_rows(
            self._sums, (weights, batch_idx), [group], "whole"
        )
        total = group.counts.sum().astype(jnp.float32)
        sums = vector(summed.sums, summed.facts)
        metrics = Metrics(summed.facts, sums / total, {})
        return add_to_totals(totals, total, sums), metrics

    def predict(
        self, collectives: Collectives, weights: Weights, group: Group
    ) -> PyTree:
        """Predictions shaped `(rows, ...)` from inputs alone, padding included."""
        return collectives.over_rows(self._predictions, weights, [group], "rows")

    def _gradients(
        self,
        collectives: Collectives,
        inputs: tuple[Weights, Int[Array, ""], LossScale | None],
        groups: Sequence[Group],
    ) -> tuple[PyTree, PyTree, "_Summed"]:
        """The gradient of the mean loss, the new model state, and sums over all rows.

        Here is all that looks at rows; a device may be shown its own only.
        """
        objective = self.objective
        assert objective is not None
        weights, step, scale = inputs
        step_key = jax.random.fold_in(jax.random.wrap_key_data(weights.key), step)
        total = _total(groups)
        if weights.model_state is not None or objective.takes_key:
            collectives.need_all_rows()
        whole = collectives.gather(weights.params)
        buffers = collectives.gather(weights.buffers)

        def gradients(model_state: PyTree, micro: _Micro) -> tuple[PyTree, ...]:
            def mean_loss(params: PyTree) -> tuple[Array, tuple[Any, ...]]:
                model = remat_submodules(self._model(params, buffers), self.remat)
                batch = cast_batch(model, mark_rows(micro.batch), self.precision)
                model = collectives.arrange(computing(model, self.precision))
                rows = _rows(collectives, step_key, micro)
                found = objective(model, model_state, batch, rows, _bound(collectives))
                _check_depends(found.values["loss"], params)
                facts = self._facts(found, stateful=model_state is not None)
                if facts.rows_interact:
                    collectives.need_all_rows()
                sums = _sums_of(found, rows.mask, facts)
                loss = sums["loss"]
                loss = loss / total.astype(loss.dtype)
                loss = loss if scale is None else loss * scale.scale
                return loss, (found.model_state, _Summed(sums, facts))

            recomputed = remat_function(mean_loss, self.remat)
            grads, aux = jax.grad(recomputed, has_aux=True)(whole)
            return widen(grads), *aux

        # An eqx.nn.State may be used once; the copy leaves the state whole.
        model_state = jax.tree.map(lambda leaf: leaf, weights.model_state)
        grads, model_state, summed = _over_micro_batches(
            gradients, whole, model_state, groups, unroll=self.unroll_convolutions
        )
        return (
            collectives.sum_gradients(grads),
            model_state,
            _Summed(collectives.sum(summed.sums), summed.facts),
        )

    def _sums(
        self,
        collectives: Collectives,
        inputs: tuple[Weights, Int[Array, ""]],
        groups: Sequence[Group],
    ) -> "_Summed":
        """Sums over all rows of a batch, in inference mode."""
        objective = self.objective
        assert objective is not None
        weights, batch_idx = inputs
        if objective.takes_key:
            collectives.need_all_rows()
        micro = _first(groups[0])
        key = _key_outside_training(weights)
        rows = _rows(collectives, jax.random.fold_in(key, batch_idx), micro)
        model = self._whole_model(collectives, weights)
        batch = cast_batch(model, mark_rows(micro.batch), self.precision)
        found = objective(
            self._inference(collectives, model),
            weights.model_state,
            batch,
            rows,
            _bound(collectives),
        )
        facts = self._facts(found, stateful=False)
        if facts.rows_interact:
            collectives.need_all_rows()
        sums = _sums_of(found, rows.mask, facts)
        return _Summed(collectives.sum(sums), facts)

    def _predictions(
        self, collectives: Collectives, weights: Weights, groups: Sequence[Group]
    ) -> PyTree:
        """Predictions for the rows of a batch that are seen here."""
        micro = _first(groups[0])
        model = self._whole_model(collectives, weights)
        prediction, _ = objectives.apply(
            self._inference(collectives, model),
            weights.model_state,
            micro.batch,
            _rows(collectives, _key_outside_training(weights), micro),
            _bound(collectives),
        )
        return prediction

    def _facts(self, found: objectives.Values, *, stateful: bool) -> Facts:
        names = tuple(found.values)
        if len(names) > MAX_METRICS:
            raise ValueError(
                f"there are {len(names)} values per step, the loss and its metrics; at"
                f" most {MAX_METRICS} can be kept."
            )
        scalars = any(value.ndim == 0 for value in found.values.values())
        # What is drawn for the batch as a whole, a permutation say, is over its rows.
        keyed = self.objective is not None and self.objective.takes_key
        interact = scalars or stateful or keyed or self.rows_interact
        return Facts(names, interact, found.num_classes, found.notes)

    def _update(
        self, grads: PyTree, state: TrainState, *, loss: Array
    ) -> tuple[PyTree, PyTree]:
        """The optimizer's updates and new state; it is given the loss if it takes it.

        (`optax.contrib.reduce_on_plateau` does.)
        """
        update = self.optimizer.update
        parameters = inspect.signature(update).parameters.values()
        takes_value = any(
            p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters
        )
        extra = {"value": loss} if takes_value else {}
        try:
            return update(grads, state.opt_state, state.params, **extra)
        except TypeError as error:
            if "required keyword-only" in str(error):
                error.add_note(
                    "`optimizer` evaluates the loss itself, as optax.lbfgs does; the"
                    " trainer gives an optimizer gradients and the loss, no functions."
                )
            raise
        except AttributeError as error:
            error.add_note(
                "in `optimizer.update`, which was given the model's trained leaves; one"
                " that wants parameters of its own kind, as optax.lookahead, can't be"
                " used."
            )
            raise

    def _model(self, params: PyTree, buffers: PyTree) -> PyTree:
        return eqx.combine(params, buffers, self.static)

    def _whole_model(self, collectives: Collectives, weights: Weights) -> PyTree:
        return self._model(
            collectives.gather(weights.params), collectives.gather(weights.buffers)
        )

    def _inference(self, collectives: Collectives, model: PyTree) -> PyTree:
        model = computing(eqx.nn.inference_mode(model), self.precision)
        return collectives.arrange(model)


def first_state(
    params: PyTree,
    buffers: PyTree,
    model_state: PyTree,
    optimizer: optax.GradientTransformation,
    seed: int,
    precision: Precision = PRECISIONS["32-true"],
) -> TrainState:
    """The state before any step; not placed yet."""

    def fixed(leaf: Any) -> Array:
        # A Python number in an optimizer's state would be a weakly typed array; a step
        # returns it strongly typed, and the second step would not fit the first's
        # program.
        array = jnp.asarray(leaf)
        return jax.lax.convert_element_type(array, array.dtype)

    def strong(leaf: Any) -> Any:
        # In the model, too: JAX computes otherwise with weakly typed arrays, such as
        # `jnp.array(2.0)`, and no checkpoint keeps that they are.
        return fixed(leaf) if getattr(leaf, "weak_type", False) else leaf

    params, buffers, model_state = jax.tree.map(strong, (params, buffers, model_state))
    init = jax.jit(lambda p: jax.tree.map(fixed, optimizer.init(p)))
    return TrainState(
        params=params,
        buffers=buffers,
        model_state=model_state,
        opt_state=init(params),
        key=jax.random.key_data(jax.random.key(seed)),
        step=np.int32(0),
        totals=new_totals(),
        loss_scale=first_scale(precision),
    )


class _Micro(NamedTuple):
    """One micro-batch inside the step, and how many real rows came before it."""

    batch: PyTree
    counts: Int[Array, " blocks"]
    rows_before: Int[Array, ""]


@jax.tree_util.register_pytree_node_class
class _Summed:
    """Sums by name, with the facts carried along as a static part."""

    def __init__(self, sums: Any, facts: Facts):
        self.sums, self.facts = sums, facts

    def tree_flatten(self) -> tuple[Any, ...]:
        return (self.sums,), self.facts

    @classmethod
    def tree_unflatten(cls, facts: Facts, children: Any) -> "_Summed":
        return cls(children[0], facts)


def _over_micro_batches(
    gradients: Callable[[PyTree, _Micro], tuple[PyTree, PyTree, _Summed]],
    params: PyTree,
    model_state: PyTree,
    groups: Sequence[Group],
    *,
    unroll: bool,
) -> tuple[PyTree, PyTree, _Summed]:
    """Sums `gradients` over the micro-batches in order, by a scan within a group.

    With `unroll` the scan is no loop in the program if there are convolutions in it.
    """

    def body(carry: tuple[PyTree, PyTree], micro: _Micro) -> tuple[Any, _Summed]:
        grads, model_state = carry
        more, model_state, summed = gradients(model_state, micro)
        return (jax.tree.map(jnp.add, grads, more), model_state), summed

    rows_before = jnp.int32(0)
    found: Any = None
    for group in groups:
        counts = group.counts.sum(axis=1)
        before = rows_before + jnp.cumsum(counts) - counts
        rows_before = rows_before + counts.sum()
        micros = _Micro(group.batch, group.counts, before)
        if len(group.counts) == 1:
            micro = jax.tree.map(lambda x: x[0], micros)
            grads, model_state, summed = gradients(model_state, micro)
        else:
            zeros = widen(jax.tree.map(jnp.zeros_like, params))
            start, first = (zeros, model_state), jax.tree.map(lambda x: x[0], micros)
            unrolled = unroll and has_convolutions(jax.make_jaxpr(body)(start, first))
            with jax.named_scope(OWN_LOOP):
                (grads, model_state), each = jax.lax.scan(
                    body, start, micros, unroll=len(group.counts) if unrolled else 1
                )
            summed = jax.tree.map(lambda x: x.sum(axis=0), each)
        new = grads, summed
        found = new if found is None else jax.tree.map(jnp.add, found, new)
    grads, summed = found
    return grads, model_state, summed


def _rows(collectives: Collectives, key: Any, micro: _Micro) -> Rows:
    """Masks and keys of the rows seen here.

    A row's key depends on `key` and its place among the real rows of the global
    batch, and so on no padding, device or process.
    """
    seen = jax.tree.leaves(micro.batch)[0].shape[0]
    ids = collectives.row_ids(seen)
    block_rows = seen * collectives.num_shards // len(micro.counts)
    block, place = ids // block_rows, ids % block_rows
    before = jnp.cumsum(micro.counts) - micro.counts
    places = micro.rows_before + before[block] + place
    return Rows(
        mask=place < micro.counts[block],
        keys=jax.vmap(jax.random.fold_in, (None, 0))(key, places),
        key=_batch_key(key, micro),
    )


def _batch_key(key: Any, micro: _Micro) -> Any:
    """One key for all rows of a micro-batch."""
    return jax.random.fold_in(
        key, jnp.uint32(_RESERVED) - micro.rows_before.astype(jnp.uint32)
    )


def _total(groups: Sequence[Group]) -> Float[Array, ""]:
    """How many real rows there are, on all devices."""
    total = jnp.stack([group.counts.sum() for group in groups]).sum()
    return total.astype(jnp.float32)


def _key_outside_training(weights: Weights) -> Any:
    return jax.random.fold_in(
        jax.random.wrap_key_data(weights.key), jnp.uint32(_RESERVED)
    )


def _first(group: Group) -> _Micro:
    batch, counts = jax.tree.map(lambda x: x[0], tuple(group))
    return _Micro(batch, counts, jnp.int32(0))


def _bound(collectives: Collectives) -> tuple[str, ...]:
    name = collectives.axis_name
    return () if name is None else (name,) if isinstance(name, str) else name


def _sums_of(found: objectives.Values, mask: Array, facts: Facts) -> dict[str, Array]:
    values = found.values if facts.rows_interact else mark_values(found.values)
    return {name: _weigh(value, mask) for name, value in values.items()}


def _weigh(value: Array, mask: Array) -> Array:
    """Sum over real rows, in float32 or wider; a scalar counts for each of them."""
    value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    if value.ndim == 0:
        return value * mask.sum().astype(value.dtype)
    return jnp.where(mask, value, 0).sum()


def _all_finite(tree: PyTree) -> Array:
    leaves = jax.tree.leaves(tree)
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def _as(old: PyTree, new: PyTree, what: str) -> PyTree:
    """`new` with the dtypes of `old`, so that the second step is the first's shape."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(old)
    leaves, new_treedef = jax.tree.flatten(new)
    if treedef != new_treedef:
        raise TypeError(
            f"The {what} has another structure after a step: was {treedef}, is"
            f" {new_treedef}."
        )
    for (path, before), after in zip(paths, leaves, strict=True):
        if jnp.shape(before) != jnp.shape(after):
            raise TypeError(
                f"The {what} has another shape after a step: {leaf_path(path)} was"
                f" {jnp.shape(before)}, is {jnp.shape(after)}."
            )
    return jax.tree.map(lambda o, n: jnp.asarray(n).astype(o.dtype), old, new)


def _with_names(
    inside: dict[str, Array], more: dict[str, Array], facts: Facts
) -> dict[str, Array]:
    """The values inside a step and some more, whose names must be new."""
    if clash := {*more} & {*inside, *facts.names, "epoch", "step"}:
        raise ValueError(
            f"there are two values named {sorted(clash)}: metrics, what `inside_step`"
            " of callbacks returned, and the trainer's own (`skipped`, `loss_scale`,"
            " `epoch`, `step`) must differ in their names. Rename yours."
        )
    return inside | more


def _check_depends(loss: Array, params: PyTree) -> None:
    """Raises when no trained leaf reaches the loss through differentiable operations.

    While JAX differentiates, a value with a tangent is a tracer of the same type as
    the parameters; one whose tangent is known to be zero is not.
    """
    leaves = jax.tree.leaves(params)
    if leaves and not isinstance(loss, type(leaves[0])):
        raise ValueError(
            "The loss does not depend on any trained parameter in a way that can be"
            " differentiated, so every gradient would be zero. Does the loss use the"
            " model it is given, without argmax, rounding or stop_gradient in between?"
            " Does `filter_spec` train the leaves that matter?"
        )
