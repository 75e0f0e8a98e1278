"""What batches are alike in but for their rows, and to how many rows each is padded.

A form is the structure, dtypes and shapes of a batch without its leading axis. Each is
compiled for, so each has a padded size of its own.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..basics.console import some_of
from ..step import Batch, Group, Picked, Rowless, joined, with_rows
from .batches import leaf_name

Key = tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...], *tuple[int, ...]]
"""A form as it is compared: the structure, and each leaf's shape without its rows, and
dtype; of rows of a table, how many it has besides."""

Leaves = list[Any]
"""NumPy's arrays, and JAX's."""


class Form:
    """One form of batches, and the size that they are padded to."""

    def __init__(self, key: Key):
        self.key = key
        self.text = _text(key)
        treedef, _, *self.of_table = key
        self.program = " of ".join([self.text, *map(str, self.of_table)])
        has_rows = with_rows(treedef)
        # Which leaves have none, and the structures of both kinds.
        self.wholes = [place for place, rows in enumerate(has_rows) if not rows]
        node = treedef.node_data()
        self.is_rowless = node is not None and node[0] is Rowless
        self.of_rows, self.of_whole = [
            jax.tree.structure(
                treedef.unflatten([rows == kind or None for rows in has_rows])
            )
            for kind in (True, False)
        ]
        if self.of_table:
            self.wholes, self.of_rows = [], jax.tree.structure(Picked(True))
        self.size = 0  # rows of a padded batch, of all processes
        self.full: tuple[int, ...] = ()  # its real rows in each block, if it is full
        self.if_full: dict[tuple[int, int], Any] = {}  # the packer's, of this size


class Forms:
    """The forms that one kind of step has met.

    All have the structure and dtypes of the first batch.

    Args:
        what: kind of step, for messages.
        num_shards: sizes are multiples of it.
        num_blocks: into which rows are cut.

    Attributes:
        sizes: of batches that a step was taken on, by the forms' texts; a checkpoint
            keeps them. That of "" is for the form that comes first: earlier versions
            knew of one alone.
    """

    def __init__(self, what: str, num_shards: int, num_blocks: int):
        self.sizes: dict[str, int] = {}
        self._grown: list[Form] = []  # those that no step has taken yet
        self._what = what
        self._num_shards, self._num_blocks = num_shards, num_blocks
        self._first: Key | None = None
        self._known: dict[Key, Form] = {}
        self._key: Key | None = None  # of the batch before, if all leaves have rows
        self._form: Form

    def find(self, batch: Batch) -> tuple[Leaves, Any, Form]:
        """The leaves of a batch that have rows, those in a `Whole`, and its form.

        Of rows of a table their numbers, the table, and the form.
        """
        if type(batch) is Picked:
            if self._key is not batch.table.key:
                self._turn_to(batch.table.key, batch)
            return [batch.index], batch.table, self._form
        leaves, treedef = jax.tree.flatten(batch)
        key = treedef, tuple([(leaf.shape[1:], leaf.dtype) for leaf in leaves])
        if key != self._key:
            self._turn_to(key_of(batch), batch)
        if wholes := self._form.wholes:
            rows = [leaf for at, leaf in enumerate(leaves) if at not in wholes]
            return rows, [leaves[at] for at in wholes], self._form
        return leaves, [], self._form

    def size_of(self, key: Key) -> int:
        """The padded size of a form so far; 0 if it has none."""
        if key in self._known:
            return self._known[key].size
        return self.sizes.get(_text(key), self.sizes.get("", 0))

    @property
    def largest(self) -> int:
        """The largest padded size so far."""
        sizes = [form.size for form in self._known.values()]
        return max((*self.sizes.values(), *sizes), default=0)

    def rounded(self, rows: int) -> int:
        """The size that so many rows need."""
        return math.ceil(rows / self._num_shards) * self._num_shards

    def grow(self, form: Form, rows: int) -> None:
        """From now on batches of this form get so many rows at least."""
        if rows > form.size:
            size = form.size = self.rounded(rows)
            self._grown.append(form)
            form.full = (size // self._num_blocks,) * self._num_blocks
            form.if_full.clear()

    def keep_sizes(self) -> None:
        """A step is taken on the batches so far: their sizes stay."""
        for form in self._grown:
            self.sizes[form.text] = max(form.size, self.sizes.get(form.text, 0))
        self._grown = []

    def start_from(self, sizes: Mapping[str, int]) -> None:
        """Pads as if these were the sizes so far."""
        self.sizes, self._known, self._key = dict(sizes), {}, None
        self._grown = []

    def refuse(self) -> None:
        """Forgets the sizes of batches that no step was taken on."""
        self.start_from(self.sizes)

    def forget(self) -> None:
        """Takes the next batch for the first."""
        self.start_from({})
        self._first = None

    def difference(self, batch: Batch) -> str:
        """How a batch differs from the first one, leaf by leaf; "" if it does not."""
        treedef, shapes, *_ = key_of(batch)
        if self._first is None or self._first[:2] == (treedef, shapes):
            return ""
        start, (first, expected) = f"a {self._what} batch", self._first[:2]
        batch = batch.table.tree if type(batch) is Picked else batch
        if treedef != first:
            start += " differs from the first one in structure"
            return f"{start}: was {first}, is {treedef}."

        triples = zip(expected, shapes, with_rows(treedef), strict=True)
        differing = [
            f"{leaf_name(batch, i)} was {_shown(*was, rows)}, is {_shown(*now, rows)}"
            for i, (was, now, rows) in enumerate(triples)
            if was != now
        ]
        return f"{start} differs from the first one: {some_of(differing, '; ')}."

    def note(self, group: Group) -> str:
        """What may help where a step for batches like those of a group failed."""
        if isinstance(group.batch, Picked):
            return ""
        stacked = joined(group.batch, group.whole)
        batch = jax.tree.map(lambda leaf: leaf[0], stacked)
        if not (difference := self.difference(batch)):
            return ""
        return (
            f"{difference} The step is compiled once for each shape. If the shapes"
            " should be the same, pad or convert in the dataset or `collate_fn`."
        )

    def _turn_to(self, key: Key, batch: Batch) -> None:
        if self._first is None:
            self._first = key
        if _kind(key) != _kind(self._first):
            raise ValueError(
                f"{self.difference(batch)} Shapes may vary (the step is compiled"
                " once for each), but structure and dtypes may not: convert in"
                " the dataset or `collate_fn`."
            )
        if key not in self._known:
            form = self._known[key] = Form(key)
            size = self.sizes.pop("", 0)
            self.grow(form, self.sizes.get(form.text, size))
        self._form = self._known[key]
        self._key = None if self._form.wholes else key


def key_of(batch: Batch) -> Key:
    """The form of a batch, as it is compared."""
    if type(batch) is Picked:
        return batch.table.key
    leaves, treedef = jax.tree.flatten(batch)
    # A bool is the number of axes that rows have.
    pairs = zip(leaves, with_rows(treedef), strict=True)
    return treedef, tuple([(leaf.shape[rows:], leaf.dtype) for leaf, rows in pairs])


def shapes_of(batch: Batch) -> list[list[int]]:
    """The shape of each leaf without its rows; JSON."""
    return [list(shape) for shape, _ in key_of(batch)[1]]


def _kind(key: Key) -> Any:
    treedef, leaves, *_ = key
    return treedef, [dtype for _, dtype in leaves]


def _text(key: Key) -> str:
    return " ".join(f"{dtype}{list(shape)}" for shape, dtype in key[1])


def _shown(shape: tuple[int, ...], dtype: Any, has_rows: bool) -> str:
    if not has_rows:
        return f"{dtype} {shape}"
    return f"{dtype} (rows, {', '.join(map(str, shape)) or '-'})"
