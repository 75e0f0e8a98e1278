"""Matches saved states to callbacks, and resets callbacks for another trainer."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from .base import Callback, Trainer, overrides

_USED_BY: Final = "_used_by"
"""The attribute of a callback with the id of its trainer, and its first state."""


def reset_reused(callbacks: Iterable[Callback], trainer_id: str) -> None:
    """Restores the first state of callbacks that another trainer has used."""
    for callback in callbacks:
        user, first = vars(callback).get(_USED_BY, (None, None))
        if user == trainer_id:
            continue
        if user is None:
            first = _read_first_state(callback)
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
    """Returns the states in a checkpoint, by the present names of their callbacks."""
    saved = meta["callbacks"]
    return {new: saved[old] for new, old in _match_names(trainer, meta).items()}


def find_unmatched(trainer: Trainer, meta: dict[str, Any]) -> tuple[str, str]:
    """Returns callbacks that find no state in a checkpoint, and those in it of classes
    that the trainer lacks, as texts; each "" if there are none."""
    pairs, by_name = _match_names(trainer, meta), list_identities(trainer)
    without = {
        name: by_name[name]
        for name, callback in name_callbacks(trainer.callbacks)
        if name not in pairs and callback.state_dict()
    }
    classes = set(map(_class, without))
    lacking = {
        name: meta["identities"].get(name, "")
        for name, state in meta["callbacks"].items()
        if state and name not in pairs.values() and _class(name) not in classes
    }
    return _format_identities(without), _format_identities(lacking)


def _match_names(trainer: Trainer, meta: dict[str, Any]) -> dict[str, str]:
    """Maps the present name of each callback that has a saved state to its saved name.

    It is the one of its class and identity, else the only one of its class that lies in
    another folder.
    """
    present, pairs = list_identities(trainer), dict[str, str]()

    def find(name: str, fits: Callable[[str, str | None], bool]) -> list[str]:
        return [
            saved
            for saved in meta["callbacks"]
            if saved not in pairs.values()
            and _class(saved) == _class(name)
            and fits(present[name], meta["identities"].get(saved))
        ]

    for name in present:
        if same := find(name, _is_same):
            pairs[name] = name if name in same else same[0]
    moved = {name: find(name, _is_moved) for name in present if name not in pairs}
    for name, found in moved.items():
        if len(found) == 1 and list(moved.values()).count(found) == 1:
            pairs[name] = found[0]
    return pairs


def _is_same(identity: str, saved: str | None) -> bool:
    # Checkpoints of 0.2 have no second lines.
    return saved in (None, identity, identity.partition("\n")[0])


def _is_moved(identity: str, saved: str | None) -> bool:
    folder, *unit = identity.split("\n")
    return os.path.isabs(folder) and str(saved).split("\n")[1:] in (unit, [])


def _format_identities(identities: dict[str, str]) -> str:
    """Returns a list in words, such as "EarlyStopping (val_loss, min) and ..."."""
    shown = {name: ", ".join(its.split("\n")) for name, its in identities.items()}
    return " and ".join(
        f"{_class(name)} ({its})" if its else name for name, its in shown.items()
    )


def match_state(trainer: Trainer, meta: dict[str, Any], callback: Callback) -> Any:
    """Returns the state of one callback in a checkpoint, or None."""
    return match_states(trainer, meta).get(find_name(trainer, callback))


def find_name(trainer: Trainer, callback: Callback) -> str:
    """Returns the name under which a checkpoint has the state of a callback."""
    return next(
        name for name, other in name_callbacks(trainer.callbacks) if other is callback
    )


def _class(name: str) -> str:
    return name.partition(":")[0]


def _read_first_state(callback: Callback) -> dict[str, Any] | None:
    if not overrides(callback, "state_dict"):
        return None
    try:
        return copy.deepcopy(callback.state_dict())
    except Exception:  # it may get its values when a fit starts
        return None
