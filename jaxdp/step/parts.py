"""Several losses in one step, each with its own optimizer and leaves.

Leaves are selected by patterns, by bools, or by declarations of modules.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import losses
from ..basics.arguments import checks_arguments, format_call
from ..basics.tracebacks import NoteOnError
from ..basics.tree import get_node, leaf_path, mark_leaves
from .collectives import Collectives
from .metrics import Facts, Metrics, Sums, check_num_values, count_real_rows
from .micro_batch import Group
from .objective import LossFnObjective
from .step_functions import StepFunctions, UpdateResult
from .train_state import TrainState, Weights, match_dtypes


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Part:
    """Some leaves (arrays) of a model, with their own loss and their own optimizer.

        Trainer(gan, [
            Part("critic", critic_loss, optax.adam(2e-4)),
            Part("generator", generator_loss, optax.adam(1e-4), every=5),
        ])

    One compiled step runs the parts in order, on the same batch, and each part sees the
    updates of the parts before it. Leaves that belong to no part are frozen.

    Args:
        params: which leaves: a path pattern such as "critic" or "blocks[*].attention",
            which means all in the submodules that match; a list of them; or a pytree of
            bools that is a prefix of the model.
        loss_fn: like the `loss_fn` of a `Trainer`. All parts get the same keys; if
            their draws should differ, fold a number of your own into them.
        optimizer: any `optax.GradientTransformation` of a `Trainer`; given the
            conjugates of complex gradients, too.
        every: the part runs in steps that this divides, counted from 1. In other
            steps its loss is not computed and is NaN among the metrics; means are over
            the steps in which the part ran.
        name: prefix of its metrics, as in `critic_loss`. By default it is the path in
            `params`: "critic", "layers_0" for "layers[0]", "0" for "[0]".
        gradient_clip_val: largest global norm of its gradient.
    """

    params: PyTree
    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    every: int = 1
    name: str | None = None
    gradient_clip_val: float | None = None

    def __repr__(self) -> str:
        return format_call(self, 3)


Part.__init__ = checks_arguments(Part.__init__)


def add_clipping(
    optimizer: optax.GradientTransformation, norm: float | None
) -> optax.GradientTransformation:
    """Returns the optimizer, preceded by clipping of the gradients to a global norm.

    Without `norm`, it is the optimizer itself.
    """
    if norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(float(norm)), optimizer)


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedPart:
    """A part, resolved for one model."""

    name: str
    mask: PyTree
    """A mask of the leaves that it trains, in the model's structure."""
    every: int
    objective: LossFnObjective
    optimizer: optax.GradientTransformationExtraArgs

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the leaves of this part, and the others."""
        return eqx.partition(params, self.mask)


def resolve_parts(
    parts: Sequence[Part],
    model: PyTree,
    *,
    keeps_outputs: bool = False,
) -> tuple[ResolvedPart, ...]:
    """Resolves each of `parts` to the leaves of `model` that it trains.

    Raises:
        ValueError: if one has no leaves, or two have the same; or for their names.
    """
    resolved: list[ResolvedPart] = []
    owners: dict[str, str] = {}
    for part in parts:
        # The name of the part.
        mask = make_leaf_mask(part.params, model, "`Part`: `params`")
        name = part.name
        if name is None:
            path = part.params if isinstance(part.params, str) else ""
            name = re.sub(r"\W+", "_", path).strip("_")
        if not (name and f"_{name}".isidentifier()):
            raise ValueError(
                f"`Part`: {name or part.params!r} can't be put before the names of"
                " metrics, as in critic_loss; pass `name`, of letters, digits and _."
            )
        losses.check_metric_name("`Part`: `name`", f"{name}_loss")
        if any(name == other.name for other in resolved):
            raise ValueError(f"`Part`: two are named {name!r}; pass another `name`.")

        # The leaves of the part.
        leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, mask))
        own_paths = [
            leaf_path(path)
            for path, leaf in leaves
            if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        if not own_paths:
            raise ValueError(
                f"`Part` {name!r}: `params` selects no floating-point array of the"
                " model."
            )
        for path in own_paths:
            if path in owners:
                raise ValueError(
                    f"`Part`: {path} is in {owners[path]!r} and in {name!r}; a leaf has"
                    " one optimizer, so take it out of one of them."
                )
        owners |= dict.fromkeys(own_paths, name)

        # The loss and the optimizer of the part.
        objective = LossFnObjective(
            part.loss_fn, keeps_outputs=keeps_outputs, is_part=True
        )
        optimizer = add_clipping(part.optimizer, part.gradient_clip_val)
        optimizer = optax.with_extra_args_support(optimizer)
        resolved.append(ResolvedPart(name, mask, int(part.every), objective, optimizer))
    return tuple(resolved)


def make_leaf_mask(params: PyTree, model: PyTree, argument: str) -> PyTree:
    """Returns bools in the structure of `model`, from patterns or bools."""
    patterns = [params] if isinstance(params, str) else params
    if isinstance(patterns, list | tuple):
        if all(isinstance(each, str) for each in patterns):
            return mark_leaves(argument, patterns, model)

    def spread(on: Any, below: PyTree) -> PyTree:
        if not isinstance(on, bool | np.bool_):
            raise TypeError(f"it has {on!r}")
        return jax.tree.map(lambda _: bool(on), below)

    try:
        return jax.tree.map(spread, params, model)
    except (TypeError, ValueError) as error:
        # JAX's text on a structure has several lines, and names types alone.
        came = f": {error}" if isinstance(error, TypeError) else "."
        raise type(error)(
            f"{argument} must be a path pattern, a list of them, or a pytree of bools"
            f" that is a prefix of the model{came}"
        ) from error


def trained_alone(model: PyTree) -> PyTree | None:
    """Returns bools for the leaves that modules declare as trained, or None.

    A class of modules, such as an adapter, names fields in `trained_alone`. If a model
    has such a module, these fields are trained and nothing else.
    """

    def is_named(path: Any, _: Any) -> bool:
        for length, key in enumerate(path):
            fields = getattr(type(get_node(model, path[:length])), "trained_alone", ())
            if getattr(key, "name", None) in fields:
                return True
        return False

    named = jax.tree_util.tree_map_with_path(is_named, model)
    return named if any(jax.tree.leaves(named)) else None


def union_masks(parts: Sequence[ResolvedPart]) -> PyTree:
    """Returns a mask of the leaves that any part trains."""
    return jax.tree.map(lambda *each: any(each), *(part.mask for part in parts))


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
            states = dict(self._states(state.opt_state))
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
        means = [part_sums.means(num_real_rows) for part_sums in summed]
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

    def _states(self, opt_state: PyTree) -> dict[str, Any]:
        """Finds the state of `combine_optimizers` inside those of callbacks."""
        names = {part.name for part in self.parts}
        is_ours = lambda node: isinstance(node, dict) and {*node} == names  # noqa: E731
        return next(filter(is_ours, jax.tree.leaves(opt_state, is_leaf=is_ours)))


def _run_if_due(
    take: Callable[[TrainState], UpdateResult], state: TrainState, every: int
) -> tuple[Bool[Array, ""], UpdateResult]:
    """Returns whether `every` divides the step's number, and the result of `take`.

    If it does not, the updates are zero, and the states those of `state`.
    """
    if every == 1:
        return jnp.array(True), take(state)
    due = (state.step + 1) % every == 0
    traced, shapes = jax.make_jaxpr(take, return_shape=True)(state)
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
