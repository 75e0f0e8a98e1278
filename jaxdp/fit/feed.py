"""Reads the batches of an epoch, and packs them for the compiled step."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..basics.console import log_info
from ..callbacks.base import Hooks
from ..data import (
    Dispatch,
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
        trainer: the trainer that runs the steps.
        source: the source of the batches.
        hooks: the hooks of the fit, which decide options of the step.
        limits: the limits of the fit; None if the user runs the loop.
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
        self._remaining: Iterator[Dispatch] | None = None  # if `compile_first` read one
        self._waiting: list[Window] = []  # steps that are read but not launched
        # A user's loop may decide its batches, so it reads only those that it needs.
        self._is_fixed = limits is not None or isinstance(source.loader, list | tuple)

    def compile_first(self) -> None:
        """Compiles the step for the first batch; `read_epoch` begins with this batch.

        There may be no batch: a killed run may have completed all batches, but not the
        epoch's end.
        """
        run, progress = self._run, self._run.progress
        self._set_up_engine()

        dispatches = self._make_dispatches()
        first = next(dispatches, None)
        if first is not None:
            self._remaining = itertools.chain([first], dispatches)
            try:
                self._compile(first)
            except Exception as wrong:
                add_batch_note(run, wrong)
                raise
        elif not progress.done:
            raise ValueError(self._source.explain_no_batches())
        elif progress.epoch_ended or not self._compile_at_end():
            # An earlier fit stopped at the end of an epoch of unknown length, or this
            # fit has a smaller loader or limit.
            log_info(
                f"epoch {progress.epoch} is over: {progress.done} batches of"
                " `train_loader` are done, and no other comes"
            )
            progress.next_epoch()
            self.compile_first()

    def read_epoch(self) -> Iterator[Dispatch]:
        """Yields the remaining dispatches of the current epoch."""
        remaining, self._remaining = self._remaining, None
        dispatches = self._make_dispatches() if remaining is None else remaining
        engine = self._run.engine
        if not engine.prefetches:
            return dispatches
        return self._prefetch(map(engine.steps["train"].prefetch, dispatches))

    def _prefetch(self, dispatches: Iterator[Dispatch]) -> Iterator[Dispatch]:
        """Yields each dispatch after the next one was read."""

        def may_read_ahead(dispatch: Dispatch) -> bool:
            after = self._run.progress.global_step + len(dispatch.windows)
            if not (self._is_fixed and self._may_read_after(after)):
                return False
            self._waiting = dispatch.windows
            return True

        for dispatch, _ in read_one_ahead(dispatches, may_read_ahead):
            yield dispatch
            self._waiting = []

    def _may_read_after(self, step: int) -> bool:
        """Returns whether batches may be read before the step that precedes them.

        They may not after the last step of the fit, nor from an iterator, because the
        next fit continues at the iterator's position.
        """
        is_last = self._limits is not None and self._limits.is_reached(step, 0)
        return not (is_last or self._source.is_iterator)

    def _set_up_engine(self) -> None:
        """Sets the options of this fit's callbacks in the engine."""
        engine, stopwatch = self._run.engine, self._run.record.stopwatch
        engine.device_state.check_not_lost()
        engine.in_flight.wait = stopwatch.time_function("device", wait)
        engine.set_options(self._hooks.step_options())

    def _compile_at_end(self) -> bool:
        """Compiles for an epoch that a run left between its last step and its end.

        Returns:
            Whether the step is compiled; False if there is no batch for it.
        """
        engine = self._run.engine
        if self._source.can_peek:
            window = [self._source.peek_batch()] * engine.micro_batches
            self._compile(engine.pack([window]))
        self._remaining = iter(())
        return bool(engine.steps["train"].facts.names)

    def _compile(self, dispatch: Dispatch) -> None:
        run = self._run
        engine = run.config.decide_loss(run.engine, dispatch.windows[0][0])
        engine.get_program("train", dispatch)

    def _make_dispatches(self) -> Iterator[Dispatch]:
        """Reads windows of batches and packs them; `read_epoch` prefetches them."""
        run, source, progress = self._run, self._source, self._run.progress
        limit = None if self._limits is None else self._limits.train_batches
        remaining = None if limit is None else max(0, limit - progress.done)

        batches = itertools.islice(source.read_epoch(progress.position()), remaining)
        windows = make_windows(batches, run.config.accumulate_grad_batches)
        windows = run.record.stopwatch.time_iterator("data", windows)
        if self._limits is not None and self._limits.batches_per_epoch is None:
            windows = self._find_end(windows)
        engine, slots = run.engine, run.config.accumulate_grad_batches
        pack = engine.steps["train"].packer.pack
        for window in windows:
            groups, error = [[window]], None
            if engine.steps_per_execution > 1:
                groups, error = self._group(window, windows)
            for group in groups:
                try:
                    dispatch = pack(group, slots)
                except Exception as pack_error:
                    add_batch_note(run, pack_error, waiting=self._waiting)
                    raise
                yield dispatch
            if error is not None:
                raise error

    def _find_end(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yields each window after reading the next, so that hooks know the last."""
        progress = self._run.progress
        step, end = progress.global_step, progress.done

        def may_read_ahead(window: Window) -> bool:
            nonlocal step, end
            step, end = step + 1, end + len(window)
            return self._may_read_after(step)

        for window, is_last in read_one_ahead(windows, may_read_ahead):
            if is_last:
                progress.end = end
            yield window
        progress.end = end

    def _group(
        self, window: Window, windows: Iterator[Window]
    ) -> tuple[list[list[Window]], Exception | None]:
        """Returns the next windows, grouped into one dispatch, or with one dispatch per
        window.

        A dispatch ends before the step that a limit or a validation is due at. An
        error of the loader is returned with the windows before it.
        """
        engine, progress, remaining = self._run.engine, self._run.progress, None
        if self._limits is not None:
            step = progress.global_step + len(self._waiting)
            done = progress.done + sum(map(len, self._waiting))
            remaining = self._limits.steps_until_stop(step, done)
        count = engine.steps_per_execution
        if remaining is not None and remaining < count:
            return [[window]], None
        more, error = take_until_error(windows, count - 1)
        group = [window, *more]
        if len(group) == count and have_equal_shapes(group, engine.micro_batches):
            return [group], error
        return [[each] for each in group], error


def read_one_ahead(
    items: Iterator[Any], may_read_ahead: Callable[[Any], bool]
) -> Iterator[tuple[Any, bool]]:
    """Yields pairs: an item, and whether it is known to be the last. Reads the next
    item first if `may_read_ahead(item)`.

    Raises an error of `items` only after it has yielded the items before the error.
    """
    following, error = take_until_error(items, 1)
    while following:
        (current,), following = following, []
        if is_ahead := may_read_ahead(current):
            following, error = take_until_error(items, 1)
        yield current, is_ahead and not following and error is None
        if not is_ahead:
            following, error = take_until_error(items, 1)
    if error is not None:
        raise error


def make_windows(batches: Iterable[Batch], size: int) -> Iterator[Any]:
    """Yields lists or tuples of `size` batches; the last may be shorter."""
    if size == 1:
        return zip(batches)  # kept fast, since small steps wait for it
    batches = iter(batches)
    return iter(lambda: [*itertools.islice(batches, size)], [])


def add_batch_note(
    run: "Run", error: Exception, steps: int = 1, waiting: Sequence[Window] = ()
) -> None:
    """Adds to an error the batch numbers of the next `steps`, counted after the
    `waiting` windows.
    """
    first = run.progress.done + sum(map(len, waiting))
    size = steps * run.config.accumulate_grad_batches
    where = f"in batch {first}"
    if size > 1:
        where = f"in one of the batches {first} to {first + size - 1}"
    if not isinstance(error, ValueError):
        step = run.progress.global_step + len(waiting) + 1
        where = f"at step {step}, {where}"
    error.add_note(f"{where} of epoch {run.progress.epoch} of `train_loader`")
