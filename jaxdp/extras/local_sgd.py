"""Local SGD and DiLoCo (arXiv:2311.08105): a replica per device, and outer steps.

The state's `params` are the outer weights, which change in outer steps only. Replicas,
and the states of their optimizers, are in the optimizer's state; each leaf has a
leading axis of replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from ..basics.arguments import check_count, checks_arguments
from ..basics.tree import find_nodes, map_nodes
from ..step import (
    DATA,
    AxisCollectives,
    Collectives,
    Group,
    OnRows,
    Results,
    TrainState,
    Weights,
    add_clipping,
    call_update,
    evaluated_params,
)
from ..strategies.base import Rows
from ..strategies.meshes import Devices, clear_ambient_mesh
from ..strategies.shard_map_collectives import NO_UNITS, ShardMapCollectives
from ..strategies.sharded import Sharded

_SPLIT: Final = PartitionSpec(DATA)


class LocalSGDState(NamedTuple):
    """The state of an optimizer that `LocalSGD` has wrapped.

    Leaves of `replicas` and `inner` are `(replicas, ...)`; scalars of `inner` that are
    the same in all replicas, such as counts and learning rates, have no such axis.
    """

    replicas: PyTree
    """The weights that gradients are taken at."""
    inner: PyTree
    outer: PyTree
    """The outer optimizer's own state."""
    count: Array
    """int32 `()`. Steps since the first."""

    def evaluated_params(self, params: PyTree) -> PyTree:
        """Returns the means over all replicas, in the dtypes of `params`.

        For a schedule-free optimizer, it averages what each replica evaluates.
        """
        replicas = evaluated_params(self.replicas, self.inner)
        return jax.tree.map(
            lambda p, leaf: _mean(leaf).astype(p.dtype), params, replicas
        )


