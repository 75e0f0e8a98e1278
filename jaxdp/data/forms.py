"""What batches are alike in but for their rows, and to how many rows each is padded.

A form is the structure, dtypes and shapes of a batch without its leading axis. Each is
compiled for, so each has a padded size of its own.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np

from ..step import Batch, Group
from .batches import leaf_name

Key = tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]]
"""A form as it is compared: the structure, and each leaf's shape and dtype."""

_MOST_LEAVES: Final = 8
"""That a message lists."""


class Form:
    """One form of batches, and the size that they are padded to."""

    __slots__ = "full", "key", "size", "text", "usual"

    def __init__(self, key: Key):
        self.key = key
        self.text = _text(key)
        self.size = 0  # rows of a padded batch, of all processes
        self.full: tuple[int, ...] = ()  # its real rows in each block, if it is full
        self.usual: Any = None  # `Dispatch.shape` of one that is


class Forms:
    """The forms that one kind of step has met.

    All have the structure and dtypes of the first batch.

    Args:
        what: kind of step, for messages.
        num_shards: sizes are multiples of it.
        num_blocks: into which rows are cut.

    Attributes:
        sizes: by the forms' texts; a checkpoint keeps them. That of "" is for the form
            that comes first: earlier versions knew of one alone.
    """

    def __init__(self, what: str, num_shards: int, num_blocks: int):
        self.sizes: dict[str, int] = {}
        self._what = what
        self._num_shards, self._num_blocks = num_shards, num_blocks
        self._first: Key | None = None
        self._known: dict[Key, Form] = {}
        self._key: Key | None = None  # of the batch before
        self._form: Form

    def find(self, batch: Batch) -> tuple[list[np.ndarray], Form]:
        """The leaves of a batch, and its form."""
        leaves, treedef = jax.tree.flatten(batch)
        key = treedef, tuple([(leaf.shape[1:], leaf.dtype) for leaf in leaves])
        if key != self._key:
            self._turn_to(key, batch)
        return leaves, self._form

    def size_of(self, key: Key) -> int:
        """The padded size of a form so far; 0 if it has none."""
        return self.sizes.get(_text(key), self.sizes.get("", 0))

    def rounded(self, rows: int) -> int:
        """The size that so many rows need."""
        return math.ceil(rows / self._num_shards) * self._num_shards

    def grow(self, form: Form, rows: int) -> None:
        """From now on batches of this form get so many rows at least."""
        if rows > form.size:
            size = form.size = self.sizes[form.text] = self.rounded(rows)
            form.full = (size // self._num_blocks,) * self._num_blocks
            form.usual = True, 1, ((1, size, form.text),)

    def start_from(self, sizes: Mapping[str, int]) -> None:
        """Pads as if these were the sizes so far."""
        self.sizes, self._known, self._key = dict(sizes), {}, None

    def forget(self) -> None:
        """Takes the next batch for the first."""
        self.start_from({})
        self._first = None

    def difference(self, batch: Batch) -> str:
        """That a batch differs from the first one, leaf by leaf; "" if it does not."""
        treedef, found = key_of(batch)
        if self._first is None or self._first == (treedef, found):
            return ""
        start, (first, expected) = f"a {self._what} batch", self._first
        if treedef != first:
            start += " differs from the first one in structure"
            return f"{start}: was {first}, is {treedef}."

        differing = [
            f"{leaf_name(batch, i)} was {_shown(*was)}, is {_shown(*now)}"
            for i, (was, now) in enumerate(zip(expected, found, strict=True))
            if was != now
        ]
        more = len(differing) - _MOST_LEAVES
        rest = [f"and {more} leaves more"] if more > 0 else []
        listed = "; ".join(differing[:_MOST_LEAVES] + rest)
        return f"{start} differs from the first one: {listed}."

    def note(self, group: Group) -> str:
        """What may help where a step for batches like those of a group failed."""
        batch = jax.tree.map(lambda leaf: leaf[0], group.batch)
        if not (difference := self.difference(batch)):
            return ""
        return (
            f"{difference} Each shape is compiled for by itself. If the shapes should"
            " be the same, pad or convert in the dataset or `collate_fn`."
        )

    def _turn_to(self, key: Key, batch: Batch) -> None:
        if self._first is None:
            self._first = key
        if _kind(key) != _kind(self._first):
            raise ValueError(
                f"{self.difference(batch)} Shapes may vary, and each is compiled for"
                " once; structure and dtypes may not: convert in the dataset or"
                " `collate_fn`."
            )
        if key not in self._known:
            form = self._known[key] = Form(key)
            size = self.sizes.pop("", 0)
            self.grow(form, self.sizes.get(form.text, size))
        self._key, self._form = key, self._known[key]


def key_of(batch: Batch) -> Key:
    """The form of a batch, as it is compared."""
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple([(leaf.shape[1:], leaf.dtype) for leaf in leaves])


def shapes_of(batch: Batch) -> list[list[int]]:
    """The shape of each leaf without its rows; JSON."""
    return [list(leaf.shape[1:]) for leaf in jax.tree.leaves(batch)]


def _kind(key: Key) -> Any:
    treedef, leaves = key
    return treedef, [dtype for _, dtype in leaves]


def _text(key: Key) -> str:
    return " ".join(f"{dtype}{list(shape)}" for shape, dtype in key[1])


def _shown(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{dtype} (rows, {', '.join(map(str, shape)) or '-'})"
