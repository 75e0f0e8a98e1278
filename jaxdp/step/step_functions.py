"""The pure functions that the engine compiles: train, evaluate, predict.

They know no devices and no jit. A strategy lays them out, and passes the `Collectives`
that fit its split of the batch. `objective` computes the loss of each row, `metrics`
the mean over all real rows, and `state` the keys of rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from .after_update import AfterUpdate
from .collectives import Collectives
from .jaxprs import OWN_LOOP, has_convolutions
from .loss_output import check_gradients
from .metrics import (
    MAX_METRICS,
    Facts,
    Metrics,
    Sums,
    add_to_totals,
    add_values,
    compute_means,
    run_step_hooks,
    sum_dtype,
    sum_row_counts,
    sum_values,
)
from .model_call import call_model
from .objective import CriterionObjective, Objective
from .precision import (
    FIRST_SCALE,
    PRECISIONS,
    LossScale,
    Precision,
    cast_arrays,
    cast_calls,
    promote_to_float32,
)
from .remat import RematSpec
from .state import (
    Group,
    MicroBatch,
    TrainState,
    Weights,
    is_finite,
    keep_old_if_nonfinite,
    key_after_update,
    key_outside_training,
    mask_and_keys,
    match_dtypes,
    only_micro_batch,
)
from .value_fn import run_optimizer
from .whole import merge_leaves, to_user_batch


class UpdateResult(NamedTuple):
    """The gradients of a step, and the updates that the optimizer returned for them."""

    grads: PyTree
    updates: PyTree
    opt_state: PyTree
    model_state: PyTree
    summed: Sums


class StepFunctions(NamedTuple):
    """The pure functions of a trainer. Methods are `(collectives, arrays...)`."""

    static: PyTree
    """The leaves of the model that are not arrays."""
    objective: Objective | None
    """None until a batch shows which loss fits its targets; prediction needs none."""
    optimizer: optax.GradientTransformationExtraArgs
    inside: tuple[Callable[..., dict[str, Array]], ...] = ()
    skip_nonfinite: bool = False
    remat: RematSpec = RematSpec()
    precision: Precision = PRECISIONS["32-true"]
    unroll_convolutions: bool = False
    """Whether micro-batches with convolutions are unrolled in the compiled step."""
    has_state: bool = False
    """Whether the model has an `eqx.nn.State`, and so is written for a batch."""
    losses_per_example: bool = False
    """Whether losses and metrics are written for one example; known before the first
    batch, while `objective` may not be."""
    after_update: AfterUpdate | None = None
    """Changes the weights after each update."""
    after_step: tuple[Callable[[TrainState], TrainState], ...] = ()
    """Hooks of callbacks that record the weights at the end of a step."""
    parts: tuple[Any, ...] = ()
    """The parts that `parts.MultiPartStepFunctions` runs one after the other."""
    extra: Any = None
    """Data of a subclass, which an extra may define."""

    def is_per_example(self, kind: str) -> bool:
        """Returns True if all functions that a kind of step calls are written for one
        example.

        If so, batches may be padded, and each device may work on its own rows alone.

        Args:
            kind: `"train"`, `"evaluate"` or `"predict"`.
        """
        return not self.has_state and (kind == "predict" or self.losses_per_example)

    def is_padded(self, kind: str) -> bool:
        """Returns True if batches may be padded for a kind of step.

        It is True for functions of one example, and for losses that name `mask`.
        """
        if self.is_per_example(kind) or self.has_state or self.objective is None:
            return self.is_per_example(kind)
        objectives = [part.objective for part in self.parts] or [self.objective]
        return all(one.knows_padding for one in objectives)

    def init_optimizer(self, params: PyTree) -> PyTree:
        """Returns the optimizer's first state."""
        return self.optimizer.init(params)

    def new_totals(self) -> np.ndarray:
        """Returns the zeros with which `TrainState.totals` starts an epoch."""
        return np.zeros((2, MAX_METRICS + 1), sum_dtype())

    def new_loss_scale(self) -> LossScale | None:
        """Returns the initial `TrainState.loss_scale` of a run."""
        if not self.precision.scales_loss:
            return None
        return LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0))

    def compute_means(self, totals: np.ndarray, facts: Facts) -> dict[str, float]:
        """Returns exact means over real rows, from fetched totals."""
        return compute_means(totals, facts)

    def measure_outputs(
        self, function: Callable[[PyTree], Mapping[str, float]], outputs: PyTree
    ) -> Mapping[str, float]:
        """Calls a function of the fetched outputs of a pass; returns named values."""
        return function(outputs)

    @property
    def keeps_outputs(self) -> bool:
        """Whether `evaluate` returns predictions and targets."""
        return self.objective is not None and self.objective.keeps_outputs

    def train(
        self, collectives: Collectives, state: TrainState, groups: Sequence[Group]
    ) -> tuple[TrainState, Metrics]:
        """Runs one optimizer step over all micro-batches of `groups`.

        The gradient is that of the mean loss over all real rows, however they are split
        into micro-batches and over devices.
        """
        with self.precision.set_product_precision():
            result = self.compute_update(collectives, state, groups)
            return self.apply_update(collectives, state, groups, result)

    def compute_update(
        self, collectives: Collectives, state: TrainState, groups: Sequence[Group]
    ) -> UpdateResult:
        """Computes the gradients of a step, and the optimizer's updates."""
        grads, model_state, summed = self._compute_mean_gradients(
            collectives, state, groups
        )
        total = sum_row_counts(groups)
        loss = summed.means(total)[0]
        state = state._replace(params=collectives.like_gradients(state.params))
        with jax.named_scope("update"):

            def evaluate(params: PyTree) -> tuple[Array, PyTree]:
                moved = state._replace(params=params)
                grads, _, summed = self._compute_mean_gradients(
                    collectives, moved, groups
                )
                return summed.means(total)[0], grads

            updates, opt_state = run_optimizer(
                self.optimizer, grads, state, loss, evaluate
            )
        return UpdateResult(grads, updates, opt_state, model_state, summed)

    def apply_update(
        self,
        collectives: Collectives,
        state: TrainState,
        groups: Sequence[Group],
        result: UpdateResult,
    ) -> tuple[TrainState, Metrics]:
        """Applies updates: returns the state after a step, and its metrics."""
        grads, updates, opt_state, model_state, summed = result
        total = sum_row_counts(groups)
        means = summed.means(total)
        sums = summed.to_vector() if summed.facts.weighted else means * total

        state = state._replace(params=collectives.like_gradients(state.params))
        with jax.named_scope("update"):
            params = eqx.apply_updates(state.params, updates)
        new = TrainState(
            params=match_dtypes(state.params, params, "params"),
            buffers=state.buffers,
            model_state=match_dtypes(state.model_state, model_state, "model state"),
            opt_state=match_dtypes(state.opt_state, opt_state, "optimizer state"),
            key=state.key,
            step=state.step + 1,
            totals=add_to_totals(state.totals, total, sums),
            loss_scale=state.loss_scale,
        )

        with jax.named_scope("update"):
            if (change := self.after_update) is not None:
                key = key_after_update(state.key, state.step)
                params, buffers = change(new.params, new.buffers, key, new.step)
                new = new._replace(params=params, buffers=buffers)
            for keep in self.after_step:
                new = keep(new)

        mean_grads = collectives.mean_gradients(grads)
        inside = run_step_hooks(self.inside, (mean_grads, updates, new), summed.facts)

        if self.skip_nonfinite or state.loss_scale is not None:
            finite = is_finite((means[0], grads))
            new, named = keep_old_if_nonfinite(state, new, means, finite)
            inside = add_values(inside, named, summed.facts)
        return new, Metrics(summed.facts, means, inside)

    def evaluate(
        self,
        collectives: Collectives,
        weights: Weights,
        totals: Float[Array, "2 metrics"],
        batch_idx: Int[Array, ""],
        group: Group,
    ) -> tuple[Float[Array, "2 metrics"], Metrics, PyTree]:
        """Adds the sums of one batch to `totals`, in inference mode.

        Returns them with the predictions and targets of the rows, padding included, if
        the objective keeps them.
        """
        summed, outputs = self.sum_batch(collectives, weights, batch_idx, group)
        total = sum_row_counts([group])
        sums, facts = summed.to_vector(), summed.facts
        means = summed.means(total) if facts.weighted else sums / total
        return add_to_totals(totals, total, sums), Metrics(facts, means, {}), outputs

    def sum_batch(
        self,
        collectives: Collectives,
        weights: Weights,
        batch_idx: Int[Array, ""],
        group: Group,
    ) -> tuple[Sums, PyTree]:
        """Returns the sums of one batch in inference mode, and its outputs if kept."""
        weights = self._cast_weights(collectives, weights)
        arguments = (weights, batch_idx), [group]
        with self.precision.set_product_precision():
            return collectives.over_rows(
                self._evaluate_rows, *arguments, ("replicated", "rows")
            )

    def predict(
        self, collectives: Collectives, weights: Weights, group: Group
    ) -> PyTree:
        """Returns predictions shaped `(rows, ...)`, padding included."""
        with self.precision.set_product_precision():
            weights = self._cast_weights(collectives, weights)
            return collectives.over_rows(self._predict_rows, weights, [group], "rows")

    def _cast_weights(self, collectives: Collectives, weights: Weights) -> Weights:
        """Casts weights before devices gather them, so that fewer bytes are sent.

        A `loss_fn` may read weights outside of calls, in their own dtype: then the
        weights are not cast.
        """
        is_named = isinstance(self.objective, CriterionObjective)
        if not is_named or not collectives.gathers_params:
            return weights
        params, buffers = cast_arrays(weights[:2], self.precision.computed)
        return weights._replace(params=params, buffers=buffers)

    def _compute_mean_gradients(
        self, collectives: Collectives, state: TrainState, groups: Sequence[Group]
    ) -> tuple[PyTree, PyTree, Sums]:
        """Returns the mean loss's gradient, the new model state, and all sums."""
        weights = self._cast_weights(collectives, collectives.weights(state))
        grads, model_state, summed = collectives.over_rows(
            self._compute_gradients,
            (weights, state.loss_scale),
            groups,
            ("gradients", "replicated", "replicated"),
        )
        grads = summed.scale_gradients(grads, groups)
        if state.loss_scale is not None:
            unscale = 1 / state.loss_scale.scale  # a power of two: exact
            grads = jax.tree.map(lambda grad: grad * unscale, grads)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        return grads, model_state, summed

    def _compute_gradients(
        self,
        collectives: Collectives,
        inputs: tuple[Weights, LossScale | None],
        groups: Sequence[Group],
    ) -> tuple[PyTree, PyTree, Sums]:
        """Returns the sums of gradients over rows, scaled for float16, in float32 or
        wider; the new model state; and the sums of values.

        Only this part of a step uses rows. A device may see only its own rows.
        """
        objective = self.objective
        assert objective is not None
        weights, scale = inputs

        # The keys depend on the seed and the step, and not on the devices.
        step_key = jax.random.fold_in(
            jax.random.wrap_key_data(weights.key), weights.step
        )
        total = sum_row_counts(groups)
        with jax.named_scope("parameters"):  # plans report collectives by their scope
            whole = collectives.gather(weights.params)
            buffers = collectives.gather(weights.buffers)

        def gradients(model_state: PyTree, micro: MicroBatch) -> tuple[PyTree, ...]:
            def mean_loss(params: PyTree) -> tuple[Array, tuple[Any, ...]]:
                model = self.remat.apply(self._model(params, buffers))
                model = collectives.arrange(model)
                batch = to_user_batch(merge_leaves(micro.batch, micro.whole))
                model, batch = cast_calls(model, batch, self.precision)
                rows = mask_and_keys(
                    collectives, step_key, micro, weights.step, training=True
                )
                result = objective(model, model_state, batch, rows)
                check_gradients(result.by_name["loss"], params)
                summed = sum_values(result, rows.mask)

                # These rows' share of the mean loss over all real rows.
                loss = summed.sums["loss"]
                loss = loss / total.astype(loss.dtype)
                loss = loss if scale is None else loss * scale.scale
                return loss, (result.model_state, summed)

            grads, aux = jax.grad(mean_loss, has_aux=True)(whole)
            return promote_to_float32(grads), *aux

        grads, model_state, summed = _accumulate_gradients(
            gradients,
            whole,
            weights.model_state,
            groups,
            unroll=self.unroll_convolutions,
        )
        with jax.named_scope("gradients"):
            grads = collectives.sum_gradients(grads)
        with jax.named_scope("metrics"):
            summed = collectives.sum(summed)
        return grads, model_state, summed

    def _evaluate_rows(
        self,
        collectives: Collectives,
        inputs: tuple[Weights, Int[Array, ""]],
        groups: Sequence[Group],
    ) -> tuple[Sums, PyTree]:
        """Returns the sums over all rows in inference mode, and the outputs kept of
        each row.
        """
        objective = self.objective
        assert objective is not None
        weights, batch_idx = inputs
        micro = only_micro_batch(groups[0])
        key = key_outside_training(weights)
        key = jax.random.fold_in(key, batch_idx)
        rows = mask_and_keys(collectives, key, micro, weights.step, training=False)

        model = self._gather_model(collectives, weights)
        batch = to_user_batch(merge_leaves(micro.batch, micro.whole))
        model, batch = cast_calls(model, batch, self.precision)
        result = objective(model, weights.model_state, batch, rows)
        summed = sum_values(result, rows.mask)
        return collectives.sum(summed), result.outputs

    def _predict_rows(
        self, collectives: Collectives, weights: Weights, groups: Sequence[Group]
    ) -> PyTree:
        """Returns predictions for the rows of a batch that this step sees."""
        micro = only_micro_batch(groups[0])
        model = self._gather_model(collectives, weights)
        key = key_outside_training(weights)
        rows = mask_and_keys(collectives, key, micro, weights.step, training=False)
        x = to_user_batch(merge_leaves(micro.batch, micro.whole))
        model, x = cast_calls(model, x, self.precision)
        return call_model(model, weights.model_state, x, rows)[0]

    def _model(self, params: PyTree, buffers: PyTree) -> PyTree:
        return eqx.combine(params, buffers, self.static)

    def _gather_model(self, collectives: Collectives, weights: Weights) -> PyTree:
        """Returns the model in inference mode."""
        params = collectives.gather(weights.params)
        buffers = collectives.gather(weights.buffers)
        model = collectives.arrange(self._model(params, buffers))
        return eqx.nn.inference_mode(model)


