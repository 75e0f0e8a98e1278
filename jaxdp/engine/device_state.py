"""The train state on the devices, as a flat list of leaves.

Compiled steps take this list, because to flatten a model's tree in Python costs more
than a small step.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.host_memory import clear_mesh, use_auto_axes
from ..distributed import make_global_array
from ..step import (
    StepFunctions,
    TrainState,
    cast_arrays,
    cast_to_original,
    make_weights_view,
)
from ..strategies import DataParallel
from ..strategies.base import state_shardings
from ..strategies.offload import offload_optimizer
from ..strategies.placement import fetch, gather_arrays, place_copy

View = Callable[[TrainState], TrainState] | None
"""Maps a state to the one that is evaluated, if that is another."""

_ModelArrays = tuple[PyTree, PyTree, PyTree]


class StateLayout:
    """The properties that all states of a run share.

    Args:
        state: one of these states, or its shapes.
        static: the leaves of the model that are not arrays.
        shapes: of its trained leaves and other arrays, before they were placed.
        view: that of a callback which chooses the weights to evaluate.

    Attributes:
        treedef: the structure of a state.
        totals: the index of the epoch's sums among the leaves.
        zeros: the first value of the sums over an epoch or evaluation, on the host.
        has_view: whether other weights than the trained ones may be evaluated.
        select_weights: selects the leaves of `TrainState.weights` from all leaves.
    """

    def __init__(self, state: TrainState, static: PyTree, shapes: PyTree, view: View):
        leaves, self.treedef = jax.tree.flatten(state)
        totals = state.totals
        self.totals = next(i for i, leaf in enumerate(leaves) if leaf is totals)
        self.zeros = np.zeros(totals.shape, totals.dtype)
        self._view, self._optimizers_view = view, make_weights_view(state.opt_state)
        self.has_view = bool(view or self._optimizers_view)
        indices = self.treedef.unflatten(range(len(leaves)))
        self.select_weights = operator.itemgetter(*jax.tree.leaves(indices.weights))
        self._static, self._shapes = static, shapes

    def choose_weights(self, state: TrainState) -> TrainState:
        """Returns `state` with the weights to evaluate: those that the callback chooses
        or else the optimizer.
        """
        chosen = state if self._view is None else self._view(state)
        if chosen is state and self._optimizers_view is not None:
            return self._optimizers_view(state)
        return chosen

    def gather_model(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Returns the model of `state` and its state, gathered from their shards."""
        return self.combine(gather_arrays(get_model_arrays(state)))

    def combine(self, arrays: _ModelArrays) -> tuple[PyTree, PyTree]:
        """Returns the model with these arrays of a state, and its `eqx.nn.State`."""
        params, buffers, model_state = arrays
        params, buffers = cast_to_original((params, buffers), self._shapes)
        return eqx.combine(params, buffers, self._static), model_state


