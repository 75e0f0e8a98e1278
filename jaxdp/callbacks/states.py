"""Whose state is whose: of callbacks in any order, and of several trainers'."""

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

from .base import Callback, Trainer, overrides

_USED_BY: Final = "_used_by"
"""Where a callback has the id of the trainer that uses it, and its first state."""

_RENAMED: Final = 3
"""How unlike identities are that differ in a folder alone."""


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
    """The states in a checkpoint, by the present names of callbacks they belong to."""
    saved = meta["callbacks"]
    return {new: saved[old] for new, old in _pairs(trainer, meta).items()}


def misfits(trainer: Trainer, meta: dict[str, Any]) -> tuple[str, str]:
    """What is to be said of callbacks that find no state in a checkpoint, and which are
    in a checkpoint that the trainer lacks; each "" if there are none."""
    pairs, by_name = _pairs(trainer, meta), identities(trainer)
    without = {
        name: by_name[name]
        for name, callback in named(trainer.callbacks)
        if name not in pairs and callback.state_dict()
    }
    classes = set(map(_class, without))
    left = {
        name: meta["identities"].get(name, "")
        for name, state in meta["callbacks"].items()
        if state and name not in pairs.values()
    }
    others = {name: its for name, its in left.items() if _class(name) in classes}
    text = ""
    if without:
        text = (
            f"no state for the callback {_listed(without)}, so nothing is loaded there"
        )
    if others:
        text += (
            f"; that of {_listed(others)} is not taken up, because its `monitor`,"
            " `mode` or folder is another"
        )
    lacking = {name: its for name, its in left.items() if name not in others}
    return text, _listed(lacking)


def _pairs(trainer: Trainer, meta: dict[str, Any]) -> dict[str, str]:
    """The saved name of each callback that has a state, by its present name.

    It is the one of its class and identity; else the one in a folder of the same last
    name, as after a move; else the only one in another folder.
    """
    pairs = sorted(
        (unlikeness, old != new, new, old)
        for new, identity in identities(trainer).items()
        for old in meta["callbacks"]
        if _class(old) == _class(new)
        for unlikeness in [_unlikeness(identity, meta["identities"].get(old))]
        if unlikeness is not None
    )
    handed: dict[str, str] = {}
    renamed: list[tuple[str, str]] = []
    for unlikeness, _, new, old in pairs:
        if new not in handed and old not in handed.values():
            if unlikeness < _RENAMED:
                handed[new] = old
            else:
                renamed.append((new, old))
    news, olds = [new for new, _ in renamed], [old for _, old in renamed]
    return handed | {
        new: old
        for new, old in renamed
        if news.count(new) == olds.count(old) == 1  # which of several, nobody knows
    }


def _unlikeness(own: str, other: str | None) -> int | None:
    """0 for equal identities, more for less alike ones, None for different ones."""
    if other is None or own == other:
        return 0
    (what, _, unit), (its, _, its_unit) = own.partition("\n"), other.partition("\n")
    if its_unit not in (unit, ""):  # version 0.2 knew no units
        return None
    if what == its:
        return 1
    if not os.path.isabs(what):
        return None
    return 2 if os.path.basename(what) == os.path.basename(its) else _RENAMED


def _listed(identities: dict[str, str]) -> str:
    """Callbacks as they are told from each other: EarlyStopping (val_loss, min)."""
    shown = {name: ", ".join(its.split("\n")) for name, its in identities.items()}
    return " and ".join(
        f"{_class(name)} ({its})" if its else name for name, its in shown.items()
    )


def saved_state(trainer: Trainer, meta: dict[str, Any], callback: Callback) -> Any:
    """The state of one callback in a checkpoint, or None."""
    return saved_states(trainer, meta).get(name_of(trainer, callback))


def name_of(trainer: Trainer, callback: Callback) -> str:
    """What the trainer calls one of its callbacks."""
    return next(name for name, other in named(trainer.callbacks) if other is callback)


def _class(name: str) -> str:
    return name.partition(":")[0]


def _first_state(callback: Callback) -> dict[str, Any] | None:
    if not overrides(callback, "state_dict"):
        return None
    try:
        return copy.deepcopy(callback.state_dict())
    except Exception:  # one that first gets its values when a fit begins
        return None