class LocalSGD(Sharded):
    """A replica of the model per device; an outer step joins them every few steps.

    Each replica takes `every` steps of the trainer's optimizer on its own rows. Then
    the outer optimizer uses the mean of their changes as its gradient, and all replicas
    continue from its result. Devices exchange `1/every` of the bytes of `Sharded`, and
    the sums of the loss and metrics, a few bytes, at each step. For machines that are
    far apart or badly connected. **It changes the numbers**: with more than one
    device or step it is a different algorithm.

    With the defaults it is DiLoCo, whose inner optimizer is AdamW; `every` is some
    tens to hundreds there. `outer=optax.sgd(1.0)` is local SGD: the mean of the
    replicas.

    - `trainer.model`, validation and `predict` take the mean of the replicas, which
      right after an outer step are the outer weights. So does `load_model` of a
      checkpoint; `trainer.state.params` and `load_model(which="raw")` have the outer
      weights, as of the last outer step.
    - A replica's gradient is the sum over its real rows, divided by the mean number of
      real rows per replica. So `every=1`, `outer=optax.sgd(1.0)` and plain SGD as the
      optimizer give the numbers of `Sharded`, even with ragged batches.
    - What is written for a batch, such as a `loss_fn`, is given a replica's rows.
    - A run resumes on the number of replicas that it was saved with.
    - Gradients are clipped in each replica; hooks of the step see the mean gradient.
    - `WeightAveraging` averages the outer weights, step by step.

    Memory per device: what `Sharded` needs, the outer weights, and the state of
    `outer`. A model with an `eqx.nn.State`, as BatchNorm has, can't be used.

    Args:
        every: how many steps replicas take by themselves.
        outer: the outer optimizer; by default
            `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        devices: how many, or which; all by default.
    """

    @checks_arguments
    def __init__(
        self,
        every: int,
        outer: optax.GradientTransformation | None = None,
        devices: Devices = None,
    ):
        check_count("every", every, suffix=" (steps between two outer steps)")
        if outer is None:
            outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        elif not isinstance(outer, optax.GradientTransformation):
            raise TypeError(
                "`outer` must be an optax.GradientTransformation, for example"
                f" optax.sgd(1.0); got {outer!r} of type {type(outer).__name__}."
            )
        super().__init__(devices)
        self.every = int(every)
        self.outer = outer

    def prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["after_update"] is not None:
            raise ValueError(
                "`after_update`: LocalSGD trains a replica on each device, and joins"
                " them in outer steps, so there is no one model to change. Leave it"
                " out, or take another strategy."
            )
        if jax.tree.leaves(arguments["state"]):
            raise ValueError(
                "`strategy`: LocalSGD trains replicas separately, so a model with"
                " an eqx.nn.State, as in BatchNorm, would have a different state"
                " in each. Use layers without a state, eqx.nn.LayerNorm or"
                " GroupNorm for example, or the strategy Sharded()."
            )
        optimizer = arguments["optimizer"]
        if arguments["ensemble"] or not isinstance(
            optimizer, optax.GradientTransformation
        ):
            raise ValueError(
                "`strategy`: LocalSGD keeps its replicas in the state of one optimizer"
                " of one model, so neither `ensemble` nor a list of parts as"
                " `optimizer` goes with it. Use another strategy."
            )
        clipped = add_clipping(optimizer, arguments["gradient_clip_val"])
        own = {"optimizer": self._wrap(clipped), "gradient_clip_val": None}
        return {**arguments, **own}

    def _wrap(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Returns an optimizer that trains a replica on each device."""
        inner = optax.with_extra_args_support(optimizer)

        def init(params: PyTree) -> LocalSGDState:
            count = self.mesh.size
            replicas = jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), params
            )
            first, outer = _init_replicas(inner, replicas), self.outer.init(params)
            return LocalSGDState(replicas, first, outer, jnp.int32(0))

        def update(
            updates: PyTree, state: Any, params: PyTree = None, **extra: Any
        ) -> tuple[PyTree, LocalSGDState]:
            value = extra.get("value", jnp.zeros(()))
            update_replicas = _make_replica_update(inner, state.inner, value)
            updates, inner_state = update_replicas(updates, state.inner, state.replicas)
            replicas = eqx.apply_updates(state.replicas, updates)

            def sync_replicas(outer_state: PyTree) -> tuple[PyTree, PyTree]:
                changes = jax.tree.map(_compute_outer_gradient, params, replicas)
                return self.outer.update(changes, outer_state, params)

            def skip_sync(outer_state: PyTree) -> tuple[PyTree, PyTree]:
                return jax.tree.map(jnp.zeros_like, params), outer_state

            count = state.count + 1
            is_due = count % self.every == 0
            updates, outer_state = jax.lax.cond(
                is_due, sync_replicas, skip_sync, state.outer
            )

            # Outside of the branch, as the step adds the updates: in it, XLA would fuse
            # them with this sum, which would round differently.
            new = eqx.apply_updates(params, updates)
            replicas = jax.tree.map(
                lambda outer, own: jnp.where(is_due, outer[None], own), new, replicas
            )
            return updates, LocalSGDState(replicas, inner_state, outer_state, count)

        return optax.GradientTransformationExtraArgs(init, update)

    def _lay_out(self, state: TrainState) -> TrainState:
        whole = lambda _: PartitionSpec()  # noqa: E731
        split = lambda leaf: _SPLIT if leaf.ndim else PartitionSpec()  # noqa: E731

        def split_replicas(local: LocalSGDState) -> Any:
            replicas, inner = jax.tree.map(split, (local.replicas, local.inner))
            others = jax.tree.map(whole, local)
            return others._replace(replicas=replicas, inner=inner)

        opt_state = map_nodes(
            LocalSGDState, split_replicas, state.opt_state, others=whole
        )
        return jax.tree.map(whole, state)._replace(opt_state=opt_state)

    def collectives(self, groups: Sequence[Group], rows: Rows) -> Collectives:
        return _ReplicaCollectives(self, rows)

    def __repr__(self) -> str:
        return f"LocalSGD(every={self.every}, devices={self.mesh.size})"


class _ReplicaCollectives(ShardMapCollectives):
    """Computes gradients of each replica at its own weights, over global arrays.

    Validation and prediction are those of `ShardMapCollectives`.
    """

    def __init__(self, strategy: "LocalSGD", rows: Rows):
        super().__init__(strategy, NO_UNITS, is_apart=rows == "apart")
        self._is_split = rows != "replicated"

    def weights(self, state: TrainState) -> Weights:
        local, *_ = find_nodes(LocalSGDState, state.opt_state)
        return state.weights._replace(params=local.replicas)

    def mean_gradients(self, gradients: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.mean(0), gradients)

    def over_rows(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        if "gradients" not in results:
            return super().over_rows(function, inputs, groups, results)
        whole, rows = PartitionSpec(), PartitionSpec(None, DATA)

        collectives = Collectives()  # each replica gets all rows: nothing is summed
        if self._is_split:
            collectives = _ReplicaAxisCollectives(DATA, self.mesh.shape[DATA])

        def on_one_device(inputs: Any, groups: Sequence[Group]) -> tuple[Any, ...]:
            values = function(collectives, _select_replica(inputs), groups)
            return tuple(
                jax.tree.map(lambda leaf: leaf[None], part) if is_stack else part
                for part, is_stack in zip(values, are_stacks, strict=True)
            )

        are_stacks = [role == "gradients" for role in results]
        return jax.shard_map(
            clear_ambient_mesh(on_one_device),
            mesh=self.mesh,
            in_specs=(
                _split_params(inputs),
                [Group(rows if self._is_split else whole, whole, whole)] * len(groups),
            ),
            out_specs=tuple(_SPLIT if stack else whole for stack in are_stacks),
            check_vma=False,
        )(inputs, list(groups))


class _ReplicaAxisCollectives(AxisCollectives):
    """The collectives of a device that trains a replica on its own rows."""

    def sum_gradients(self, gradients: PyTree) -> PyTree:
        """Scales gradients of sums over the replicas' mean number of rows.

        Their mean over replicas is the one over all rows.
        """
        return jax.tree.map(lambda leaf: leaf * self.num_shards, gradients)


def _init_replicas(inner: Any, replicas: PyTree) -> PyTree:
    """Returns the state of the optimizer `inner` for each replica.

    Scalars of no parameter, such as learning rates, are shared by all replicas, so that
    they can be set; unless an update computes one of them from gradients.
    """
    states = jax.vmap(inner.init)(replicas)
    share = lambda leaf: leaf[0] if leaf.ndim == 1 else leaf  # noqa: E731
    try:
        shared = optax.tree_utils.tree_map_params(
            inner, lambda leaf: leaf, states, transform_non_params=share
        )
    except Exception:  # optax can't tell the parameters in this state
        shared = jax.tree.map(share, states)
    update = _make_replica_update(inner, shared, jnp.zeros(()))
    try:
        jax.eval_shape(update, replicas, shared, replicas)
    except _NeedsLosses:
        raise
    except ValueError:  # from vmap, because a scalar differs
        return states
    return shared


def _make_replica_update(
    inner: Any, state: PyTree, value: Array
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns `inner.update` over gradients, states and weights of replicas.

    `value` is the loss.
    """
    axes = jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, state)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        known = {"value": value, "grad": grads}
        known |= dict.fromkeys(["value_fn", "grad_fn"], _refuse)
        return call_update(inner.update, grads, state, params, known)

    return jax.vmap(update, in_axes=(0, axes, 0), out_axes=(0, axes))


