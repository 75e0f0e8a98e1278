"""Host batches stacked and padded to what the compiled step takes.

Batches that are alike but for their rows are of one form: structure, dtypes, and shapes
without the leading axis. Each form is compiled for, so each has a padded size of its
own.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..basics.console import join_some
from ..distributed import RowBlocks
from ..step import Batch, Group, SingleRowBatch, find_batched_leaves, merge_leaves
from .batches import (
    Key,
    Portion,
    key_of,
    leaf_name,
    own_of,
    rows_at,
    stacked,
)

_ONE_BLOCK: Final = RowBlocks()
_LOOK: Final = operator.attrgetter("shape", "dtype")
_AS_ONE: Final = operator.itemgetter(None)
"""The only batch of a group: an array with an axis more in front."""
_HOST: Final = {np.ndarray}

Leaves = list[Any]
"""NumPy's arrays, and JAX's."""


Window = Sequence[Batch]
"""The batches of one optimizer step."""

_Counts = tuple[int, ...]
"""How many real rows each block of a batch has."""


class Dispatch(NamedTuple):
    """The batches that one call of a compiled step works on, as it takes them."""

    windows: list[Window]
    """The batches of each optimizer step, as they came."""
    groups: list[Group]
    split: bool
    """Whether rows are split over the devices, or the batch is whole on each."""
    rows: list[int]
    """How many real rows each optimizer step has. Several steps are one group."""
    forms: tuple[str, ...]
    """Of the groups, in words."""
    shape: Hashable
    """What a compiled step depends on: the split, the steps, each group's sizes."""
    are_there: bool = False
    """Whether any arrays are on the devices already: JAX's, of a loader."""
    placed: Any = None
    """The groups on their way to the devices, ahead of their turn."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, padding included."""
        return sum(map(_bytes_of, self.groups))


class Form:
    """One form of batches, and the size that they are padded to."""

    def __init__(self, key: Key):
        self.key = key
        self.text = _text(key)
        treedef, _ = key
        has_rows = find_batched_leaves(treedef)
        # Which leaves have none, and the structures of both kinds.
        self.wholes = [place for place, rows in enumerate(has_rows) if not rows]
        node = treedef.node_data()
        self.is_rowless = node is not None and node[0] is SingleRowBatch
        self.of_rows, self.of_whole = [
            jax.tree.structure(
                treedef.unflatten([rows == kind or None for rows in has_rows])
            )
            for kind in (True, False)
        ]
        self.size = 0  # rows of a padded batch, of all processes
        self.full: tuple[int, ...] = ()  # its real rows in each block, if it is full


