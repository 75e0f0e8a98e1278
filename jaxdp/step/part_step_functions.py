"""The step functions of a model with several `Part`s, which one step runs in order."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..basics.tracebacks import NoteOnError
from .collectives import Collectives
from .metrics import Facts, Metrics, Sums, check_num_values, count_real_rows
from .micro_batch import Group
from .parts import ResolvedPart
from .step_functions import StepFunctions, UpdateResult
from .train_state import TrainState, Weights, match_dtypes


def combine_optimizers(
    parts: Sequence[ResolvedPart],
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose state holds the states of the parts, by name.

    `MultiPartStepFunctions` calls the optimizers of the parts, and passes the results
    on to this one: the updates, and the new states as `states`.
    """
    optimizers = {part.name: part.optimizer for part in parts}

    def init(params: PyTree) -> dict[str, Any]:
        return {part.name: part.optimizer.init(part.split(params)[0]) for part in parts}

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, dict[str, Any]]:
        return updates, {name: extra["states"][name] for name in optimizers}

    return optax.GradientTransformationExtraArgs(init, update)


class MultiPartStepFunctions(StepFunctions):
    """The step functions of a trainer with several parts, which run in order."""

    def train(
        self, collectives: Collectives, state: TrainState, groups: Sequence[Group]
    ) -> tuple[TrainState, Metrics]:
        """Runs one step of each part that is due."""
        with self.precision.set_product_precision():
            params, model_state = state.params, state.model_state
            states = dict(self._find_states(state.opt_state))
            num_real_rows = count_real_rows(groups)
            nothing = jax.tree.map(lambda _: None, params)
            grads, updates, ran, summed = nothing, nothing, [], []

            for part in self.parts:
                # The step of this part, with the other parts frozen.
                trained, others = part.split(params)
                part_state = state._replace(
                    params=trained,
                    buffers=eqx.combine(others, state.buffers),
                    model_state=model_state,
                    opt_state=states[part.name],
                )
                update = functools.partial(self._update_part, part, collectives, groups)
                due, result = _run_if_due(update, part_state, part.every)
                old = collectives.like_gradients(trained)
                params = eqx.combine(eqx.apply_updates(old, result.updates), others)
                model_state, states[part.name] = result.model_state, result.opt_state
                grads = eqx.combine(grads, result.grads)
                updates = eqx.combine(updates, result.updates)
                ran.append(due)
                summed.append(result.summed)

            sums, due = self._merge_sums(ran, summed, num_real_rows)
            updates, opt_state = self.optimizer.update(
                updates, state.opt_state, state.params, states=states
            )
            result = UpdateResult(grads, updates, opt_state, model_state, sums)
            state, metrics = self.apply_update(collectives, state, groups, result)
            config: Any = jax.config  # debug_nans would raise for the NaN set below
            if any(part.every > 1 for part in self.parts) and not config.jax_debug_nans:
                means = metrics.means
                ran_means = jnp.where(due, means[: len(due)], jnp.nan)
                means = means.at[: len(due)].set(ran_means)
                metrics = Metrics(metrics.facts, means, metrics.inside)
            return state, metrics

    def _update_part(
        self,
        part: ResolvedPart,
        collectives: Collectives,
        groups: Sequence[Group],
        state: TrainState,
    ) -> UpdateResult:
        with NoteOnError(f"in the Part {part.name!r}"):
            step_functions = self._make_part_functions(part)
            result = step_functions.compute_update(collectives, state, groups)
        return result._replace(
            opt_state=match_dtypes(
                state.opt_state, result.opt_state, "optimizer state"
            ),
            model_state=match_dtypes(
                state.model_state, result.model_state, "model state"
            ),
        )

    def sum_batch(
        self,
        collectives: Collectives,
        weights: Weights,
        batch_idx: Int[Array, ""],
        group: Group,
    ) -> tuple[Sums, PyTree]:
        summed, outputs = [], {}
        for part in self.parts:
            step_functions = self._make_part_functions(part)
            with NoteOnError(f"in the Part {part.name!r}"):
                sums, predictions = step_functions.sum_batch(
                    collectives, weights, batch_idx, group
                )
            summed.append(sums)
            if predictions is not None:
                outputs[part.name] = predictions
        if self.keeps_outputs and not outputs:
            raise ValueError(
                "`metrics` has a PassMetric, and no part has a `loss_fn` that returns"
                " (loss, {'predictions': ..., 'targets': ...}), with whatever else."
            )
        always = [jnp.array(True)] * len(self.parts)
        sums, _ = self._merge_sums(always, summed, count_real_rows([group]))
        return sums, outputs or None

    def _merge_sums(
        self,
        ran: Sequence[Bool[Array, ""]],
        summed: Sequence[Sums],
        num_real_rows: Float[Array, ""],
    ) -> tuple[Sums, Bool[Array, " metrics"]]:
        """Merges the sums of all parts, and marks the values of those that ran."""
        means = [part_sums.to_means(num_real_rows) for part_sums in summed]
        sums: dict[str, Array] = {}
        weights: dict[str, Array] = {}
        sums["loss"] = (
            functools.reduce(jnp.add, [each[0] for each in means]) * num_real_rows
        )
        due = [jnp.array(True)]
        for part, did, part_sums in zip(self.parts, ran, summed, strict=True):
            for short in part_sums.facts.names:
                name = f"{part.name}_{short}"
                if name in sums:
                    raise ValueError(
                        f"there are two values named {name!r}: the name of a part"
                        " is put before the names of its metrics. Rename a part"
                        " or a metric."
                    )
                sums[name] = part_sums.sums[short]
                due.append(did)
                if short in part_sums.weights:
                    weights[name] = part_sums.weights[short]
                elif part.every > 1:
                    weights[name] = jnp.where(did, num_real_rows, 0)

        facts = [part_sums.facts for part_sums in summed]
        notes = dict.fromkeys(note for part_sums in facts for note in part_sums.notes)
        merged = Facts(tuple(sums), None, tuple(notes), tuple(weights))
        check_num_values(merged.names + merged.weighted)
        return Sums(sums, weights, merged), jnp.stack(due)

    def _make_part_functions(self, part: ResolvedPart) -> StepFunctions:
        """Returns the step functions of one part alone."""
        return StepFunctions(*self)._replace(
            objective=part.objective, optimizer=part.optimizer
        )

    def _find_states(self, opt_state: PyTree) -> dict[str, Any]:
        """Finds the state of `combine_optimizers` inside those of callbacks."""
        names = {part.name for part in self.parts}
        is_ours = lambda node: isinstance(node, dict) and {*node} == names  # noqa: E731
        return next(filter(is_ours, jax.tree.leaves(opt_state, is_leaf=is_ours)))


def _run_if_due(
    update: Callable[[TrainState], UpdateResult], state: TrainState, every: int
) -> tuple[Bool[Array, ""], UpdateResult]:
    """Returns whether `every` divides the step's number, and the result of `update`.

    If it does not, the updates are zero, and the states those of `state`.
    """
    if every == 1:
        return jnp.array(True), update(state)
    due = (state.step + 1) % every == 0
    traced, shapes = jax.make_jaxpr(update, return_shape=True)(state)
    leaves, treedef = jax.tree.flatten(shapes)

    def skip(state: TrainState) -> list[Array]:
        zeros = treedef.unflatten(jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves)
        unchanged = zeros._replace(
            opt_state=state.opt_state, model_state=state.model_state
        )
        return jax.tree.leaves(unchanged)

    def run(state: TrainState) -> list[Array]:
        return jaxpr_as_fun(traced)(*jax.tree.leaves(state))

    return due, treedef.unflatten(jax.lax.cond(due, run, skip, state))
