"""The batches of an epoch, as many at a time as a dispatch takes."""

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..basics.console import log_info
from ..callbacks.base import Hooks
from ..data import Dispatch, Position, Source, Window, are_alike, taken
from ..engine import wait
from ..step import Batch
from .progress import Limits

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Run


class Feed:
    """What is to be trained on, packed for the compiled step.

    Args:
        trainer: whose steps.
        source: of the batches.
        hooks: of the fit, which say how the step is compiled.
        limits: of the fit, or None if its caller has the loop.

    Attributes:
        prepared: what the engine has made of the first dispatch.
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
        self._left: Iterator[Dispatch] | None = None  # after the first one
        self._waiting: list[Window] = []  # steps that are read, and not begun
        self._refused: Exception | None = None  # by the engine, while some wait
        # The batches of a caller's loop, which it may decide, are read when it asks.
        is_known = limits is not None or isinstance(source.loader, list | tuple)
        self._reads_ahead = is_known and source.may_read_ahead

    def first(self) -> Dispatch | None:
        """Reads the first batch, to be `prepared`; `epoch` goes on from there.

        None if all batches of the epoch are done, and it lacks its end alone.
        """
        progress = self._run.progress
        self._set_up_engine()

        self._left = self._dispatches()
        first = next(self._left, None)
        if first is None and not progress.done:
            raise ValueError(self._source.gave_nothing())
        if first is None and (progress.epoch_ended or not self._compile_at_end()):
            self._say_epoch_is_over()
            progress.next_epoch()
            return self.first()
        return first

    def epoch(self) -> Iterator[Dispatch]:
        """What is left of the present epoch."""
        left, self._left = self._left, None
        dispatches = self._dispatches() if left is None else left
        prepared, self.prepared = self.prepared, ()
        dispatches = itertools.chain(prepared, dispatches)
        engine = self._run.engine
        if not engine.puts_ahead:
            return dispatches
        return self._ahead(map(engine.steps["train"].put, dispatches))

    def _ahead(self, dispatches: Iterator[Dispatch]) -> Iterator[Dispatch]:
        """Each dispatch once the next one is there; if that fails, those before it are
        taken first."""
        coming, error = taken(dispatches, 1)
        while coming:
            (present,), coming = coming, []
            if self._may_read_on(present):
                self._waiting = present.windows
                coming, error = taken(dispatches, 1)
            yield present
            self._waiting = []
            if not coming and error is None:
                coming, error = taken(dispatches, 1)
        if error is None:
            return
        if error is self._refused:
            blame(self._run, error)
        raise error

    def _may_read_on(self, present: Dispatch) -> bool:
        """Whether what comes after a dispatch may be read before that is begun."""
        after = self._run.progress.global_step + len(present.windows)
        is_last = self._limits is not None and self._limits.is_reached(after, 0)
        return self._reads_ahead and not is_last

    def _set_up_engine(self) -> None:
        """Has the engine compile what the callbacks of this fit need."""
        engine = self._run.engine
        engine.held.check()
        engine.in_flight.wait = self._run.record.stopwatch.time_function("device", wait)
        engine.set_options(self._hooks.step_options())

    def _compile_at_end(self) -> bool:
        """Compiles for an epoch that was left between its last step and its end.

        Returns:
            Whether that was done, now or before; else there was no batch for it.
        """
        run, begun = self._run, self._source.begun
        assert begun is not None
        start = Position(begun.epoch, state=begun.state)
        window = self._source.look(start, run.config.accumulate_grad_batches)
        if window:
            engine = run.config.decide_loss(run.engine, window[0])
            engine.prepare_training(engine.pack([window]))
        self._left = iter(())
        return bool(run.engine.steps["train"].facts.names)

    def _say_epoch_is_over(self) -> None:
        """An earlier fit stopped at the end of an epoch of unknown length, or this one
        has a smaller loader."""
        progress = self._run.progress
        limit = None if self._limits is None else self._limits.train_batches
        is_cut = limit is not None and limit <= progress.done
        last = f"`limit_train_batches` is {limit}" if is_cut else "no other came"
        log_info(
            f"epoch {progress.epoch} is over: {progress.done} batches of"
            f" `train_loader` are done, and {last}"
        )

    def _dispatches(self) -> Iterator[Dispatch]:
        """read -> host -> own rows -> windows -> pack; `epoch` puts them ahead."""
        run, source, progress = self._run, self._source, self._run.progress
        limit = None if self._limits is None else self._limits.train_batches
        left = None if limit is None else max(0, limit - progress.done)

        batches = itertools.islice(source.epoch(progress.position()), left)
        steps = windows(batches, run.config.accumulate_grad_batches)
        steps = run.record.stopwatch.time_iterator("data", steps)
        if self._limits is not None and self._limits.sure_batches is None:
            steps = self._noting_end(steps, self._limits)
        engine, slots = run.engine, run.config.accumulate_grad_batches
        pack = engine.steps["train"].packer.pack
        for window in steps:
            groups, error = [[window]], None
            if engine.steps_per_execution > 1:
                groups, error = self._together(window, steps)
            try:
                for group in groups:
                    yield pack(group, slots)
            except Exception as wrong:
                if self._waiting:
                    self._refused = wrong
                else:
                    blame(run, wrong)
                raise
            if error is not None:
                raise error

    def _noting_end(self, steps: Iterator[Window], limits: Limits) -> Iterator[Window]:
        """Each step once the next one is read, so that hooks know the last one; if
        reading fails, the steps before are taken first."""
        progress = self._run.progress
        step, end = progress.global_step, progress.done
        coming, error = taken(steps, 1)
        if not coming and error is None:
            progress.end = end
        while coming:
            (present,), coming = coming, []
            step, end = step + 1, end + len(present)
            may_read_on = self._source.may_read_ahead and not limits.is_reached(step, 0)
            if may_read_on:
                coming, error = taken(steps, 1)
                if not coming and error is None:
                    progress.end = end
            yield present
            if not may_read_on:
                coming, error = taken(steps, 1)
        if error is not None:
            raise error

    def _together(
        self, window: Window, steps: Iterator[Window]
    ) -> tuple[list[list[Window]], Exception | None]:
        """A step with those that run with it as one; or alone, or all one by one.

        A limit or a validation comes after the very step that it is due at. Of a loader
        that fails, the batches before are trained on first.
        """
        engine, progress, left = self._run.engine, self._run.progress, None
        if self._limits is not None:
            step = progress.global_step + len(self._waiting)
            done = progress.done + sum(map(len, self._waiting))
            left = self._limits.steps_until_stop(step, done)
        most = engine.steps_per_execution
        is_cut = left is not None and left < most
        if is_cut or not self._source.may_read_ahead:
            return [[window]], None
        more, error = taken(steps, most - 1)
        together = [window, *more]
        if len(together) == most and are_alike(together, engine.micro_batches):
            return [together], error
        return [[each] for each in together], error


def windows(batches: Iterable[Batch], size: int) -> Iterator[Any]:
    """Lists or tuples of `size` batches; the last may be shorter."""
    if size == 1:
        return zip(batches)  # quick: small steps wait for it
    batches = iter(batches)
    return iter(lambda: [*itertools.islice(batches, size)], [])


def blame(run: "Run", wrong: Exception, steps: int = 1) -> None:
    """Says which batches the next steps went wrong on, which do not come again."""
    first, size = run.progress.done, steps * run.config.accumulate_grad_batches
    where = f"in batch {first}"
    if size > 1:
        where = f"in one of the batches {first} to {first + size - 1}"
    if not isinstance(wrong, ValueError):
        where = f"at step {run.progress.global_step + 1}, {where}"
    wrong.add_note(f"{where} of epoch {run.progress.epoch} of `train_loader`")
    run.progress.discard_batches(size)