class DeviceState:
    """A placed `TrainState` as a list of leaves; replaced, never changed.

    The tree, the model and the evaluated state are made on the first use.

    Args:
        leaves: the arguments of a train step, which overwrites them.
        layout: shared by all states of a run.

    Attributes:
        made_tree: the tree, if it was made. A user may hold a reference to it.
    """

    def __init__(self, leaves: list[Array], layout: StateLayout):
        self.leaves, self.layout = leaves, layout
        self.made_tree: TrainState | None = None
        self._evaluated: TrainState | None = None
        self._fetched: _ModelArrays | None = None

    def replace_leaves(self, changes: Mapping[int, np.ndarray]) -> "DeviceState":
        """Returns the state with other leaves, by index, of the same spec."""
        leaves = list(self.leaves)
        with clear_mesh():
            for index, leaf in changes.items():
                leaves[index] = make_global_array(leaf, leaves[index].sharding)
        return DeviceState(leaves, self.layout)

    @property
    def tree(self) -> TrainState:
        """The placed state. The next step overwrites its arrays: copy before that."""
        self.check_not_written()
        self.check_not_lost()
        if (tree := self.made_tree) is None:
            tree = self.made_tree = self.layout.treedef.unflatten(self.leaves)
        return tree

    @property
    def evaluated(self) -> TrainState:
        """The state whose weights are evaluated."""
        tree = self.tree
        if not self.layout.has_view:
            return tree
        if self._evaluated is None:
            with jax.ensure_compile_time_eval():
                self._evaluated = self.layout.choose_weights(tree)
        return self._evaluated

    def get_weights(self) -> list[Array]:
        """Returns the leaves that are evaluated, without their tree."""
        if self.layout.has_view:
            return jax.tree.leaves(self.evaluated.weights)
        # To make a tree costs more than a small step, and epochs may be short.
        self.check_not_lost()
        return list(self.layout.select_weights(self.leaves))

    def check_not_lost(self) -> None:
        """Raises if a step has failed while it overwrote the state."""
        is_abstract = not isinstance(self.leaves[0], jax.Array)
        if not is_abstract and any(leaf.is_deleted() for leaf in self.leaves):
            raise RuntimeError(
                "the state is lost: a step failed while it was overwriting it."
                " Resume from the last checkpoint with a new Trainer (`fit(...,"
                " ckpt_path=...)`); with DonateBuffers('none') a failed step"
                " leaves the state as it was."
            )

    def check_not_written(self) -> None:
        """Raises if a user has written to the tree.

        Otherwise the value would read back as set, and no step would use it.
        """
        if self.made_tree is None:
            return
        if [*map(id, jax.tree.leaves(self.made_tree))] != [*map(id, self.leaves)]:
            self.made_tree = None
            raise RuntimeError(
                "`trainer.state` was written to, but that has no effect: it only shows"
                " what is on the devices. Use `trainer.set_hyperparams` for what"
                " optax.inject_hyperparams holds, and `trainer.load` for a whole state."
            )

    @functools.cached_property
    def model(self) -> tuple[PyTree, PyTree]:
        """The evaluated model and its `eqx.nn.State`, gathered from their shards."""
        # Values, even while a function of the user is traced.
        with jax.ensure_compile_time_eval():
            arrays = self._fetched or fetch(get_model_arrays(self.evaluated))
            self._fetched = None
            return self.layout.combine(jax.tree.map(jnp.asarray, arrays))

    def fetch(self) -> None:
        """Copies a model that is sharded over processes to this host.

        All processes must call it; afterwards `model` needs no other process.
        """
        arrays = get_model_arrays(self.evaluated)
        if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(arrays)):
            self._fetched = fetch(arrays)

    def get_shapes(self) -> TrainState:
        """Returns shapes and shardings of the state."""
        return self.layout.treedef.unflatten(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for leaf in self.leaves
        )


def get_model_arrays(state: TrainState) -> _ModelArrays:
    """Returns the arrays of the model in a state: trained, others, `eqx.nn.State`."""
    return state.params, state.buffers, state.model_state


def make_first_state(
    model_parts: tuple[PyTree, PyTree, PyTree],
    model_state: PyTree,
    step_functions: StepFunctions,
    seed: int,
    strategy: DataParallel,
    *,
    adds_state: bool,
) -> TrainState:
    """Returns the state before the first step, which is not placed yet.

    If the strategy `adds_state` to the optimizer's, no device need hold all of that.
    """
    params, buffers, _ = cast_arrays(
        use_auto_axes(model_parts), step_functions.precision.stored
    )
    model = params, buffers, use_auto_axes(model_state)
    layout = None
    # A model may be sharded because no device has memory for all of it. Zeros made
    # without its shardings would be full-sized on each device. The same holds for the
    # state of a strategy.
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    is_sharded = not all(leaf.is_fully_replicated for leaf in arrays)
    if is_sharded and not strategy.mesh.empty or adds_state:
        shardings = state_shardings(strategy, make_shapes(model, step_functions))
        layout = shardings.opt_state
        if not is_sharded:
            params = jax.tree.map(make_global_array, params, shardings.params)
    return step_functions.init_state(params, *model[1:], seed, layout)


def make_shapes(model: _ModelArrays, step_functions: StepFunctions) -> TrainState:
    """Returns the first state of a model as shapes, without any computation."""

    def first(params: PyTree, buffers: PyTree, model_state: PyTree) -> TrainState:
        params, buffers = cast_arrays(
            (params, buffers), step_functions.precision.stored
        )
        return step_functions.init_state(params, buffers, model_state, seed=0)

    return jax.eval_shape(first, *model)


def place_state(
    strategy: DataParallel, state: TrainState, offload: bool, *, abstract: bool = False
) -> TrainState:
    """Returns a copy of the state on the devices; if `abstract`, shapes with shardings.

    `offload` puts large leaves of the optimizer's state into the host's memory.
    """
    if not (offload or abstract):
        return strategy.place(state)
    shardings = state_shardings(strategy, state)
    if offload:
        shardings = offload_optimizer(shardings, state)
    if not abstract:
        return place_copy(state, shardings)

    def make_shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(make_shape, state, shardings)
