"""What the devices hold of the data: all rows that batches name, and row counts.

Of a data set that the devices hold, what crosses for a step is row numbers. A small
program there takes the rows out of the columns, laid out as the compiled step takes
them; the step itself is that of any other loader.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jaxtyping import Array

from .processes import put
from .step import Batch, Group
from .strategies.base import no_ambient_mesh

_MOST_COUNTS: Final = 128
"""Of one program that are kept; there are more only if batches have all sizes."""


class Columns:
    """All rows of a data set: on the host, and from the first step on on the devices.

    Args:
        host: a batch that has them all, as `data.to_host` gives it.
        placed: columns that are on devices already, by `id` and sharding.

    Attributes:
        host: as given.
    """

    def __init__(self, host: Batch, placed: dict[Any, Array] | None = None):
        self.host = host
        self._leaves, self._treedef = jax.tree.flatten(host)
        self._placed: dict[Any, Array] = {} if placed is None else placed
        # Of trainers that are gone, nothing stays.
        self._takers: weakref.WeakKeyDictionary[
            Callable[..., Any], Callable[..., Any]
        ] = weakref.WeakKeyDictionary()

    @functools.cached_property
    def inputs(self) -> "Columns":
        """Those that are predicted from: `x` of `(x, y)`. They are held but once."""
        host = self.host[0] if isinstance(self.host, tuple) else self.host
        return Columns(host, self._placed)

    @functools.cached_property
    def _labels(self) -> tuple[Any, Any]:
        return self.host[1].min(), self.host[1].max()

    def have_labels_below(self, num_classes: int) -> bool:
        """Whether all integer labels of `(x, y)` rows are 0 or more, and fewer."""
        low, high = self._labels
        return 0 <= low and high < num_classes

    def take(
        self,
        groups: Sequence[Group],
        step: Callable[..., Any],
        whole: Callable[[], Any],
    ) -> list[Group]:
        """The rows of `groups` on the devices.

        Args:
            groups: batches are `Rows` of these columns.
            step: what is compiled for the rows; `groups` is its last argument.
            whole: tells the sharding of what all of its devices hold.
        """
        indices = [group.batch.indices for group in groups]
        taker = self._takers.get(step)
        if taker is None:
            sharding = whole()
            columns = self._on(sharding)
            with no_ambient_mesh():
                program = jax.jit(_take, out_shardings=_layout(step, sharding))
                program = program.lower(columns, indices).compile()
            taker = self._takers[step] = functools.partial(program, columns)
        return [
            Group(self._treedef.unflatten(leaves), group.counts)
            for leaves, group in zip(taker(indices), groups, strict=True)
        ]

    def _on(self, sharding: Any) -> list[Array]:
        """The columns, each as a whole on every device of `sharding`."""
        for leaf in self._leaves:
            key = id(leaf), sharding
            if key not in self._placed:
                self._placed[key] = jax.device_put(leaf, sharding)
        return [self._placed[id(leaf), sharding] for leaf in self._leaves]


@jax.tree_util.register_pytree_node_class
class Rows:
    """A batch by the numbers of its rows, which are its only leaf.

    So it is padded, stacked and counted like any batch.

    Args:
        columns: whose rows.
        indices: int32 `(rows,)`, or stacked `(micro_batches, rows)`; all are rows of
            `columns`, counted from 0.
    """

    __slots__ = ("columns", "indices")

    def __init__(self, columns: Columns, indices: Any):
        self.columns = columns
        self.indices = indices

    @property
    def own(self) -> Batch:
        """The rows themselves, on the host."""
        return jax.tree.map(
            lambda column: column.take(self.indices, axis=0), self.columns.host
        )

    @property
    def shapes(self) -> Batch:
        """What `own` would be, as `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(
            lambda column: jax.ShapeDtypeStruct(
                (*self.indices.shape, *column.shape[1:]), column.dtype
            ),
            self.columns.host,
        )

    @property
    def inputs(self) -> "Rows":
        """The same rows of the columns that are predicted from."""
        return Rows(self.columns.inputs, self.indices)

    def tree_flatten(self) -> tuple[tuple[Any], Columns]:
        return (self.indices,), self.columns

    @classmethod
    def tree_unflatten(cls, columns: Columns, leaves: Sequence[Any]) -> "Rows":
        return cls(columns, *leaves)


class Counts:
    """How many rows of a batch are real, kept on the devices.

    Most batches have as many as one before, and what comes from the host is sent to
    each device by itself: 50 us for four bytes on eight of them.
    """

    def __init__(self) -> None:
        # Of programs that are gone, nothing stays.
        self._placed: weakref.WeakKeyDictionary[Any, dict[Any, Array]] = (
            weakref.WeakKeyDictionary()
        )

    def placed(
        self, groups: Sequence[Group], step: Callable[..., Any]
    ) -> Sequence[Group]:
        """`groups` as `step` takes them last, with arrays that others may share."""
        placed = self._placed.get(step)
        if placed is None:
            placed = self._placed[step] = {}
        if len(placed) > _MOST_COUNTS:
            placed.clear()
        found = []
        for place, (batch, counts) in enumerate(groups):
            key = place, counts.tobytes()
            if key not in placed:
                positional, _ = step.input_shardings
                sharding = positional[-1][place].counts
                # None where the step has no use for them, as prediction has not.
                placed[key] = counts if sharding is None else put(counts, sharding)
            found.append(Group(batch, placed[key]))
        return found


def shapes_of(batch: Batch) -> Batch:
    """What a step is compiled for: `batch`, or the shapes of the rows it names."""
    return batch.shapes if type(batch) is Rows else batch


def _take(columns: list[Array], indices: list[Array]) -> list[list[Array]]:
    """The rows of each group, which are there: the loader's sampler was checked."""
    return [
        [column.at[rows].get(mode="promise_in_bounds") for column in columns]
        for rows in indices
    ]


def _layout(step: Callable[..., Any], whole: Any) -> list[list[Any]]:
    """The shardings in which `step` takes the leaves of each group."""
    if not hasattr(step, "input_shardings"):
        raise TypeError(
            "`OnDevice` lays rows out as the compiled step takes them, and `compile` of"
            f" the strategy returned a {type(step).__name__}, which does not tell how."
            " Return the jax.stages.Compiled of `program.lower(*arguments).compile()`,"
            " or fit with the loader itself."
        )
    positional, _ = step.input_shardings
    return [
        # None where the step has no use for a leaf.
        [whole if leaf is None else leaf for leaf in leaves]
        for leaves in (
            jax.tree.leaves(group.batch, is_leaf=lambda leaf: leaf is None)
            for group in positional[-1]
        )
    ]
