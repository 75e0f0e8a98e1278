"""What a run was made of, for its records: hyperparameters, versions, hardware."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..basics.environment import hardware, versions
from ..step import closed_over, updates_in
from .base import Trainer

Facts = dict[str, Any]
"""`{"hyperparameters": {name: value}, "versions": {...}, "hardware": {...}}`, JSON;
loggers are given a `"run_id"` too."""


def run_facts(trainer: Trainer, hyperparameters: Mapping[str, Any] | None) -> Facts:
    """The arguments of the trainer and its fit, and what it runs on.

    Args:
        trainer: the running one.
        hyperparameters: the user's own, which come first.
    """
    given = {name: plain(value) for name, value in (hyperparameters or {}).items()}
    settings = {name: plain(value) for name, value in trainer.run.arguments.items()}
    optimizer = trainer.run.optimizer_for(trainer.strategy)
    settings["optimizer"] = optimizer_text(optimizer.update)
    for name in ("max_epochs", "max_steps", "num_training_batches"):
        if getattr(trainer, name) is not None:
            settings[name] = getattr(trainer, name)
    state = trainer.state
    settings["parameters"] = _count((state.params, state.buffers))
    settings["trained_parameters"] = _count(state.params)
    return {
        "hyperparameters": given
        | {k: v for k, v in settings.items() if k not in given},
        "versions": versions(),
        "hardware": hardware(),
    }


def plain(value: Any) -> Any:
    """`value` as JSON: numbers and short texts as they are, the rest by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()  # on the host
    if isinstance(value, list | tuple):
        return ", ".join(str(plain(item)) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {plain(v)}" for k, v in value.items())
    if hasattr(value, "__qualname__"):
        return value.__qualname__
    if type(value).__repr__ is object.__repr__ or _is_model(value):
        return type(value).__name__
    return str(value)[:200]


def flat(facts: Facts) -> dict[str, Any]:
    """One mapping: hyperparameters under their names, the rest as `versions/jax`."""
    rest = {
        f"{part}/{name}": value
        for part in ("versions", "hardware")
        for name, value in facts[part].items()
    }
    return facts["hyperparameters"] | rest


def markdown(values: Mapping[str, Any]) -> str:
    """A table, as TensorBoard and W&B render it."""
    rows = [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "| --- | --- |", *rows])


def optimizer_text(update: Any) -> str:
    """The stages of an optax optimizer with their numbers, as far as its closures show
    them: `clip_by_global_norm(max_norm=1), scale_by_adam(b1=0.9, ...)`."""
    function = inspect.unwrap(update)
    inside = closed_over(function)
    updates = [stage for value in inside.values() for stage in updates_in(value)]
    stages = [optimizer_text(stage) for stage in updates]
    made = _made(function, inside)
    if not made.endswith("()") or not stages:
        stages.insert(0, made)
    return ", ".join(stage for stage in stages if stage not in ("", "identity()"))


def _made(function: Any, inside: Mapping[str, Any], depth: int = 0) -> str:
    """Who has made a function, and from what: numbers, functions, such as schedules."""
    told = []
    for name, value in inside.items():
        if not updates_in(value):
            values = value if isinstance(value, list | tuple) else [value]
            text = " ".join(filter(None, (_told(each, depth) for each in values)))
            told += [f"{name}={text}"] if text else []
    maker = getattr(function, "__qualname__", type(function).__name__)
    return f"{maker.split('.<locals>')[0]}({', '.join(told)})"


def _told(value: Any, depth: int) -> str:
    if isinstance(value, int | float) or "<" not in getattr(value, "__qualname__", "<"):
        return str(plain(value))
    if inspect.isfunction(value) and depth < 3:
        made = _made(value, closed_over(value), depth + 1)
        return "" if made.endswith("()") else made  # which would say nothing
    return ""


def _is_model(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
