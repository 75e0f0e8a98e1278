"""The state between steps: a flat list of its leaves, how users see it, and what of it
they may set.

It crosses into the compiled step like this, because to flatten a model's tree in Python
costs more than a small step.
"""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey
from jaxtyping import Array, PyTree

from ..basics.host_memory import clear_mesh, use_auto_axes
from ..basics.tree import leaf_path
from ..distributed import make_global_array
from ..step import (
    Steps,
    TrainState,
    cast_for_storage,
    cast_to_original,
    first_state,
    make_weights_view,
)
from ..strategies import DataParallel
from ..strategies.base import adds_state, state_shardings
from ..strategies.offload import offload_optimizer
from ..strategies.placement import fetch, gather_arrays, place_copy

RATES: Final = ("learning_rate", "lr", "step_size")
"""How optimizers call their learning rate."""


View = Callable[[TrainState], TrainState] | None
"""From a state to the one that is evaluated, if that is another."""


class Model(NamedTuple):
    """What of a model its state does not tell, and how it is seen."""

    static: PyTree
    """The leaves that are not arrays."""
    own: PyTree
    """Shapes of its trained leaves and other arrays, before they were placed."""
    view: View
    """That of a callback which chooses the weights to evaluate."""


class State:
    """A placed `TrainState` as a flat list of leaves; replaced, never changed.

    What is made of it for others (the whole tree, the model, what is evaluated) is made
    when it is asked for.

    Attributes:
        leaves: which cross into the compiled step, and are overwritten by it.
        treedef: how they make a `TrainState`.
        kind: what all states of a run have in common.
        handed_out: the tree that a user has, and the leaves it was made of.
    """

    __slots__ = ("_made", "handed_out", "kind", "leaves")

    def __init__(self, leaves: list[Array], kind: "_Kind"):
        self.leaves, self.kind = leaves, kind
        self._made: dict[str, Any] = {}
        self.handed_out: tuple[TrainState, list[Any]] | None = None

    @classmethod
    def of(cls, tree: TrainState, model: Model) -> "State":
        """A state that a strategy has placed."""
        leaves, treedef = jax.tree.flatten(tree)
        totals = tree.totals
        places = treedef.unflatten(range(len(leaves)))
        kind = _Kind(
            treedef,
            next(i for i, leaf in enumerate(leaves) if leaf is totals),
            operator.itemgetter(*jax.tree.leaves(places.weights)),
            np.zeros(totals.shape, totals.dtype),
            isinstance(totals, jax.Array),
            _first_of_views(model.view, make_weights_view(tree.opt_state)),
            model,
        )
        state = cls(leaves, kind)
        state._made["tree"] = tree
        return state

    @property
    def treedef(self) -> Any:
        return self.kind.treedef

    @property
    def zeros(self) -> np.ndarray:
        """What the sums over a pass begin at, on the host."""
        return self.kind.zeros

    def leaves_from_zero(self) -> list[Any]:
        """The leaves with the epoch's sums at zero, which the call of a step moves."""
        leaves: list[Any] = list(self.leaves)
        leaves[self.kind.totals] = self.kind.zeros
        return leaves

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            # Values, though a function of the user's be traced in which they are read.
            with jax.ensure_compile_time_eval():
                self._made[name] = make()
        return self._made[name]

    @property
    def tree(self) -> TrainState:
        """The placed state. The next step overwrites its arrays: copy what you keep."""
        self.check()
        return self._once("tree", lambda: self.treedef.unflatten(self.leaves))

    def hand_out(self) -> TrainState:
        """`tree` for a user, who may keep it until the next step but not change it."""
        self.check_handed_out()
        if self.handed_out is None:
            leaves, treedef = jax.tree.flatten(self.tree)
            self.handed_out = treedef.unflatten(leaves), leaves
        return self.handed_out[0]

    def check_handed_out(self) -> None:
        """Raises where code has put something into the state it was handed.

        It would read back as set, and no step would ever see it.
        """
        where = self.handed_out and _written_to(*self.handed_out)
        if where is None:
            return
        self.handed_out = None
        raise RuntimeError(
            f"`trainer.state` was written to, at {where}, but that has no effect:"
            " it only shows what is on the devices. Use `trainer.set_hyperparams`"
            " for what optax.inject_hyperparams holds, and `trainer.load` for a"
            " whole state."
        )

    def check(self) -> None:
        """Raises where a step that failed has taken the state along."""
        if self.kind.is_placed and any(map(_is_deleted, self.leaves)):
            raise RuntimeError(
                "the state is lost: a step failed while it was overwriting it."
                " Resume from the last checkpoint with a new Trainer (`fit(...,"
                " ckpt_path=...)`); with DonateBuffers('none') a failed step"
                " leaves the state as it was."
            )

    def with_leaves(self, changes: Mapping[int, np.ndarray]) -> "State":
        """The same with other leaves of the same kind, by their places."""
        self.check_handed_out()
        leaves = list(self.leaves)
        with clear_mesh():
            for place, leaf in changes.items():
                leaves[place] = make_global_array(leaf, leaves[place].sharding)
        return State(leaves, self.kind)

    def fetch_totals(self) -> np.ndarray:
        """The epoch's sums. Waits for the device."""
        return np.asarray(self.leaves[self.kind.totals])  # waits for the device

    @property
    def evaluated(self) -> TrainState:
        """The state whose weights are evaluated."""
        view = self.kind.view
        if view is None:
            return self.tree
        return self._once("evaluated", lambda: view(self.tree))

    def weights(self) -> list[Array]:
        """The leaves that are evaluated, without making a tree of them."""
        if self.kind.view is not None:
            return jax.tree.leaves(self.evaluated.weights)
        self.check()
        return list(self.kind.weights(self.leaves))

    def gather(self) -> tuple[PyTree, PyTree]:
        """The model and its state, whole and live."""
        return self._once("model", self._gathered)

    def _gathered(self) -> tuple[PyTree, PyTree]:
        fetched = self._made.pop("fetched", None)
        if fetched is None:
            return self.model_of(self.evaluated)
        return self._as_model(jax.tree.map(jnp.asarray, fetched))

    def fetch(self) -> None:
        """Brings the model to this host, if it is split between processes.

        All processes must call it; `gather` is then a matter of each.
        """
        if jax.process_count() == 1:
            return
        state = self.evaluated
        parts = state.params, state.buffers, state.model_state
        if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(parts)):
            self._made["fetched"] = fetch(parts)

    def model_of(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model and its state as `state` has them, whole and live."""
        parts = state.params, state.buffers, state.model_state
        return self._as_model(gather_arrays(parts))

    def _as_model(self, parts: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        params, buffers, model_state = parts
        model = self.kind.model
        params, buffers = cast_to_original((params, buffers), model.own)
        return eqx.combine(params, buffers, model.static), model_state

    def shapes(self) -> TrainState:
        """The state without its values: nothing is looked at on the devices."""
        return self.treedef.unflatten(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for leaf in self.leaves
        )


class _Kind(NamedTuple):
    """What all states of a run have in common."""

    treedef: Any
    totals: int
    """The place of the epoch's sums among the leaves."""
    weights: Callable[[list[Array]], tuple[Array, ...]]
    """Takes those of what is evaluated: parameters, and at least the step's number."""
    zeros: np.ndarray
    is_placed: bool
    """Whether there are arrays, not shapes alone."""
    view: View
    model: Model


def _first_of_views(chosen: View, own: View) -> View:
    """The view that a callback has chosen; the optimizer's where that changes none."""
    if chosen is None or own is None:
        return chosen or own

    def view(state: TrainState) -> TrainState:
        seen = chosen(state)
        return own(state) if seen is state else seen

    return view


_is_deleted: Final = operator.methodcaller("is_deleted")


def _written_to(state: PyTree, leaves: list[Any]) -> str | None:
    """Where a state has other leaves than those that it was made of, or None."""
    now = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), held in zip(now, leaves, strict=False):
        if leaf is not held:
            return leaf_path(path)
    return None if len(now) == len(leaves) else "a leaf that was added or removed"


