"""Which saved state is which callback's, in whatever order they are listed."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from .base import Callback, Trainer


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
