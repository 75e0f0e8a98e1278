"""Collects the metadata of a run: hyperparameters, versions, hardware."""

import re
from collections.abc import Mapping
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
        trainer: the running one.
        hyperparameters: the user's own, which come first.
    """
    given = {name: plain(value) for name, value in (hyperparameters or {}).items()}
    arguments = dict(trainer.run.arguments)
    settings = {name: plain(value) for name, value in arguments.items()}
    numbers = [f"{name}={value}" for name, value in trainer.hyperparams.items()]
    kinds = describe_optimizer(trainer.state.opt_state)
    settings["optimizer"] = ", ".join([kinds, *numbers])
    for name in ("max_epochs", "max_steps", "num_training_batches"):
        if getattr(trainer, name) is not None:
            settings[name] = getattr(trainer, name)
    state = trainer.state
    (device, *_) = jax.tree.leaves(state)[0].sharding.device_set
    precision = find_precision(arguments["precision"])
    settings["float32_products"] = float32_products(precision, device)
    settings["parameters"] = _count((state.params, state.buffers))
    settings["trained_parameters"] = _count(state.params)
    return {
        "hyperparameters": given
        | {k: v for k, v in settings.items() if k not in given},
        "versions": get_versions(),
        "hardware": describe_hardware(),
    }


def plain(value: Any) -> Any:
    """Returns `value` as JSON: numbers and texts as they are, the rest by name."""
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
    # Of a user's callback, an argument may be a secret.
    is_named = isinstance(value, Callback) or _is_model(value)
    if type(value).__repr__ is object.__repr__ or is_named:
        return type(value).__name__
    return str(value)[:200]


def flat(facts: Facts) -> dict[str, Any]:
    """Returns one mapping, with hyperparameters under their own names and the rest as
    `versions/jax`."""
    rest = {
        f"{part}/{name}": value
        for part in ("versions", "hardware")
        for name, value in facts[part].items()
    }
    return facts["hyperparameters"] | rest


def markdown(values: Mapping[str, Any]) -> str:
    """Returns a Markdown table, which TensorBoard renders."""
    rows = [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "| --- | --- |", *rows])


def describe_optimizer(opt_state: Any) -> str:
    """Returns the kinds of state that an optimizer keeps, in order, such as
    `ScaleByAdamState, EmptyState`: its functions do not tell their numbers."""
    structure = str(jax.tree.structure(opt_state))
    return ", ".join(re.findall(r"namedtuple\[(\w+)\]", structure))


def _is_model(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