def first_of(
    parts: tuple[PyTree, PyTree, PyTree],
    model_state: PyTree,
    steps: Steps,
    seed: int,
    strategy: DataParallel,
) -> TrainState:
    """The state before the first step, to be placed."""
    params, buffers, _ = cast_for_storage(use_auto_axes(parts), steps.precision)
    model = params, buffers, use_auto_axes(model_state)
    layout = None
    # Of a model that is split already, no device need have room for all of it; zeros
    # would be whole on each. Nor for what the strategy adds.
    is_split = not all(leaf.is_fully_replicated for leaf in _placed(params))
    if is_split and not strategy.mesh.empty or adds_state(strategy):
        shapes = jax.eval_shape(
            lambda p, b, s: first_state(p, b, s, steps, seed), *model
        )
        shardings = state_shardings(strategy, shapes)
        layout = shardings.opt_state
        if not is_split:
            model = (
                jax.tree.map(make_global_array, params, shardings.params),
                *model[1:],
            )
    return first_state(*model, steps, seed, layout)


def _placed(tree: PyTree) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def placed_state(
    strategy: DataParallel, state: TrainState, offloads: bool
) -> TrainState:
    """A state on the devices, its optimizer's part on the host if it `offloads`."""
    if offloads:
        return place_copy(state, _layout(strategy, state, offloads))
    placed = strategy.place(state)
    if not isinstance(placed, TrainState):
        raise TypeError(
            f"`strategy`: {type(strategy).__name__}.place returned a"
            f" {type(placed).__name__}; it must return the TrainState it was given,"
            " copied to its devices."
        )
    return placed


