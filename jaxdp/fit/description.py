"""What of a trainer's arguments decides the numbers, in words, to compare later."""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import equinox as eqx
import jax

from ..basics.console import some_of
from ..basics.tree import leaf_path
from ..callbacks.base import Callback, overrides
from ..callbacks.run_facts import function_text, optimizer_text, plain
from ..strategies.base import OwnState

if TYPE_CHECKING:
    from .run import Recipe


_AS_THEY_ARE: Final = (
    "loss",
    "loss_fn",
    "precision",
    "after_update",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "ensemble",
)


def described(recipe: "Recipe", callbacks: Iterable[Callback]) -> dict[str, str]:
    """Arguments that are not None by name; of a model what is no array, by field."""
    _, buffers, rest = recipe.parts
    texts = {name: _text(recipe.arguments[name]) for name in _AS_THEY_ARE}
    texts["optimizer"] = _optimizer(recipe)
    texts["filter_spec"] = _frozen(buffers)
    parts = map(_text_of, filter(_is_part, callbacks))
    texts["callbacks"] = ", ".join(parts) or "none that adds state"
    adds = isinstance(recipe.strategy, OwnState)
    texts["strategy"] = repr(recipe.strategy) if adds else "one that adds no state"
    return {name: text for name, text in texts.items() if text not in ("", "None")} | (
        _model(rest)
    )


def _optimizer(recipe: "Recipe") -> str:
    parts = recipe.several or ()
    if not parts:
        return optimizer_text(recipe.arguments["optimizer"])
    return "; ".join(
        f"{p.name}, every={p.every}: {optimizer_text(p.optimizer)}" for p in parts
    )


def _frozen(buffers: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(buffers)
    names = [leaf_path(path) for path, leaf in leaves if eqx.is_inexact_array(leaf)]
    return f"one that freezes {some_of(names)}" if names else "one that freezes nothing"


def _is_part(callback: Callback) -> bool:
    return any(overrides(callback, n) for n in ("wrap_optimizer", "evaluated_state"))


def _text_of(callback: Callback) -> str:
    public = {n: v for n, v in vars(callback).items() if not n.startswith("_")}
    simple = (int, float, str, type(None))
    shown = [f"{name}={v!r}" for name, v in public.items() if isinstance(v, simple)]
    return f"{type(callback).__name__}({', '.join(shown)})"


def _model(model: Any) -> dict[str, str]:
    """The distinct values of every field, such as `Linear.use_bias`."""
    by_layer: dict[str, dict[str, None]] = {}
    waiting = [("model", model)]
    while waiting:
        where, value = waiting.pop(0)
        for leaf in jax.tree.leaves(value, is_leaf=_is_module):
            if _is_module(leaf):
                waiting[:0] = _fields(leaf)
            elif not eqx.is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
                by_layer.setdefault(where, {})[_text(leaf)] = None
    return {where: ", ".join(texts) for where, texts in by_layer.items()}


def _fields(module: eqx.Module) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(module):
        if hasattr(module, field.name):
            name = f"{type(module).__name__}.{field.name}"
            yield name, getattr(module, field.name)


def _is_module(value: Any) -> bool:
    return isinstance(value, eqx.Module)


def _text(value: Any) -> str:
    """Without addresses, which differ in every process."""
    if inspect.isfunction(value):
        return function_text(value)
    text = value.__name__ if isinstance(value, type) else str(plain(value))
    return re.sub(r" at 0x[0-9a-f]+", "", text)
