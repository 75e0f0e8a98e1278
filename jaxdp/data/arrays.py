"""A loader over arrays that are in memory."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import jax
import numpy as np

from ..basics.arguments import check_choice, check_count
from ..basics.console import say_once
from ..basics.hardware import least_memory
from ..step import Batch, Picked, Table, as_given, map_rows, with_rows
from .conversion import as_numpy, fetch, to_host, with_key_data
from .loader_state import Position
from .random_states import seed_of
from .shares import LocalShare, Share
from .source import ALL, Source

_SHARE: Final = 0.1
"""Of a device's memory, at most, that arrays take by themselves."""


class Arrays:
    """Batches of the rows of arrays: NumPy's, JAX's or torch's, or trees of them.

        trainer.fit(Arrays(x, y, batch_size=64), Arrays(x_val, y_val), max_epochs=10)
        trainer.predict(Arrays(x_test))

    `Arrays(x, y)` gives batches `(x, y)`, `Arrays(x, y, weight)` gives `(x, y,
    weight)`, and with one argument a batch has its form: `Arrays(x)` gives arrays, for
    `predict` or a `loss_fn(model, x)`, and `Arrays({"a": a, "b": b})` dicts.

    Training shuffles the rows in each epoch, by `Trainer(seed=)` and the epoch, so a
    resumed run goes on with the same batches. Validation, tests and predictions take
    the rows in their order. If you iterate over it yourself, each iteration is an
    epoch, in an order that `seed` decides.

    Args:
        arrays: all with the same number of rows, along the first axis. A `jaxdp.Whole`
            in them has no rows, and is the same in each batch.
        batch_size: rows of a batch, those of all devices and processes together. With
            `Trainer(data="local")`, those of one process.
        shuffle: whether training takes the rows in another order in each epoch.
        drop_last: whether to leave out a last batch that is smaller.
        on_device: whether the arrays are copied to each device once, where the step
            then takes the rows. "auto" does so if they take at most a tenth of the
            memory of a device that tells how much it has, which CPUs do not. The
            numbers are the same. Later changes of the arrays are not seen.
        seed: for iterating by hand; a trainer has a seed of its own.
    """

    def __init__(
        self,
        *arrays: Any,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        on_device: bool | str = "auto",
        seed: int = 0,
    ):
        check_count("batch_size", batch_size)
        check_choice("shuffle", shuffle, (True, False))
        check_choice("drop_last", drop_last, (True, False))
        check_choice("on_device", on_device, ("auto", True, False))
        check_count("seed", seed, least=0)
        tree = with_key_data(arrays[0] if len(arrays) == 1 else arrays)
        self.tree = jax.tree.map(_on_host, tree)
        self.batch_size, self.seed = int(batch_size), int(seed)
        self.shuffle, self.drop_last, self.on_device = shuffle, drop_last, on_device
        self._columns, self.num_rows = _columns(self.tree)
        # The first row tells what conversion makes of the tree.
        columns = iter(self._columns)
        self._first = to_host(map_rows(lambda _: next(columns)[:1], self.tree))
        is_tuple = type(self._first) is tuple
        self._is_flat = is_tuple and jax.tree_util.all_leaves(self._first)
        self._epoch = 0
        self._table: Table | None = None
        if not len(self):
            raise ValueError(
                f"`Arrays`: {self.num_rows} rows are less than one batch"
                f" (`batch_size`={batch_size}), and `drop_last` leaves that out. Take a"
                " smaller `batch_size`, or drop_last=False."
            )

    def __len__(self) -> int:
        """How many batches an epoch has."""
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        lists = self.lists(self.seed, self._epoch)
        self._epoch += 1
        return map(as_given, self.batches(lists))

    def __repr__(self) -> str:
        return f"Arrays({self.num_rows} rows, batch_size={self.batch_size})"

    def lists(self, *seed: int, first: int = 0) -> Iterator[np.ndarray]:
        """The rows of each batch of an epoch, from a batch on; in order if no seed."""
        rows = np.arange(self.num_rows)
        if self.shuffle and seed:
            np.random.default_rng(seed_of(*seed)).shuffle(rows)
        size = self.batch_size
        for number in range(first, len(self)):
            yield rows[number * size :][:size]

    def table(self, devices: Iterable[Any]) -> Table | None:
        """All rows, to be kept on these devices; None if they stay on the host."""
        nbytes = sum(column.nbytes for column in self._columns)
        if not self.on_device:
            return None
        # Rows of weight 0 are replaced by the trainer, on the host.
        is_tuple = isinstance(self.tree, list | tuple) and len(self.tree) == 3
        if is_tuple and not np.all(self.tree[2]):
            if self.on_device is True:
                say_once(f"{self}: with rows of weight 0, it stays on the host")
            return None
        if self.on_device == "auto" and nbytes > _SHARE * (least_memory(devices) or 0):
            return None
        if self._table is None:
            self._table = Table(to_host(self.tree))
        return self._table

    def batches(self, lists: Iterator[Any]) -> Iterator[Batch]:
        """Host batches of such rows."""
        return map(self._filled, fetch(tuple(self._columns), [], lists))

    def _filled(self, columns: tuple[np.ndarray, ...]) -> Batch:
        """A batch of some rows of each column."""
        if self._is_flat:
            return columns
        rows = iter(columns)
        return map_rows(lambda _: next(rows), self._first)


class ArraysSource(Source):
    """The batches of `Arrays`: the epoch and the seed decide them, and nothing else.

    Args:
        seed: the trainer's.
        in_order: whether rows come as they are, whatever `shuffle` says.
        devices: tells those that the steps run on. If not given, all stays on the host.
    """

    loader: Arrays

    def __init__(
        self,
        loader: Arrays,
        argument: str,
        share: Share = ALL,
        seed: int = 0,
        *,
        in_order: bool = False,
        devices: Callable[[], Iterable[Any]] | None = None,
    ):
        super().__init__(loader, argument, share, seed)
        self._seed = () if in_order else (seed, *share.sampling)
        self._devices = None if isinstance(share, LocalShare) else devices

    def _read(self, position: Position) -> Iterator[Batch]:
        seed = (*self._seed, position.epoch) if self._seed else ()
        lists = self.loader.lists(*seed, first=position.batches)
        lists, portions = self.share.of_lists(lists)
        table = None
        if self._devices is not None:
            table = self.loader.table(self._devices())
        if table is None:
            return portions(self.loader.batches(lists))
        return portions(Picked(np.asarray(rows, np.int32), table) for rows in lists)

    def first(self, count: int | None) -> list[Batch]:
        self._seed = ()
        return super().first(count)

    @property
    def is_at_hand(self) -> bool:
        return True


def _on_host(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf  # on the host


def _columns(tree: Any) -> tuple[list[np.ndarray], int]:
    """The leaves that have rows, over the same memory, and how many rows they have."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    columns, shapes = [], []
    for (path, leaf), has_rows in zip(paths, with_rows(treedef), strict=True):
        name = f"arrays{jax.tree_util.keystr(path)}"
        array = as_numpy(leaf)
        if array is None or (has_rows and not array.ndim):
            kind = type(leaf).__name__
            made = "np.asarray(...) of a list or a column of a table"
            if isinstance(leaf, np.ma.MaskedArray):
                made = "x.filled(0), and the mask beside it"
            raise TypeError(
                f"`Arrays`: {name} is a {kind}, and must be an array with rows: {made}."
            )
        if has_rows:
            columns.append(array)
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
    if counts == {0}:
        raise ValueError(f"`Arrays`: there are no rows in {', '.join(shapes)}.")
    return columns, counts.pop()