def _layout(strategy: DataParallel, state: TrainState, offloads: bool) -> TrainState:
    """The sharding of each leaf of a state."""
    shardings = state_shardings(strategy, state)
    return offload_optimizer(shardings, state) if offloads else shardings


def shapes_of_first(
    parts: tuple[PyTree, PyTree, PyTree],
    model_state: PyTree,
    steps: Steps,
    strategy: DataParallel,
    offloads: bool,
) -> TrainState:
    """The first state as shapes and shardings; nothing is computed or moved."""

    def first(params: PyTree, buffers: PyTree, model_state: PyTree) -> TrainState:
        params, buffers = cast_for_storage((params, buffers), steps.precision)
        return first_state(params, buffers, model_state, steps, seed=0)

    state = jax.eval_shape(first, parts[0], parts[1], model_state)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        state,
        _layout(strategy, state, offloads),
    )


# What an optimizer keeps in its state so that it can be set between two steps:
# `optax.inject_hyperparams` puts its arguments there. Setting one is to write an array,
# and no step is compiled for it.


class Hyperparam(NamedTuple):
    """One that can be read, and unless a schedule overwrites it, set."""

    name: str
    """As its optimizer calls it."""
    label: str
    """The keys of dictionaries on the way to it, as `optax.partition` has them."""
    place: int
    """Which of the state's leaves it is."""
    leaf: Any
    is_scheduled: bool


