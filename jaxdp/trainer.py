"""The Trainer: what a user calls. Each method hands over to one room."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from . import checkpoint, distributed, losses
from .basics.console import warn
from .callbacks import Callback
from .engine import hyperparams
from .fit import Metric, Run, Wanted, checks, evaluation, leave_if_asked, loop, snapshot
from .fit.defaults import with_defaults
from .fit.report import in_a_line, report, summary
from .history import History
from .step import Ensemble, Metrics, Part, Remat, TrainState
from .strategies import DataParallel

if TYPE_CHECKING:  # imported where they are used
    from .comparison import Comparison
    from .plan import Hardware, Plan
    from .reports import Summary


class Trainer:
    """Trains an Equinox model on batches from any iterable, on any devices.

        trainer = Trainer(model, optax.adam(1e-3), metrics=["accuracy"])
        history = trainer.fit(train_loader, val_loader, max_epochs=10)
        trainer.model                                # trained, ready to call

    Args:
        model: a callable pytree (an Equinox module), applied to one example; the step
            vmaps it. It is neither modified nor deleted.
        optimizer: any `optax.GradientTransformation`, those that evaluate the loss too
            (`optax.lbfgs()`); or a list of `Part`. `optax.adamw(1e-3)` by default.
        loss: a criterion `(prediction, target)` giving `(batch,)` or a scalar: a name
            of `jaxdp.losses.LOSSES`, or a callable such as optax's losses, of which
            those that return `(batch, ...)` are averaged over the rest. Without it and
            without `loss_fn`, integer targets get softmax cross-entropy and floating
            ones the mean squared error. With batches `(x, y, weight)` it and the
            metrics are weighted means, over each step and over the whole set.
        loss_fn: the whole computation instead: `loss_fn(model, *batch)`, where a batch
            that is no tuple is passed whole. It may name `keys` (a PRNG key per row),
            `key` (one per batch), `mask` (which rows are real, `(batch,)` bools),
            `state` (the `eqx.nn.State`), `step` (how many are completed, an int32) and
            `training` (a bool). It returns the loss, or `(loss, metrics)`, and the new
            state last if it takes one. Values shaped `(batch,)` should each come from
            their own row alone; they are averaged over real rows. A pair `(values,
            weights)`, both `(batch, ...)`, is a weighted mean over the set, of tokens
            say. A scalar is taken as the mean over the batch, whose rows may interact,
            as in contrastive losses. Such batches are never padded, and neither are
            those of a loss that names `key` or whose values depend on other rows.
        metrics: names of `jaxdp.losses.METRICS`, or `{name: criterion}`, for training
            and validation. One value per row, or `(values, weights)`, is averaged
            exactly over all rows; a scalar is averaged over batches, weighted by their
            rows. `PassMetric(fn)` is computed over a whole validation or test.
        strategy: where arrays live and how the step is compiled; `Sharded()`, all
            devices, by default.
        callbacks: called in list order.
        state: the `eqx.nn.State` of `eqx.nn.make_with_state`.
        filter_spec: which leaves are trained: a callable or a pytree of bools. Frozen
            leaves get no gradient and no optimizer state.
        precision: "32-true", "bf16-mixed", "bf16-true" or "16-mixed"; see
            docs/precision.md.
        accumulate_grad_batches: batches per optimizer step, weighted by their rows.
        gradient_clip_val: largest global norm of the gradient.
        steps_per_execution: optimizer steps per call of the compiled program, or
            "auto", which measures and picks. It changes only the speed: hooks see every
            step. If a hook may look at the state, steps run one by one.
        remat: recompute activations in the backward pass: True, a policy of
            `jax.checkpoint_policies`, or path patterns of submodules.
        data: with several processes, whether each gets the same loader ("global") or
            one with its own rows ("local"). It makes no difference to one process.
        ensemble: how many models the first axis of every array of `model` holds, or a
            `jaxdp.Ensemble`; each step trains all. See docs/ensembles.md.
        seed: decides all randomness: shuffling, dropout, augmentation.
        reproducible: "bitwise": the same bits on 1, 2, 4 and 8 devices, under
            `SingleDevice`, `Sharded` and `Pmap`; see docs/reproducibility.md.
        compiler_options: XLA's options for the steps, a dict, or an effort level: from
            "O1" on, GPUs overlap communication with computation. See docs/speed.md.
        offload: "optimizer": its state is in the host's memory between steps; see
            docs/strategies.md.
        log_every_n_steps: how often loggers write a row.
        enable_progress_bar: whether to show one.
        default_root_dir: where callbacks without a path write.
    """

    def __init__(
        self,
        model: PyTree,
        optimizer: optax.GradientTransformation | Sequence[Part] | None = None,
        *,
        loss: str | losses.Criterion | None = None,
        loss_fn: Callable[..., Any] | None = None,
        metrics: Sequence[str | Metric] | Mapping[str, Metric] = (),
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
        ensemble: int | Ensemble | None = None,
        seed: int = 0,
        reproducible: str | None = None,
        compiler_options: Mapping[str, Any] | str | None = None,
        offload: str | None = None,
        log_every_n_steps: int = 50,
        enable_progress_bar: bool = True,
        default_root_dir: str = "runs",
    ):
        arguments = checks.checked({k: v for k, v in locals().items() if k != "self"})
        several = jax.process_count() > 1
        self.callbacks = with_defaults(
            checks.check_callbacks(callbacks),
            progress_bar=enable_progress_bar,
            in_lockstep=several,
        )
        if not several and (warning := distributed.forgotten()):
            warn(warning, stacklevel=2)
        self.strategy: DataParallel = arguments["strategy"]
        self.run = Run(arguments, self.callbacks)
        """The engine, the counters and what else few callbacks need."""

        self.log_every_n_steps = int(log_every_n_steps)
        self.default_root_dir = default_root_dir
        self.history = History()
        self.should_stop = False
        self.is_global_zero = self.run.processes.index == 0
        self.max_epochs: int | None = None
        self.max_steps: int | None = None
        self.num_training_batches: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if "run" in vars(self):
            self.run.check_may_be_set(name)
        super().__setattr__(name, value)

    def fit(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
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
            val_loader: validated on after each epoch; or several loaders by name,
                `{"clean": a, "shifted": b}`, whose values are `val_clean_loss`, ...
            max_epochs: epochs in total, earlier fits counted in: 1 unless `max_steps`
                or `max_time` is given. An epoch that they cut short is gone on with by
                the next fit.
            max_steps: optimizer steps in total, earlier fits counted in.
            max_time: of this fit after compilation: "DD:HH:MM:SS", a timedelta, a dict
                of its arguments, or seconds.
            ckpt_path: resume from this checkpoint: a path, or `"last"`, `"best"` or
                `"auto"` of those that the `ModelCheckpoint` callback has saved; the
                last word starts afresh if there are none. Damaged ones are passed over.
            limit_train_batches: batches per epoch, or as a float a share of them.
            limit_val_batches: the same for validation.
            check_val_every_n_epoch: which epochs end with a validation.
            val_check_interval: also validate every so many training batches, or as a
                float after every such share of an epoch.
            fast_dev_run: run one batch (or so many) of training and validation, without
                loggers and checkpoints, to find mistakes. It counts as an epoch.
            overfit_batches: train on the first so many batches (or share of them) over
                and over, to see whether the model can learn at all.

        Returns:
            The history of this trainer: means per epoch over real rows.
        """
        leave_if_asked(self, train_loader)
        self.run.check_is_free("fit")
        wanted = Wanted(
            max_epochs,
            max_steps,
            max_time,
            limit_train_batches,
            limit_val_batches,
            check_val_every_n_epoch,
            val_check_interval,
            fast_dev_run,
            overfit_batches,
        )
        loop.fit(self, train_loader, val_loader, wanted, ckpt_path)
        return self.history

    def steps(self, train_loader: Iterable[Any]) -> Iterator[Metrics]:
        """One epoch as a generator of steps, for those who want to own the loop.

            for epoch in range(10):
                for metrics in trainer.steps(loader):
                    ...

        Callbacks' `setup` and batch hooks run; validation and the rest are left to the
        caller. `current_epoch` counts a pass that came to its end.

        Args:
            train_loader: as for `fit`.

        Yields:
            The lazy metrics of each optimizer step.
        """
        leave_if_asked(self, train_loader)
        self.run.check_is_free("steps")
        return loop.own_loop(self, train_loader)

    def validate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Exact means over the rows of `loader`, or several: `{"val_loss": ..., ...}`.

        The model is in inference mode: no dropout, running statistics in BatchNorm.
        Callbacks hear of it, but not while a fit runs.
        """
        return evaluation.validate(self, loader)

    def test(
        self, loader: Iterable[Any], ckpt_path: str | os.PathLike[str] | None = None
    ) -> dict[str, float]:
        """Like `validate`, with keys `test_loss` and so on, and without hooks.

        With `ckpt_path` of the weights of a checkpoint: of a path, or of `"best"` or
        `"last"` of those that the `ModelCheckpoint` callback has saved. The trainer
        keeps its own; `load` is for going on with a checkpoint's.
        """
        return evaluation.test(self, loader, ckpt_path)

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

        The step is compiled on shapes alone, and nothing runs. The model may be made of
        shapes too. The plan's `to_html`, `scaling` and `largest_batch` say more.

        Args:
            loader: as for `fit`; one batch of it is read, for its shapes.
            devices: how many, of which none need be here: others are faked CPU devices
                for the compiler, up to 2048. Those of the strategy by default.
            topology: hardware that is not here, for its real compiler: "h100x1024" and
                the like for GPUs, "v5p-2048" for TPU slices. Needs the extra `plan`.
            hardware: whose peaks to estimate time with: "h100", "v5e", ..., or a
                `jaxdp.plan.Hardware`. That of the devices, if known, by default.
            hosts: how many hosts the devices are on, in equal parts. A topology knows,
                and so do the devices of a job of several processes.
        """
        from .fit import previews

        return previews.plan(self, loader, devices, topology, hardware, hosts)

    def running_plan(self) -> "Plan | None":
        """The plan of the train step that runs, without compiling, or None before."""
        return self.run.plan()

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
        return evaluation.predict(self, loader, gather=gather)

    def __repr__(self) -> str:
        return in_a_line(self)

    def summary(self) -> "Summary":
        """The layers of the model, their arrays, parameters and bytes, as a table.

            print(trainer.summary())  # a notebook shows it without `print`

        Nothing is placed or compiled for it; the model may be made of shapes.
        """
        return summary(self)

    def compare(
        self, loader: Iterable[Any], *strategies: DataParallel, steps: int = 5
    ) -> "Comparison":
        """Runs the same steps under each strategy, and tells what differs.

            trainer.compare(loader, MyStrategy()).assert_close()

        Each starts from this trainer's state, which stays. The host holds each step's.

        Args:
            loader: as for `fit`.
            strategies: instances; `SingleDevice()` if there are none.
            steps: optimizer steps; fewer if the loader has fewer batches.
        """
        from .fit import previews

        return previews.compare(self, loader, strategies, steps)

    @property
    def model(self) -> PyTree:
        """The model as trained so far: a live copy, whole, on the default device."""
        if not self.run.has_engine:
            return self.run.model
        return self.run.settled_engine("`trainer.model`").held.gather()[0]

    def member(self, index: int) -> PyTree:
        """One model of an ensemble, an ordinary model."""
        return self.run.member_of(self.model, index)

    @property
    def model_state(self) -> eqx.nn.State | None:
        """The `eqx.nn.State` that belongs to `model`, or None."""
        if not self.run.has_engine:
            return self.run.model_state
        return self.run.settled_engine("`trainer.model_state`").held.gather()[1]

    @property
    def state(self) -> TrainState:
        """The placed `TrainState`. The next step overwrites it: copy what you keep.

        Writing into it is an error; a `copy.deepcopy` is yours to write to.
        """
        return self.run.settled_engine("`trainer.state`").held.hand_out()

    @property
    def hyperparams(self) -> Mapping[str, Any]:
        """What `optax.inject_hyperparams` holds, by name. Waits for the device."""
        engine = self.run.settled_engine("`trainer.hyperparams`")
        return hyperparams.values_of(engine.state)

    def set_hyperparams(self, **values: Any) -> None:
        """Sets hyperparameters of the optimizer, from the next step on.

            optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
            trainer = Trainer(model, optimizer)
            trainer.set_hyperparams(learning_rate=1e-4)  # in a callback, say

        No step is compiled again, and checkpoints have them. Of several with the same
        name, each has the key of `optax.partition` before it, or its number;
        `hyperparams` lists them: `set_hyperparams(**{"head/learning_rate": 1e-4})`. All
        processes must call it with the same values.

        Args:
            values: numbers of the shape and kind that are there; not of schedules.
        """
        engine = self.run.settled_engine("`set_hyperparams`")
        self.run.processes.same("values in `set_hyperparams`", values)
        engine.held.write(hyperparams.to_set(engine.state, values))

    def log(self, name: str, value: Any) -> None:
        """Adds a value of a callback's own to what is logged; inside hooks alone.

            trainer.log("val_auroc", auroc)  # in `on_validation_end`, say

        The history, loggers and every `monitor=` have it: with the other values of a
        validation or, from other hooks, with those of the epoch, the last one of each
        name; from batch hooks in the row of the step, too. All processes must call it;
        the first one's value is taken. One that is on the device is waited for.
        """
        if not self.run.is_fitting and not self.run.logged.is_open:
            raise RuntimeError(f"`log({name!r})`: call it in a hook of a callback.")
        self.run.logged.log(name, value, self.run.logged_names)

    @property
    def accumulate_grad_batches(self) -> int:
        """As passed. Another number needs another Trainer, which may `load`."""
        return self.run.accumulate_grad_batches

    @property
    def global_step(self) -> int:
        """Optimizer steps that were taken."""
        return self.run.progress.global_step

    @property
    def current_epoch(self) -> int:
        """The present epoch, counted from 0."""
        return self.run.progress.epoch

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes the whole `TrainState` and the counters into `path`, a new folder.

        All processes must call it, with the same path in a file system that they share.

        Returns:
            The absolute path, once all is on disk.
        """
        with self.run.interrupts.whole():
            return self.start_saving(path).finish()

    def start_saving(self, path: str | os.PathLike[str]) -> checkpoint.Saving:
        """Like `save`, but in the background; call `finish` on what it returns."""
        return snapshot.start_saving(self, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes up what `save` wrote, whatever strategy and device count wrote it.

        All of it or nothing. A callback that it lacks keeps its state, with a warning.
        """
        snapshot.load(self, path)

    def report(self, path: str | os.PathLike[str], plan: Any = None) -> str:
        """Writes one HTML page about the run: its curves, and what it was made of.

        With a `CSVLogger` it has single steps, with a `ThroughputMonitor` the speed.

        Args:
            path: of the file, or a folder to write `report.html` into; returned.
            plan: what `trainer.plan` gave, to be shown instead of `running_plan`.
        """
        return report(self, path, plan)

    def compiled_train_step(self) -> jax.stages.Compiled | None:
        """The compiled train step, or None before there is one."""
        return self.run.compiled_train_step()
