"""Matches saved states to callbacks, and resets callbacks for another trainer."""

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

from .base import Callback, Trainer, overrides

_USED_BY: Final = "_used_by"
"""The attribute of a callback with the id of its trainer, and its first state."""


def reset_reused(callbacks: Iterable[Callback], trainer_id: str) -> None:
    """Restores the first state of callbacks that another trainer has used."""
    for callback in callbacks:
        user, first = vars(callback).get(_USED_BY, (None, None))
        if user is None:
            first = _read_first_state(callback)
        elif user != trainer_id and first is not None:
            callback.load_state_dict(copy.deepcopy(first))
        vars(callback)[_USED_BY] = trainer_id, first


def _read_first_state(callback: Callback) -> dict[str, Any] | None:
    if not overrides(callback, "state_dict"):
        return None
    try:
        return copy.deepcopy(callback.state_dict())
    except Exception:  # it may get its values when a fit starts
        return None


def name_callbacks(callbacks: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    """Yields each callback with its class name; the second of a class is `Name:1`."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__name__
        count = counts[name] = counts.get(name, -1) + 1
        yield f"{name}:{count}" if count else name, callback


def list_identities(trainer: Trainer) -> dict[str, str]:
    """Returns the `identity` of each callback by name, for checkpoints."""
    return {name: c.identity(trainer) for name, c in name_callbacks(trainer.callbacks)}


def match_states(trainer: Trainer, meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the states in a checkpoint, by the present names of their callbacks.

    A callback gets the state of its class and identity. If there is none, it gets, in
    order, a state of its class from another folder.
    """
    remaining, matched = dict(meta["callbacks"]), dict[str, Any]()
    for is_moved in (False, True):
        for name, identity in list_identities(trainer).items():
            if name in matched:
                continue
            fitting = [
                saved
                for saved in remaining
                if saved.partition(":")[0] == name.partition(":")[0]
                and _fits(identity, meta["identities"].get(saved, ""), is_moved)
            ]
            if fitting:
                saved = name if name in fitting else fitting[0]
                matched[name] = remaining.pop(saved)
    return matched


def _fits(identity: str, saved: str, is_moved: bool) -> bool:
    (folder, *unit), (saved_folder, *saved_unit) = (
        identity.split("\n"),
        saved.split("\n"),
    )
    is_same = os.path.isabs(folder) if is_moved else folder == saved_folder
    return is_same and saved_unit in (unit, [])  # checkpoints of 0.2 have no units


def describe_unmatched(trainer: Trainer, matched: dict[str, Any]) -> str:
    """Returns the callbacks that have a state and none in a checkpoint, as a text such
    as "EarlyStopping (val_loss, min) and ..."; "" if there are none."""
    identities = {
        name: callback.identity(trainer).replace("\n", ", ")
        for name, callback in name_callbacks(trainer.callbacks)
        if name not in matched and callback.state_dict()
    }
    return " and ".join(
        f"{name.partition(':')[0]} ({identity})" if identity else name
        for name, identity in identities.items()
    )


def match_state(trainer: Trainer, meta: dict[str, Any], callback: Callback) -> Any:
    """Returns the state of one callback in a checkpoint, or None."""
    return match_states(trainer, meta).get(find_name(trainer, callback))


def find_name(trainer: Trainer, callback: Callback) -> str:
    """Returns the name under which a checkpoint has the state of a callback."""
    return next(
        name for name, other in name_callbacks(trainer.callbacks) if other is callback
    )