def hyperparams_in(state: PyTree) -> dict[str, Hyperparam]:
    """All hyperparameters in a state, by the names that they are set by.

    That is the optimizer's own name for it, if there is one such in the state. Several
    have a label before it: the key that `optax.partition` or `optax.named_chain` knows
    each by (`head/learning_rate`), or where that does not tell them apart their number
    (`0/learning_rate`).
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    scheduled = {
        (path[:place], path[place + 1])
        for path, _ in leaves
        for place, key in enumerate(path)
        if key == GetAttrKey("hyperparams_states")
    }
    by_name: dict[str, list[Hyperparam]] = {}
    for place, (path, leaf) in enumerate(leaves):
        match path:
            case (*owner, GetAttrKey("hyperparams"), DictKey(name)):
                label = "/".join(str(key.key) for key in owner if type(key) is DictKey)
                sets_itself = (tuple(owner), DictKey(name)) in scheduled
                one = Hyperparam(name, label, place, leaf, sets_itself)
                by_name.setdefault(name, []).append(one)
    return {
        name: hyperparam
        for group in by_name.values()
        for name, hyperparam in _told_apart(group).items()
    }


def hyperparam_values(state: PyTree) -> Mapping[str, Any]:
    """The present ones, as `hyperparams_in` names them. Waits for the device."""
    arrays = {
        # waits for the device
        name: np.asarray(hyperparam.leaf)
        for name, hyperparam in hyperparams_in(state).items()
    }
    # on the host
    values = {name: a if a.ndim else a.item() for name, a in arrays.items()}
    return MappingProxyType(values)


def leaves_to_set(state: PyTree, values: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """Which leaves of a state are to become what, to have these hyperparameters.

    Raises:
        ValueError: for a name that is not there, one that a schedule sets, and a value
            of another shape, or that is not finite.
        TypeError: for a value that is no number, or not of the kind of the present one.
    """
    present = hyperparams_in(state)
    return {
        _present(name, present).place: _as_present(name, value, present[name].leaf)
        for name, value in values.items()
    }


def _told_apart(group: list[Hyperparam]) -> dict[str, Hyperparam]:
    """Hyperparameters of one name, told apart."""
    if len(group) == 1:
        return {group[0].name: group[0]}
    labels = [hyperparam.label for hyperparam in group]
    if not all(labels) or len({*labels}) < len(labels):
        labels = [str(number) for number in range(len(group))]
    return {f"{label}/{x.name}": x for label, x in zip(labels, group, strict=True)}


def _present(name: str, found: Mapping[str, Hyperparam]) -> Hyperparam:
    """The hyperparameter of a name, or an error that says what there is."""
    if name not in found:
        alike = [key for key, hyperparam in found.items() if hyperparam.name == name]
        listed = ", ".join(map(repr, alike or found))
        has = f"has no {name!r}; there are {listed or 'none'}"
        if alike:
            has = f"has {len(alike)} named {name!r}: {listed}. Say which, as"
            has += f" set_hyperparams(**{{{alike[0]!r}: ...}})"
        raise ValueError(
            f"`set_hyperparams`: the optimizer's state {has}. Only what is in it can be"
            " set: numbers and arrays that optax.inject_hyperparams was given, for"
            " example optax.inject_hyperparams(optax.adam)(learning_rate=1e-3) instead"
            " of optax.adam(1e-3)."
        )
    if found[name].is_scheduled:
        raise ValueError(
            f"`set_hyperparams`: {name!r} is set by a schedule in every step,"
            " which would overwrite the new value. Give optax.inject_hyperparams"
            " a number instead of the schedule."
        )
    return found[name]


def _as_present(name: str, value: Any, leaf: Any) -> np.ndarray:
    """`value` in the dtype of the present one."""
    array = np.asarray(value)  # waits for the device
    what = f"`set_hyperparams`: {name!r} is {leaf.dtype} of shape {leaf.shape}"
    is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    kinds = (jnp.floating, jnp.integer) if is_floating else (jnp.integer,)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise TypeError(
            f"{what}, and can't be set to {value!r} of type {type(value).__name__};"
            f" pass {'a number' if is_floating else 'an int'}."
        )
    if not array.ndim:  # one for each member of an ensemble
        array = np.broadcast_to(array, leaf.shape)
    if array.shape != leaf.shape:
        raise ValueError(f"{what}; got a value of shape {array.shape}.")

    with np.errstate(over="ignore"):
        new = array.astype(leaf.dtype)
    if is_floating and not np.isfinite(new.astype(np.float64)).all():
        raise ValueError(f"{what}, and must be finite; got {value!r}.")
    if not is_floating and not np.array_equal(new, array):
        raise ValueError(f"{what}, and {value!r} does not fit into it.")
    return new
