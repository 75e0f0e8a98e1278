"""What a run was made of, for its records: hyperparameters, versions, hardware."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..basics.environment import hardware, versions

if TYPE_CHECKING:
    from jaxdp import Trainer

Facts = dict[str, Any]
"""`{"hyperparameters": {name: value}, "versions": {...}, "hardware": {...}}`, JSON;
loggers are given a `"layout"` too, see `jaxdp.reports.layout`."""


def run_facts(trainer: "Trainer", hyperparameters: Mapping[str, Any] | None) -> Facts:
    """The arguments of the trainer and its fit, and what it runs on.

    Args:
        trainer: the running one.
        hyperparameters: the user's own, which come first.
    """
    own = {name: plain(value) for name, value in (hyperparameters or {}).items()}
    found = {name: plain(value) for name, value in trainer.run.arguments.items()}
    found["optimizer"] = optimizer_text(trainer.run.optimizer.update)
    for name in ("max_epochs", "max_steps", "num_training_batches"):
        if getattr(trainer, name) is not None:
            found[name] = getattr(trainer, name)
    state = trainer.state
    found["parameters"] = _count((state.params, state.buffers))
    found["trained_parameters"] = _count(state.params)
    return {
        "hyperparameters": {**own, **{k: v for k, v in found.items() if k not in own}},
        "versions": versions(),
        "hardware": hardware(),
    }


def plain(value: Any) -> Any:
    """`value` as JSON: numbers and short texts as they are, the rest by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
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
    """The stages of an optax optimizer with their numbers, as far as they show.

    optax keeps them in closures: `clip_by_global_norm(max_norm=1.0),
    scale_by_adam(b1=0.9, b2=0.999, eps=1e-08), scale(step_size=-0.001)`, or
    `scale_by_schedule(step_size_fn=cosine_decay_schedule(init_value=0.001, ...))`.
    """
    stages: list[str] = []
    _add_stages(update, stages, set())
    return ", ".join(stages) or "custom"


def _add_stages(update: Any, stages: list[str], seen: set[int]) -> None:
    if id(update) in seen:
        return
    seen.add(id(update))
    maker, inside = _closure(update)
    inner = _transformations(inside)
    own = [f"{name}={float(v):g}" for name, v in inside.items() if _is_number(v)]
    own += [
        f"{name}={_function_text(value)}"
        for name, value in inside.items()
        if name in ("step_size_fn", "inner_factory") and hasattr(value, "__qualname__")
    ]
    groups = {
        label: group.update
        for label, group in inside.get("transforms", {}).items()
        if hasattr(group, "update")
    }
    if groups:
        texts = [f"{label}: {optimizer_text(group)}" for label, group in groups.items()]
        stages.append(f"{maker}({'; '.join(texts)})")
    elif (not inner or own) and maker != "identity":
        stages.append(f"{maker}({', '.join(own)})")
    for stage in inner:
        _add_stages(stage, stages, seen)


def _function_text(function: Any) -> str:
    """A schedule with its numbers: `cosine_decay_schedule(init_value=0.001, ...)`."""
    maker, inside = _closure(function)
    if maker == "scale_by_learning_rate" and callable(inside.get("learning_rate")):
        return _function_text(inside["learning_rate"])  # times -1
    found = {name: _value_text(value) for name, value in inside.items()}
    told = ", ".join(f"{name}={text}" for name, text in found.items() if text)
    return f"{maker}({told})" if told else maker


def _value_text(value: Any) -> str:
    if _is_number(value):
        return f"{float(value):g}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {_value_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    return _function_text(value) if hasattr(value, "__qualname__") else ""


def _is_number(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return value.ndim == 0
    return isinstance(value, float | int | np.number) and value is not False


def _is_model(value: Any) -> bool:
    return any(
        isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value)
    )


def _count(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


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
