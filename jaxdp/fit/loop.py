"""A fit, told in the order things happen: epochs, steps, validations, and its end."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..basics.console import log_info, warn
from ..basics.tracebacks import TracebackFilter
from ..callbacks.base import HOOKS, Hooks
from ..data import Dispatch, ListSource, Source, Window, own_of, read_only
from ..distributed import PeriodicVote, Preempted, is_graceful_stop, log_stop
from ..step import Metrics
from . import evaluation, resume
from .around import check_may_train, doing, noting
from .feed import Feed, blame
from .progress import Limits, Wanted, capped, check_limit

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Run


def fit(
    trainer: "Trainer",
    train_loader: Iterable[Any] | None,
    val_loader: Iterable[Any] | None,
    wanted: Wanted,
    ckpt_path: Any,
) -> None:
    """`Trainer.fit`: takes a checkpoint up, if asked, and trains what is left."""
    check_may_train(trainer, "fit", train_loader)
    with TracebackFilter():
        trainer.run.renew_hooks(trainer.callbacks, to_train=True)
        if ckpt_path is not None:
            resume.resume(trainer, ckpt_path)

        loop = Loop(trainer, train_loader, val_loader, wanted)
        if not loop.has_nothing_to_do():
            loop.run()
        elif ckpt_path is not None:
            loop.clean_up()


class Loop:
    """One fit, from its first batch to its last hook."""

    def __init__(
        self,
        trainer: "Trainer",
        train_loader: Iterable[Any] | None,
        val_loader: Iterable[Any] | None,
        wanted: Wanted,
    ):
        self.trainer, self._run = trainer, trainer.run
        self._record = trainer.record
        self.progress = trainer.run.progress
        self._told_of_minimum = self._told_of_few = self._warned_of_nan = False
        self._epoch_is_over = False  # no batch of it is left
        self._wishes = PeriodicVote(trainer.run.processes, "whether to stop")

        # The loaders.
        train = trainer.run.open(train_loader, "train_loader", "train")
        vals = {}
        if val_loader is not None:
            vals = evaluation.open_loaders(trainer, val_loader, "val_loader", "val")

        # A fit for trying leaves some of it out.
        if not isinstance(wanted.fast_dev_run, bool):
            count = wanted.fast_dev_run
            check_limit("fast_dev_run", int(count))
        if wanted.fast_dev_run:
            if self.progress.done:
                self.progress.leave_epoch()
            wanted = wanted.of_fast_dev_run(self.progress.epoch)
        if wanted.overfit_batches:
            train, *firsts = (
                ListSource(source.first(_count(source, wanted)), source.argument)
                for source in (train, *vals.values())
            )
            vals = dict(zip(vals, firsts, strict=True))

        self.limits = Limits(train, vals, wanted, trainer.accumulate_grad_batches)
        at = self.progress
        self.limits.check_minimum(at.global_step, at.epoch, at.done)
        self.limits.check_iterators(train, vals, at.global_step, at.epoch)
        self.train, self.vals = train, {} if self.limits.skips_validation else vals
        self.hooks = Hooks(
            callback
            for callback in trainer.callbacks
            if not (wanted.fast_dev_run and callback.skip_in_fast_dev_run)
        )
        self.feed: Feed
        self._evaluate: evaluation.Evaluation

    def run(self) -> None:
        """Trains until a limit is reached, or a callback stops the fit."""
        self._announce()
        with (
            doing(self.trainer, "a fit", self.hooks),
            self._record.open(),
            self._ending_well(),
        ):
            self._start()

            while self._goes_on():
                self.hooks.on_train_epoch_start(self.trainer)

                self._take_steps()
                if not self.progress.done:
                    self._warn_of_no_batches()
                    break

                if self._should_validate_at_end():
                    self._validate(ends_epoch=True)
                self._end_epoch()

            self._say_time_is_up()
            self._run.engine.held.fetch()  # several processes: each gets the model

    def has_nothing_to_do(self) -> bool:
        """Whether the limits, which are totals, were reached before; says so."""
        limits, step = self.limits, self.progress.global_step
        if not limits.done(step, self.progress.epoch) or self._lacks_its_end():
            return False
        warn(
            f"`fit` has nothing to do: {self.progress.epoch} epochs and {step} steps"
            f" are done, and `max_epochs`={limits.max_epochs}, `max_steps`="
            f"{limits.max_steps} are totals that include earlier fits. Raise them to"
            " continue."
        )
        return True

    def clean_up(self) -> None:
        """Removes what a kill at the very end of a fit may have left."""
        self.hooks = self._run.hooks
        with (
            doing(self.trainer, "a fit", self.hooks),
            self._record.open(),
            self._ending_well(),
        ):
            self.hooks.setup(self.trainer)

    # The beginning.

    def _start(self) -> None:
        """Reads the first batch, places the state and compiles the step."""
        trainer, run = self.trainer, self._run
        self.hooks = set_up(trainer, self.hooks)

        self.progress.go_on_with(self.train, self.vals)
        self.feed = Feed(trainer, self.train, self.hooks, self.limits)
        begin(trainer, self.feed)
        evaluation.compile_ahead(trainer, self.vals)
        given = trainer, self.vals, self.limits.val_limits, self.hooks
        self._evaluate = evaluation.Evaluation(*given)
        run.interrupts.check()

        names = run.engine.steps["train"].facts.names
        self._record.names = names + evaluation.names_of(self.vals, names)
        self._record.names_are_all = not run.recipe.pass_metrics
        self._record.read_queue()  # of a loop before; waits for the device
        self.hooks.on_fit_start(trainer)
        self.limits.start_clock()

    def _announce(self) -> None:
        """What callbacks may read of the fit to come."""
        trainer, run, limits = self.trainer, self._run, self.limits
        if self.progress.done:
            log_info(
                f"continuing epoch {self.progress.epoch} after batch"
                f" {self.progress.done}, where the last fit stopped"
            )

        loaded, run.loaded = run.loaded, None
        if loaded and loaded.left_behind:  # for `test`, it would not matter
            warn(
                "the checkpoint that this fit goes on from was saved with callbacks"
                f" that this trainer lacks: {loaded.left_behind}. Pass them too, to go"
                " on as before."
            )
        trainer.max_epochs, trainer.max_steps = limits.max_epochs, limits.max_steps
        trainer.num_training_batches = limits.batches_per_epoch
        self._record.limits = limits

        if loaded is None or loaded.padded_rows is None:
            return
        steps, sizes, *saved = loaded.padded_rows
        now = limits.steps_by(*saved or [limits.accumulate])
        if steps == now:
            run.engine.pad_as(sizes)  # the same loader, resumed
        elif steps and self.progress.done:
            warn(
                f"an epoch of `train_loader` had {steps} steps when this run was"
                f" saved, and has {now} now. The {self.progress.done} batches that"
                " were already trained on are skipped in this epoch; with another"
                " batch size, these contain other rows."
            )

    # An epoch.

    def _take_steps(self) -> None:
        """Takes what is left of the epoch, until the fit is to stop."""
        self._epoch_is_over, settle = False, None
        if self.vals and self.limits.val_interval is not None:
            settle = self._validate_if_due
            if self._interval_is_up():  # where the run stopped
                self._validate()
                self.hooks.on_boundary(self.trainer)
        steps = take(self.trainer, self.feed.epoch(), self.hooks, settle)
        with contextlib.closing(steps):  # the device works; nothing here waits
            while not (self._epoch_is_over or self._is_done()):
                self._epoch_is_over = next(steps, None) is None

    def _validate_if_due(self) -> None:
        if self._interval_is_up():
            self._validate()

    def _interval_is_up(self) -> bool:
        """Whether `val_check_interval` asks for a validation here."""
        at = self.progress
        return self.limits.interval_is_up(at.epoch, at.done, at.validated_at)

    def _should_validate_at_end(self) -> bool:
        """Returns True if an epoch, or what is done of it, ends with a validation.

        One that is due does, and the last of a fit, unless these weights are validated.
        """
        at, limits = self.progress, self.limits
        if not self.vals or at.validated_at == at.done:
            return False
        ends = limits.done(at.global_step, at.epoch + 1) or not self._epoch_is_over
        is_due = ends or limits.epoch_is_due(at.epoch)
        return is_due or self._is_done(between_epochs=True)

    def _validate(self, *, ends_epoch: bool = False) -> None:
        """A validation within a fit; the epoch's metrics have the last one's."""
        with self._record.stopwatch.measure("validation"):
            self.progress.val_metrics = self._evaluate()
            metrics = self.progress.val_metrics
            self._record.put("val", metrics, ends_epoch=ends_epoch)
        self.progress.validated_at = self.progress.done

    def _end_epoch(self) -> None:
        """History and hooks. An epoch cut short stays current, for a later fit."""
        progress, record = self.progress, self._record
        with record.stopwatch.measure("device"):
            means = self._run.engine.epoch_means()
        if not math.isfinite(means["loss"]):
            self._warn_of_nan(means["loss"])
        means |= progress.val_metrics | progress.logged
        record.read_queue()  # the device is done with them
        record.history.append(progress.epoch, means)  # hooks may look there

        if self._epoch_is_over and self.limits.is_short(progress.done):
            self._warn_of_few_batches()
        is_finished = self.limits.is_finished(progress.done)
        progress.is_finished = self._epoch_is_over or is_finished
        progress.epoch_ended = True
        with record.redirect_logs(metrics := dict(means)) as logged:
            self.hooks.on_train_epoch_end(self.trainer, metrics)
        if logged:
            record.history.append(progress.epoch, logged)
        record.put("epoch", means | logged)
        if progress.is_finished:
            progress.next_epoch()
        progress.is_finished = False
        self.hooks.on_boundary(self.trainer)

    # When it ends.

    def _goes_on(self) -> bool:
        """Whether there is another epoch, or the end of one."""
        return not self._is_done(between_epochs=True) or self._lacks_its_end()

    def _is_done(self, between_epochs: bool = False) -> bool:
        run, trainer, limits = self._run, self.trainer, self.limits
        if run.progress.ahead:
            return False  # not before the end of the dispatch
        is_late = limits.deadline is not None and limits.time_is_up()
        stops = trainer.should_stop or is_late
        stops = stops and self._may_stop()
        if run.processes.count > 1:
            # What one process wants, all do: at once between epochs, within them a
            # fraction of a second later.
            stops = bool(self._wishes.poll(stops or None, force=between_epochs))
            trainer.should_stop = stops or trainer.should_stop
        return stops or limits.done(self.progress.global_step, self.progress.epoch)

    def _may_stop(self) -> bool:
        """Whether a fit that is to end early has done its minimum; says once if not."""
        limits, step = self.limits, self.progress.global_step
        is_over = limits.is_finished(self.progress.done)
        may_stop = limits.may_stop(step, self.progress.epoch + is_over)
        if not (may_stop or self._told_of_minimum):
            self._told_of_minimum = True
            least = {"min_epochs": limits.min_epochs, "min_steps": limits.min_steps}
            these = " and ".join(
                f"`{k}`={value}" for k, value in least.items() if value
            )
            log_info(
                f"the fit is to end after step {step}, but goes on to reach {these}"
            )
        return may_stop

    def _lacks_its_end(self) -> bool:
        """Whether a killed run took the last step of an epoch, but did not end it."""
        most, progress = self.limits.max_epochs, self.progress
        is_inside = most is None or progress.epoch < most
        return is_inside and progress.done > 0 and not progress.epoch_ended

    def _say_time_is_up(self) -> None:
        at, limits = self.progress, self.limits
        if limits.time_is_up() and not limits.done(at.global_step, at.epoch):
            log_info(
                f"`max_time` is over: the fit ends after step {at.global_step}, in"
                f" epoch {at.epoch}"
            )

    def _warn_of_no_batches(self) -> None:
        if not self.trainer.should_stop and not self.limits.time_is_up():
            warn(
                f"`train_loader` gave no batches in epoch {self.progress.epoch}: a"
                " generator can be iterated only once. The fit ends here."
            )

    def _warn_of_nan(self, loss: float) -> None:
        is_guarded = self._run.engine.options.skip_nonfinite
        if not (self._warned_of_nan or is_guarded):
            self._warned_of_nan = True
            warn(
                f"the loss of epoch {self.progress.epoch} is {loss}:"
                " jaxdp.callbacks.NanGuard() ends a fit at the first step whose loss or"
                " gradients are not finite, and names them"
            )

    def _warn_of_few_batches(self) -> None:
        if not self._told_of_few:
            warn(
                f"`train_loader` gave {self.progress.done} batches in epoch"
                f" {self.progress.epoch}, fewer than `limit_train_batches`"
                f"={self.limits.train_batches}; the epoch ends there."
            )
        self._told_of_few = True

    @contextlib.contextmanager
    def _ending_well(self) -> Iterator[None]:
        """Whatever happens inside: callbacks hear of it, and may close their files.

        Then the passes over the loaders end.
        """
        trainer, run, hooks = self.trainer, self._run, self.hooks
        trainer.should_stop = False
        run.interrupts.defers_log = True
        try:
            with run.interrupts:
                yield
                run.interrupts.check(force=True)
        except BaseException as exception:
            with noting(exception):
                hooks.on_exception(trainer, exception)
            with noting(exception):
                with self._record.write_last_row():
                    hooks.on_fit_end(trainer)
            log_stop(exception)
            if isinstance(exception, KeyboardInterrupt) and is_graceful_stop(exception):
                exception.args = (resume.how_to_go_on(trainer),)
            if not (isinstance(exception, Preempted) and run.interrupts.returns):
                raise
        else:
            with self._record.write_last_row():
                hooks.on_fit_end(trainer)
        finally:
            self.progress.is_finished = False
            run.interrupts.defers_log = False
            for source in (self.train, *self.vals.values()):
                source.close()


def _count(source: Source, wanted: Wanted) -> int | None:
    """How many batches `overfit_batches` takes of a source."""
    return capped("overfit_batches", wanted.overfit_batches, source.num_batches)


def set_up(trainer: "Trainer", hooks: Hooks) -> Hooks:
    """Calls `setup` of the callbacks; returns their hooks, timed if one has asked."""
    hooks.setup(trainer)
    return trainer.record.stopwatch.time_methods("callbacks", hooks, HOOKS)


def own_loop(
    trainer: "Trainer", train_loader: Iterable[Any] | None
) -> Iterator[Metrics]:
    """`Trainer.steps`: one epoch, whose loop is the caller's."""
    check_may_train(trainer, "steps", train_loader)
    return _own_loop(trainer, train_loader)


