"""Whose state is whose: of callbacks in any order, and of several trainers'."""

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

from .base import Callback, Trainer, overrides

_USED_BY: Final = "_used_by"
"""Where a callback has the id of the trainer that uses it, and its first state."""


def take_over(callbacks: Iterable[Callback], trainer_id: str) -> None:
    """Gives callbacks that another trainer has used the state from before that."""
    for callback in callbacks:
        user, first = vars(callback).get(_USED_BY, (None, None))
        if user == trainer_id:
            continue
        if user is None:
            first = _first_state(callback)
        elif first is not None:
            try:
                callback.load_state_dict(copy.deepcopy(first))
            except Exception as error:
                name = type(callback).__name__
                error.add_note(
                    f"while the callback {name}, which another trainer has used, loaded"
                    " what its `state_dict()` was before that"
                )
                raise
        vars(callback)[_USED_BY] = trainer_id, first


def named(callbacks: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    """Callbacks by class, the second of a class as `Name:1`, in any list."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__name__
        count = counts[name] = counts.get(name, -1) + 1
        yield f"{name}:{count}" if count else name, callback


def identities(trainer: Trainer) -> dict[str, str]:
    """What a checkpoint tells of each callback beside its state, by name."""
    return {name: c.identity(trainer) for name, c in named(trainer.callbacks)}


def saved_states(trainer: Trainer, meta: dict[str, Any]) -> dict[str, Any]:
    """The states in a checkpoint, by the present name of the callback they belong to.

    Of callbacks of one class each gets the state of the one with its identity; else of
    the one whose path has its last name, as in a folder that was moved; else of the one
    at its place.
    """
    saved, whose = meta["callbacks"], meta["identities"]
    name_in = os.path.basename
    pairs = sorted(
        (own != other, name_in(own) != name_in(other), old != new, new, old)
        for new, own in identities(trainer).items()
        for old in saved
        if _class(old) == _class(new)
        for other in [whose.get(old, "")]
    )
    found: dict[str, str] = {}
    for *_, new, old in pairs:
        if new not in found and old not in found.values():
            found[new] = old
    return {new: saved[old] for new, old in found.items()}


def saved_state(trainer: Trainer, meta: dict[str, Any], callback: Callback) -> Any:
    """The state of one callback in a checkpoint, or None."""
    return saved_states(trainer, meta).get(name_of(trainer, callback))


def name_of(trainer: Trainer, callback: Callback) -> str:
    """What the trainer calls one of its callbacks."""
    return next(name for name, each in named(trainer.callbacks) if each is callback)


def _class(name: str) -> str:
    return name.partition(":")[0]


def _first_state(callback: Callback) -> dict[str, Any] | None:
    if not overrides(callback, "state_dict"):
        return None
    try:
        return copy.deepcopy(callback.state_dict())
    except Exception:  # one that first gets its values when a fit begins
        return None
