"""The training loop of `Trainer.fit` and `Trainer.steps`, in the order of events."""

import atexit
import contextlib
import copy
import functools
import inspect
import itertools
import math
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from ..basics.arguments import check_count
from ..basics.console import log_info, warn
from ..basics.tracebacks import TracebackFilter
from ..callbacks.base import HOOKS, Hooks
from ..data import Dispatch, ListSource, Source, get_local, make_read_only
from ..distributed import PeriodicVote, Preempted, is_graceful_stop
from ..step import Metrics
from . import evaluation, resume
from .checks import log_trained_layers
from .feed import Feed, add_batch_note
from .lifecycle import FIT, STEPS, attach_second_error, check_may_train, run_activity
from .progress import FitArguments, Limits, resolve_limit

if TYPE_CHECKING:
    from jaxdp import Trainer

_Steps = Generator[Metrics, None, None]

_OPEN_LOOPS: Final = weakref.WeakSet[_Steps]()
"""The iterators of `Trainer.steps`."""


def fit(
    trainer: "Trainer",
    train_loader: Iterable[Any] | None,
    val_loader: Iterable[Any] | None,
    arguments: FitArguments,
    ckpt_path: Any,
) -> None:
    """Implements `Trainer.fit`: resumes from `ckpt_path` if given, then trains."""
    check_may_train(trainer, "fit", train_loader)
    log_trained_layers(trainer.run)
    with TracebackFilter():
        trainer.run.renew_hooks(trainer.callbacks, to_train=True)
        if ckpt_path is not None:
            resume.resume(trainer, ckpt_path)

        loop = FitLoop(trainer, train_loader, val_loader, arguments)
        if not loop.has_nothing_to_do():
            loop.run()
        elif ckpt_path is not None:
            loop.run_last_hooks()


