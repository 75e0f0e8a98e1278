"""What a class of callbacks gets wrong about hooks, found before anything runs."""

import difflib
import inspect
from collections.abc import Iterator
from typing import Any, Final

from ..basics.console import warn
from .base import Callback, overrides

_ELSEWHERE: Final = {
    name: ours
    for ours, names in {
        "on_fit_start": (
            "on_train_start on_sanity_check_start on_sanity_check_end on_train_begin"
        ),
        "on_fit_end": "on_train_end",
        "on_validation_start": (
            "on_validation_epoch_start on_validation_batch_start on_test_begin"
            " on_test_batch_begin"
        ),
        "on_validation_end": "on_validation_epoch_end",
        "on_test_start": "on_test_epoch_start on_test_batch_start",
        "on_test_end": "on_test_epoch_end on_test_batch_end",
        "on_predict_start": (
            "on_predict_epoch_start on_predict_batch_start on_predict_begin"
            " on_predict_batch_begin"
        ),
        "on_predict_end": "on_predict_epoch_end on_predict_batch_end",
        "load_state_dict": "on_load_checkpoint",
        "inside_step": (
            "on_before_backward on_after_backward on_before_optimizer_step"
            " on_before_zero_grad"
        ),
        "on_train_epoch_start": "on_epoch_start on_epoch_begin",
        "on_train_batch_start": "on_batch_start on_batch_begin on_train_batch_begin",
        "setup": "on_init_start on_init_end",
        "on_exception": "on_keyboard_interrupt",
        "on_train_epoch_end": "on_epoch_end",
        "on_train_batch_end": "on_batch_end",
    }.items()
    for name in names.split()
}
"""Hooks of Lightning and Keras that nothing calls here, and what does their work."""

_METHODS: Final = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if inspect.isfunction(method)
}
"""The arguments that each method of a callback is called with."""

_WORDS: Final = frozenset(
    "trainer pl_module metrics logs outputs batch batch_idx step epoch stage path"
    " exception".split()
)
_SAME: Final = {"metrics": ("logs", "outputs"), "batch_idx": ("batch", "step")}
"""Names of an argument that say what it is, where trainers use several."""


def check_hooks(callback: Callback) -> None:
    """Raises for a hook that is never called, or not called as it is written.

    Warns of names that look like a slip of the pen.
    """
    for name in _methods_of(callback):
        where = f"`{type(callback).__name__}.{name}`"
        if name in _METHODS:
            if overrides(callback, name):
                _check_arguments(where, name, getattr(callback, name))
        elif name in _ELSEWHERE:
            raise TypeError(
                f"{where} is a hook of another library, which nothing calls here. Use"
                f" `{_spelled(_ELSEWHERE[name])}`."
            )
        elif (meant := _near(name)) is not None:
            warn(
                f"{where} is no hook, so nothing calls it. If you mean a hook, use"
                f" `{_spelled(meant)}`."
            )


def _methods_of(callback: Callback) -> Iterator[str]:
    """Public names that a callback does not just inherit from the base."""
    owners = [callback, *(c for c in type(callback).__mro__ if c is not Callback)]
    for name in dict.fromkeys(name for owner in owners for name in vars(owner)):
        is_method = callable(inspect.getattr_static(callback, name))
        if not name.startswith("_") and (is_method or name in _METHODS):
            yield name


def _check_arguments(where: str, name: str, method: Any) -> None:
    ours = _METHODS[name]
    called = f"called with ({', '.join(ours)}); write `def {_spelled(name)}`"
    if not callable(method):
        raise TypeError(f"{where} is {method!r}, but it must be a method, {called}.")
    try:
        given = inspect.signature(method, follow_wrapped=False)
    except (TypeError, ValueError):  # not written in Python
        return
    if (named := _bound(given, ours)) is None:
        raise TypeError(f"{where} takes {given}, but it is {called}.")

    # Where a decorator takes `*args`, what it decorates has the names.
    named = (_bound(inspect.signature(method), ours) or {}) | named
    for mine, theirs in named.items():
        means_another = theirs in _WORDS.union(ours) and theirs not in _SAME.get(
            mine, ()
        )
        if theirs != mine and means_another:
            model = " The model is `trainer.model`." * (theirs == "pl_module")
            raise TypeError(
                f"{where} has `{theirs}` where it is given `{mine}`: it is {called}."
                f"{model}"
            )


def _bound(given: inspect.Signature, ours: tuple[str, ...]) -> dict[str, str] | None:
    """The names that a method has for our arguments; None if it can't take them."""
    try:
        taken = given.bind(*ours).arguments  # each name is its own value
    except TypeError:
        return None
    return {name: theirs for theirs, name in taken.items() if isinstance(name, str)}


def _near(name: str) -> str | None:
    """The method that a name may be meant for."""
    squeezed = name.replace("_", "").lower()
    cutoff = 0.82 if squeezed.startswith("on") else 0.9
    for names in (_METHODS, _ELSEWHERE):
        known = {name_there.replace("_", ""): name_there for name_there in names}
        for match in difflib.get_close_matches(squeezed, known, n=1, cutoff=cutoff):
            return _ELSEWHERE.get(known[match], known[match])
    return None


def _spelled(name: str) -> str:
    return f"{name}({', '.join(('self', *_METHODS[name]))})"
