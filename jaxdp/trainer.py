"""The Trainer: fit, validate, predict; the loop in the order things happen."""

import contextlib
import itertools
import os
import uuid
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import PyTree

from . import checkpoint, distributed, losses
from .basics.arguments import check_choice, check_count, check_is_local, check_number
from .basics.console import say, warn
from .callbacks.base import HOOKS, Callback, Hooks, RollBack
from .callbacks.csv_logger import CSVLogger
from .callbacks.lockstep import Lockstep
from .callbacks.progress_bar import ProgressBar
from .callbacks.run_facts import run_facts
from .callbacks.states import identities, saved_states
from .callbacks.stopwatch import Phase, Stopwatch
from .checkpoint import undone_if_it_fails
from .data import (
    ALL,
    GlobalShare,
    LocalShare,
    Share,
    Source,
    inputs_of,
    open_loader,
    read_only,
    rows_of,
    shown,
    windows,
)
from .distributed import Interrupts, Preempted, Pulse, find_processes, tell
from .engine import Block, Engine, Kind, hyperparams, wait
from .fit import Limits, Progress, checks, resume
from .fit.instead import leave_if_asked
from .history import History
from .reports import layout
from .step import (
    Batch,
    CriterionObjective,
    Metrics,
    Objective,
    Remat,
    Steps,
    TrainState,
    check_remat,
    find_precision,
    means_of,
    new_totals,
    split_pair,
)
from .strategies import DataParallel, Sharded, SingleDevice
from .strategies.bitwise import Bitwise
from .strategies.cpu_options import keep_freed_memory

if TYPE_CHECKING:
    # Imported where they are used: not every fit is planned, compared or reported on.
    from .comparison import Comparison
    from .plan.hardware import Hardware
    from .plan.plan import Plan