class FitLoop:
    """One fit, from its first batch to its last hook.

    Attributes:
        progress: the completed steps and epochs of the run, and its position.
        limits: when the fit ends, and when it validates.
        train, vals: the training source, and the validation sources by name.
    """

    def __init__(
        self,
        trainer: "Trainer",
        train_loader: Iterable[Any] | None,
        val_loader: Iterable[Any] | None,
        arguments: FitArguments,
    ):
        self.trainer, self._run = trainer, trainer.run
        self._record = trainer.record
        self.progress = trainer.run.progress
        self._losses: list[str] = []  # names of the losses that were finite so far
        self._is_loader_exhausted = False  # no batch of the epoch remains
        self._stop_vote = PeriodicVote(trainer.run.processes, "whether to stop")

        # Open the loaders.
        train = trainer.run.open_source(
            train_loader,
            "train_loader",
            "train",
            in_order=bool(arguments.overfit_batches),
        )
        vals = {}
        if val_loader is not None:
            vals = evaluation.open_loaders(trainer, val_loader, "val_loader", "val")

        # Debug options reduce the epochs, or the batches of an epoch.
        check_count("fast_dev_run", int(arguments.fast_dev_run), minimum=0)
        if arguments.fast_dev_run:
            if self.progress.batches_done:
                self.progress.next_epoch()
            arguments = arguments.limit_to_fast_dev_run(self.progress.epoch)
        if arguments.overfit_batches:
            train, *sources = (
                _read_overfit_batches(source, arguments.overfit_batches)
                for source in (train, *vals.values())
            )
            vals = dict(zip(vals, sources, strict=True))

        accumulate = trainer.accumulate_grad_batches
        self.limits = Limits(train, vals, arguments, accumulate)
        self.train, self.vals = train, {} if self.limits.skips_validation else vals
        self.hooks = Hooks(
            callback
            for callback in trainer.callbacks
            if not (arguments.fast_dev_run and callback.skip_in_fast_dev_run)
        )
        self.feed: Feed
        self._fetch_means: Callable[[], dict[str, float]]

    def run(self) -> None:
        """Trains until a limit is reached, or a callback stops the fit."""
        limits, progress = self.limits, self.progress
        self._publish_limits()
        self._continue_epoch()
        with self._open_fit():
            self._prepare()

            # A killed run may have taken all steps of an epoch, but not ended it.
            while (
                not self._vote_to_stop(between_epochs=True) or self._lacks_epoch_end()
            ):
                self.hooks.on_train_epoch_start(self.trainer)

                self._train_epoch()
                if not progress.batches_done:
                    if not self.trainer.should_stop and not limits.is_time_over():
                        warn(
                            f"`train_loader` gave no batches in epoch {progress.epoch}:"
                            " a generator can be iterated only once. The fit ends here."
                        )
                    break

                if self._should_validate_at_end():
                    self._validate(ends_epoch=True)
                self._end_epoch()

            step, epoch = progress.global_step, progress.epoch
            where = f"the fit ends after step {step}, in epoch {epoch}"
            if not limits.may_stop(step, epoch):
                least = {"min_epochs": limits.min_epochs, "min_steps": limits.min_steps}
                given = " and ".join(f"`{name}`={n}" for name, n in least.items() if n)
                warn(f"{where}, before {given}")
            elif limits.is_time_over() and not limits.is_reached(step, epoch):
                log_info(f"`max_time` is over: {where}")
            if self._run.processes.count > 1:
                self._run.engine.device_state.fetch()

    def has_nothing_to_do(self) -> bool:
        """Returns True, and warns, if earlier fits have reached the limits.

        Limits are totals: they include the epochs and steps of earlier fits.
        """
        limits, progress = self.limits, self.progress
        step, epoch = progress.global_step, progress.epoch
        if not limits.is_reached(step, epoch) or self._lacks_epoch_end():
            return False
        warn(
            f"`fit` has nothing to do: {epoch} epochs and {step} steps are done, and"
            f" `max_epochs`={limits.max_epochs}, `max_steps`={limits.max_steps} are"
            " totals that include earlier fits. Raise them to continue."
        )
        return True

    def run_last_hooks(self) -> None:
        """Runs the last hooks of a fit that has nothing to do.

        A run that was killed in these hooks may not have saved its last step, removed
        old files, or restored its best weights.
        """
        with self._open_fit():
            self.hooks.setup(self.trainer)

    # Start.

    def _prepare(self) -> None:
        """Reads the first batch, places the state and compiles the step."""
        trainer, run = self.trainer, self._run
        self.hooks = run_setup_hooks(trainer, self.hooks)

        self.progress.resume_loaders(self.train, self.vals)
        self.feed = Feed(trainer, self.train, self.hooks, self.limits)
        self.feed.compile_first()
        evaluation.compile_ahead(trainer, self.vals)
        run.interrupts.check()

        # Made once a fit: a short epoch takes as long as some hundred Python calls.
        fetch_means = run.engine.fetch_epoch_means
        self._fetch_means = self._record.stopwatch.time_function("device", fetch_means)
        watches_loss = not run.engine.options.skip_nonfinite
        self._losses = ["loss"] * watches_loss + [f"{name}_loss" for name in self.vals]
        names = run.engine.compiled_steps["train"].facts.names
        of_vals = [f"{prefix}_{name}" for prefix in self.vals for name in names]
        self._record.names = (*names, *of_vals)
        self._record.names_are_all = not run.config.pass_metrics
        self._record.read_queue()  # steps before this fit; waits for the device
        self.hooks.on_fit_start(trainer)
        self.limits.start_clock()

    def _publish_limits(self) -> None:
        """Sets the attributes of trainer and record that describe this fit."""
        limits = self.limits
        vars(self.trainer).update(
            max_epochs=limits.max_epochs,
            max_steps=limits.max_steps,
            num_training_batches=limits.batches_per_epoch,
        )
        self._record.limits = limits

    def _continue_epoch(self) -> None:
        """Logs where an epoch continues, and pads its batches as a checkpoint did."""
        run, limits, progress = self._run, self.limits, self.progress
        if progress.batches_done:
            log_info(
                f"continuing epoch {progress.epoch} after batch"
                f" {progress.batches_done}, where the last fit stopped"
            )

        # The padded sizes of a checkpoint fit the batches of the same loader.
        if run.loaded_padding is None:
            return
        (steps, sizes, *saved), run.loaded_padding = run.loaded_padding, None
        now = limits.count_steps(*saved or [limits.accumulate])
        if steps == now:
            run.engine.load_padding(sizes)
        elif steps and progress.batches_done:
            warn(
                f"an epoch of `train_loader` had {steps} steps when this run was"
                f" saved, and has {now} now. The {progress.batches_done} batches that"
                " were already trained on are skipped in this epoch; with another"
                " batch size, these contain other rows."
            )

    # Epochs.

    def _train_epoch(self) -> None:
        """Runs the remaining steps of the epoch, until the fit should stop."""
        self._is_loader_exhausted, after_dispatch = False, None
        if self.vals and self.limits.val_interval is not None:
            after_dispatch = self._validate_if_due
            if self._validate_if_due():  # the run stopped before it
                self.hooks.on_boundary(self.trainer)
        steps = run_steps(
            self.trainer, self.feed.read_epoch(), self.hooks, after_dispatch
        )
        with contextlib.closing(steps):  # nothing in this block waits for the device
            while not (self._is_loader_exhausted or self._vote_to_stop()):
                self._is_loader_exhausted = next(steps, None) is None
        if self._is_loader_exhausted:
            self.progress.num_batches = self.progress.batches_done

    def _validate_if_due(self) -> bool:
        """Validates if `val_check_interval` requires it now; returns True if it did."""
        is_due = self.limits.is_interval_due(self.progress)
        if is_due:
            self._validate()
        return is_due

    def _should_validate_at_end(self) -> bool:
        """Returns True if the epoch ends with a validation.

        An epoch does so if its validation is due, or if it is the last of the fit, even
        if cut short. It does not if its current weights were validated already.
        """
        progress, limits = self.progress, self.limits
        if not self.vals or progress.validated_at == progress.batches_done:
            return False
        return (
            not self._is_loader_exhausted
            or limits.is_epoch_due(progress.epoch)
            or limits.is_reached(progress.global_step, progress.epoch + 1)
            or self._vote_to_stop(between_epochs=True)
        )

    def _validate(self, *, ends_epoch: bool = False) -> None:
        """Runs a validation; the epoch's metrics include the values of the last one."""
        arguments = self.trainer, self.vals, self.limits.val_limits, self.hooks
        with self._record.stopwatch.measure("validation"):
            metrics = self.progress.val_metrics = evaluation.evaluate(*arguments)
            self._record.put("val", metrics, ends_epoch=ends_epoch)
        self.progress.validated_at = self.progress.batches_done

    def _end_epoch(self) -> None:
        """Logs the means of the epoch and calls its hooks.

        An epoch that was cut short stays the current one, for a later fit.
        """
        progress, record = self.progress, self._record
        means = self._fetch_means()
        means |= progress.val_metrics | progress.logged
        for name in self._losses:
            if not math.isfinite(means.get(name, 0.0)):
                self._warn_of_nan(name, means[name])
        record.read_queue()  # the device has completed these steps
        record.history.append(progress.epoch, means)  # hooks may read it

        is_complete = self.limits.completes_epoch(progress.batches_done)
        progress.is_epoch_complete = self._is_loader_exhausted or is_complete
        progress.has_epoch_ended = True
        logged: dict[str, float] = {}

        def log_row() -> None:
            if logged:
                record.history.append(progress.epoch, logged)
            record.put("epoch", means | logged)

        try:
            with record.redirect_logs(metrics := dict(means)) as logged:
                self.hooks.on_train_epoch_end(self.trainer, metrics)
        except BaseException as exception:
            # A checkpoint of the exception says that the epoch is over.
            with attach_second_error(exception):
                log_row()
            raise
        log_row()
        if progress.is_epoch_complete:
            progress.next_epoch()
        progress.is_epoch_complete = False
        self.hooks.on_boundary(self.trainer)

    # End.

    def _vote_to_stop(self, between_epochs: bool = False) -> bool:
        """Returns True if the fit has reached a limit, or any process should stop.

        With several processes it sets `trainer.should_stop` of all if one of them
        should: between epochs at once, within an epoch a fraction of a second later.
        """
        trainer, limits, progress = self.trainer, self.limits, self.progress
        if progress.ahead:
            return False  # not before the end of the dispatch
        step, epoch = progress.global_step, progress.epoch
        is_late = limits.deadline is not None and limits.is_time_over()
        should_stop = trainer.should_stop or is_late
        if should_stop:
            completes_epoch = limits.completes_epoch(progress.batches_done)
            should_stop = limits.may_stop(step, epoch + completes_epoch)
        if self._run.processes.count > 1:
            vote = self._stop_vote.poll(should_stop or None, force=between_epochs)
            should_stop = bool(vote)
            trainer.should_stop = should_stop or trainer.should_stop
        return should_stop or limits.is_reached(step, epoch)

    def _lacks_epoch_end(self) -> bool:
        """Returns True if a killed run took steps of an epoch, but did not end it."""
        max_epochs, progress = self.limits.max_epochs, self.progress
        is_within = max_epochs is None or progress.epoch < max_epochs
        return is_within and progress.batches_done > 0 and not progress.has_epoch_ended

    def _warn_of_nan(self, name: str, loss: float) -> None:
        """Warns of a loss that is not finite, once in a fit."""
        self._losses = [other for other in self._losses if other != name]
        warn(
            f"the {name} of epoch {self.progress.epoch} is {loss}: that of at least one"
            " row is not finite, or all weights are 0. jaxdp.callbacks.NanGuard() ends"
            " a fit at the first step whose loss or gradients are not finite, and names"
            " them"
        )

    @contextlib.contextmanager
    def _open_fit(self) -> Iterator[None]:
        """Opens the record and holds signals back, and ends the fit after the block.

        Its end calls `on_exception` if the block raised, then `on_fit_end` and
        `teardown`, and closes the loaders. It raises a signal, unless `Preemption` has
        `fit` return.
        """
        trainer, run, hooks = self.trainer, self._run, self.hooks
        is_stopped = True  # by an exception or a signal

        def end() -> None:
            # Savers still write, so a first signal after a complete fit waits for them.
            # Processes do not wait for each other any more.
            error = None
            try:
                with contextlib.nullcontext() if is_stopped else run.interrupts:
                    with self._record.write_last_row():
                        hooks.on_fit_end(trainer)
                if not is_stopped:
                    run.interrupts.raise_pending()
            except (Preempted, KeyboardInterrupt) as stop:
                if (error := stop.__cause__) is None:
                    raise
            if error is not None:  # of a saver: it says more than the signal
                raise error

        try:
            with (
                self._record.open(),
                run_activity(trainer, FIT, hooks, end),
                run.interrupts,
            ):
                trainer.should_stop = False
                yield
                run.interrupts.check(force=True)
                is_stopped = False
        except KeyboardInterrupt as exception:
            if is_stopped and is_graceful_stop(exception):
                exception.args = (resume.format_resume_hint(trainer),)
            raise
        except Preempted as stop:
            if not run.interrupts.returns:
                raise
            if stop.later_error is not None:
                raise stop.later_error  # noqa: B904  # it keeps its own cause
        finally:
            self.progress.is_epoch_complete = False
            for source in (self.train, *self.vals.values()):
                source.close()


