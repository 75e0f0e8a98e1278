"""The pure functions that the engine compiles: train, evaluate, predict.

They know no devices and no jit. A strategy lays them out, and passes the `Collectives`
that fit its split of the batch. `objective` computes the loss of each row, `metrics`
the mean over all real rows, and `mask_and_keys` the keys of rows.
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
from .mask_and_keys import (
    make_after_update_key,
    make_evaluation_key,
    make_mask_and_keys,
    make_step_key,
)
from .metrics import (
    MAX_METRICS,
    Facts,
    Metrics,
    Sums,
    add_to_totals,
    add_values,
    compute_means,
    count_real_rows,
    run_step_hooks,
    sum_dtype,
    sum_values,
)
from .micro_batch import Group, MicroBatch, get_only_micro_batch
from .model_call import call_model
from .objective import CriterionObjective, Objective
from .optimizer_call import run_optimizer
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
from .train_state import (
    TrainState,
    Weights,
    is_finite,
    keep_old_if_nonfinite,
    match_dtypes,
)


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
    inside_step: tuple[Callable[..., dict[str, Array]], ...] = ()
    """Hooks of callbacks that return values of gradients and updates."""
    skip_nonfinite: bool = False
    """Whether a step with NaN or infinity in it keeps the old state."""
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
    """The parts that `MultiPartStepFunctions` runs one after the other."""
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

    @property
    def keeps_outputs(self) -> bool:
        """Whether `evaluate` returns predictions and targets."""
        return self.objective is not None and self.objective.keeps_outputs

    # The first state.

    def init_state(
        self,
        params: PyTree,
        buffers: PyTree,
        model_state: PyTree,
        seed: int,
        optimizer_layout: Any = None,
    ) -> TrainState:
        """Returns the state before the first step; it is not placed yet.

        If `optimizer_layout` is given, the optimizer's state is made in these
        shardings.
        """

        def fix_dtype(leaf: Any) -> Array:
            # A Python number in an optimizer's state would be a weakly typed array.
            # Steps return strongly typed ones, so the second step would need a new
            # program.
            array = jnp.asarray(leaf)
            return jax.lax.convert_element_type(array, array.dtype)

        def strengthen(leaf: Any) -> Any:
            # JAX computes differently with the weakly typed arrays of a model, such as
            # `jnp.array(2.0)`, and checkpoints do not record weak types.
            return fix_dtype(leaf) if getattr(leaf, "weak_type", False) else leaf

        params, buffers, model_state = jax.tree.map(
            strengthen, (params, buffers, model_state)
        )
        init = jax.jit(
            lambda p: jax.tree.map(fix_dtype, self.init_optimizer(p)),
            out_shardings=optimizer_layout,
        )
        return TrainState(
            params=params,
            buffers=buffers,
            model_state=model_state,
            opt_state=init(params),
            key=jax.random.key_data(jax.random.key(seed)),
            step=np.int32(0),
            totals=self.init_totals(),
            loss_scale=self.init_loss_scale(),
        )

    def init_optimizer(self, params: PyTree) -> PyTree:
        """Returns the optimizer's first state."""
        return self.optimizer.init(params)

    def init_totals(self) -> np.ndarray:
        """Returns the zeros with which `TrainState.totals` starts an epoch."""
        return np.zeros((2, MAX_METRICS + 1), sum_dtype())

    def init_loss_scale(self) -> LossScale | None:
        """Returns the initial `TrainState.loss_scale` of a run."""
        if not self.precision.scales_loss:
            return None
        return LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0))

    # Training, in the order of a step.

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
        num_real_rows = count_real_rows(groups)
        loss = summed.to_means(num_real_rows)[0]
        state = state._replace(params=collectives.like_gradients(state.params))
        with jax.named_scope("update"):

            def evaluate(params: PyTree) -> tuple[Array, PyTree]:
                moved = state._replace(params=params)
                grads, _, summed = self._compute_mean_gradients(
                    collectives, moved, groups
                )
                return summed.to_means(num_real_rows)[0], grads

            updates, opt_state = run_optimizer(
                self.optimizer, grads, state, loss, evaluate
            )
        return UpdateResult(grads, updates, opt_state, model_state, summed)

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

        step_key = make_step_key(weights.key, weights.step)
        num_real_rows = count_real_rows(groups)
        with jax.named_scope("parameters"):  # plans report collectives by their scope
            full_params = collectives.gather(weights.params)
            buffers = collectives.gather(weights.buffers)

        def compute_micro_batch(
            model_state: PyTree, micro_batch: MicroBatch
        ) -> tuple[PyTree, ...]:
            def compute_mean_loss(params: PyTree) -> tuple[Array, tuple[Any, ...]]:
                model = self.remat.apply(self._combine_model(params, buffers))
                model = collectives.arrange(model)
                batch = micro_batch.to_user_batch()
                model, batch = cast_calls(model, batch, self.precision)
                mask_and_keys = make_mask_and_keys(
                    collectives, step_key, micro_batch, weights.step, training=True
                )
                result = objective(model, model_state, batch, mask_and_keys)
                check_gradients(result.by_name["loss"], params)
                summed = sum_values(result, mask_and_keys.mask)

                # These rows' share of the mean loss over all real rows.
                loss = summed.sums["loss"]
                loss = loss / num_real_rows.astype(loss.dtype)
                loss = loss if scale is None else loss * scale.scale
                return loss, (result.model_state, summed)

            grads, aux = jax.grad(compute_mean_loss, has_aux=True)(full_params)
            return promote_to_float32(grads), *aux

        grads, model_state, summed = _accumulate_gradients(
            compute_micro_batch,
            full_params,
            weights.model_state,
            groups,
            unroll=self.unroll_convolutions,
        )
        with jax.named_scope("gradients"):
            grads = collectives.sum_gradients(grads)
        with jax.named_scope("metrics"):
            summed = collectives.sum(summed)
        return grads, model_state, summed

    def apply_update(
        self,
        collectives: Collectives,
        state: TrainState,
        groups: Sequence[Group],
        result: UpdateResult,
    ) -> tuple[TrainState, Metrics]:
        """Applies updates: returns the state after a step, and its metrics."""
        grads, updates, opt_state, model_state, summed = result
        num_real_rows = count_real_rows(groups)
        means = summed.to_means(num_real_rows)
        sums = summed.to_vector() if summed.facts.weighted else means * num_real_rows

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
            totals=add_to_totals(state.totals, num_real_rows, sums),
            loss_scale=state.loss_scale,
        )

        with jax.named_scope("update"):
            if (change := self.after_update) is not None:
                key = make_after_update_key(state.key, state.step)
                params, buffers = change(new.params, new.buffers, key, new.step)
                new = new._replace(params=params, buffers=buffers)
            for hook in self.after_step:
                new = hook(new)

        mean_grads = collectives.mean_gradients(grads)
        arguments = mean_grads, updates, new
        inside = run_step_hooks(self.inside_step, arguments, summed.facts)

        if self.skip_nonfinite or state.loss_scale is not None:
            finite = is_finite((means[0], grads))
            new, named = keep_old_if_nonfinite(state, new, means, finite)
            inside = add_values(inside, named, summed.facts)
        return new, Metrics(summed.facts, means, inside)

    # Evaluation and prediction.

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
        num_real_rows = count_real_rows([group])
        sums, facts = summed.to_vector(), summed.facts
        means = (
            summed.to_means(num_real_rows) if facts.weighted else sums / num_real_rows
        )
        return (
            add_to_totals(totals, num_real_rows, sums),
            Metrics(facts, means, {}),
            outputs,
        )

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
        micro_batch = get_only_micro_batch(groups[0])
        key = make_evaluation_key(weights.key)
        key = jax.random.fold_in(key, batch_idx)
        mask_and_keys = make_mask_and_keys(
            collectives, key, micro_batch, weights.step, training=False
        )

        model = self._gather_model(collectives, weights)
        batch = micro_batch.to_user_batch()
        model, batch = cast_calls(model, batch, self.precision)
        result = objective(model, weights.model_state, batch, mask_and_keys)
        summed = sum_values(result, mask_and_keys.mask)
        return collectives.sum(summed), result.outputs

    def predict(
        self, collectives: Collectives, weights: Weights, group: Group
    ) -> PyTree:
        """Returns predictions shaped `(rows, ...)`, padding included."""
        with self.precision.set_product_precision():
            weights = self._cast_weights(collectives, weights)
            return collectives.over_rows(self._predict_rows, weights, [group], "rows")

    def _predict_rows(
        self, collectives: Collectives, weights: Weights, groups: Sequence[Group]
    ) -> PyTree:
        """Returns predictions for the rows of a batch that this step sees."""
        micro_batch = get_only_micro_batch(groups[0])
        model = self._gather_model(collectives, weights)
        key = make_evaluation_key(weights.key)
        mask_and_keys = make_mask_and_keys(
            collectives, key, micro_batch, weights.step, training=False
        )
        x = micro_batch.to_user_batch()
        model, x = cast_calls(model, x, self.precision)
        return call_model(model, weights.model_state, x, mask_and_keys)[0]

    # The model in a step.

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

    def _combine_model(self, params: PyTree, buffers: PyTree) -> PyTree:
        return eqx.combine(params, buffers, self.static)

    def _gather_model(self, collectives: Collectives, weights: Weights) -> PyTree:
        """Returns the model in inference mode."""
        params = collectives.gather(weights.params)
        buffers = collectives.gather(weights.buffers)
        model = collectives.arrange(self._combine_model(params, buffers))
        return eqx.nn.inference_mode(model)

    # Fetched results, on the host.

    def compute_means(self, totals: np.ndarray, facts: Facts) -> dict[str, float]:
        """Returns exact means over real rows, from fetched totals."""
        return compute_means(totals, facts)

    def measure_outputs(
        self, function: Callable[[PyTree], Mapping[str, float]], outputs: PyTree
    ) -> Mapping[str, float]:
        """Calls a function of the fetched outputs of a pass; returns named values."""
        return function(outputs)


