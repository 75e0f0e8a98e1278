"""Reads the batches of an epoch, and packs them for the compiled step."""

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..basics.console import log_info
from ..callbacks.base import Hooks
from ..data import (
    Dispatch,
    Position,
    Source,
    Window,
    have_equal_shapes,
    take_until_error,
)
from ..engine import wait
from ..step import Batch
from .progress import Limits

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Run


class Feed:
    """The dispatches of a trainer's epochs.

    Args:
        trainer: runs the steps.
        source: of the batches.
        hooks: of the fit, which decide options of the step.
        limits: of the fit, or None if the user has the loop.

    Attributes:
        prepared: the dispatches that the engine has made of the first one.
    """

    def __init__(
        self,
        trainer: "Trainer",
        source: Source,
        hooks: Hooks,
        limits: Limits | None = None,
    ):
        self._run = trainer.run
        self._source, self._hooks, self._limits = source, hooks, limits
        self.prepared: Iterable[Dispatch] = ()
        self._remaining: Iterator[Dispatch] | None = None  # after the first one
        self._waiting: list[Window] = []  # steps that are read, and not launched
        self._pack_error: Exception | None = None  # while some are waiting
        # A user's loop may decide its batches, so it reads only those that it needs.
        is_fixed = limits is not None or isinstance(source.loader, list | tuple)
        self._can_read_ahead = is_fixed and source.can_read_ahead

    def read_first(self) -> Dispatch | None:
        """Reads the first dispatch, to be `prepared`; `read_epoch` continues there.

        None if all batches of the epoch are done, and only its end is missing.
        """
        progress = self._run.progress
        self._set_up_engine()

        self._remaining = self._make_dispatches()
        first = next(self._remaining, None)
        if first is None and not progress.done:
            raise ValueError(self._source.explain_no_batches())
        if first is None and (progress.epoch_ended or not self._compile_at_end()):
            self._log_epoch_is_over()
            progress.next_epoch()
            return self.read_first()
        return first

    def read_epoch(self) -> Iterator[Dispatch]:
        """Yields the remaining dispatches of the present epoch."""
        remaining, self._remaining = self._remaining, None
        dispatches = self._make_dispatches() if remaining is None else remaining
        prepared, self.prepared = self.prepared, ()
        dispatches = itertools.chain(prepared, dispatches)
        engine = self._run.engine
        if not engine.prefetches:
            return dispatches
        return self._prefetch(map(engine.steps["train"].prefetch, dispatches))

    def _prefetch(self, dispatches: Iterator[Dispatch]) -> Iterator[Dispatch]:
        """Yields each dispatch after the next one was read.

        An error is raised after the dispatches before it.
        """
        following, error = take_until_error(dispatches, 1)
        while following:
            (present,), following = following, []
            if self._should_read_on(present):
                self._waiting = present.windows
                following, error = take_until_error(dispatches, 1)
            yield present
            self._waiting = []
            if not following and error is None:
                following, error = take_until_error(dispatches, 1)
        if error is None:
            return
        if error is self._pack_error:
            add_batch_note(self._run, error)
        raise error

    def _should_read_on(self, present: Dispatch) -> bool:
        """Returns whether to read the next dispatch before the present step."""
        after = self._run.progress.global_step + len(present.windows)
        is_last = self._limits is not None and self._limits.is_reached(after, 0)
        return self._can_read_ahead and not is_last

    def _set_up_engine(self) -> None:
        """Sets the options of this fit's callbacks in the engine."""
        engine, stopwatch = self._run.engine, self._run.record.stopwatch
        engine.device_state.check_not_lost()
        engine.in_flight.wait = stopwatch.time_function("device", wait)
        engine.set_options(self._hooks.step_options())

    def _compile_at_end(self) -> bool:
        """Compiles for an epoch that was left between its last step and its end.

        Returns:
            Whether the step is compiled; False if there is no batch for it.
        """
        run, start = self._run, self._source.epoch_start
        assert start is not None
        position = Position(start.epoch, state=start.state)
        num_batches = run.config.accumulate_grad_batches
        window = self._source.peek_batches(position, num_batches)
        if window:
            engine = run.config.decide_loss(run.engine, window[0])
            engine.compile_training(engine.pack([window]))
        self._remaining = iter(())
        return bool(run.engine.steps["train"].facts.names)

    def _log_epoch_is_over(self) -> None:
        """Reports an epoch without another batch.

        An earlier fit stopped at the end of an epoch of unknown length, or this one has
        a smaller loader.
        """
        progress = self._run.progress
        limit = None if self._limits is None else self._limits.train_batches
        is_cut = limit is not None and limit <= progress.done
        last = f"`limit_train_batches` is {limit}" if is_cut else "no other came"
        log_info(
            f"epoch {progress.epoch} is over: {progress.done} batches of"
            f" `train_loader` are done, and {last}"
        )

    def _make_dispatches(self) -> Iterator[Dispatch]:
        """Reads windows of batches and packs them; `read_epoch` prefetches them."""
        run, source, progress = self._run, self._source, self._run.progress
        limit = None if self._limits is None else self._limits.train_batches
        left = None if limit is None else max(0, limit - progress.done)

        batches = itertools.islice(source.read_epoch(progress.position()), left)
        windows = make_windows(batches, run.config.accumulate_grad_batches)
        windows = run.record.stopwatch.time_iterator("data", windows)
        if self._limits is not None and self._limits.sure_batches is None:
            windows = self._find_end(windows, self._limits)
        engine, slots = run.engine, run.config.accumulate_grad_batches
        pack = engine.steps["train"].packer.pack
        for window in windows:
            groups, error = [[window]], None
            if engine.steps_per_execution > 1:
                groups, error = self._group(window, windows)
            try:
                for group in groups:
                    yield pack(group, slots)
            except Exception as pack_error:
                if self._waiting:
                    self._pack_error = pack_error
                else:
                    add_batch_note(run, pack_error)
                raise
            if error is not None:
                raise error

    def _find_end(self, windows: Iterator[Window], limits: Limits) -> Iterator[Window]:
        """Yields each window after the next one was read, so that hooks know the last.

        An error is raised after the windows before it.
        """
        progress = self._run.progress
        step, end = progress.global_step, progress.done
        following, error = take_until_error(windows, 1)
        if not following and error is None:
            progress.end = end
        while following:
            (present,), following = following, []
            step, end = step + 1, end + len(present)
            reads_on = self._source.can_read_ahead and not limits.is_reached(step, 0)
            if reads_on:
                following, error = take_until_error(windows, 1)
                if not following and error is None:
                    progress.end = end
            yield present
            if not reads_on:
                following, error = take_until_error(windows, 1)
        if error is not None:
            raise error

    def _group(
        self, window: Window, windows: Iterator[Window]
    ) -> tuple[list[list[Window]], Exception | None]:
        """Returns a window with those of the same dispatch, or each in its own.

        A dispatch ends before the step that a limit or a validation is due at. An
        error of the loader is returned with the windows before it.
        """
        engine, progress, left = self._run.engine, self._run.progress, None
        if self._limits is not None:
            step = progress.global_step + len(self._waiting)
            done = progress.done + sum(map(len, self._waiting))
            left = self._limits.steps_until_stop(step, done)
        count = engine.steps_per_execution
        is_cut = left is not None and left < count
        if is_cut or not self._source.can_read_ahead:
            return [[window]], None
        more, error = take_until_error(windows, count - 1)
        group = [window, *more]
        if len(group) == count and have_equal_shapes(group, engine.micro_batches):
            return [group], error
        return [[each] for each in group], error


def make_windows(batches: Iterable[Batch], size: int) -> Iterator[Any]:
    """Yields lists or tuples of `size` batches; the last may be shorter."""
    if size == 1:
        return zip(batches)  # fast: small steps wait for it
    batches = iter(batches)
    return iter(lambda: [*itertools.islice(batches, size)], [])


def add_batch_note(run: "Run", error: Exception, steps: int = 1) -> None:
    """Adds the numbers of the next steps' batches to an error, and discards them."""
    first, size = run.progress.done, steps * run.config.accumulate_grad_batches
    where = f"in batch {first}"
    if size > 1:
        where = f"in one of the batches {first} to {first + size - 1}"
    if not isinstance(error, ValueError):
        where = f"at step {run.progress.global_step + 1}, {where}"
    error.add_note(f"{where} of epoch {run.progress.epoch} of `train_loader`")
    run.progress.discard_batches(size)
