"""Averages the weights over the steps of a run, and evaluates the average."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from ..basics.arguments import check_count, check_number, checks_arguments
from ..basics.host_memory import move_to_device
from ..basics.tree import find_nodes, map_nodes
from .base import Callback, Trainer


class WeightAveraging(Callback):
    """Keeps a moving average (EMA) of the trained weights, and evaluates with it.

    Training continues with its own weights, in `trainer.state.params`; validation,
    `test`, `predict` and `trainer.model` use the average. The average is part of the
    optimizer's state, and is sharded, donated, saved and loaded with it. It costs one
    copy of the weights (at least float32) and one pass over them per step. Running
    statistics of BatchNorm are those of the training model.

    Args:
        decay: how much of the average each step keeps; 0.999 looks back over about a
            thousand steps. It begins with the weights after the first step, as in
            torch. None takes the plain mean of all steps since `start_step`
            (stochastic weight averaging).
        every_n_steps: average only the weights after steps n, 2 n, 3 n and so on, as
            `every_n_train_steps` of `ModelCheckpoint` counts.
        start_step: how many steps to skip; until then the average is the weights.
        evaluate: whether validation, `test`, `predict` and `trainer.model` use the
            average. If not, only `averaged_model` returns it.
    """

    @checks_arguments
    def __init__(
        self,
        decay: float | None = 0.999,
        *,
        every_n_steps: int = 1,
        start_step: int = 0,
        evaluate: bool = True,
    ):
        if decay is not None:
            mean = ", or None for the plain mean"
            check_number("decay", decay, minimum=0, below=1, suffix=mean)
        check_count("every_n_steps", every_n_steps)
        check_count("start_step", start_step, minimum=0)
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.evaluate = evaluate

    def wrap_optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Returns the `optimizer` with the average of the weights in its state."""
        inner = optax.with_extra_args_support(optimizer)

        def init(params: PyTree) -> AveragingState:
            def widen(leaf: Array) -> Array:  # or small contributions round to zero
                return jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32))

            average = jax.tree.map(widen, params)
            zero = jnp.zeros((), jnp.int32)
            return AveragingState(inner.init(params), average, zero, zero)

        def update(
            updates: PyTree, state: Any, params: PyTree = None, **extra: Any
        ) -> tuple[PyTree, AveragingState]:
            updates, inner_state = inner.update(updates, state.inner, params, **extra)
            return updates, state._replace(inner=inner_state)

        return optax.GradientTransformationExtraArgs(init, update)

    def after_step(self, state: Any) -> Any:
        """Returns `state` with its weights added to the average."""
        update = functools.partial(self._update_average, state.params)
        opt_state = map_nodes(AveragingState, update, state.opt_state)
        return state._replace(opt_state=opt_state)

    def evaluated_state(self, state: Any) -> Any:
        """Returns `state` with the weights to evaluate as its `params`."""
        return _replace_params(state) if self.evaluate else state

    def averaged_model(self, trainer: Trainer) -> PyTree:
        """Returns the model with the average as its weights, on the default device."""
        return trainer.run.model_of(_replace_params(trainer.state))

    def _update_average(
        self, params: PyTree, state: "AveragingState"
    ) -> "AveragingState":
        steps = state.steps + 1
        if self.decay is None:
            share = 1 / (state.taken + 1).astype(jnp.float32)
        else:
            share = jnp.float32(1 - self.decay)
        follows = (steps <= self.start_step) | (state.taken == 0)
        due = (steps > self.start_step) & (steps % self.every_n_steps == 0)

        def mix(average: Array, leaf: Array) -> Array:
            leaf = _round_as_stored(leaf).astype(average.dtype)
            mixed = average + share.astype(average.dtype) * (leaf - average)
            return jnp.where(follows, leaf, jnp.where(due, mixed, average))

        average = jax.tree.map(mix, state.average, params)
        return AveragingState(
            state.inner, average, steps, state.taken + due.astype(jnp.int32)
        )


class AveragingState(NamedTuple):
    """The state of an optimizer that `WeightAveraging` has wrapped."""

    inner: Any
    average: PyTree
    """Shaped like the trained leaves, in float32 at least."""
    steps: Array
    """int32 `()`. Optimizer steps done."""
    taken: Array
    """int32 `()`. The number of them in the average."""


def _replace_params(state: Any) -> Any:
    average = find_nodes(AveragingState, state.opt_state)[0].average

    def cast_mean(own: Array, mean: Array) -> Array:
        mean = move_to_device(mean)
        return mean if mean.dtype == own.dtype else mean.astype(own.dtype)

    return state._replace(params=jax.tree.map(cast_mean, state.params, average))


def _round_as_stored(leaf: Array) -> Array:
    """Returns the leaf rounded as it is stored; a fusion of XLA would not round it."""
    facts = jnp.finfo(leaf.dtype)
    if facts.bits >= 32:
        return leaf
    return jax.lax.reduce_precision(leaf, facts.nexp, facts.nmant)
