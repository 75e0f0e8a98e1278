"""The train state on the devices, as a flat list of leaves.

Compiled steps take this list, because to flatten a model's tree in Python costs more
than a small step.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.host_memory import clear_mesh, use_auto_axes
from ..distributed import make_global_array
from ..step import (
    Steps,
    TrainState,
    cast_arrays,
    cast_to_original,
    first_state,
    make_weights_view,
)
from ..strategies import DataParallel
from ..strategies.base import adds_state, state_shardings
from ..strategies.offload import offload_optimizer
from ..strategies.placement import fetch, gather_arrays, place_copy

View = Callable[[TrainState], TrainState] | None
"""Maps a state to the one that is evaluated, if that is another."""

_ModelParts = tuple[PyTree, PyTree, PyTree]


class ModelStructure(NamedTuple):
    """The parts of a model that its state lacks, and its view."""

    static: PyTree
    """The leaves that are not arrays."""
    shapes: PyTree
    """Of its trained leaves and other arrays, before they were placed."""
    view: View
    """That of a callback which chooses the weights to evaluate."""


class _Layout(NamedTuple):
    """The properties that all states of a run share."""

    treedef: Any
    totals: int
    """The index of the epoch's sums among the leaves."""
    select_weights: Callable[[list[Array]], tuple[Array, ...]]
    """Selects the leaves that are evaluated: parameters, and at least the step."""
    zeros: np.ndarray
    """The first value of the sums over an epoch or evaluation, on the host."""
    is_placed: bool
    """Whether there are arrays, not shapes alone."""
    view: View
    structure: ModelStructure