def _accumulate_gradients(
    compute: Callable[[PyTree, MicroBatch], tuple[PyTree, PyTree, Sums]],
    params: PyTree,
    model_state: PyTree,
    groups: Sequence[Group],
    *,
    unroll: bool,
) -> tuple[PyTree, PyTree, Sums]:
    """Sums the results of `compute` over micro-batches in order, by a scan in a group.

    With `unroll`, a scan that contains convolutions is unrolled in the program.
    """

    def body(carry: tuple[PyTree, PyTree], micro_batch: MicroBatch) -> tuple[Any, Sums]:
        grads, model_state = carry
        more, model_state, summed = compute(model_state, micro_batch)
        return (jax.tree.map(jnp.add, grads, more), model_state), summed

    rows_before = jnp.int32(0)
    earlier: Any = None

    for group in groups:
        counts = group.counts.sum(axis=1)
        before = rows_before + jnp.cumsum(counts) - counts
        rows_before = rows_before + counts.sum()
        micro_batches = MicroBatch(*group, before)

        if len(group.counts) == 1:
            micro_batch = jax.tree.map(lambda x: x[0], micro_batches)
            grads, model_state, summed = compute(model_state, micro_batch)
        else:
            zeros = promote_to_float32(jax.tree.map(jnp.zeros_like, params))
            arguments = (zeros, model_state), micro_batches
            with jax.named_scope(OWN_LOOP):
                loop = functools.partial(jax.lax.scan, body)
                # JAX caches the trace of the body, so it is traced once.
                unrolled = unroll and has_convolutions(jax.make_jaxpr(loop)(*arguments))
                (grads, model_state), stacked = loop(
                    *arguments, unroll=len(group.counts) if unrolled else 1
                )
            summed = jax.tree.map(lambda x: x.sum(axis=0), stacked)

        if earlier is not None:
            earlier_grads, earlier_summed = earlier
            grads = jax.tree.map(jnp.add, earlier_grads, grads)
            summed = earlier_summed + summed
        earlier = grads, summed

    grads, summed = earlier
    return grads, model_state, summed
