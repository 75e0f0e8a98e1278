"""What a run was made of, for its records: hyperparameters, versions, hardware."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np

from ..basics.environment import hardware, versions
from ..step import closed_over, find_precision, float32_products, updates_in
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
    arguments = dict(trainer.run.arguments)
    settings = {name: plain(value) for name, value in arguments.items()}
    settings["optimizer"] = optimizer_text(trainer.run.optimizer)
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


def optimizer_text(optimizer: Any) -> str:
    """The stages of an optax optimizer with their numbers, as far as its closures show
    them: `clip_by_global_norm(max_norm=1), scale_by_adam(b1=0.9, ...)`."""
    stages = _stages(optimizer.update)
    given = [f"{name}={_told(value)}" for name, value in _injected(optimizer.init)]
    return ", ".join(stage for stage in (*stages, *given) if stage not in _NOTHING)


def function_text(function: Any) -> str:
    """The name of a function, with the fractions in its code and its closure, which
    tell two lambdas apart: `<lambda>(0.1, 0.9)`."""
    made = _made(function, closed_over(function))
    return function.__qualname__ if made.endswith("()") else made


_NOTHING: Final = ("", "identity()")


def _stages(update: Any) -> list[str]:
    function = inspect.unwrap(update)
    inside = closed_over(function)
    updates = [each for value in inside.values() for each in updates_in(value)]
    stages = [", ".join(s for s in _stages(u) if s not in _NOTHING) for u in updates]
    made = _made(function, inside)
    return stages if made.endswith("()") and stages else [made, *stages]


def _injected(init: Any) -> Iterator[tuple[str, Any]]:
    """The numbers that `optax.inject_hyperparams` was given, which only the `init` of
    the optimizer knows."""
    inside = closed_over(inspect.unwrap(init))
    yield from inside.get("numeric_hps", {}).items()
    for value in inside.values():
        several = value.values() if isinstance(value, Mapping) else value
        for stage in several if isinstance(several, Iterable) else [value]:
            stage = getattr(stage, "init", stage)
            if getattr(stage, "__name__", "").endswith(("init", "init_fn")):
                yield from _injected(stage)


def _made(function: Any, inside: Mapping[str, Any], depth: int = 0) -> str:
    """Who has made a function, and from what: numbers, functions, such as schedules."""
    arguments = _fractions(function)
    maker = getattr(function, "__qualname__", type(function).__name__)
    maker = maker.rpartition(".")[2] if arguments else maker.split(".<locals>")[0]
    for name, value in inside.items():
        if not updates_in(value):
            values = value if isinstance(value, list | tuple) else [value]
            text = " ".join(filter(None, (_told(part, depth) for part in values)))
            arguments += [f"{name}={text}"] if text else []
    return f"{maker}({', '.join(arguments)})"


def _told(value: Any, depth: int = 0) -> str:
    if getattr(value, "ndim", None) == 0:
        return str(np.asarray(value))  # waits for the device, if it is there
    is_known = "<" not in getattr(value, "__qualname__", "<")
    if inspect.isfunction(value) and depth < 3:
        made = _made(value, closed_over(value), depth + 1)
        if not made.endswith("()"):
            return made
    return str(plain(value)) if isinstance(value, int | float) or is_known else ""


def _fractions(function: Any) -> list[str]:
    """The fractions that are written in a user's function."""
    if not inspect.isfunction(function) or function.__module__.startswith(_LIBRARIES):
        return []
    written = *function.__code__.co_consts, *(function.__defaults__ or ())
    return [str(constant) for constant in written if isinstance(constant, float)]


_LIBRARIES: Final = ("optax", "jax", "equinox")
"""jaxdp, too, begins like this."""


def _is_model(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
