"""Host batches stacked and padded to what the compiled step takes."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from ..distributed import RowBlocks
from ..step import Batch, Group, Picked
from .batches import Portion, counts_of, own_of, rows_at, stacked
from .forms import Form, Forms, Key, Leaves, key_of

_ONE_BLOCK: Final = RowBlocks()
_LOOK: Final = operator.attrgetter("shape", "dtype")

Window = Sequence[Batch]
"""The batches of one optimizer step."""

_Counts = tuple[int, ...]
"""How many real rows each block of a batch has."""


class Placed(NamedTuple):
    """Batches as a compiled step takes them, put on the devices."""

    step: Any
    groups: Any
    nbytes: int
    """What they take of a device before their step; 0 if the call brings them there."""
    checks: tuple[Callable[[Any], None], ...]
    """What raises for targets that were there, given a result of the step."""


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
    placed: Placed | None = None
    """The groups on their way to the devices, ahead of their turn."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, padding included."""
        return sum(map(_bytes_of, self.groups))


class Packer:
    """Stacks and pads batches so that one compiled shape serves all of a form.

    Where rows are independent, every block of a short batch is padded to the size of
    the largest of its form, with copies of its own first row (zeros or NaN could poison
    gradients). Where rows interact, batches keep their size, and one that the devices
    do not divide is worked on whole by each of them.

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
    ):
        self.num_shards = num_shards
        self.what = what
        self.blocks = blocks
        self.rows_interact = False
        self.forms = Forms(what, num_shards, blocks.count)
        self._in_order = in_order
        self._collect = collect

    @property
    def size(self) -> int:
        """Rows of the largest padded batch so far, of all processes."""
        return self.forms.largest

    def pack(self, windows: list[Window], slots: int = 1) -> Dispatch:
        """Packs the batches of optimizer steps; see `can_stack` for more than one.

        A step has room for so many batches as there are slots; what the last one leaves
        over holds no real rows. Those of one form come together, others in turn.
        """
        # Most batches are full, and this is quick: small steps wait for it.
        formed, counts, are_alike = [], [], not self.rows_interact
        for window in windows:
            for batch in window:
                is_portion = type(batch) is Portion
                formed.append(self.forms.find(batch.own if is_portion else batch))
                leaves, _, form = formed[-1]
                counts.append(batch.counts if is_portion else (len(leaves[0]),))
                are_alike = are_alike and form is formed[0][2]
        steps = len(windows)
        form, count = formed[0][2], steps * slots
        if are_alike and counts == [form.full] * count:
            if (known := form.if_full.get((steps, slots))) is None:
                known = _if_full(form, steps, slots, self._counts(counts))
                form.if_full[steps, slots] = known
            of_all, *others = known
            micros = [entry[0] for entry in formed]
            wholes = [entry[1] for entry in formed]
            group = _group(micros, wholes, of_all, form)
            return Dispatch(windows, [group], *others, are_there=_are_there(formed))

        if form.is_rowless:  # what has no rows has none to pad or to split
            self.rows_interact = True
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
        if not self.rows_interact:
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
            of_all = self._counts(counts[here])
            groups.append(_group(micros[here], wholes[here], of_all, form))
            shapes.append((stop - start, size, form))
            start = stop
        texts = tuple(form.text for *_, form in shapes)
        shapes = [(*sizes, form.program) for *sizes, form in shapes]
        shape = split, steps, tuple(shapes)
        are_there = _are_there(formed)
        return Dispatch(windows, groups, split, rows, texts, shape, are_there)

    def cut(self) -> "_Cut":
        """A function that cuts the batches of one epoch; it remembers their sizes."""
        return _Cut(self)

    def real_rows(self, leaf: Any, batch: Batch, *, own: bool = False) -> np.ndarray:
        """Values of the rows of a packed `batch` that are no padding, on the host.

        With `own`, those of this process's blocks are enough.
        """
        if not isinstance(batch, Portion):
            return np.asarray(leaf)[: counts_of(batch)[0]]
        per_block = len(leaf) // self.blocks.count
        blocks = self.blocks.own if own else range(self.blocks.count)
        if own and not leaf.is_fully_replicated:
            shards = {s.index[0].start or 0: s.data for s in leaf.addressable_shards}
            whole = np.concatenate([np.asarray(shards[at]) for at in sorted(shards)])
            starts = range(0, len(whole), per_block)
        else:
            whole, starts = np.asarray(leaf), [block * per_block for block in blocks]
        return np.concatenate(
            [
                whole[start : start + batch.counts[block]]
                for start, block in zip(starts, blocks, strict=True)
            ]
        )

    def alike(self, windows: list[Window]) -> Iterator[list[Window]]:
        """The windows in runs of neighbours whose batches have the same forms."""

        def forms(window: Window) -> Any:
            return {key_of(own_of(batch)) for batch in window}

        if _are_same(windows):
            return iter([windows])
        return (list(run) for _, run in itertools.groupby(windows, forms))

    def can_stack(self, windows: list[Window], slots: int) -> bool:
        """Whether steps, which are `alike`, would be one group, of the sizes that they
        have one by one."""
        if _are_same(windows):
            count = sum(map(len, windows))
            return not self.rows_interact or count == slots * len(windows)
        if len(keys := {key_of(own_of(batch)) for batch in windows[0]}) > 1:
            return False
        counts = [counts_of(batch) for window in windows for batch in window]
        if self.rows_interact:
            return len({*counts}) == 1 and len(counts) == slots * len(windows)
        # The first step must need as many rows as any after it, or have had more: last
        # bits may depend on the number of padded rows.
        sizes = [max(per_block) * self.blocks.count for per_block in counts]
        first = self.forms.rounded(max(sizes[:slots]))
        return max(sizes) <= max(self.forms.size_of(*keys), first)

    def _padded(
        self, micros: list[Leaves], counts: list[_Counts], forms: list[Form], slots: int
    ) -> tuple[list[Leaves], list[_Counts]]:
        """Each of its form's size, and so many that all slots are full."""
        for form, per_block in zip(forms, counts, strict=True):
            self.forms.grow(form, max(per_block) * self.blocks.count)
        padded = [
            self._with_padding(leaves, per_block, form.full[0])
            for leaves, per_block, form in zip(micros, counts, forms, strict=True)
        ]
        # The last is of the step that lacks some: NaN in another's stays there.
        nothing, missing = (0,) * self.blocks.count, slots - len(micros)
        return padded + padded[-1:] * missing, counts + [nothing] * missing

    def _with_padding(self, leaves: Leaves, counts: _Counts, size: int) -> Leaves:
        """The rows of this process's blocks, each block padded to `size`."""
        counts_here = [counts[block] for block in self.blocks.own]
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
        """The real rows of all processes: where rows interact and do not divide."""
        if self.blocks.count == 1:
            return leaves
        shards = self.num_shards // self.blocks.count
        size = math.ceil(max(counts) / shards) * shards
        local = self._with_padding(leaves, counts, size)
        collected = self._collect([stacked([leaf]) for leaf in local])
        starts = range(0, self.blocks.count * size, size)
        real = [slice(s, s + c) for s, c in zip(starts, counts, strict=True)]
        return [np.concatenate([leaf[0, r] for r in real]) for leaf in collected]

    def _counts(self, counts: list[_Counts]) -> np.ndarray:
        return _counts(tuple(counts), self._in_order)