def _own_loop(
    trainer: "Trainer", train_loader: Iterable[Any] | None
) -> Iterator[Metrics]:
    run = trainer.run
    run.renew_hooks(trainer.callbacks, to_train=True)
    if not run.has_looped:
        run.hooks.warn_about_steps()
    run.has_looped = True
    source = run.open(train_loader, "train_loader", "train")
    with (
        TracebackFilter(),
        contextlib.closing(source),
        run.record.open(),
        doing(trainer, "a loop of steps", run.hooks),
    ):
        run.progress.start_with(source)
        trainer.num_training_batches = run.record.limits = None
        run.loaded = run.loaded and run.loaded._replace(padded_rows=None)
        hooks = set_up(trainer, run.hooks)

        feed = Feed(trainer, source, hooks)
        begin(trainer, feed)

        steps = take(trainer, feed.epoch(), hooks)
        while True:
            with run.interrupts:  # not while the caller's code runs
                metrics = next(steps, None)
            if metrics is None:
                break
            yield metrics
    run.progress.next_epoch()


def begin(trainer: "Trainer", feed: Feed) -> None:
    """Reads the first batch and compiles the step for it."""
    run = trainer.run
    if (first := feed.first()) is None:
        return  # all of the epoch is done, but for its end
    try:
        engine = run.recipe.decide_loss(run.engine, first.windows[0][0])
        feed.prepared = engine.prepare_training(first)
    except Exception as wrong:
        blame(run, wrong)
        raise