class Trainer:
    """Trains an Equinox model on batches from any iterable, on any devices.

        trainer = Trainer(model, optax.adam(1e-3), metrics=["accuracy"])
        history = trainer.fit(train_loader, val_loader, max_epochs=10)
        trainer.model                                # trained, ready to call

    Args:
        model: a callable pytree (an Equinox module), applied to one example; the step
            vmaps it. It is neither modified nor deleted.
        optimizer: any `optax.GradientTransformation`; `optax.adamw(1e-3)` by default.
        loss: a criterion `(prediction, target)` giving `(batch,)` or a scalar: a name
            of `jaxdp.losses.LOSSES`, or a callable such as optax's losses, of which
            those that give `(batch, ...)` are averaged over the rest. Without it and
            without `loss_fn`, integer targets get softmax cross-entropy and
            floating ones the mean squared error.
        loss_fn: the whole computation instead: `loss_fn(model, *batch)`, where a batch
            that is no tuple is passed whole. It may name `keys` (a PRNG key per row),
            `key` (one per batch), `mask` (which rows are real, `(batch,)` bools) and
            `state` (the `eqx.nn.State`). It returns the loss, or `(loss, metrics)`, and
            the new state last if it takes one. Values
            shaped `(batch,)` should each come from their own row alone; they are
            averaged over real rows. A scalar is taken as the mean over the batch, whose
            rows may interact, as in contrastive losses: such batches are never padded.
            Nor are those of a loss that names `key`, whose draws may be over all rows,
            or of values per row that other rows are seen to have a part in.
        metrics: names of `jaxdp.losses.METRICS`, or `{name: criterion}`, for training
            and validation. One value per row is averaged exactly over all rows; of a
            scalar the mean over batches is taken, weighted by their rows, and more
            values per row are refused.
        strategy: where things live and how the step is compiled; `Sharded()`, all
            devices, by default.
        callbacks: called in list order.
        state: the `eqx.nn.State` of `eqx.nn.make_with_state`.
        filter_spec: which leaves are trained: a callable or a pytree of bools. Frozen
            leaves get no gradient and no optimizer state.
        precision: "32-true", "bf16-mixed", "bf16-true" or "16-mixed"; see
            docs/precision.md for what is in which dtype.
        accumulate_grad_batches: batches per optimizer step, weighted by their rows.
        gradient_clip_val: largest global norm of the gradient.
        steps_per_execution: optimizer steps that one dispatch takes, or "auto", which
            times some and picks. It changes the speed, and how far ahead batches are
            read, and nothing else: hooks see every step, and whatever has to happen
            between two steps does.
        remat: recompute activations in the backward pass: True, a policy of
            `jax.checkpoint_policies`, or path patterns of submodules.
        data: with several processes, whether each is given the same loader ("global")
            or one with its own rows ("local"). One process is its own whole.
        seed: decides initial shuffling, dropout, everything.
        reproducible: "bitwise": the same bits on 1, 2, 4 and 8 devices, under
            `SingleDevice`, `Sharded` and `Pmap`; see docs/reproducibility.md.
        log_every_n_steps: how often loggers see a row.
        enable_progress_bar: whether to show one.
        default_root_dir: where callbacks without a path write.
    """

    def __init__(
        self,
        model: PyTree,
        optimizer: optax.GradientTransformation | None = None,
        *,
        loss: str | losses.Criterion | None = None,
        loss_fn: Callable[..., Any] | None = None,
        metrics: Sequence[str] | Mapping[str, losses.Criterion] = (),
        strategy: DataParallel | None = None,
        callbacks: Sequence[Callback] = (),
        state: eqx.nn.State | None = None,
        filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
        precision: str = "32-true",
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        steps_per_execution: int | str = 1,
        remat: Remat = False,
        data: str = "global",
        seed: int = 0,
        reproducible: str | None = None,
        log_every_n_steps: int = 50,
        enable_progress_bar: bool = True,
        default_root_dir: str = "runs",
    ):
        arguments = {k: v for k, v in locals().items() if k != "self"}
        checks.check_model(model, must_be_callable=loss_fn is None)
        checks.check_state(model, state)
        optimizer = optax.adamw(1e-3) if optimizer is None else optimizer
        checks.check_optimizer(optimizer)
        own_optimizer = optimizer
        strategy = Sharded() if strategy is None else strategy
        checks.check_strategy_argument(strategy)
        check_choice("reproducible", reproducible, (None, "bitwise"))
        check_choice("data", data, ("global", "local"))
        check_count("accumulate_grad_batches", accumulate_grad_batches)
        if steps_per_execution != "auto":
            check_count(
                "steps_per_execution", steps_per_execution, or_else=" or 'auto'"
            )
        check_count("log_every_n_steps", log_every_n_steps)
        check_count("seed", seed, least=0, most=2**63 - 1)
        check_remat(remat)
        if gradient_clip_val is not None:
            none = ", or None for no clipping"
            check_number("gradient_clip_val", gradient_clip_val, above=0, or_else=none)
            clip = optax.clip_by_global_norm(float(gradient_clip_val))
            optimizer = optax.chain(clip, optimizer)

        self.arguments = {**arguments, "strategy": strategy, "optimizer": own_optimizer}
        """What the trainer was made from, by name: for the records of loggers."""
        self.strategy = strategy
        self.reproducible = reproducible
        with_bits = self._reproducibly(strategy)  # refuses now what it can't keep
        checks.check_processes(with_bits, data, reproducible)
        self.seed = int(seed)
        self.data = data
        self.log_every_n_steps = int(log_every_n_steps)
        check_is_local("default_root_dir", default_root_dir)
        self.default_root_dir = default_root_dir
        self._accumulate_grad_batches = int(accumulate_grad_batches)
        self._steps_per_execution = steps_per_execution
        self.callbacks = list(checks.check_callbacks(callbacks))
        if enable_progress_bar and not any(
            isinstance(callback, ProgressBar) for callback in self.callbacks
        ):
            # First, so that it has cleared its line before the others print.
            self.callbacks.insert(0, ProgressBar())
        if jax.process_count() > 1:
            self._guard()
        elif warning := distributed.forgotten():
            warn(warning, stacklevel=2)

        self.should_stop = False
        self.history = History()
        self.processes = find_processes()
        self.is_global_zero = self.processes.index == 0
        self.max_epochs: int | None = None
        self.max_steps: int | None = None
        self.num_training_batches: int | None = None
        self.num_val_batches: int | None = None
        self.metric_names: tuple[str, ...] = ()
        self.logged_names: tuple[str, ...] = ()

        self.run_id = self.processes.first("a new trainer", lambda: uuid.uuid4().hex)
        """Tells the checkpoints of this run, resumed or not, from those of others."""

        # What `Callback.setup` may set:
        self.donate = "state"
        self.skip_nonfinite = False
        self.stopwatch: Stopwatch | None = None
        self.last_values: dict[str, float] = {}
        self.bar_notes: dict[str, Callable[[], str]] = {}
        self.returns_when_preempted = False

        self._model = model
        self._model_state = state
        self._parts = checks.split_model(model, filter_spec)
        self._metrics = losses.find_metrics(metrics)
        self._objective = checks.choose_objective(loss, loss_fn, metrics, state)
        self._remat = remat
        self._precision = find_precision(precision)
        self._hooks = Hooks(self.callbacks)
        self.optimizer = optax.with_extra_args_support(
            self._hooks.wrap_optimizer(optimizer)
        )
        self._interrupts = Interrupts(self.processes)
        self._wishes = Pulse(self.processes, "whether to stop")
        self._engine: Engine | None = None
        self._planned: tuple[Any, Plan | None] | None = None
        self._progress = Progress()
        self._padded_rows: Any = None
        self._roll_back: RollBack | None = None
        self._epoch_is_over = False
        self._is_fitting = False

    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        max_time: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        check_val_every_n_epoch: int = 1,
        val_check_interval: int | float | None = None,
        fast_dev_run: bool | int = False,
        overfit_batches: int | float | None = None,
    ) -> History:
        """Trains until a limit is reached.

            read the first batch, place the state, compile the step
            while epochs, steps and time are left:
                for each batch:
                    step                                  # the device works on it
                    validate, if an interval is up
                validate, if the epoch is due
                append to the history

        Args:
            train_loader: a torch `DataLoader`, or any iterable of batches.
            val_loader: validated on after each epoch.
            max_epochs: epochs in total, earlier fits counted in: 1 unless `max_steps`
                or `max_time` is given. An epoch that they cut short is gone on with by
                the next fit.
            max_steps: optimizer steps in total, earlier fits counted in.
            max_time: of this fit after compilation: "DD:HH:MM:SS", a timedelta, a dict
                of its arguments, or seconds.
            ckpt_path: resume from this checkpoint: a path, or `"last"`, `"best"` or
                `"auto"` of those that the `ModelCheckpoint` callback has saved.
                `"auto"` starts afresh if there are none. A damaged one is reported,
                and the next one taken.
            limit_train_batches: batches per epoch, or as a float a share of them.
            limit_val_batches: the same for validation.
            check_val_every_n_epoch: which epochs end with a validation.
            val_check_interval: also validate every so many training batches, or as a
                float after every such share of an epoch.
            fast_dev_run: run one batch (or so many) of training and validation,
                without loggers and checkpoints, to find mistakes. It is real training,
                and counts as an epoch.
            overfit_batches: train on the first so many batches (or share of them) over
                and over, to see whether the model can learn at all.

        Returns:
            The history of this trainer: means per epoch over real rows.
        """
        arguments: dict[str, Any] = {**locals()}
        del arguments["self"]
        leave_if_asked(self, train_loader)
        self._check_is_free("fit")
        self._renew_hooks()
        if ckpt_path is not None:
            resume.resume(self, ckpt_path)
        if self._roll_back is not None:
            self._progress.left_out |= self._roll_back.left_out
            self._roll_back = None
        train = self._open(train_loader, "train_loader", "train")
        val = None
        if val_loader is not None:
            val = self._open(val_loader, "val_loader", "evaluate")
        if not isinstance(fast_dev_run, bool):
            check_count("fast_dev_run", fast_dev_run, least=0, or_else=", or bool")
        if fast_dev_run:
            limit_train_batches = limit_val_batches = int(fast_dev_run)
            check_val_every_n_epoch, val_check_interval = 1, None
            if self._progress.done:
                self._progress.leave_epoch()
            max_epochs, max_steps = self.current_epoch + 1, None
        if overfit_batches:
            train = Source(train.first(overfit_batches), train.argument)
        limits = Limits(
            train,
            val,
            max_epochs=max_epochs,
            max_steps=max_steps,
            max_time=max_time,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            check_val_every_n_epoch=check_val_every_n_epoch,
            val_check_interval=val_check_interval,
            accumulate=self.accumulate_grad_batches,
        )
        is_over = limits.done(self.global_step, self.current_epoch)
        if is_over and not self._lacks_its_end(limits):
            warn(
                f"`fit` has nothing to do: {self.current_epoch} epochs and"
                f" {self.global_step} steps are done, and `max_epochs`="
                f"{limits.max_epochs}, `max_steps`={limits.max_steps} are totals,"
                " earlier fits counted in. Raise them to train on.",
                stacklevel=2,
            )
            if ckpt_path is not None:  # a kill at the very end may have left rubbish
                with self._ending_well(self._hooks):
                    self._hooks.setup(self)
            return self.history
        if self._progress.done:
            say(
                f"going on in epoch {self.current_epoch}, after batch"
                f" {self._progress.done} of it, where the last fit stopped"
            )
        val = None if limits.skips_validation else val
        self._announce(limits, val)
        hooks = Hooks(
            callback
            for callback in self.callbacks
            if not (fast_dev_run and callback.skip_in_fast_dev_run)
        )
        with self._ending_well(hooks, train, val):
            self.stopwatch, self.last_values = None, {}
            hooks.setup(self)
            hooks = self._timed(hooks)
            self._progress.go_on_with(train, val)
            blocks = self._begin(train, limits, hooks)
            self._prepare_validation(val)
            self._interrupts.check()
            self._name_what_is_logged(val is not None)
            hooks.on_fit_start(self)
            limits.start_clock()
            limits.was_validated(self._progress.validated_at)
            while self._goes_on(limits):
                hooks.on_train_epoch_start(self)
                blocks = blocks or self._blocks(train, limits, hooks)
                self._validate_inside(val, limits, hooks)  # due where the run stopped
                with contextlib.closing(self._steps(blocks, hooks)) as steps:
                    while not self._is_done(limits) and next(steps, None) is not None:
                        self._validate_inside(val, limits, hooks)
                if self._progress.done == 0:
                    if not self.should_stop and not limits.time_is_up():
                        warn(
                            "`train_loader` gave no batches in epoch"
                            f" {self.current_epoch}: a generator can be iterated only"
                            " once. The fit ends here.",
                            stacklevel=2,
                        )
                    break
                if val is not None and limits.epoch_is_due(self.current_epoch):
                    self._validate(val, limits, hooks)
                self._end_epoch(limits, hooks)
                blocks = None
            if self.processes.count > 1:
                self._ready().fetch()
        if self._roll_back is not None:
            if hasattr(train_loader, "__next__"):
                raise RuntimeError(
                    "`train_loader` is an iterator, which can't go back to the batches"
                    f" after {self._roll_back.path}; pass an iterable that can start"
                    " again, such as a DataLoader."
                )
            arguments["ckpt_path"] = self._roll_back.path
            arguments["max_time"] = limits.time_left()
            return self.fit(**arguments)
        return self.history

    def steps(self, train_loader: Iterable[Any]) -> Iterator[Metrics]:
        """One epoch as a generator of steps, for those who want to own the loop.

            for epoch in range(10):
                for metrics in trainer.steps(loader):
                    ...

        Callbacks' `setup` and batch hooks run; the other hooks, validation and history
        are left to the caller. `current_epoch` counts a pass that came to its end.

        Args:
            train_loader: as for `fit`.

        Yields:
            The lazy metrics of each optimizer step.
        """
        leave_if_asked(self, train_loader)
        self._check_is_free("steps")
        self._renew_hooks()
        with contextlib.closing(
            self._open(train_loader, "train_loader", "train")
        ) as source:
            self._progress.start_with(source)
            self.num_training_batches = self.stopwatch = self._padded_rows = None
            self._hooks.setup(self)
            hooks = self._timed(self._hooks)
            steps = self._steps(self._begin(source, None, hooks), hooks)
            while True:
                with self._interrupts:  # not while the caller's code runs
                    metrics = next(steps, None)
                if metrics is None:
                    break
                yield metrics
        self._progress.next_epoch()

    def validate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Exact means over the rows of `loader`: `{"val_loss": ..., ...}`.

        The model is in inference mode: no dropout, running statistics in BatchNorm.
        Callbacks hear of it, but not while a fit runs, whose own they would take it
        for.
        """
        self._renew_hooks()
        self._settle()
        hooks = Hooks(()) if self._is_fitting else self._hooks
        with contextlib.closing(self._open(loader, "loader", "evaluate")) as source:
            return self._evaluate(source, "val", None, hooks)

    def test(self, loader: Iterable[Any]) -> dict[str, float]:
        """Like `validate`, with keys `test_loss` and so on, and without hooks."""
        self._settle()
        with contextlib.closing(self._open(loader, "loader", "evaluate")) as source:
            return self._evaluate(source, "test", None, Hooks(()))

    @jax.disable_jit(False)
    def plan(
        self,
        loader: Iterable[Any],
        devices: int | None = None,
        *,
        topology: str | None = None,
        hardware: "str | Hardware | None" = None,
        hosts: int | None = None,
    ) -> "Plan":
        """What a train step will take: memory, communication, operations, time.

            print(trainer.plan(loader))                      # here
            print(trainer.plan(loader, devices=64))          # with 64 devices
            print(trainer.plan(loader, topology="h100x64"))  # by the compiler for them

        The step is compiled on shapes alone. No weights are moved, nothing runs, and
        the loader and the trainer stay as they are. The model may be made of shapes,
        too, by `eqx.filter_eval_shape`: one that no machine here could hold. The
        plan's `to_html`, `scaling` and `largest_batch` say more.

        Args:
            loader: as for `fit`; one batch of it is read, for its shapes.
            devices: how many, of which none need be here: others are faked CPU devices
                for the compiler, up to 2048. Those of the strategy by default.
            topology: hardware that is not here, for its real compiler: "h100x1024" and
                the like for GPUs, "v5p-2048" for TPU slices. Needs the extra `plan`.
            hardware: whose peaks to estimate time with: "h100", "v5e", ..., or a
                `jaxdp.plan.Hardware`. That of the devices, if known, by default.
            hosts: how many hosts the devices are on, in equal parts: processes, each of
                which loads its rows and writes its part of checkpoints. A topology
                knows, and so do the devices of a job of several processes.
        """
        from .plan.plan import Planner

        if devices is not None:
            check_count("devices", devices)
            if topology is not None:
                raise ValueError(
                    f"`devices`={devices} and `topology`={topology!r} were both given;"
                    " a topology has its number of devices in its name."
                )
        if hosts is not None and topology is not None:
            raise ValueError(
                f"`hosts`={hosts} and `topology`={topology!r} were both given; a"
                " topology has its own hosts."
            )
        with contextlib.closing(open_loader(loader, "loader", self.seed)) as source:
            batch = shown(source.peek())
        options = checks.step_options(self.callbacks, self.donate, self.skip_nonfinite)
        known = (
            self._engine and self._engine.programs.steps.objective or self._objective
        )
        objective = known or self._infer_objective(batch)

        def engine_on(strategy: DataParallel) -> Engine:
            engine = self._new_engine(strategy, abstract=True)
            engine.programs.set(objective=objective)
            engine.set_options(*options, can_rewind=False)
            return engine

        window = [batch] * self.accumulate_grad_batches
        strategy = self._reproducibly(self.strategy)
        planner = Planner(engine_on, strategy, window, topology, hardware)
        if hosts is not None:
            check_count("hosts", hosts)
            planner.spread(devices, hosts)
        rows = None
        if self.data == "local" and self.processes.count > 1:
            rows = rows_of(batch) * self.processes.count  # each has other ones
        return planner.plan(devices, rows)

    def predict(self, loader: Iterable[Any], *, gather: bool = True) -> Any:
        """Predictions of the model in inference mode.

        Args:
            loader: as for `fit`; of a tuple batch, `(x, y)` say, `x` is predicted from.
            gather: whether, of several processes, each gets the predictions for all
                rows; if not, for those that it has loaded itself, and none is sent.

        Returns:
            NumPy arrays shaped `(rows, ...)`, in the structure of what the model
            returns: exactly the rows that came, in their order.
        """
        self._settle()
        with (
            contextlib.closing(self._open(loader, "loader", "predict")) as source,
            self._interrupts,
            distributed.together("predict"),
            self._ready().as_settled(),
        ):
            inputs = (inputs_of(batch) for batch in self._in_step(source, "predict"))
            done = list(self._ready().predict(inputs, gather=gather))
        if not done:
            raise ValueError(source.gave_nothing())
        return jax.tree.map(lambda *parts: np.concatenate(parts), *done)

    @jax.disable_jit(False)
    def compare(
        self, loader: Iterable[Any], *strategies: DataParallel, steps: int = 5
    ) -> "Comparison":
        """Runs the same steps under each strategy, and tells what differs.

            print(trainer.compare(loader, SingleDevice(), FSDP()))
            trainer.compare(loader, MyStrategy()).assert_close()

        Every strategy starts from this trainer's present state, which stays as it is,
        and takes the first batches of `loader`. They are compared with the trainer's
        own strategy. The host holds the state of every step meanwhile.

        Args:
            loader: as for `fit`.
            strategies: instances; `SingleDevice()` if there are none.
            steps: optimizer steps; fewer if the loader has fewer batches.
        """
        from . import comparison

        check_count("steps", steps)
        if self.processes.count > 1:
            raise RuntimeError(
                f"`compare` was called in a job of {self.processes.count} processes; it"
                " compares strategies on the devices of one. Call it in a program that"
                " runs alone, with as many faked devices if need be."
            )
        for strategy in strategies:
            checks.check_strategy_argument(strategy)
        source = self._open(loader, "loader", "train")
        with contextlib.closing(source):
            batches = map(shown, source.epoch(0))
            each = windows(batches, self.accumulate_grad_batches)
            found = list(itertools.islice(each, steps))
        if not found:
            raise ValueError(source.gave_nothing())
        own = self._ready(found[0][0])
        self._settle()
        start = own.strategy.gather(own.state)

        def trace(strategy: DataParallel) -> comparison.Trace:
            engine = self._new_engine(self._reproducibly(strategy))
            engine.programs.steps = own.programs.steps._replace(inside=())
            engine.state = engine.strategy.place(start)
            return comparison.trace(engine, strategy, found)

        traces = [trace(s) for s in strategies or (SingleDevice(),)]
        return comparison.compare(trace(self.strategy), traces)

    @property
    def model(self) -> PyTree:
        """The model as trained so far: a live copy, whole, on the default device."""
        if self._engine is None:
            return self._model
        self._settle()
        return self._engine.gather()[0]

    def model_of(self, state: TrainState) -> PyTree:
        """The model with the weights of a placed `state`, as `model` gives it."""
        return self._ready().model_of(state)[0]

    @property
    def model_state(self) -> eqx.nn.State | None:
        """The `eqx.nn.State` that belongs to `model`, or None."""
        if self._engine is None:
            return self._model_state
        self._settle()
        return self._engine.gather()[1]

    @property
    def state(self) -> TrainState:
        """The placed `TrainState`. The next step overwrites it: copy what you keep.

        It shows what is on the devices, and writing into it is an error. A
        `copy.deepcopy` is yours to write to.
        """
        engine = self._ready()
        self._settle()
        return engine.hand_out()

    @property
    def hyperparams(self) -> Mapping[str, Any]:
        """What `optax.inject_hyperparams` holds, by the names of `set_hyperparams`.

        To read them waits for the device.
        """
        engine = self._ready()
        self._settle()
        return hyperparams.values_of(engine.state)

    def set_hyperparams(self, **values: Any) -> None:
        """Sets hyperparameters of the optimizer, from the next step on.

            optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
            trainer = Trainer(model, optimizer)
            trainer.set_hyperparams(learning_rate=1e-4)  # in a callback, say

        They are in the optimizer's state, so that no step is compiled again, and
        checkpoints have them. Of several with the same name, each has the key of
        `optax.partition` before it, or its number; `hyperparams` lists them:
        `set_hyperparams(**{"head/learning_rate": 1e-4})`. All processes must call it
        with the same values.

        Args:
            values: numbers of the shape and kind that are there. What a schedule sets
                can't be set.
        """
        engine = self._ready()
        self._settle()
        if engine.ahead:
            raise RuntimeError(
                "`set_hyperparams` was called between steps that run as one"
                f" (`steps_per_execution`={self.steps_per_execution}), and those after"
                " it are running already. Call it in `on_boundary` (with `next_stop` at"
                " the steps you need) or at the end of an epoch; or leave"
                " `looks_inside_blocks` of the callback True."
            )
        self.processes.same("values in `set_hyperparams`", values)
        engine.write(hyperparams.to_set(engine.state, values))

    @property
    def accumulate_grad_batches(self) -> int:
        """As passed. Another number needs another Trainer, which may `load`."""
        return self._accumulate_grad_batches

    @property
    def steps_per_execution(self) -> int | str:
        """As passed; what "auto" has picked is said when it is."""
        return self._steps_per_execution

    @property
    def global_step(self) -> int:
        """Optimizer steps that were taken."""
        return self._progress.global_step

    @property
    def current_epoch(self) -> int:
        """The present epoch, counted from 0."""
        return self._progress.epoch

    @property
    def examples_seen(self) -> int:
        """Real rows of the present epoch that steps have had."""
        return self._progress.examples

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether all steps of the epoch are done, and what ends it is still to come:
        validation, history, `on_train_epoch_end`."""
        total, done = self.num_training_batches, self.batch_idx
        return (
            total is not None and 0 < total <= done and not self._progress.epoch_ended
        )

    @property
    def batch_idx(self) -> int:
        """Optimizer steps done of the present epoch: the number of the next one."""
        return -(-self._progress.done // self.accumulate_grad_batches)

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes the whole `TrainState` and the counters into the folder `path`.

        With several processes all must call it, with the same path in a file system
        that they share; each writes what its devices hold.

        Returns:
            The absolute path, once all is on disk. Raises `FileExistsError` if
            something is there already.
        """
        with self._interrupts.whole():
            return self.start_saving(path).finish()

    def start_saving(self, path: str | os.PathLike[str]) -> checkpoint.Saving:
        """Like `save`, but goes on in the background; call `finish` on what it returns.

        The state is that of now, and the next step may overwrite it.
        """
        with self._interrupts.whole():
            return self._start_saving(path)

    def _start_saving(self, path: str | os.PathLike[str]) -> checkpoint.Saving:
        self._renew_hooks()
        self._settle()
        state = self._ready().state
        meta = {
            "run_id": self.run_id,
            **self._progress.state_dict(self._share("train")),
            "seed": self.seed,
            "history": self.history.state_dict(),
            "callbacks": {
                name: checks.check_json(name, callback.state_dict())
                for name, callback in self.named_callbacks()
            },
            "identities": identities(self),
            "padded_rows": self._padded_rows
            or [
                self.num_training_batches,
                self._ready().sizes,
                self.accumulate_grad_batches,
            ],
            "strategy": repr(self.strategy),
            "devices": len(state.step.sharding.device_set),
        }
        with self._phase("checkpoints"):
            saving = checkpoint.start_saving(
                path,
                state,
                meta,
                lambda path: self._hooks.on_save_checkpoint(self, path),
                lambda: self._phase("checkpoints"),
            )
        return saving

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes up what `save` wrote, whatever strategy and device count wrote it.

        The callbacks should be the same; those that are not keep their present state,
        with a warning. What can't be taken up whole changes nothing.
        """
        with self._interrupts.whole():
            with undone_if_it_fails(self._progress, self.history, *self.callbacks):
                state, meta = checkpoint.restore(
                    path, self._ready().state, lambda meta: self._take_up(path, meta)
                )
                state = self._ready().strategy.place(state)
            self._ready().state = state
            self.run_id = meta.get("run_id", self.run_id)
            self._epoch_is_over = False
            self._padded_rows = meta.get("padded_rows")
            self._ready().pad_as({})  # larger batches since then are none of that run's

    def _take_up(self, path: str | os.PathLike[str], meta: dict[str, Any]) -> None:
        """The counters, history and callbacks of a checkpoint."""
        take_up: Callable[..., None] = self._progress.load_state_dict
        with resume.taking_up(path, "the loaders' positions", take_up):
            self._progress.check(meta)
            take_up(meta, self._share("train"))
        self.history.load_state_dict(meta["history"])
        if meta["seed"] != self.seed:
            warn(
                f"`load`: {path} was saved with `seed`={meta['seed']}, and this trainer"
                f" has `seed`={self.seed}, which decides the order of data.",
                stacklevel=5,
            )
        saved = saved_states(self, meta)
        for name, callback in self.named_callbacks():
            if name in saved:
                take_up = callback.load_state_dict
                with resume.taking_up(path, f"the callback {name}", take_up):
                    take_up(saved[name])
            elif callback.state_dict():
                warn(
                    f"`load`: {path} has no state for the callback {name}; it keeps its"
                    " own.",
                    stacklevel=5,
                )

    def last_checkpoint(self, before: int) -> str | None:
        """The newest checkpoint of fewer than `before` steps that the callbacks saved.

        Its path, or None if there is none.
        """
        return resume.last_checkpoint(self, before)

    def stop_on(self, *signals: str, returns: bool = False) -> None:
        """Which signals end a fit at the next boundary, saved; for `Callback.setup`.

        Args:
            signals: their names; `"SIGTERM"` and `"SIGHUP"` by default.
            returns: whether `fit` returns then, instead of exiting with code 143.
        """
        self._interrupts.listen(signals)
        self.returns_when_preempted = returns

    def report(self, path: str | os.PathLike[str], plan: Any = None) -> str:
        """Writes one HTML page about the run, which opens anywhere, also offline.

        It has the curves, where every leaf of the state is, and what the run was made
        of. With a `CSVLogger` the curves have single steps too, and with a
        `ThroughputMonitor` besides there is the throughput.

        Args:
            path: of the file, or a folder to write `report.html` into.
            plan: what `trainer.plan` gave, to be shown instead of `running_plan`.

        Returns:
            The path of the file.
        """
        from .reports import read_run, run_of_history, write_report

        record: dict[str, Any] = dict(run_facts(self, None))
        tables = [c.path for c in self.callbacks if isinstance(c, CSVLogger)]
        tables = [table for table in tables if table is not None and table.exists()]
        file = Path(path)
        if file.is_dir() or not file.suffix:
            file = file / "report.html"
        if tables:
            run = read_run(tables[0])
            run.record.update({**record, **run.record, "layout": layout(self.state)})
            run = run._replace(name=str(tables[0].parent))
        else:
            record["layout"] = layout(self.state)
            run = run_of_history(str(self.default_root_dir), self.history, record)
        return str(write_report(run, file, plan or self.running_plan()))

    def flops_per_example(self, batch: Batch) -> float:
        """Matrix operations per row of a training step: products and convolutions.

        Of the forward and backward pass, without what `remat` computes again and
        without what is element by element. Traces the step once more.

        Args:
            batch: as `on_train_batch_start` has it.
        """
        window = [batch] if self.accumulate_grad_batches == 1 else batch
        return self._ready(window[0]).flops_per_row(window)

    def compiled_train_step(self) -> jax.stages.Compiled | None:
        """The compiled train step, or None before there is one."""
        program = None if self._engine is None else self._engine.programs.of_training()
        return None if program is None else program.compiled

    def running_plan(self) -> "Plan | None":
        """The plan of the train step that is compiled and runs, or None before one.

        It costs no compilation, unlike `plan`, which knows more: matrix operations,
        and other devices. Loggers show it.
        """
        from .plan.plan import of_running

        compiled = self.compiled_train_step()
        if self._engine is None or compiled is None:
            return None
        if self._planned is None or self._planned[0] is not compiled:
            self._planned = compiled, of_running(self._engine)
        return self._planned[1]

    def state_arrays(self) -> dict[str, jax.Array]:
        """The arrays that the compiled step takes of `state`, in its order.

        Small leaves cross in one array, whose name lists their paths.
        """
        return self._ready().arrays()

    @property
    def is_fitting(self) -> bool:
        """Whether `fit` is running."""
        return self._is_fitting

    @property
    def batch_sizes(self) -> dict[str, int]:
        """How many rows batches are padded to: of training, validation, prediction."""
        return self._ready().sizes

    @property
    def program_digests(self) -> tuple[str, ...]:
        """Of the programs compiled so far, in a job of several processes."""
        return () if self._engine is None else self._engine.strategy.program_digests

    # What the public methods are made of, in the order that `fit` uses it.

    def _renew_hooks(self) -> None:
        """Callbacks may have been added since the last time, or taken out."""
        checks.check_callbacks(self.callbacks)
        self._hooks = self._hooks.renewed(self.callbacks)

    def _check_is_free(self, method: str) -> None:
        if self._is_fitting:
            raise RuntimeError(
                f"`{method}` was called while a fit of the same trainer is running,"
                " from a callback perhaps; use a Trainer of its own."
            )

    def _guard(self) -> None:
        """Lets processes meet before anything else happens at a hook."""
        guards = [c for c in self.callbacks if isinstance(c, Lockstep)] or [Lockstep()]
        others = [c for c in self.callbacks if not isinstance(c, Lockstep)]
        self.callbacks = guards + others

    @contextlib.contextmanager
    def _ending_well(self, hooks: Hooks, *sources: Source | None) -> Iterator[None]:
        """Whatever happens inside: callbacks hear of it, and may close their files.

        Then the passes over `sources` end.
        """
        self.should_stop, self._is_fitting = False, True
        self._interrupts.saves_first = True
        try:
            with self._interrupts:
                yield
                self._interrupts.check(now=True)
        except RollBack as request:
            # The fit ends here, and is resumed like any other.
            hooks.on_fit_end(self)
            self._roll_back = request
        except BaseException as exception:
            with self._noting(exception):
                hooks.on_exception(self, exception)
            with self._noting(exception):
                hooks.on_fit_end(self)
            tell(exception)
            if not (isinstance(exception, Preempted) and self.returns_when_preempted):
                raise
        else:
            hooks.on_fit_end(self)
        finally:
            self._is_fitting = self._epoch_is_over = self._progress.is_whole = False
            self._interrupts.saves_first = False
            for source in sources:
                if source is not None:
                    source.close()

    @contextlib.contextmanager
    def _noting(self, exception: BaseException) -> Iterator[None]:
        """Keeps a second exception from hiding the first."""
        try:
            yield
        except Exception as second:
            text = f"{type(second).__name__}: {second}"
            exception.add_note(f"and after that: {text}")
            if isinstance(exception, Preempted):  # whose notes nobody gets to see
                say(f"{exception.signal}: {text}")

    def _begin(
        self, source: Source, limits: Limits | None, hooks: Hooks
    ) -> Iterator[Block]:
        """Reads a batch and compiles for it; returns what is left of the epoch."""
        engine = self._ready()
        engine.check_state()
        engine.in_flight.wait = wait
        if self.stopwatch is not None:
            engine.in_flight.wait = self.stopwatch.function("device", wait)
        engine.set_options(
            self.donate,
            self.skip_nonfinite,
            can_rewind=limits is None or hooks.look_inside_blocks,
        )
        engine.steps_per_epoch = None if limits is None else limits.steps_per_epoch
        blocks = self._blocks(source, limits, hooks)
        first = next(blocks, None)
        if first is None and self._progress.done:
            return self._begin_at_end(source, limits, hooks)
        if first is None:
            raise ValueError(source.gave_nothing())
        try:
            self._ready(first.windows[0][0])
            blocks = itertools.chain(engine.prepare_training(first), blocks)
        except Exception as wrong:
            if not engine.strategy.compiles:  # the step has run
                wrong.add_note(f"at step {self.global_step + 1}, {self._place()}")
            self._progress.begin()
            raise
        return blocks

    def _begin_at_end(
        self, source: Source, limits: Limits | None, hooks: Hooks
    ) -> Iterator[Block]:
        """Where the epoch has no batch left, but what ends it may be to come."""
        engine, progress = self._ready(), self._progress
        if not progress.epoch_ended:
            # It was saved between the last step of an epoch and what ends the epoch.
            with source.looking_back():
                again = source.epoch(progress.epoch)
                window = next(windows(again, self.accumulate_grad_batches), None)
            if window is not None:
                self._ready(window[0])
                engine.prepare_training(*engine.blocks([window]))
                return iter(())
        # An earlier fit stopped at the end of an epoch of unknown length, or this one
        # has a smaller loader.
        limit = None if limits is None else limits.train_batches
        is_cut = limit is not None and limit <= progress.done
        last = f"`limit_train_batches` is {limit}" if is_cut else "no other came"
        say(
            f"epoch {progress.epoch} is over: of `train_loader` {progress.done} batches"
            f" are done, and {last}"
        )
        progress.next_epoch()
        return self._begin(source, limits, hooks)

    def _prepare_validation(self, val: Source | None) -> None:
        """Compiles it now, so that what is wrong with it shows before an epoch."""
        sample = None if val is None else val.sample()
        if sample is not None:
            self._ready().prepare("evaluate", sample)

    def _blocks(
        self, source: Source, limits: Limits | None, hooks: Hooks
    ) -> Iterator[Block]:
        """What is left of the epoch, as many batches at a time as a dispatch takes."""
        engine, progress = self._ready(), self._progress
        limit = None if limits is None else limits.train_batches
        steps = progress.steps(source, self.accumulate_grad_batches, limit)
        if self.stopwatch is not None:
            steps = self.stopwatch.iterator("data", steps)
        error = None
        while error is None:
            # Of a loader that fails, the batches before it are trained on first.
            room = self._room(limits, hooks) if source.may_read_ahead else 1
            found, error = progress.take(steps, room)
            if not found and error is None:
                return
            try:
                yield from engine.blocks(found)
            except Exception as wrong:
                progress.begin()  # the wrong batch does not come again
                wrong.add_note(self._place())
                raise
        raise error

    def _room(self, limits: Limits | None, hooks: Hooks) -> int:
        """How many steps may run as one, before somebody must see the state."""
        most = self._ready().steps_per_execution
        if most == 1 or self._progress.left_out:
            return 1
        stop = hooks.next_stop(self)
        rooms = [most] if stop is None else [most, stop - self.global_step]
        if limits is not None:
            left = limits.steps_until_stop(self.global_step, self._progress.done)
            rooms += [] if left is None else [left]
        return max(1, min(rooms))

    def _steps(
        self, blocks: Iterable[Block], hooks: Hooks
    ) -> Generator[Metrics, None, None]:
        """Takes the steps of `blocks`, and never waits for one."""
        engine, progress = self._ready(), self._progress
        if progress.done == 0:
            engine.start_epoch()
            progress.begin_epoch()
        self._epoch_is_over, left_out = False, progress.left_out
        looks = hooks.has("on_train_batch_start")
        batch_idx = self.batch_idx
        for block in blocks:
            # What is left out is a block of its own, see `_room`.
            if left_out and (progress.epoch, batch_idx) in left_out:
                for window in block.windows:
                    progress.begin()
                    progress.pass_over(window)
                    batch_idx += 1
                continue
            try:
                ahead: Iterator[Metrics] = iter(())
                for window, rows in zip(block.windows, block.packed.rows, strict=True):
                    if looks:
                        hooks.on_train_batch_start(self, self._shown(window), batch_idx)
                    progress.begin()
                    if engine.ahead == 0:
                        try:
                            ahead = iter(engine.train(block, window))
                        except ValueError as wrong:
                            wrong.add_note(self._place())
                            raise
                        except Exception as wrong:
                            step = self.global_step + 1
                            wrong.add_note(f"at step {step}, {self._place()}")
                            raise
                    metrics = next(ahead)
                    engine.ahead -= 1
                    progress.count(window, rows)
                    hooks.on_train_batch_end(self, metrics, batch_idx)
                    batch_idx += 1
                    if engine.ahead == 0:
                        hooks.on_boundary(self)
                        self._interrupts.check()
                    yield metrics
            finally:
                if engine.ahead:
                    self._leave(block)
        self._epoch_is_over = True

    def _place(self) -> str:
        """Where the next step's batches are, for messages."""
        first, size = self._progress.done, self.accumulate_grad_batches
        those = f"batch {first}"
        if size > 1:
            those = f"one of the batches {first} to {first + size - 1}"
        return f"in {those} of epoch {self.current_epoch} of `train_loader`"

    def _shown(self, window: list[Batch]) -> Any:
        """What batch hooks are given: the rows that are here."""
        batches = [read_only(shown(batch)) for batch in window]
        return batches[0] if self.accumulate_grad_batches == 1 else batches

    def _settle(self) -> None:
        """Takes the state back to `global_step`, if the device is ahead in a block.

        Not where the block's start was not kept.
        """
        engine = self._ready()
        engine.check_handed_out()
        if engine.ahead and engine.can_rewind:
            engine.rewind()

    def _leave(self, block: Block) -> None:
        """Has state and counters agree, where a block is left before its last step."""
        self._settle()
        engine = self._ready()
        if engine.ahead:
            rest = zip(block.windows, block.packed.rows, strict=True)
            for window, rows in list(rest)[-engine.ahead :]:
                self._progress.begin()
                self._progress.count(window, rows)
            engine.ahead = 0

    def _in_step(
        self, source: Source, doing: str, limit: int | None = None
    ) -> Iterator[Any]:
        """The batches of a pass, all processes taking the same ones; signals heard."""
        for callback in self.callbacks:
            if isinstance(callback, Lockstep):
                callback.set_limits()
        self.processes.all(f"the start of {doing}", None)
        for number, batch in enumerate(itertools.islice(source.epoch(0), limit)):
            self.processes.step(f"batch {number} of {doing}")
            yield batch
            self._interrupts.check()
        self.processes.all(f"the end of {doing}", None)

    def _validate_inside(
        self, val: Source | None, limits: Limits, hooks: Hooks
    ) -> None:
        """Validates if `val_check_interval` asks for it here."""
        progress = self._progress
        if val is not None and limits.interval_is_up(progress.epoch, progress.done):
            self._validate(val, limits, hooks)

    def _validate(self, source: Source, limits: Limits, hooks: Hooks) -> None:
        """A validation within a fit; the epoch's metrics have the last one's."""
        with self._phase("validation"):
            metrics = self._evaluate(source, "val", limits.val_limit, hooks)
        self._progress.val_metrics = metrics
        self._progress.validated_at = self._progress.done

    def _evaluate(
        self, source: Source, prefix: str, limit: int | None, hooks: Hooks
    ) -> dict[str, float]:
        hooks.on_validation_start(self)
        totals, batch_idx = new_totals(), -1
        with (
            source.a_pass(),
            self._interrupts,
            distributed.together(prefix),
            self._ready().as_settled(),
        ):
            engine = self._ready()
            weights = engine.weights()
            for batch_idx, batch in enumerate(self._in_step(source, prefix, limit)):
                self._ready(batch)
                totals = engine.evaluate(weights, batch, totals, batch_idx)
                hooks.on_validation_batch_end(self, batch_idx)
        if batch_idx < 0:
            raise ValueError(source.gave_nothing())
        means = means_of(np.asarray(totals), engine.facts["evaluate"].names)
        metrics = {f"{prefix}_{name}": value for name, value in means.items()}
        hooks.on_validation_end(self, metrics)
        return metrics

    def _end_epoch(self, limits: Limits, hooks: Hooks) -> None:
        """History and hooks. An epoch cut short stays current, for a later fit."""
        progress = self._progress
        with self._phase("device"):
            metrics = self._ready().epoch_means() | progress.val_metrics
        self.history.append(progress.epoch, metrics)
        progress.is_whole = self._epoch_is_over or limits.is_whole(progress.done)
        progress.epoch_ended = True
        hooks.on_train_epoch_end(self, metrics)
        if progress.is_whole:
            progress.next_epoch()
        progress.is_whole = self._epoch_is_over = False
        hooks.on_boundary(self)

    def _timed(self, hooks: Hooks) -> Hooks:
        """`hooks`, measured if a callback has asked for it."""
        if self.stopwatch is None:
            return hooks
        return self.stopwatch.methods("callbacks", hooks, HOOKS)

    def _phase(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        if self.stopwatch is None:
            return contextlib.nullcontext()
        return self.stopwatch.phase(phase)

    def named_callbacks(self) -> Iterator[tuple[str, Callback]]:
        """Callbacks by class, the second of a class as `Name:1`, in any list."""
        counts: dict[str, int] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            count = counts[name] = counts.get(name, -1) + 1
            yield f"{name}:{count}" if count else name, callback

    def _is_done(self, limits: Limits, between_epochs: bool = False) -> bool:
        engine = self._ready()
        if engine.ahead and not engine.can_rewind:
            return False  # not before the end of the block
        stops = self.should_stop or limits.time_is_up()
        if self.processes.count > 1:
            # What one process wants, all do: at once between epochs, within them a
            # fraction of a second later.
            stops = bool(self._wishes.beat(stops or None, now=between_epochs))
            self.should_stop = stops or self.should_stop
        return stops or limits.done(self.global_step, self.current_epoch)

    def _goes_on(self, limits: Limits) -> bool:
        """Whether there is another epoch, or the end of one."""
        is_done = self._is_done(limits, between_epochs=True)
        return not is_done or self._lacks_its_end(limits)

    def _lacks_its_end(self, limits: Limits) -> bool:
        """Whether a killed run took the last step of an epoch, but did not end it."""
        is_inside = limits.max_epochs is None or self.current_epoch < limits.max_epochs
        return is_inside and self._progress.done > 0 and not self._progress.epoch_ended

    def _announce(self, limits: Limits, val: Source | None) -> None:
        """What callbacks may read of the fit to come."""
        self.max_epochs, self.max_steps = limits.max_epochs, limits.max_steps
        self.num_training_batches = limits.steps_per_epoch
        self.num_val_batches = None if val is None else limits.val_batches
        if self._padded_rows is None:
            return
        steps, sizes, *saved = self._padded_rows
        now = limits.steps_by(*saved or [self.accumulate_grad_batches])
        if steps == now:
            self._ready().pad_as(sizes)  # the same loader, resumed
        elif steps and self._progress.done:
            warn(
                f"an epoch of `train_loader` had {steps} steps when this run was saved,"
                f" and has {now} now. As ever, the {self._progress.done} batches that"
                " were trained on are left out of the present epoch; with another batch"
                " size these are other rows.",
                stacklevel=3,
            )
        self._padded_rows = None

    def _name_what_is_logged(self, validates: bool) -> None:
        self.metric_names = self._ready().facts["train"].names
        val_names = tuple(f"val_{name}" for name in self.metric_names)
        self.logged_names = self.metric_names + (val_names if validates else ())

    def _ready(self, batch: Batch | None = None) -> Engine:
        """The engine, its state placed, and with a `batch` its loss decided."""
        if self._engine is None:
            checks.check_has_arrays(self._model)
            if jax.default_backend() == "cpu":
                keep_freed_memory()
            self._engine = self._new_engine(self._reproducibly(self.strategy))
        if batch is not None and self._engine.programs.steps.objective is None:
            self._engine.programs.infer(self._infer_objective(batch))
        return self._engine

    def _open(self, loader: Any, argument: str, kind: Kind) -> Source:
        """What a user passed as `argument`, shared out to the processes."""
        if self._engine is not None and not self._is_fitting:
            self._engine.follow_settings()
        return open_loader(loader, argument, self.seed, self._share(kind))

    def _share(self, kind: Kind) -> Share:
        if self.processes.count == 1:
            return ALL
        if self.data == "local":
            return LocalShare(self.processes)
        return GlobalShare(self.processes, lambda: self._ready().packers[kind])

    def _new_engine(self, strategy: DataParallel, *, abstract: bool = False) -> Engine:
        """A new engine, with the state of a trainer that has not been trained."""
        return Engine(
            self._parts,
            self._model_state,
            Steps(
                self._parts[2],
                self._objective,
                self.optimizer,
                self._hooks.inside_step(),
                remat=self._remat,
                precision=self._precision,
            ),
            strategy,
            seed=self.seed,
            micro_batches=self.accumulate_grad_batches,
            steps_per_execution=1 if abstract else self.steps_per_execution,
            view=self._hooks.evaluated_state(),
            in_order=self.data == "global",
            abstract=abstract,
        )

    def _infer_objective(self, batch: Batch) -> Objective:
        name, reason = losses.infer_loss(split_pair(shown(batch))[1])
        say(f"`loss` is not given: {name!r}, because {reason}")
        return CriterionObjective(losses.LOSSES[name], self._metrics)

    def _reproducibly(self, strategy: DataParallel) -> DataParallel:
        return Bitwise(strategy) if self.reproducible else strategy
