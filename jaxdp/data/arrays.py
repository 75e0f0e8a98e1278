"""A loader over arrays that are in memory."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..basics.arguments import check_count, checks_arguments
from ..basics.console import add_article
from ..basics.host_memory import use_auto_axes
from ..step import Batch, find_batched_leaves, map_row_leaves, to_user_batch
from .batches import select_on_device
from .conversion import as_numpy, fetch_rows, normalize_batch, take_rows, wrap_keys
from .loader_state import Position
from .random_states import make_seed
from .source import Source


class Arrays:
    """Batches of the rows of arrays: NumPy's, JAX's or torch's, or trees of them.

        trainer.fit(Arrays(x, y, batch_size=64), Arrays(x_val, y_val), max_epochs=10)
        trainer.predict(Arrays(x_test))

    `Arrays(x, y)` gives batches `(x, y)`, `Arrays(x, y, weight)` gives `(x, y,
    weight)`, and with one argument a batch has its form: `Arrays(x)` gives arrays, for
    `predict` or a `loss_fn(model, x)`, and `Arrays({"a": a, "b": b})` dicts.

    Training shuffles the rows in each epoch, by `Trainer(seed=)` and the epoch, so a
    resumed run continues with the same batches. Validation, tests and predictions take
    the rows in their order. If you iterate over it yourself, each iteration is an
    epoch, in an order that `seed` decides.

    The batches of arrays that lie on a device (`jax.device_put(x)`) are taken there,
    and never come to the host. Where memory allows it, that spares the transfer of
    each batch.

    Args:
        arrays: arrays with the same number of rows, along the first axis. A
            `jaxdp.Whole` among them has no rows, and is the same in each batch.
        batch_size: the rows of a batch, over all devices and processes. With
            `Trainer(data="local")`, the rows of one process.
        shuffle: whether training takes the rows in another order in each epoch.
        drop_last: whether to leave out a last batch that is smaller.
        seed: the seed if you iterate over it yourself; a trainer uses its own seed.
    """

    @checks_arguments
    def __init__(
        self,
        *arrays: Any,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ):
        check_count("batch_size", batch_size)
        check_count("seed", seed, minimum=0)
        tree = wrap_keys(arrays[0] if len(arrays) == 1 else arrays)
        tree = use_auto_axes(tree)
        self.batch_size, self.seed = int(batch_size), int(seed)
        self.shuffle, self.drop_last = shuffle, drop_last
        self._columns, self.num_rows = _collect_columns(tree)
        # Converting one row is enough to learn the structure of each batch, and the
        # leaves without rows.
        columns = iter(self._columns)
        first = normalize_batch(map_row_leaves(lambda _: next(columns)[:1], tree))
        leaves, self._treedef = jax.tree.flatten(first)
        has_rows = find_batched_leaves(self._treedef)
        self._leaves = [*zip(leaves, has_rows, strict=True)]
        self._epoch = 0

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        lists = self.draw_row_lists(self.seed, self._epoch)
        self._epoch += 1
        return map(to_user_batch, self.fetch(lists))

    def __repr__(self) -> str:
        return f"Arrays({self.num_rows} rows, batch_size={self.batch_size})"

    def draw_row_lists(self, *seed: int, first: int = 0) -> Iterator[np.ndarray]:
        """Yields the row numbers of each batch, from batch `first` on.

        Without a seed, rows are in order, even with `shuffle`.
        """
        rows = np.arange(self.num_rows)
        if self.shuffle and seed:
            np.random.default_rng(make_seed(*seed)).shuffle(rows)
        size = self.batch_size
        for number in range(first, len(self)):
            yield rows[number * size :][:size]

    def fetch(self, lists: Iterator[Any]) -> Iterator[Batch]:
        """Yields the batches of row numbers, on the devices of the arrays."""
        if not any(isinstance(column, jax.Array) for column in self._columns):
            return map(self._make_batch, fetch_rows(self._columns, [], lists))
        return map(self._make_batch, map(self._select, lists))

    def _select(self, rows: Any) -> tuple[Any, ...]:
        """Returns rows of each column. Does not wait for the device."""
        on_device = [c for c in self._columns if isinstance(c, jax.Array)]
        selected = iter(select_on_device(on_device, np.asarray(rows, np.int32)))
        columns = [
            next(selected) if isinstance(column, jax.Array) else take_rows(column, rows)
            for column in self._columns
        ]
        return normalize_batch(tuple(columns))

    def _make_batch(self, columns: tuple[Any, ...]) -> Batch:
        """Returns the batch of some rows of each column."""
        rows = iter(columns)
        return self._treedef.unflatten(
            [next(rows) if has_rows else leaf for leaf, has_rows in self._leaves]
        )


@dataclasses.dataclass(eq=False, repr=False)
class ArraysSource(Source):
    """The batches of `Arrays`, which depend only on the epoch and the seed.

    With `in_order`, rows keep their order even if `shuffle` is set.
    """

    in_order: bool = False
    is_in_memory = True

    def _read(self, position: Position) -> Iterator[Batch]:
        seed = self.seed, *self.partition.sampler_seed, position.epoch
        seed = () if self.in_order else seed
        lists = self.loader.draw_row_lists(*seed, first=position.batches)
        lists, add_counts = self.partition.split_lists(lists)
        return add_counts(self.loader.fetch(lists))


def _collect_columns(tree: Any) -> tuple[list[Any], int]:
    """Returns the arrays and tensors that have rows, and their row count."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    columns, shapes = [], []
    for (path, leaf), has_rows in zip(paths, find_batched_leaves(treedef), strict=True):
        name = f"arrays{jax.tree_util.keystr(path)}"
        array = as_numpy(leaf)
        if isinstance(leaf, jax.Array):
            # On a single CPU, NumPy selects rows of the same memory in a tenth of the
            # time.
            is_on_host = [device.platform for device in leaf.devices()] == ["cpu"]
            array = np.asarray(leaf) if is_on_host else leaf  # on the host
        if array is None or (has_rows and not array.ndim):
            raise TypeError(
                f"`Arrays`: {name} is {add_article(type(leaf).__name__)}, and must be"
                " an array with rows: np.asarray(...) of a list or a column of a table,"
                " df.to_numpy() of a DataFrame, x.filled(0) of a masked array."
            )
        if has_rows:
            is_array = isinstance(leaf, np.ndarray | jax.Array)
            columns.append(array if is_array else leaf)
            shapes.append(f"{name} {array.shape}")
    if not columns:
        raise TypeError(
            "`Arrays` needs arrays with rows: Arrays(x, y, batch_size=32), or Arrays(x)"
            " without targets."
        )
    counts = {len(column) for column in columns}
    if len(counts) > 1:
        raise ValueError(
            "`Arrays`: all arrays must have as many rows, along their first axis; got"
            f" {', '.join(shapes)}. Put an array that is the same for every row into a"
            " jaxdp.Whole(array)."
        )
    return columns, counts.pop()