def _read_overfit_batches(source: Source, limit: Any) -> Source:
    """Returns a source of the batches that `overfit_batches` selects."""
    count = resolve_limit("overfit_batches", limit, source.num_batches)
    with contextlib.closing(source):
        batches = list(itertools.islice(source.read_epoch(), count))
    return ListSource(batches, source.argument)


def run_setup_hooks(trainer: "Trainer", hooks: Hooks) -> Hooks:
    """Calls `setup` of the callbacks; returns their hooks, timed if a callback asks for
    it.
    """
    hooks.setup(trainer)
    timed, stopwatch = copy.copy(hooks), trainer.record.stopwatch
    for name in HOOKS:
        hook = stopwatch.time_function("callbacks", getattr(hooks, name))
        setattr(timed, name, hook)
    return timed


def iterate_steps(trainer: "Trainer", train_loader: Iterable[Any] | None) -> _Steps:
    """Implements `Trainer.steps`: an iterator over the steps of one epoch."""
    check_may_train(trainer, "steps", train_loader)  # now, not when iterated
    log_trained_layers(trainer.run)
    steps = _iterate_steps(trainer, train_loader)
    _OPEN_LOOPS.add(steps)
    _close_loops_at_exit()
    return steps


@functools.cache
def _close_loops_at_exit() -> None:
    atexit.register(_close_loops)


