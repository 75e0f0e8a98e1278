"""Checks the hooks of callbacks before anything runs."""

import inspect
from typing import Any, Final

from ..basics.console import warn
from ..basics.other_libraries import INSTEAD, find_near
from .base import Callback, overrides

_METHODS: Final = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if inspect.isfunction(method)
}
"""The arguments that each method of a callback is called with."""

_MEANINGS: Final = {
    **{name: name for arguments in _METHODS.values() for name in arguments},
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
                _check_arguments(where, name, getattr(callback, name))
        elif not callable(inspect.getattr_static(callback, name, None)):
            continue
        elif name in others and name.startswith("on_"):
            raise TypeError(
                f"{where} is a hook of another library, which nothing calls here. Use"
                f" `{_format_signature(others[name])}`."
            )
        else:
            cutoff = 0.82 if name.startswith("on") else 0.9
            near = (find_near(name, known, cutoff) for known in (_METHODS, others))
            meant = name if name in others else next(filter(None, near), None)
            if meant is not None:
                warn(
                    f"{where} is no hook, so nothing calls it. If you mean a hook, use"
                    f" `{_format_signature(others.get(meant, meant))}`."
                )


def _check_arguments(where: str, name: str, method: Any) -> None:
    ours = _METHODS[name]
    called = f"called with ({', '.join(ours)}); write `def {_format_signature(name)}`"
    if not callable(method):
        raise TypeError(f"{where} is {method!r}, but it must be a method, {called}.")
    try:
        signature = inspect.signature(method, follow_wrapped=False)
    except ValueError:  # some that are written in C have none
        return
    try:
        bound = signature.bind(*ours).arguments  # each name is its own value
    except TypeError:
        raise TypeError(f"{where} takes {signature}, but it is {called}.") from None

    for theirs, param in bound.items():
        if (theirs, param) == ("outputs", "predictions"):  # Lightning's word
            continue
        if theirs != param and _MEANINGS.get(theirs, param) != param:
            meaning = _MEANINGS[theirs]
            note = "" if meaning == theirs else f" `{theirs}` is `{meaning}` here."
            raise TypeError(
                f"{where} has `{theirs}` where it is given `{param}`: it is {called}."
                f"{note}"
            )


def _format_signature(name: str) -> str:
    return f"{name}({', '.join(('self', *_METHODS[name]))})"