def take(
    trainer: "Trainer",
    dispatches: Iterable[Dispatch],
    hooks: Hooks,
    settle: Callable[[], None] | None = None,
) -> Generator[Metrics, None, None]:
    """Takes the steps of each dispatch, calls their hooks, and never waits for one.

    `settle` is called after each dispatch, before its boundary: state, counters and
    loaders agree there.
    """
    run, record = trainer.run, trainer.record
    engine, progress = run.engine, run.progress
    engine.begins_epoch = progress.done == 0
    if engine.begins_epoch:
        progress.begin_epoch()

    # A small step takes as long as a few calls of Python, so here are no idle ones.
    micro_batches = run.recipe.accumulate_grad_batches
    shows_batches = hooks.has("on_train_batch_start")
    has_end, has_boundary = map(hooks.has, ("on_train_batch_end", "on_boundary"))
    for dispatch in dispatches:
        last, results = len(dispatch.windows) - 1, iter(())
        try:
            for number, window in enumerate(dispatch.windows):
                batch_idx = -(-progress.done // micro_batches)
                if shows_batches:
                    record.begin_step()
                    hooks.on_train_batch_start(trainer, _shown(run, window), batch_idx)

                if number == 0:
                    try:
                        results = iter(engine.train(dispatch))
                    except Exception as wrong:
                        blame(run, wrong, last + 1)
                        raise
                progress.count(window, dispatch.rows[number])
                progress.ahead = last - number

                metrics = next(results)
                record.put_step(metrics, batch_idx)
                if has_end:
                    hooks.on_train_batch_end(trainer, metrics, batch_idx)
                if number == last:
                    if settle is not None:
                        settle()
                    if has_boundary:
                        hooks.on_boundary(trainer)
                    run.interrupts.check()
                yield metrics
        finally:
            if progress.ahead:
                _catch_up(run, dispatch)


def _catch_up(run: "Run", dispatch: Dispatch) -> None:
    """Counts the steps of a dispatch that was left before its last hook.

    The state has them, and a fit that goes on must not take them again.
    """
    progress = run.progress
    rest = list(zip(dispatch.windows, dispatch.rows, strict=True))[-progress.ahead :]
    progress.ahead = 0
    for window, rows in rest:
        progress.count(window, rows)


def _shown(run: "Run", window: Window) -> Any:
    """What batch hooks are given: the rows that are here."""
    batches = [read_only(own_of(batch)) for batch in window]
    return batches[0] if run.recipe.accumulate_grad_batches == 1 else batches
