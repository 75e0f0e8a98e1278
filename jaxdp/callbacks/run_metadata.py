"""Collects the metadata of a run: hyperparameters, versions, hardware."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ..basics.environment import describe_hardware, get_versions
from ..step import find_precision, float32_products
from .base import Callback, Trainer

Facts = dict[str, Any]
"""`{"hyperparameters": {name: value}, "versions": {...}, "hardware": {...}}`, JSON;
loggers are given a `"run_id"` too."""


def collect_metadata(
    trainer: Trainer, hyperparameters: Mapping[str, Any] | None
) -> Facts:
    """Returns the arguments of the trainer and its fit, versions and hardware.

    Args:
        trainer: the running trainer.
        hyperparameters: the user's own, which come first.
    """
    arguments = trainer.run.arguments
    settings = {name: plain(value) for name, value in arguments.items()}
    settings["optimizer"] = describe_optimizer(trainer.run.optimizer)
    for name in ("max_epochs", "max_steps", "num_training_batches"):
        if getattr(trainer, name) is not None:
            settings[name] = getattr(trainer, name)
    state = trainer.state
    (device, *_) = jax.tree.leaves(state)[0].sharding.device_set
    precision = find_precision(arguments["precision"])
    settings["float32_products"] = float32_products(precision, device)
    settings["parameters"] = _count((state.params, state.buffers))
    settings["trained_parameters"] = _count(state.params)
    custom = {name: plain(value) for name, value in (hyperparameters or {}).items()}
    return {
        "hyperparameters": custom | settings | custom,
        "versions": get_versions(),
        "hardware": describe_hardware(),
    }


def plain(value: Any) -> Any:
    """Converts `value` to JSON: numbers and texts stay, other objects become names."""
    if isinstance(value, np.generic):
        return value.item()  # on the host
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return ", ".join(str(plain(item)) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {plain(v)}" for k, v in value.items())
    if hasattr(value, "__qualname__"):
        return value.__qualname__
    # An argument of a custom callback may be a secret.
    is_named = isinstance(value, Callback) or _has_arrays(value)
    if type(value).__repr__ is object.__repr__ or is_named:
        return type(value).__name__
    return str(value)[:200]


def flat(facts: Facts) -> dict[str, Any]:
    """Flattens facts to one mapping: hyperparameters keep their names, other facts get
    names such as `versions/jax`.
    """
    rest = {
        f"{part}/{name}": value
        for part in ("versions", "hardware")
        for name, value in facts[part].items()
    }
    return facts["hyperparameters"] | rest


def describe_optimizer(optimizer: Any) -> str:
    """Returns the stages of an optax optimizer with their numbers, as far as its
    closures show them: `chain(scale_by_adam(b1=0.9, ...), scale(step_size=-0.001))`."""
    injected = [
        f"{name}={_text(value)}" for name, value in _find_injected(optimizer.init)
    ]
    return ", ".join([describe_function(optimizer.update), *injected])


def describe_function(function: Any, depth: int = 0) -> str:
    """Returns the name of a function, or of the function that made it, with the values
    that it closes over.
    """
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    if depth > 6:  # a function may refer to itself
        return name
    inside = {k: _text(v, depth + 1) for k, v in _get_closure(function).items()}
    stages = [text for text in inside.values() if text.endswith(")")]
    numbers = [f"{k}={v}" for k, v in inside.items() if v and v not in stages]
    if len(stages) == 1 and not numbers:  # a mere wrapper
        return stages[0]
    parts = ", ".join([*stages, *numbers])
    return f"{name.split('.<locals>')[0]}({parts})" if parts else name


def _text(value: Any, depth: int = 0) -> str:
    """Returns a value that a function closes over as text; "" for most kinds."""
    if hasattr(value, "init") and hasattr(value, "update"):
        value = value.update
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return ", ".join(filter(None, (_text(item, depth) for item in value)))
    if inspect.isfunction(value):
        text = describe_function(value, depth)
        return "" if "<" in text else text
    if getattr(value, "ndim", None) == 0:
        return str(np.asarray(value))  # waits for the device, if it is there
    return str(plain(value)) if isinstance(value, int | float | type) else ""


def _get_closure(function: Any) -> Mapping[str, Any]:
    """Returns the variables that a nested function or a method holds."""
    if inspect.ismethod(function):
        return getattr(function.__self__, "__dict__", {})
    if inspect.isfunction(function):
        with contextlib.suppress(ValueError):  # the variable has no value yet
            return inspect.getclosurevars(function).nonlocals
    return {}


def _find_injected(init: Any) -> Iterator[tuple[str, Any]]:
    """Yields the numbers that `optax.inject_hyperparams` was given, which only the
    `init` of the optimizer knows."""
    inside = _get_closure(inspect.unwrap(init))
    yield from inside.get("numeric_hps", {}).items()
    for stage in inside.get("init_fns", ()):
        yield from _find_injected(stage)


def _has_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
