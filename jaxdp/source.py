"""Any iterable of batches, epoch by epoch."""

import contextlib
import itertools
from collections.abc import Iterator, Sized
from typing import Any, Final

from .data import to_host
from .portions import Portion, Share
from .step import Batch

END: Final = object()
"""What `next` gives at the end of an iterator, where None would be a batch."""

ALL: Final = Share()
"""That of one process."""


class Source:
    """Any iterable of batches.

    Args:
        loader: an iterable of batches, iterated once per epoch. An iterator goes on
            where the last epoch stopped.
        argument: how the user calls it, for messages.
        share: how its batches come to several processes.

    Attributes:
        state: what, of its own, the loader started the present epoch from; JSON.
        start_from: such a state, for the next epoch alone to start from.
        replay: how many batches an iterator gave in an earlier process, for the next
            epoch alone to pass over.
    """

    def __init__(self, loader: Any, argument: str, share: Share = ALL):
        self.loader: Any = loader
        self.argument = argument
        self.share = share
        self.state: Any = None
        self.start_from: Any = None
        self.replay = 0

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch, or None where that can't be known."""
        try:
            own = len(self.loader) if isinstance(self.loader, Sized) else None
        except TypeError:  # a DataLoader over an iterable dataset without a length
            own = None
        return self.share.length(self.argument, own)

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[Batch]:
        """Host batches of an epoch, in order, but for the first `skip`.

        An iterator has given those already, and is not asked for them again.
        """
        # What is no list may write every batch into the same memory.
        copy = not isinstance(self.loader, list | tuple)
        batches = iter(self.loader)
        passed = self.replay if batches is self.loader else skip
        self.replay = 0
        self._pass_over(batches, passed)
        peek = None if batches is self.loader else self._peek_here
        return self.share.of(self._converted(batches, epoch, skip, copy), peek)

    @contextlib.contextmanager
    def looking_back(self) -> Iterator[None]:
        """Inside, the present epoch can be begun again; what follows it is as before.

        An iterator has nothing to look back at.
        """
        loader, state, following = self.loader, self.state, self.present_state()
        if hasattr(loader, "__next__"):
            self.loader = ()
        self.start_from = state
        try:
            yield
        finally:
            self.loader, self.state, self.start_from = loader, state, following

    def present_state(self) -> Any:
        """What `state` would be of an epoch that started now."""
        return None

    def first(self, share: int | float) -> list[Batch]:
        """The first batches of epoch 0: so many, or as a float such a share."""
        count = capped("overfit_batches", share, self.num_batches)
        return list(itertools.islice(self.epoch(0), count))

    def peek(self) -> Batch:
        """The first batch of epoch 0; the loader is left as it was.

        Raises:
            TypeError: for an iterator, which would be one batch shorter.
        """
        if hasattr(self.loader, "__next__"):
            raise TypeError(
                f"`{self.argument}` is an iterator ({type(self.loader).__name__}), and"
                " looking at its first batch would use it up; pass what it iterates"
                " over, or one batch in a list."
            )
        batches = self.epoch(0)
        batch = next(batches, None)
        getattr(batches, "close", lambda: None)()
        if batch is None:
            raise ValueError(self.gave_nothing())
        return batch

    def sample(self) -> Batch | None:
        """The first batch of epoch 0, if to look at it costs next to nothing."""
        return self.peek() if isinstance(self.loader, list | tuple) else None

    def _peek_here(self) -> Batch:
        """`peek`, whatever other processes have."""
        share, self.share = self.share, ALL
        try:
            return self.peek()
        finally:
            self.share = share

    def gave_nothing(self) -> str:
        """What to say when an epoch has no batches."""
        return (
            f"`{self.argument}` gave no batches. Is the dataset empty, shorter than one"
            " batch with drop_last=True, a generator exhausted, or a limit 0?"
        )

    def _explain(self, exception: Exception) -> None:
        """Adds what may help to an exception of the loader."""

    def _pass_over(self, batches: Iterator[Any], count: int) -> None:
        """Asks for `count` batches that an earlier fit has had."""
        if isinstance(self.loader, list | tuple | range) or not count:
            next(itertools.islice(batches, count, count), None)
            return
        from tqdm import tqdm

        what = f"`{self.argument}` can't jump: replaying {count} batches"
        for _ in tqdm(range(count), what, delay=1, leave=False, mininterval=1):
            if next(batches, END) is END:
                return

    def _converted(
        self,
        batches: Iterator[Any],
        epoch: int,
        first: int,
        copy: bool,
        ready: bool = False,
    ) -> Iterator[Batch]:
        for batch_idx in itertools.count(first):
            try:
                batch = next(batches, END)
                if batch is END:
                    return
                is_ready = ready or type(batch) is Portion
                host = batch if is_ready else to_host(batch, copy=copy)
            except Exception as exception:
                exception.add_note(
                    f"in batch {batch_idx} of epoch {epoch} of `{self.argument}`"
                )
                self._explain(exception)
                raise
            yield host


def check_share(name: str, limit: Any) -> None:
    """Raises unless `limit` is None, a number of batches or a share of them."""
    if limit is None or isinstance(limit, int) and not isinstance(limit, bool):
        if limit is not None and limit < 0:
            raise ValueError(f"`{name}` must be 0 or more batches; got {limit}.")
    elif not isinstance(limit, float):
        raise TypeError(
            f"`{name}` must be an int (batches) or a float (share of them); got"
            f" {limit!r} of type {type(limit).__name__}."
        )
    elif not 0 <= limit <= 1:
        raise ValueError(f"`{name}` as a share must be from 0.0 to 1.0; got {limit}.")


def capped(name: str, limit: int | float | None, available: int | None) -> int | None:
    """`limit` in batches: a float is a share of the `available` ones."""
    check_share(name, limit)
    if limit is None or isinstance(limit, int):
        return limit
    if limit == 1.0:  # all of them, however many come
        return None
    if available is None:
        raise ValueError(
            f"`{name}`={limit} is a share of an epoch, and the length of the loader is"
            " not known; pass a number of batches."
        )
    return int(available * limit)
