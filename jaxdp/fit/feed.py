"""Reads the batches of an epoch, and packs them for the compiled step."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
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
from ..engine import SlowInLoop, wait
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
        self._run, self._engine = trainer.run, trainer.run.engine
        self._source, self._hooks, self._limits = source, hooks, limits
        # The dispatches of the epoch that `compile_first` has begun to read.
        self._begun: Iterator[Dispatch] | None = None
        self._waiting: list[Window] = []  # steps that are read but not launched

        # Batches may be read before the step that precedes them. Not those of a user's
        # loop, which may decide its batches; nor those of an iterator, because the next
        # fit continues at its position.
        is_fixed = limits is not None or isinstance(source.loader, list | tuple)
        self._may_read_ahead = is_fixed and not source.is_iterator

    def compile_first(self) -> None:
        """Compiles the step for the first batch; `read_epoch` begins with this batch.

        There may be no batch: a killed run may have completed all batches, but not the
        epoch's end.
        """
        run, engine, progress = self._run, self._engine, self._run.progress
        engine.device_state.check_not_lost()
        engine.in_flight.wait = run.record.stopwatch.time_function("device", wait)
        engine.set_options(self._hooks.step_options())

        dispatches = self._make_dispatches()
        first = next(dispatches, None)
        if first is not None:
            try:
                compiled = self._compile(first)
            except Exception as wrong:
                add_batch_note(run, wrong)
                raise
            self._begun = itertools.chain(compiled, dispatches)
        elif not progress.batches_done:
            raise ValueError(self._source.explain_no_batches())
        elif not progress.has_epoch_ended and self._compile_for_end():
            self._begun = iter(())
        else:
            # An earlier fit stopped at the end of an epoch of unknown length, or this
            # fit has a smaller loader or limit.
            log_info(
                f"epoch {progress.epoch} is over: {progress.batches_done} batches of"
                " `train_loader` are done, and no other comes"
            )
            progress.next_epoch()
            self.compile_first()

    def read_epoch(self) -> Iterator[Dispatch]:
        """Yields the remaining dispatches of the current epoch."""
        begun, self._begun = self._begun, None
        dispatches = self._make_dispatches() if begun is None else begun
        limits, engine = self._limits, self._engine
        if engine.prefetches:
            dispatches = map(engine.compiled_steps["train"].prefetch, dispatches)
        elif limits is None or limits.batches_per_epoch is not None:
            return dispatches
        return self._read_one_ahead(dispatches) if self._may_read_ahead else dispatches

    def _read_one_ahead(self, dispatches: Iterator[Dispatch]) -> Iterator[Dispatch]:
        """Yields each dispatch after the next one was read.

        So the next batches are on their way to the device while a step runs. At the
        last one it sets `progress.num_batches`, and callbacks know the last step of an
        epoch of unknown length. Nothing is read after the last step of the fit. An
        error of the loader is raised after the dispatches before it.
        """
        limits, progress = self._limits, self._run.progress
        following, error = take_until_error(dispatches, 1)
        while following:
            (current,), following = following, []
            after = progress.global_step + len(current.windows)
            is_last_of_fit = limits is not None and limits.is_reached(after, 0)
            if not is_last_of_fit:
                self._waiting = current.windows
                following, error = take_until_error(dispatches, 1)
                self._waiting = []
                if not following and error is None:
                    count = sum(map(len, current.windows))
                    progress.num_batches = progress.batches_done + count
            yield current
        if error is not None:
            raise error

    def _compile_for_end(self) -> bool:
        """Compiles the step for an epoch of which only the end is missing.

        Returns:
            Whether the names of the step's values are known; False if there is no batch
            to compile for.
        """
        engine = self._engine
        if self._source.can_peek:
            window = [self._source.peek_batch()] * engine.num_micro_batches
            self._compile(engine.pack([window]))
        return bool(engine.compiled_steps["train"].facts.names)

    def _compile(self, dispatch: Dispatch) -> list[Dispatch]:
        """Compiles the step; returns the dispatch, or single steps if these are faster.

        So a script for GPUs runs on a CPU unchanged.
        """
        config, engine = self._run.config, self._engine
        config.decide_loss(engine, dispatch.windows[0][0])
        try:
            engine.get_program("train", dispatch)
        except SlowInLoop as reason:
            log_info(f"{reason} This trainer runs one at a time.")
            config.steps_per_execution = 1  # in later fits too, which try no loop again
            first, *others = [engine.pack([window]) for window in dispatch.windows]
            return [*self._compile(first), *others]
        return [dispatch]

    def _make_dispatches(self) -> Iterator[Dispatch]:
        """Reads windows of batches and packs them, for one or several steps each."""
        run, engine, progress = self._run, self._engine, self._run.progress
        slots = engine.num_micro_batches
        limit = None if self._limits is None else self._limits.train_batches
        remaining = None if limit is None else max(0, limit - progress.batches_done)
        batches = self._source.read_epoch(progress.take_position())
        windows = make_windows(itertools.islice(batches, remaining), slots)
        windows = run.record.stopwatch.time_iterator("data", windows)
        pack = engine.compiled_steps["train"].packer.pack
        for window in windows:
            groups = [[window]]
            if run.config.steps_per_execution > 1:
                groups = self._group(window, windows)
            for group in groups:
                try:
                    dispatch = pack(group, slots)
                except Exception as pack_error:
                    add_batch_note(run, pack_error, waiting=self._waiting)
                    raise
                yield dispatch

    def _group(self, window: Window, windows: Iterator[Window]) -> list[list[Window]]:
        """Returns this window and the next ones as one group, for one dispatch; or as a
        group each, where they are fewer or differ in shape.

        A dispatch ends before the step that a limit or a validation is due at.
        """
        engine, progress, remaining = self._engine, self._run.progress, None
        if self._limits is not None:
            step = progress.global_step + len(self._waiting)
            done = progress.batches_done + sum(map(len, self._waiting))
            remaining = self._limits.steps_until_stop(step, done)
        count = self._run.config.steps_per_execution
        if remaining is not None and remaining < count:
            return [[window]]
        group = [window, *itertools.islice(windows, count - 1)]
        if len(group) == count and have_equal_shapes(group, engine.num_micro_batches):
            return [group]
        return [[each] for each in group]


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
    first = run.progress.batches_done + sum(map(len, waiting))
    size = steps * run.config.accumulate_grad_batches
    where = f"in batch {first}"
    if size > 1:
        where = f"in one of the batches {first} to {first + size - 1}"
    if not isinstance(error, ValueError):
        step = run.progress.global_step + len(waiting) + 1
        where = f"at step {step}, {where}"
    error.add_note(f"{where} of epoch {run.progress.epoch} of `train_loader`")
