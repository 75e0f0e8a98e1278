"""Checks the hooks of callbacks before anything runs."""

import inspect
from collections.abc import Callable
from typing import Any, Final

from ..basics.arguments import bind_method, format_method
from ..basics.console import warn
from ..basics.other_libraries import INSTEAD, find_near
from .base import Callback, overrides

_METHODS: Final = {n: m for n, m in vars(Callback).items() if inspect.isfunction(m)}
"""The methods of a callback."""

_MEANINGS: Final = {
    **{
        name: name
        for m in _METHODS.values()
        for name in [*inspect.signature(m).parameters][1:]
    },
    **INSTEAD["hook"],
}
"""Maps the name of an argument, ours or of another library, to our name for it."""


def check_hooks(callback: Callback) -> None:
    """Raises for a hook that is never called, or is called with other arguments, and
    warns of names that look like a misspelt hook."""
    others = INSTEAD["Callback"]
    for name in dir(callback):
        where = f"`{type(callback).__name__}.{name}`"
        if name.startswith("_"):
            continue
        if name in _METHODS:
            if overrides(callback, name):
                _check_arguments(where, getattr(callback, name), _METHODS[name])
        elif not callable(inspect.getattr_static(callback, name, None)):
            continue
        elif name in others and name.startswith("on_"):
            raise TypeError(
                f"{where} is a hook of another library, which nothing calls here. Use"
                f" `{format_method(_METHODS[others[name]])}`."
            )
        else:
            cutoff = 0.82 if name.startswith("on") else 0.9
            near = (find_near(name, known, cutoff) for known in (_METHODS, others))
            meant = name if name in others else next(filter(None, near), None)
            if meant is not None:
                warn(
                    f"{where} is no hook, so nothing calls it. If you mean a hook, use"
                    f" `{format_method(_METHODS[others.get(meant, meant)])}`."
                )


def _check_arguments(where: str, method: Any, ours: Callable[..., Any]) -> None:
    for theirs, param in bind_method(where, method, ours).items():
        if (theirs, param) == ("outputs", "predictions"):  # Lightning's word
            continue
        if theirs != param and _MEANINGS.get(theirs, param) != param:
            meaning = _MEANINGS[theirs]
            note = "" if meaning == theirs else f" `{theirs}` is `{meaning}` here."
            raise TypeError(
                f"{where} has `{theirs}` where it is given `{param}`: write"
                f" `def {format_method(ours)}`.{note}"
            )