class DeviceState:
    """A placed `TrainState` as a list of leaves; replaced, never changed.

    The tree, the model and the evaluated state are made on the first use.

    Attributes:
        leaves: the arguments of a train step, which overwrites them.
        layout: shared by all states of a run.
        made_tree: the tree, if it was made. A user may hold a reference to it.
    """

    __slots__ = ("_cache", "layout", "leaves", "made_tree")

    def __init__(self, leaves: list[Array], layout: _Layout):
        self.leaves, self.layout = leaves, layout
        self.made_tree: TrainState | None = None
        self._cache: dict[str, Any] = {}

    @classmethod
    def from_tree(cls, tree: TrainState, structure: ModelStructure) -> "DeviceState":
        """Returns the state of a tree that a strategy has placed."""
        leaves, treedef = jax.tree.flatten(tree)
        totals = tree.totals
        indices = treedef.unflatten(range(len(leaves)))
        layout = _Layout(
            treedef,
            next(i for i, leaf in enumerate(leaves) if leaf is totals),
            operator.itemgetter(*jax.tree.leaves(indices.weights)),
            np.zeros(totals.shape, totals.dtype),
            isinstance(totals, jax.Array),
            _compose_views(structure.view, make_weights_view(tree.opt_state)),
            structure,
        )
        state = cls(leaves, layout)
        state.made_tree = tree
        return state

    def replace_leaves(self, changes: Mapping[int, np.ndarray]) -> "DeviceState":
        """Returns the state with other leaves, by index, of the same spec."""
        self.check_not_written()
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
        view = self.layout.view
        return self._get("evaluated", lambda: view(self.tree)) if view else self.tree

    def _get(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns a part of the state, which is made once."""
        if name not in self._cache:
            # Values, even while a function of the user is traced.
            with jax.ensure_compile_time_eval():
                self._cache[name] = make()
        return self._cache[name]

    def check_not_lost(self) -> None:
        """Raises if a step has failed while it overwrote the state."""
        if self.layout.is_placed and any(map(_is_deleted, self.leaves)):
            raise RuntimeError(
                "the state is lost: a step failed while it was overwriting it."
                " Resume from the last checkpoint with a new Trainer (`fit(...,"
                " ckpt_path=...)`); with DonateBuffers('none') a failed step"
                " leaves the state as it was."
            )

    def check_not_written(self) -> None:
        """Raises if a user has written to the tree.

        The value would read back as set, and no step would use it.
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

    def get_weights(self) -> list[Array]:
        """Returns the leaves that are evaluated, without their tree."""
        if self.layout.view is not None:
            return jax.tree.leaves(self.evaluated.weights)
        self.check_not_lost()
        return list(self.layout.select_weights(self.leaves))

    def gather(self) -> tuple[PyTree, PyTree]:
        """Returns the evaluated model and its state, gathered from their shards."""
        return self._get("model", self._gather)

    def _gather(self) -> tuple[PyTree, PyTree]:
        fetched = self._cache.pop("fetched", None)
        if fetched is None:
            return self.gather_model(self.evaluated)
        return self._combine(jax.tree.map(jnp.asarray, fetched))

    def fetch(self) -> None:
        """Copies a model that is sharded over processes to this host.

        All processes must call it; afterwards `gather` needs no other process.
        """
        parts = _get_model_parts(self.evaluated)
        if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(parts)):
            self._cache["fetched"] = fetch(parts)

    def gather_model(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """Returns the model of `state` and its state, gathered from their shards."""
        return self._combine(gather_arrays(_get_model_parts(state)))

    def _combine(self, parts: _ModelParts) -> tuple[PyTree, PyTree]:
        params, buffers, model_state = parts
        structure = self.layout.structure
        params, buffers = cast_to_original((params, buffers), structure.shapes)
        return eqx.combine(params, buffers, structure.static), model_state

    def get_shapes(self) -> TrainState:
        """Returns shapes and shardings of the state."""
        return self.layout.treedef.unflatten(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for leaf in self.leaves
        )


_is_deleted: Final = operator.methodcaller("is_deleted")


def _get_model_parts(state: TrainState) -> _ModelParts:
    return state.params, state.buffers, state.model_state


def _compose_views(chosen: View, optimizers: View) -> View:
    """Returns a view that applies a callback's view, or the optimizer's if the
    callback's changes nothing.
    """
    if chosen is None or optimizers is None:
        return chosen or optimizers

    def view(state: TrainState) -> TrainState:
        viewed = chosen(state)
        return optimizers(state) if viewed is state else viewed

    return view


def make_first_state(
    parts: _ModelParts,
    model_state: PyTree,
    steps: Steps,
    seed: int,
    strategy: DataParallel,
) -> TrainState:
    """Returns the state before the first step, which is not placed yet."""
    params, buffers, _ = cast_arrays(use_auto_axes(parts), steps.precision.stored)
    model = params, buffers, use_auto_axes(model_state)
    layout = None
    # A model may be sharded because no device has memory for all of it. Zeros made
    # without its shardings would be full-sized on each device. The same holds for the
    # state of a strategy.
    arrays = [leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)]
    is_sharded = not all(leaf.is_fully_replicated for leaf in arrays)
    if is_sharded and not strategy.mesh.empty or adds_state(strategy):
        shapes = jax.eval_shape(
            lambda p, b, s: first_state(p, b, s, steps, seed), *model
        )
        shardings = state_shardings(strategy, shapes)
        layout = shardings.opt_state
        if not is_sharded:
            model = (
                jax.tree.map(make_global_array, params, shardings.params),
                *model[1:],
            )
    return first_state(*model, steps, seed, layout)


def place_state(strategy: DataParallel, state: TrainState, offload: bool) -> TrainState:
    """Returns the state on the devices; `offload` puts the optimizer's on the host."""
    if not offload:
        return strategy.place(state)
    shardings = offload_optimizer(state_shardings(strategy, state), state)
    return place_copy(state, shardings)


def make_abstract_state(
    parts: _ModelParts,
    model_state: PyTree,
    steps: Steps,
    strategy: DataParallel,
    offload: bool,
) -> TrainState:
    """Returns the first state as shapes and shardings, without any computation."""

    def first(params: PyTree, buffers: PyTree, model_state: PyTree) -> TrainState:
        params, buffers = cast_arrays((params, buffers), steps.precision.stored)
        return first_state(params, buffers, model_state, steps, seed=0)

    state = jax.eval_shape(first, parts[0], parts[1], model_state)
    shardings = state_shardings(strategy, state)
    if offload:
        shardings = offload_optimizer(shardings, state)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        state,
        shardings,
    )