class Forms:
    """The forms that one kind of step has met.

    All have the structure and dtypes of the first batch.

    Args:
        what: kind of step, for messages.
        num_shards: sizes are multiples of it.
        num_blocks: into which rows are cut.

    Attributes:
        last: the shapes and dtypes of a batch of arrays that came alone and was not
            padded, and what its dispatch had beside the arrays: a batch that looks the
            same needs no more looking at. None if a size has changed since.
        before: the sizes that `refuse` brings back: those before the last batches.
    """

    def __init__(self, what: str, num_shards: int, num_blocks: int):
        self.last: tuple[Any, ...] | None = None
        self._what = what
        self._num_shards, self._num_blocks = num_shards, num_blocks
        self._first: Key | None = None
        self._known: dict[Key, Form] = {}
        # Of forms that are not met yet. That of "" is for the one that comes first:
        # earlier versions knew of one alone.
        self._saved: dict[str, int] = {}
        self.before: dict[Form, int] = {}
        self._key: Key | None = None  # of the batch before, if all leaves have rows
        self._form: Form

    @property
    def sizes(self) -> dict[str, int]:
        """The padded sizes so far, by the forms' texts, for a checkpoint."""
        sizes = dict(self._saved)
        for form in self._known.values():
            sizes[form.text] = max(form.size, sizes.get(form.text, 0))
        return {text: size for text, size in sizes.items() if size}

    def find(self, batch: Batch) -> tuple[Leaves, Any, Form]:
        """The leaves of a batch that have rows, those in a `Whole`, and its form."""
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
        return self._saved.get(_text(key), self._saved.get("", 0))

    def rounded(self, rows: int) -> int:
        """The size that so many rows need."""
        return math.ceil(rows / self._num_shards) * self._num_shards

    def grow(self, forms: Sequence[Form], rows: Sequence[int]) -> None:
        """From now on batches of these forms get so many rows at least."""
        self.before = {form: form.size for form in forms}
        for form, needed in zip(forms, rows, strict=True):
            self._resize(form, max(form.size, self.rounded(needed)))

    def refuse(self) -> None:
        """Forgets what the last batches needed: no step is taken on them."""
        for form, size in self.before.items():
            self._resize(form, size)
        self.before = {}

    def start_from(self, sizes: Mapping[str, int]) -> None:
        """Pads as if these were the sizes so far."""
        self._saved, self._known, self.before = dict(sizes), {}, {}
        self._key = self.last = None

    def forget(self) -> None:
        """Takes the next batch for the first."""
        self.start_from({})
        self._first = None

    def _resize(self, form: Form, size: int) -> None:
        if size != form.size:
            form.size, self.last = size, None
            form.full = (size // self._num_blocks,) * self._num_blocks if size else ()

    def difference(self, batch: Batch) -> str:
        """How a batch differs from the first one, leaf by leaf; "" if it does not."""
        treedef, shapes = key_of(batch)
        if self._first is None or self._first == (treedef, shapes):
            return ""
        start, (first, expected) = f"a {self._what} batch", self._first
        if treedef != first:
            start += " differs from the first one in structure"
            return f"{start}: was {first}, is {treedef}."

        triples = zip(expected, shapes, find_batched_leaves(treedef), strict=True)
        differing = [
            f"{leaf_name(batch, i)} was {_shown(*was, rows)}, is {_shown(*now, rows)}"
            for i, (was, now, rows) in enumerate(triples)
            if was != now
        ]
        return f"{start} differs from the first one: {join_some(differing, '; ')}."

    def note(self, group: Group) -> str:
        """What may help where a step for batches like those of a group failed."""
        stacked = merge_leaves(group.batch, group.whole)
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
            of_first = self._saved.pop("", 0)
            self._resize(form, self.rounded(self._saved.get(form.text, of_first)))
        self._form = self._known[key]
        self._key = None if self._form.wholes else key


class Packer:
    """Stacks and pads batches so that one compiled shape serves all of a form.

    If it pads, every block of a short batch is padded to the size of the largest of
    its form, with copies of its own first row (zeros or NaN could poison gradients).
    If not, batches keep their size, and one that the devices do not divide is worked on
    whole by each of them. The first batch decides, by `pads`; None means no.

    Sizes are rounded up to a multiple of `num_shards`. If portions fill the blocks
    `in_order`, all padding is at the end, and the compiled step is that of one process.
    All processes call `collect`: from leaves `(micro_batches, rows of own blocks, ...)`
    to the same with the rows of all blocks.
    """

    def __init__(
        self,
        num_shards: int,
        what: str,
        blocks: RowBlocks = _ONE_BLOCK,
        in_order: bool = True,
        collect: Callable[[Leaves], Leaves] = list,
        pads: Callable[[Batch], bool] | None = lambda _: True,
    ):
        self.num_shards = num_shards
        self.what = what
        self.blocks = blocks
        self.pads = pads is not None
        self._pads, self._is_settled = pads, pads is None
        self.forms = Forms(what, num_shards, blocks.count)
        self._in_order = in_order
        self._collect = collect

    @property
    def size(self) -> int:
        """Rows of the largest padded batch so far, of all processes."""
        return max(self.forms.sizes.values(), default=0)

    def pack(self, windows: list[Window], slots: int = 1) -> Dispatch:
        """Packs the batches of optimizer steps, of several if they `are_alike`.

        A step has room for so many batches as there are slots; what the last one leaves
        over holds no real rows. Those of one form come together, others in turn.
        """
        # Most batches come alone and look like the one before, and this is quick: small
        # steps wait for it.
        first, last, steps = windows[0][0], self.forms.last, len(windows)
        if not self._is_settled:
            self._settle(first)
        is_plain = type(first) is tuple and _HOST.issuperset(map(type, first))
        if last and is_plain and steps == slots == 1:
            if [*map(_LOOK, first)] == last[0]:
                group = Group(tuple(map(_AS_ONE, first)), last[1], None)
                return Dispatch(windows, [group], *last[2])

        formed, counts, are_alike = [], [], self.pads
        for batch in itertools.chain.from_iterable(windows):
            is_portion = type(batch) is Portion
            formed.append(self.forms.find(batch.own if is_portion else batch))
            leaves, _, form = formed[-1]
            counts.append(batch.counts if is_portion else (len(leaves[0]),))
            are_alike = are_alike and form is formed[0][2]
        form, count = formed[0][2], steps * slots
        if are_alike and counts == [form.full] * count:
            shape = True, steps, ((count, form.size, form.text),)
            of_all = _counts(tuple(counts), self._in_order)
            known = True, [slots * form.size] * steps, (form.text,), shape
            self.forms.before = {}
            if is_plain and count == 1:
                self.forms.last = [*map(_LOOK, first)], of_all, known
            micros, wholes = [entry[0] for entry in formed], [e[1] for e in formed]
            group = _group(micros, wholes, of_all, form)
            return Dispatch(windows, [group], *known, are_there=_are_there(formed))

        sizes = [sum(entry) for entry in counts]
        rows = [sum(sizes[step * slots :][:slots]) for step in range(steps)]
        if any(other is not form for *_, other in formed):
            # In the order of their text, which a resumed process finds again.
            order = sorted(range(len(formed)), key=lambda place: formed[place][2].text)
            formed = [formed[place] for place in order]
            counts = [counts[place] for place in order]
            sizes = [sizes[place] for place in order]
        micros, wholes, forms = ([*entry] for entry in zip(*formed, strict=True))

        split = True
        if self.pads and not form.is_rowless:  # which has no rows to pad
            micros, counts = self._padded(micros, counts, forms, count)
            missing = len(micros) - len(forms)
            wholes, forms = wholes + wholes[-1:] * missing, forms + forms[-1:] * missing
            sizes = [form.size for form in forms]
        elif not all(map(self._fills_shards, counts)):
            split = False
            micros = [self._whole(m, c) for m, c in zip(micros, counts, strict=True)]
            counts = [(size,) for size in sizes]

        groups, shapes, start = [], [], 0
        for (form, size), run in itertools.groupby(zip(forms, sizes, strict=True)):
            stop = start + len(list(run))
            here = slice(start, stop)
            of_all = _counts(tuple(counts[here]), self._in_order)
            groups.append(_group(micros[here], wholes[here], of_all, form))
            shapes.append((stop - start, size, form))
            start = stop
        texts = tuple(form.text for *_, form in shapes)
        key = split, steps, tuple([(*size, form.text) for *size, form in shapes])
        known = split, rows, texts, key
        if is_plain and steps == slots == 1 and not self.pads:
            self.forms.last = [*map(_LOOK, first)], groups[0].counts, known
        return Dispatch(windows, groups, *known, _are_there(formed))

    def _settle(self, first: Any) -> None:
        """Decides by the first batch whether batches are padded."""
        if not self._is_settled and self._pads is not None:
            self.pads, self._is_settled = self._pads(own_of(first)), True

    def forget(self) -> None:
        """Takes the next batch for the first."""
        self.forms.forget()
        self._is_settled = self._pads is None

    def _padded(
        self, micros: list[Leaves], counts: list[_Counts], forms: list[Form], slots: int
    ) -> tuple[list[Leaves], list[_Counts]]:
        """Each of its form's size, and so many that all slots are full."""
        self.forms.grow(forms, [max(one) * self.blocks.count for one in counts])
        padded = [
            self._with_padding(leaves, per_block, form.full[0])
            for leaves, per_block, form in zip(micros, counts, forms, strict=True)
        ]
        # The last is of the step that lacks some: NaN in another's stays there.
        nothing, missing = (0,) * self.blocks.count, slots - len(micros)
        return padded + padded[-1:] * missing, counts + [nothing] * missing

    def _with_padding(self, leaves: Leaves, counts: _Counts, size: int) -> Leaves:
        """The rows of this process's blocks, each block padded to `size`."""
        counts_here = [counts[block] for block in self.blocks.local]
        if counts_here == [size] * len(counts_here):
            return leaves
        stops = list(itertools.accumulate(counts_here))

        index = np.zeros((len(stops), size), np.int32)  # the padding is of row 0
        for block, (count, stop) in enumerate(zip(counts_here, stops, strict=True)):
            index[block, :count] = range(stop - count, stop)
        return [rows_at(leaf, index.ravel()) for leaf in leaves]

    def _fills_shards(self, counts: _Counts) -> bool:
        """Whether blocks of so many rows need no padding."""
        shards = self.num_shards // self.blocks.count
        return len(set(counts)) == 1 and counts[0] % shards == 0

    def _whole(self, leaves: Leaves, counts: _Counts) -> Leaves:
        """Returns the real rows of all processes, of a batch that is not split."""
        if self.blocks.count == 1:
            return leaves
        shards = self.num_shards // self.blocks.count
        size = math.ceil(max(counts) / shards) * shards
        local = self._with_padding(leaves, counts, size)
        collected = self._collect([stacked([leaf]) for leaf in local])
        starts = range(0, self.blocks.count * size, size)
        real = [slice(s, s + c) for s, c in zip(starts, counts, strict=True)]
        return [np.concatenate([leaf[0, r] for r in real]) for leaf in collected]


def _kind(key: Key) -> Any:
    treedef, leaves = key
    return treedef, [dtype for _, dtype in leaves]


def _text(key: Key) -> str:
    return " ".join(f"{dtype}{list(shape)}" for shape, dtype in key[1])


def _shown(shape: tuple[int, ...], dtype: Any, has_rows: bool) -> str:
    if not has_rows:
        return f"{dtype} {shape}"
    return f"{dtype} (rows, {', '.join(map(str, shape)) or '-'})"


def _group(
    micros: list[Leaves], wholes: list[Any], counts: np.ndarray, form: Form
) -> Group:
    """Micro-batches of one shape, stacked."""
    batch = form.of_rows.unflatten(_stacked(micros))
    whole = form.of_whole.unflatten(_stacked(wholes)) if form.wholes else None
    return Group(batch, counts, whole)


def _are_there(formed: list[tuple[Leaves, Any, Form]]) -> bool:
    """Whether any leaf of batches is not on the host."""
    return not all(
        _HOST.issuperset(map(type, [*leaves, *wholes] if form.wholes else leaves))
        for leaves, wholes, form in formed
    )


def _bytes_of(group: Group) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(group))


def are_alike(windows: list[Window], slots: int) -> bool:
    """Whether windows are full and all their batches of the same shapes, rows included.

    Small steps wait for this check, so it costs no more than to flatten each batch.
    """
    batches = list(itertools.chain.from_iterable(windows))
    if len(batches) < slots * len(windows):
        return False
    first, *others = map(_look_of, batches)
    return all([look == first for look in others])


def _look_of(batch: Batch) -> Any:
    """The structure of a batch, and the shapes and dtypes of its leaves."""
    if type(batch) is Portion:
        return batch.counts, _look_of(batch.own)
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [*map(_LOOK, leaves)]


def _stacked(micros: list[Leaves]) -> Leaves:
    if len(micros) > 1:
        return [stacked(leaves) for leaves in zip(*micros, strict=True)]
    return [
        leaf[None] if type(leaf) is np.ndarray else stacked([leaf])  # without a copy
        for leaf in micros[0]
    ]


@functools.lru_cache
def _counts(counts: tuple[_Counts, ...], in_order: bool) -> np.ndarray:
    """Made once for each of the few there are in a run."""
    array = np.asarray(counts, np.int32)
    if in_order:
        array = array.sum(axis=1, keepdims=True, dtype=np.int32)
    array.flags.writeable = False
    return array