def _accumulate_gradients(
    gradients: Callable[[PyTree, MicroBatch], tuple[PyTree, PyTree, Sums]],
    params: PyTree,
    model_state: PyTree,
    groups: Sequence[Group],
    *,
    unroll: bool,
) -> tuple[PyTree, PyTree, Sums]:
    """Sums `gradients` over the micro-batches in order, by a scan within a group.

    With `unroll`, a scan that contains convolutions is unrolled in the program.
    """

    def body(carry: tuple[PyTree, PyTree], micro: MicroBatch) -> tuple[Any, Sums]:
        grads, model_state = carry
        more, model_state, summed = gradients(model_state, micro)
        return (jax.tree.map(jnp.add, grads, more), model_state), summed

    rows_before = jnp.int32(0)
    before_these: Any = None

    for group in groups:
        counts = group.counts.sum(axis=1)
        before = rows_before + jnp.cumsum(counts) - counts
        rows_before = rows_before + counts.sum()
        micros = MicroBatch(*group, before)

        if len(group.counts) == 1:
            micro = jax.tree.map(lambda x: x[0], micros)
            grads, model_state, summed = gradients(model_state, micro)
        else:
            zeros = promote_to_float32(jax.tree.map(jnp.zeros_like, params))
            arguments = (zeros, model_state), micros
            with jax.named_scope(OWN_LOOP):
                loop = functools.partial(jax.lax.scan, body)
                # JAX caches the trace of the body, so it is traced once.
                unrolled = unroll and has_convolutions(jax.make_jaxpr(loop)(*arguments))
                (grads, model_state), parts = loop(
                    *arguments, unroll=len(group.counts) if unrolled else 1
                )
            summed = jax.tree.map(lambda x: x.sum(axis=0), parts)

        if before_these is not None:
            before, sums = before_these
            grads, summed = jax.tree.map(jnp.add, before, grads), sums + summed
        before_these = grads, summed

    grads, summed = before_these
    return grads, model_state, summed
