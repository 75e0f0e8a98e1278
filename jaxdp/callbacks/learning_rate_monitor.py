"""The learning rate of every step, found in the optimizer itself."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from .base import Callback

_RATE_NAMES: Final = ("learning_rate", "lr", "step_size")
_KEEP_SCALE: Final = ("scale_by_param_block_norm", "scale_by_param_block_rms")
_OWN_RATE: Final = ("scale_by_rprop", "scale_by_optimistic_gradient")


class LearningRateMonitor(Callback):
    """Adds the learning rate to the metrics of every step, and so to all loggers.

    It is computed inside the compiled step, at no cost, and is the rate that the
    latest update was scaled by: with `optax.adam(schedule)` the first step shows
    `schedule(0)`.

    Where it comes from: a rate in the hyperparameters of `optax.inject_hyperparams`
    is read from the optimizer's state. Otherwise optax keeps nothing but a count of
    updates there, and the schedule or the constant itself is in the closures of
    `optimizer.update`, where this callback looks for the `scale_by_learning_rate`,
    `scale_by_schedule` and `scale` stages. Several in a row are multiplied, from the
    last stage on that forgets the scale of its input (`scale_by_adam` and the like).
    Wrappers such as `MultiSteps`, `apply_if_finite` and `lookahead` are looked
    through. Different rates for different leaves appear under different names:
    `lr/<label>` for `optax.partition`, `lr/0`, `lr/1`, ... for `optax.masked` stages.

    Args:
        schedule: a number, or a function from the count of earlier steps to the rate,
            to use in place of what is in the optimizer. For optimizers that hide it.
        name: of the metric.
    """

    looks_inside_blocks = False

    def __init__(
        self,
        schedule: float | Callable[[Array], Any] | None = None,
        name: str = "lr",
    ):
        self.schedule = schedule
        self.name = name
        self._rates: dict[str, tuple[_Factor, ...]] = {}
        self._num_states = 0

    def setup(self, trainer: Any) -> None:
        if self.schedule is not None:
            return
        found = _Finder()
        rates = found.walk(trainer.optimizer.update, _Rates({"": ()})).named()
        if not rates:
            raise ValueError(
                "`LearningRateMonitor()`: found no learning rate in `optimizer`:"
                " nothing in it is made by `optax.scale_by_learning_rate`,"
                " `optax.scale_by_schedule` or `optax.scale`. Pass"
                " `LearningRateMonitor(schedule=...)`, a number or a function of the"
                " step, or build the optimizer with"
                " `optax.inject_hyperparams(make_optimizer)(learning_rate=...)`."
            )
        self._rates, self._num_states = rates, found.num_states

    def inside_step(
        self, grads: PyTree, updates: PyTree, state: Any
    ) -> dict[str, Array]:
        if self.schedule is not None:
            done = state.step - 1
            rate = self.schedule(done) if callable(self.schedule) else self.schedule
            return {self.name: jnp.asarray(rate, jnp.float32)}
        states = _counting_states(state.opt_state)
        if len(states) != self._num_states:
            raise ValueError(
                f"`LearningRateMonitor()`: `optimizer` has {self._num_states} schedules"
                f" but its state counts the updates of {len(states)}, so that no count"
                " can be told from another. Pass `LearningRateMonitor(schedule=...)`."
            )
        values = {}
        for label, factors in self._rates.items():
            rate = jnp.float32(1)
            for factor in factors:
                rate = rate * jnp.asarray(factor(states), jnp.float32)
            values[f"{self.name}/{label}" if label else self.name] = jnp.abs(rate)
        return values


_Factor = Callable[[list[Any]], Any]
"""From the counting states of the whole optimizer to what a stage multiplies by."""


class _Rates(NamedTuple):
    """The factors that updates were multiplied by so far, for each group of leaves."""

    factors: dict[str, tuple[_Factor, ...]]
    branches: int = 0

    def times(self, factor: _Factor) -> "_Rates":
        new = {label: (*known, factor) for label, known in self.factors.items()}
        return self._replace(factors=new)

    def forgotten(self) -> "_Rates":
        return self._replace(factors=dict.fromkeys(self.factors, ()))

    def named(self) -> dict[str, tuple[_Factor, ...]]:
        named = {label: known for label, known in self.factors.items() if known}
        # A mask over everything that has a rate makes no second group.
        return {"": named["0"]} if list(named) == ["0"] and self.branches else named


class _Finder:
    """Walks the closures of an `update` function in the order of its stages."""

    def __init__(self) -> None:
        self.num_states = 0
        self._open: set[int] = set()

    def walk(self, update: Any, rates: _Rates) -> _Rates:
        """`rates` after this stage."""
        if id(update) in self._open:
            return rates
        self._open.add(id(update))
        try:
            return self._stage(update, rates)
        finally:
            self._open.discard(id(update))

    def _stage(self, update: Any, rates: _Rates) -> _Rates:
        maker, inside = _closure(update)
        if maker == "scale":
            return rates.times(lambda _: inside["step_size"])
        if maker == "scale_by_schedule":
            place, schedule = self._next_state(), inside["step_size_fn"]
            return rates.times(lambda states: schedule(_before(states[place].count)))
        if maker == "inject_hyperparams":
            return self._injected(inside, rates)
        if maker in ("partition", "multi_transform"):
            return self._partition(inside["transforms"], rates)
        if maker == "masked":
            return self._masked(inside["inner"], rates)
        if maker in _OWN_RATE:
            # What follows only flips the sign, and would pass for a rate of 1.
            raise ValueError(
                f"`LearningRateMonitor()`: `optax.{maker}`, a stage of `optimizer`,"
                " keeps its learning rate to itself. Pass"
                " `LearningRateMonitor(schedule=...)`, a number or a function of the"
                " step."
            )
        if _forgets_scale(maker):
            rates = rates.forgotten()
        inner = list(_transformations(inside))
        for transformation in inner:
            rates = self.walk(transformation, rates)
        rate = inside.get("learning_rate")
        if not inner and isinstance(rate, int | float | jax.Array):
            rates = rates.forgotten().times(lambda _: rate)
        return rates

    def _injected(self, inside: Mapping[str, Any], rates: _Rates) -> _Rates:
        place, factory = self._next_state(), inside["inner_factory"]
        name = getattr(factory, "__name__", "")
        if name != "scale":
            rates = rates.forgotten()
        parameters = inspect.signature(factory).parameters
        given = [known for known in _RATE_NAMES if known in parameters]
        if not given or given[0] in inside["other_hps"]:
            return rates
        return rates.times(lambda states: states[place].hyperparams[given[0]])

    def _partition(self, transforms: Mapping[Any, Any], rates: _Rates) -> _Rates:
        new: dict[str, tuple[_Factor, ...]] = {}
        # JAX visits the states of a dict in the order of its sorted keys.
        for label in sorted(transforms):
            group = self.walk(transforms[label].update, rates)
            for outer, factors in group.factors.items():
                new[f"{outer}/{label}" if outer else str(label)] = factors
        return rates._replace(factors=new)

    def _masked(self, inner: Any, rates: _Rates) -> _Rates:
        after = self.walk(inner.update, _Rates({"": rates.factors.get("", ())}))
        new = {**rates.factors}
        branches = rates.branches
        for label, factors in after.factors.items():
            if factors and factors != rates.factors.get(""):
                new[f"{branches}/{label}" if label else str(branches)] = factors
                branches += 1
        return _Rates(new, branches)

    def _next_state(self) -> int:
        self.num_states += 1
        return self.num_states - 1


def _closure(update: Any) -> tuple[str, dict[str, Any]]:
    """Who made `update`, and the values it closes over, by name."""
    while hasattr(update, "__wrapped__"):
        update = update.__wrapped__
    if isinstance(update, functools.partial):
        return _closure(update.func)
    owner = getattr(update, "__self__", None)
    if owner is not None:
        return type(owner).__name__, dict(vars(owner))
    maker = getattr(update, "__qualname__", "").split(".<locals>")[0]
    cells = getattr(update, "__closure__", None) or ()
    names = update.__code__.co_freevars if cells else ()
    values = {}
    for name, cell in zip(names, cells, strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue
    return maker, values


def _transformations(inside: Mapping[str, Any]) -> list[Any]:
    """The `update` functions of the stages in a closure, in order."""
    found: list[Any] = []
    for name, value in inside.items():
        several = isinstance(value, list | tuple) and not hasattr(value, "update")
        items: list[Any] = list(value) if several else [value]
        for item in items:
            if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
                item = item[1]
            stage: Any = item
            if hasattr(stage, "update") and hasattr(stage, "init"):
                found.append(stage.update)
            elif callable(item) and name in ("update_fns", "update_fn", "update"):
                found.append(item)
    return found


def _forgets_scale(maker: str) -> bool:
    """Whether twice the input of such a stage gives the same output."""
    return maker == "normalize_by_update_norm" or (
        maker.startswith("scale_by_") and maker not in _KEEP_SCALE
    )


def _before(count: Array) -> Array:
    """The count that the latest update was made with."""
    return jnp.maximum(count - 1, 0)


def _counting_states(opt_state: PyTree) -> list[Any]:
    """States that hold a schedule's count or hyperparameters, in order of stages."""

    def counts(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState) or hasattr(
            node, "hyperparams"
        )

    return [s for s in jax.tree.leaves(opt_state, is_leaf=counts) if counts(s)]