def _close_loops() -> None:
    """Ends loops that were left, while Python still has the modules that they need."""
    for steps in [*_OPEN_LOOPS]:
        if inspect.getgeneratorstate(steps) != inspect.GEN_RUNNING:  # in a thread
            try:
                steps.close()
            except Exception:
                traceback.print_exc()


def _iterate_steps(trainer: "Trainer", train_loader: Iterable[Any] | None) -> _Steps:
    """Yields the steps of one epoch to a loop of the caller."""
    run = trainer.run
    run.renew_hooks(trainer.callbacks, to_train=True)
    source = run.open_source(train_loader, "train_loader", "train")
    with (
        TracebackFilter(),
        contextlib.closing(source),
        run.record.open(),
        run_activity(trainer, STEPS, run.hooks),
    ):
        run.progress.start_loader(source)
        vars(trainer)["num_training_batches"] = run.record.limits = None
        run.loaded_padding = None
        hooks = run_setup_hooks(trainer, run.hooks)

        feed = Feed(trainer, source, hooks)
        feed.compile_first()

        steps = run_steps(trainer, feed.read_epoch(), hooks)
        while True:
            with run.interrupts:  # not around the caller's code
                metrics = next(steps, None)
            if metrics is None:
                break
            yield metrics
    run.progress.next_epoch()