class _NeedsLosses(ValueError):
    pass


def _refuse(*_: Any) -> Any:
    """Raises when an optimizer asks for the loss, which belongs to all replicas."""
    raise _NeedsLosses(
        "`optimizer` evaluates the loss, as optax.lbfgs does, but under LocalSGD there"
        " are several models with a loss each. Use an optimizer that only needs"
        " gradients, such as optax.adamw."
    )


def _compute_outer_gradient(outer: Array, replicas: Array) -> Array:
    """Returns the gradient for the outer optimizer: the mean change, negated."""
    mean = _mean(replicas)
    return (outer.astype(mean.dtype) - mean).astype(outer.dtype)


def _mean(replicas: Array) -> Array:
    """Returns the mean over replicas, computed in float32 or wider."""
    return replicas.mean(0, dtype=jnp.promote_types(replicas.dtype, jnp.float32))


def _split_params(inputs: Any) -> Any:
    """Returns the specs of a step's inputs: parameters are split by replicas."""
    whole = PartitionSpec()
    by_replica = Weights(_SPLIT, whole, whole, whole, whole)
    return map_nodes(Weights, lambda _: by_replica, inputs, others=lambda _: whole)


def _select_replica(inputs: Any) -> Any:
    """Returns the inputs of one replica, from a stack of one on this device."""

    def take_first(weights: Weights) -> Weights:
        params = jax.tree.map(lambda leaf: leaf[0], weights.params)
        return weights._replace(params=params)

    return map_nodes(Weights, take_first, inputs)
