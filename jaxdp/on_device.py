"""Small data sets that live on the devices."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from .columns import Columns, Rows
from .data import to_host
from .eager import debugging
from .portions import Share
from .source import ALL
from .step import Batch
from .torch_loader import TorchSource, fetch, table


class OnDevice:
    """A torch `DataLoader` whose data set is put on the devices once.

        trainer.fit(OnDevice(train_loader), OnDevice(val_loader))

    A step is then sent the numbers of its rows, 4 bytes each, instead of the rows, and
    takes them from what the devices hold. Numbers, order, history and checkpoints are
    those of `fit(train_loader)`. It is meant for data sets that fit on every device
    beside the training, and for GPUs and TPUs, to which rows go over a bus.

    Every device of the strategy holds all rows, from the first step on and for as long
    as this object is there, or a trainer that was given no other loader since. So keep
    it for the next `fit`: a new one is placed anew. On the host the tensors are held,
    too, as they are or, where they have 64 bits, narrowed; rows of a `Subset` are
    copied. What is written into the tensors later may or may not be seen.
    `Trainer.plan` does not count the memory.

    For `fit`, `validate`, `test`, `predict`, `steps`, `plan` and `compare`, in programs
    of one process. Iterating it is iterating the loader.

    Args:
        loader: over a `TensorDataset`, or a `Subset` of one, with tensors `(rows, ...)`
            of numbers; with torch's own collation, and any sampler, batch sampler and
            generator. Its workers have nothing to do and are not started.

    Raises:
        TypeError: if it is no such loader, or its data set no such one.
        ValueError: if it makes batches in a way of its own, has no rows, or has values
            that do not fit into 32 bits.
    """

    def __init__(self, loader: Any):
        _check(loader)
        self.loader = loader
        self.columns = Columns(_columns(loader.dataset))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        rows = len(self.columns.host[0])
        size = sum(column.nbytes for column in self.columns.host)
        return f"OnDevice({rows} rows, {size / 1e6:.1f} MB)"


class OnDeviceSource(TorchSource):
    """The batches of an `OnDevice` loader, as `Rows`.

    Args:
        loader: what the user passed.
        argument, seed, share: as for `TorchSource`.
    """

    def __init__(self, loader: OnDevice, argument: str, seed: int, share: Share = ALL):
        super().__init__(loader.loader, argument, seed, share)
        self._columns = loader.columns
        self._numbers = np.arange(len(loader.columns.host[0]), dtype=np.int32)

    def sample(self) -> Batch | None:
        return self.peek()

    def _whole_rows(self) -> Any:
        def rows(lists: Iterator[Any]) -> Iterator[Rows]:
            # Looking the numbers up finds those that are none, and counts from the
            # end where they are negative.
            ahead = self._has_torchs_samplers()
            for (indices,) in fetch((self._numbers,), [], lists, ahead):
                rows = Rows(self._columns, indices)
                # Programs take rows out of columns; without any, they come as they are.
                yield rows.own if debugging().without_jit else rows

        return rows


_INSTEAD = (
    "`OnDevice` takes a torch DataLoader over a TensorDataset, or a Subset of one:"
    " DataLoader(TensorDataset(x, y), batch_size, shuffle=True)."
)


def _check(loader: Any) -> None:
    torch = sys.modules.get("torch")
    kind = type(loader).__name__
    if torch is None or not isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(f"`loader` is a {kind}. {_INSTEAD}")
    source = TorchSource(loader, "loader", 0)
    if not source.is_torchs_collation():
        raise ValueError(
            "`loader` has a `collate_fn` of its own or no batches (batch_size=None),"
            " and rows on the devices are batched as torch's own collation does it."
            " Put what it computes into the tensors, or pass the loader itself."
        )
    if not source.is_plain():
        raise ValueError(
            f"`loader` is a {kind} over a {type(loader.dataset).__name__}, and one of"
            " the two iterates in its own way; rows on the devices are taken by index"
            " lists of a sampler. Pass the loader itself."
        )


def _columns(dataset: Any) -> tuple[np.ndarray, ...]:
    """All rows of a data set, in 32 bits."""
    found = table(dataset) if len(dataset) else None
    if found is None:
        raise _not_held(dataset)
    columns, subsets = to_host(found[0]), found[1]
    if not subsets:
        return columns
    try:
        rows = subsets[0]
        for subset in subsets[1:]:
            rows = subset.take(rows)
        return tuple([column.take(rows, axis=0) for column in columns])
    except IndexError as error:
        raise ValueError(
            f"`loader` has a Subset of rows that are not there: {error}. Correct its"
            " `indices`."
        ) from error


def _not_held(dataset: Any) -> Exception:
    from torch.utils.data import Subset

    if not len(dataset):
        return ValueError(
            "`loader` has a data set without rows; `OnDevice` needs one at least."
        )
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return TypeError(
        f"`loader` has a data set of type {type(dataset).__name__}, and only tensors"
        f" can be put on the devices. {_INSTEAD} Or pass the loader itself."
    )