def run_steps(
    trainer: "Trainer",
    dispatches: Iterable[Dispatch],
    hooks: Hooks,
    after_dispatch: Callable[[], object] | None = None,
) -> _Steps:
    """Runs the steps of each dispatch and calls their hooks, without waiting for them.

    Args:
        trainer: the trainer, whose state is trained.
        dispatches: packed batches, for one or more steps each.
        hooks: the hooks to call.
        after_dispatch: called after each dispatch, where state, counters and loaders
            agree, before `on_boundary`.
    """
    run, record = trainer.run, trainer.record
    engine, progress = run.engine, run.progress
    engine.starts_epoch = progress.batches_done == 0
    if engine.starts_epoch:
        progress.examples = 0

    # A small step takes as long as a few Python calls, so hooks that no callback has
    # are skipped.
    num_micro_batches = engine.num_micro_batches
    shows_batches = "on_train_batch_start" in hooks.overridden
    has_end = "on_train_batch_end" in hooks.overridden
    has_boundary = "on_boundary" in hooks.overridden
    for dispatch in dispatches:
        last, results = len(dispatch.windows) - 1, iter(())
        # Inlines `record.batch_idx`.
        first_idx = -(-progress.batches_done // num_micro_batches)
        try:
            for number, window in enumerate(dispatch.windows):
                batch_idx = first_idx + number
                if shows_batches:
                    record.begin_step()
                    shown = [make_read_only(get_local(batch)) for batch in window]
                    batch = shown[0] if num_micro_batches == 1 else shown
                    hooks.on_train_batch_start(trainer, batch, batch_idx)

                if number == 0:
                    try:
                        results = iter(engine.train(dispatch))
                    except Exception as wrong:
                        add_batch_note(run, wrong, last + 1)
                        raise
                progress.count_step(window, dispatch.rows[number])
                progress.ahead = last - number

                metrics = next(results)
                record.put_step(metrics, batch_idx)
                if has_end:
                    hooks.on_train_batch_end(trainer, metrics, batch_idx)
                if number == last:
                    if after_dispatch is not None:
                        after_dispatch()
                    if has_boundary:
                        hooks.on_boundary(trainer)
                    run.interrupts.check()
                yield metrics
        finally:
            # An exception leaves out the hooks of the dispatch's other steps. But the
            # state includes these steps, and a resumed fit does not repeat them.
            for number in range(last + 1 - progress.ahead, last + 1):
                progress.count_step(dispatch.windows[number], dispatch.rows[number])
                progress.ahead = last - number
                record.put_step(next(results), first_idx + number, sends=False)
