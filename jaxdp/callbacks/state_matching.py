"""Matches saved states to callbacks, and resets callbacks for another trainer."""

import contextlib
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
        if user is None and overrides(callback, "state_dict"):
            with contextlib.suppress(Exception):  # it may get values when a fit starts
                first = copy.deepcopy(callback.state_dict())
        elif user not in (None, trainer_id) and first is not None:
            callback.load_state_dict(copy.deepcopy(first))
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
    """Returns the states in a checkpoint, by the present names of their callbacks.

    A callback gets the state of its class and identity. If there is none, it gets, in
    order, a state of its class from another folder.
    """
    remaining, matched = dict(meta["callbacks"]), dict[str, Any]()
    for is_moved in (False, True):
        for name, identity in list_identities(trainer).items():
            kind, (folder, *unit) = name.partition(":")[0], identity.split("\n")
            fitting = []
            for saved in remaining:
                saved_folder, *saved_unit = (
                    meta["identities"].get(saved, "").split("\n")
                )
                is_same = os.path.isabs(folder) if is_moved else folder == saved_folder
                # Checkpoints of 0.2 have no units.
                is_same = is_same and saved_unit in (unit, [])
                if is_same and saved.partition(":")[0] == kind:
                    fitting.append(saved)
            if fitting and name not in matched:
                saved = name if name in fitting else fitting[0]
                matched[name] = remaining.pop(saved)
    return matched


def describe_unmatched(trainer: Trainer, matched: dict[str, Any]) -> str:
    """Returns the callbacks whose state the checkpoint lacks, as a text such as
    "EarlyStopping (val_loss, min) and ..."; "" if there are none."""
    texts = []
    for name, callback in name_callbacks(trainer.callbacks):
        if name not in matched and callback.state_dict():
            identity = callback.identity(trainer).replace("\n", ", ")
            texts.append(f"{name.partition(':')[0]} ({identity})" if identity else name)
    return " and ".join(texts)


def match_state(trainer: Trainer, meta: dict[str, Any], callback: Callback) -> Any:
    """Returns the state of one callback in a checkpoint, or None."""
    matched, named = match_states(trainer, meta), name_callbacks(trainer.callbacks)
    return next(matched.get(name) for name, other in named if other is callback)
