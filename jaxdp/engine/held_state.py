"""The state between steps: a flat list of its leaves, and what users see of it.

It crosses into the compiled step like this, because to flatten a model's tree in Python
costs more than a small step.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.ambient_mesh import no_ambient_mesh
from ..basics.tree import leaf_path
from ..distributed import put
from ..step import Steps, TrainState, as_own, as_stored, first_state
from ..strategies import DataParallel
from ..strategies.base import with_auto_axes


class HeldState:
    """A placed `TrainState`, which every step overwrites.

    What is made of it for others (the whole tree, the model, what is evaluated) is made
    when it is asked for, once per step.

    Args:
        model: as (trained leaves, other arrays, the rest), before it was placed.
        view: from the state to the one whose weights are evaluated and handed out.
    """

    arrays: list[Array]
    """The leaves of the state, which cross into the compiled step."""
    treedef: Any
    """How they make a `TrainState`."""

    def __init__(
        self,
        model: tuple[PyTree, PyTree, PyTree],
        view: Callable[[TrainState], TrainState] | None,
    ):
        self._static = model[2]
        self._own = jax.eval_shape(lambda *trees: trees, *model[:2])
        self._view = view
        self._strategy: DataParallel
        self._made: dict[str, Any] = {}
        """What was made of `arrays`; of the state handed out, its leaves besides."""

    def put(self, state: TrainState, strategy: DataParallel) -> None:
        """Takes up a state that `strategy` has placed."""
        totals, self._strategy = state.totals, strategy
        self.arrays, self.treedef = jax.tree.flatten(state)
        self._totals = next(i for i, x in enumerate(self.arrays) if x is totals)
        places = self.treedef.unflatten(range(len(self.arrays)))
        self._weights = jax.tree.leaves(places.weights)
        self._zeros = _zeros(totals.shape, totals.dtype, totals.sharding)
        self._made = {"state": state}

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            # Values, though a function of the user's be traced in which they are read.
            with jax.ensure_compile_time_eval():
                self._made[name] = make()
        return self._made[name]

    @property
    def state(self) -> TrainState:
        """The placed state. The next step overwrites its arrays: copy what you keep."""
        self.check_state()
        return self._once("state", lambda: self.treedef.unflatten(self.arrays))

    def hand_out(self) -> TrainState:
        """`state` for a user, who may keep it until the next step but not change it."""
        self.check_handed_out()

        def given() -> tuple[TrainState, list[Any]]:
            leaves, treedef = jax.tree.flatten(self.state)
            return treedef.unflatten(leaves), leaves

        return self._once("handed out", given)[0]

    def check_handed_out(self) -> None:
        """Raises where code has put something into the state it was handed.

        It would read back as set, and no step would ever see it.
        """
        if "handed out" not in self._made:
            return
        where = _written_to(*self._made["handed out"])
        if where is None:
            return
        del self._made["handed out"]
        raise RuntimeError(
            f"`trainer.state` was written to, at {where}, but that has no effect:"
            " it only shows what is on the devices. Use `trainer.set_hyperparams`"
            " for what optax.inject_hyperparams holds, and `trainer.load` for a"
            " whole state."
        )

    def check_state(self) -> None:
        """Raises where a step that failed has taken the state along."""
        arrays = [held for held in self.arrays if isinstance(held, jax.Array)]
        if any(array.is_deleted() for array in arrays):
            raise RuntimeError(
                "the state is lost: a step failed while it was overwriting it."
                " Resume from the last checkpoint with a new Trainer (`fit(...,"
                " ckpt_path=...)`); with DonateBuffers('none') a failed step"
                " leaves the state as it was."
            )

    def replace(self, arrays: list[Array]) -> None:
        """Takes up what a step has made of `arrays`."""
        self.arrays, self._made = arrays, {}

    def write(self, leaves: Mapping[int, np.ndarray]) -> None:
        """Sets leaves of the state, by their place in it, to others of their kind."""
        with self._written():
            for place, leaf in leaves.items():
                self.arrays[place] = put(leaf, self.arrays[place].sharding)

    def zero_totals(self) -> None:
        """Sets the epoch's sums to zero: on the devices, where it takes least time."""
        with self._written():
            self.arrays[self._totals] = self._zeros()

    def fetch_totals(self) -> np.ndarray:
        """The epoch's sums. Waits for the device."""
        return np.asarray(self.arrays[self._totals])  # waits for the device

    def _written(self) -> AbstractContextManager[Any]:
        """Around what changes `arrays`."""
        self.check_handed_out()
        self.arrays, self._made = list(self.arrays), {}
        return no_ambient_mesh()

    def named_arrays(self) -> dict[str, Array]:
        """The leaves of the state by their paths."""
        paths = jax.tree_util.tree_leaves_with_path(
            self.treedef.unflatten(range(len(self.arrays)))
        )
        names = [leaf_path(path) for path, _ in paths]
        return dict(zip(names, self.arrays, strict=True))

    @property
    def evaluated(self) -> TrainState:
        """The state whose weights are evaluated; looked for once per step."""
        view = self._view
        if view is None:
            return self.state
        return self._once("evaluated", lambda: view(self.state))

    def weights(self) -> list[Array]:
        """The leaves that are evaluated of `state`, without making a tree of them."""
        if self._view is not None:
            return jax.tree.leaves(self.evaluated.weights)
        self.check_state()
        return [self.arrays[place] for place in self._weights]

    def gather(self) -> tuple[PyTree, PyTree]:
        """The model and its state, whole and live; gathered once per step."""
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
            self._made["fetched"] = self._strategy.fetch(parts)

    def model_of(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model and its state as `state` has them, whole and live."""
        parts = state.params, state.buffers, state.model_state
        return self._as_model(self._strategy.gather(parts))

    def _as_model(self, parts: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        params, buffers, model_state = parts
        params, buffers = as_own((params, buffers), self._own)
        return eqx.combine(params, buffers, self._static), model_state

    def shapes(self) -> TrainState:
        """The state without its values: nothing is looked at on the devices."""
        return self.treedef.unflatten(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for leaf in self.arrays
        )


@functools.lru_cache
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def _written_to(state: PyTree, leaves: list[Any]) -> str | None:
    """Where a state has other leaves than those that it was made of, or None."""
    now = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), held in zip(now, leaves, strict=False):
        if leaf is not held:
            return leaf_path(path)
    return None if len(now) == len(leaves) else "a leaf that was added or removed"


def placed_first(
    model: tuple[PyTree, PyTree, PyTree],
    model_state: PyTree,
    steps: Steps,
    strategy: DataParallel,
    seed: int,
) -> TrainState:
    """The state before the first step, placed by `strategy`."""
    params, buffers, _ = as_stored(with_auto_axes(model), steps.precision)
    model_state = with_auto_axes(model_state)
    with no_ambient_mesh():
        state = first_state(params, buffers, model_state, steps, seed)
        placed = strategy.place(state)
    if not isinstance(placed, TrainState):
        raise TypeError(
            f"`strategy`: {type(strategy).__name__}.place returned a"
            f" {type(placed).__name__}; it must return the TrainState it was given,"
            " copied to its devices."
        )
    return placed


def shapes_of_first(
    model: tuple[PyTree, PyTree, PyTree],
    model_state: PyTree,
    steps: Steps,
    strategy: DataParallel,
) -> TrainState:
    """The first state as shapes and shardings; nothing is computed or moved."""

    def first(params: PyTree, buffers: PyTree, model_state: PyTree) -> TrainState:
        params, buffers = as_stored((params, buffers), steps.precision)
        state = first_state(params, buffers, model_state, steps, seed=0)
        return strategy.as_held(state)

    state = jax.eval_shape(first, model[0], model[1], model_state)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        state,
        strategy.state_shardings(state),
    )