class _Cut:
    """Where batches are cut: as one process would have padded them at the end."""

    def __init__(self, packer: Packer):
        self.blocks, self._packer = packer.blocks, packer
        self._sizes: dict[Key | None, int] = {None: packer.size}

    def __call__(
        self, rows: int, key: Key | None
    ) -> tuple[tuple[int, ...], list[range]]:
        """Real rows of every block, and this process's rows, one at least."""
        forms = self._packer.forms
        if key is not None and key not in self._sizes:
            self._sizes[key] = forms.size_of(key)
        self._sizes[key] = max(self._sizes[key], forms.rounded(rows))
        per_block = self._sizes[key] // self.blocks.count
        if self._packer.rows_interact:
            per_block = math.ceil(rows / self.blocks.count)
        places = self.blocks.own_rows(rows, per_block)
        counts = self.blocks.counts(rows, per_block)
        return counts, places if any(places) else [range(1)]


def _if_full(form: Form, steps: int, slots: int, counts: np.ndarray) -> tuple[Any, ...]:
    """What all dispatches of full batches have in common: the counts of their group,
    and the fields of a `Dispatch` after its groups."""
    rows = [slots * form.size] * steps
    shape = True, steps, ((steps * slots, form.size, form.program),)
    return counts, True, rows, (form.text,), shape


def _group(
    micros: list[Leaves], wholes: list[Any], counts: np.ndarray, form: Form
) -> Group:
    """Micro-batches of one shape, stacked."""
    batch = form.of_rows.unflatten(_stacked(micros))
    if form.of_table:
        return Group(batch, counts, wholes[0])
    whole = form.of_whole.unflatten(_stacked(wholes)) if form.wholes else None
    return Group(batch, counts, whole)


def _are_there(formed: list[tuple[Leaves, Any, Form]]) -> bool:
    """Whether any leaf of batches is not on the host."""
    for leaves, wholes, form in formed:  # a loop, as small steps wait for it
        for leaf in (*leaves, *wholes) if form.wholes else leaves:
            if type(leaf) is not np.ndarray:
                return True
    return False


def _bytes_of(group: Group) -> int:
    if isinstance(group.batch, Picked):
        return group.batch.index.size * group.whole.row_bytes
    return sum(leaf.nbytes for leaf in jax.tree.leaves(group))


def _are_same(windows: list[Window]) -> bool:
    """Whether all batches are seen at once to have the same shapes, rows included.

    Most batches do. Small steps wait for this check, so it costs no more than to
    flatten each batch once.
    """
    batches = list(itertools.chain.from_iterable(windows))
    if all(type(batch) is Picked for batch in batches):
        return len({(id(batch.table), len(batch.index)) for batch in batches}) == 1
    if any(type(batch) is not tuple for batch in batches):
        return False
    try:
        looks = [[*map(_LOOK, batch)] for batch in batches]
    except AttributeError:  # something nested
        return False
    return bool(looks) and all([look == looks[0] for look in looks])


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
