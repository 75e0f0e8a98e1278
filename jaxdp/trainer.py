"""The Trainer: the public methods, each of which calls one package."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

import jaxdp

from . import checkpoint, losses
from .basics.arguments import checks_arguments
from .basics.files import expand_path
from .callbacks import Callback
from .engine.hyperparams import fetch_hyperparams
from .fit import (
    FitArguments,
    Metric,
    Run,
    checkpointing,
    checks,
    evaluation,
    loop,
    trainer_methods,
)
from .fit.run import add_default_callbacks
from .history import History
from .step import InferenceModel, Metrics, Part, Remat, TrainState
from .strategies import DataParallel

Precision = Literal[
    "32-true", "32-highest", "bf16-mixed", "bf16-true", "16-mixed",
    32, 16, "32", "16", "bf16",
]  # fmt: skip


Model = TypeVar("Model")


class Trainer(Generic[Model]):
    """Trains an Equinox model on batches from any iterable, on any devices.

        trainer = Trainer(model, optax.adam(1e-3), metrics=["accuracy"])
        history = trainer.fit(train_loader, val_loader, max_epochs=10)
        trainer.inference_model()                    # trained, to call on one example

    The model, named losses and metrics (and optax's) and `per_example(fn)` are written
    for one example: the trainer vmaps them, pads and masks ragged batches, and gives
    each device rows of its own. A `loss_fn`, callable losses and metrics, and a model
    with state are written for a batch: they are called with the batch that the loader
    gave, at its own size, on any number of devices. Only a `loss_fn` that names `mask`
    may be given a padded batch.

    Args:
        model: a callable pytree (an Equinox module) that takes one example, and may
            name `key` and `training` (a bool); with `loss_fn`, also a dict or tuple of
            such. It stays as it is.
        optimizer: any `optax.GradientTransformation`, including those that evaluate the
            loss (`optax.lbfgs()`), or a list of `Part`. Default: `optax.adamw(1e-3)`.
        loss: compares `(prediction, target)` and returns `(batch,)` or a scalar: a name
            from `jaxdp.losses.LOSSES`, or a callable such as optax's losses. Default,
            without `loss_fn`: softmax cross-entropy of integer targets, and the mean
            squared error of floating ones. Of batches `(x, y, weight)`, the loss and
            the metrics are weighted means.
        loss_fn: replaces `loss` by a computation of your own, `loss_fn(model, *batch)`;
            a batch that is no tuple or list is one argument. It may also have arguments
            named `keys` (a PRNG key per row), `key` (one per batch), `mask` (`(batch,)`
            bools, which rows are real), `state` (the `eqx.nn.State`), `step` (int32,
            how many are completed) and `training` (a bool). It returns the loss or
            `(loss, metrics)`, followed by the new state if it takes one. A loss is
            `(batch,)`, a scalar that is the mean of the batch, or a pair `(values,
            weights)`, both `(batch, ...)`, for a weighted mean over the set. A scalar
            is taken as it is: with `mask`, divide by `mask.sum()`.
        metrics: names from `jaxdp.losses.METRICS`, or `{name: criterion}`, for training
            and validation. One value per row, or `(values, weights)`, is averaged
            exactly over all rows; a scalar is averaged over batches, weighted by their
            rows. `PassMetric(fn)` is computed over a whole validation or test.
        strategy: where arrays live, and how. Default: `Sharded()`, on all devices.
        callbacks: called in this order.
        state: the `eqx.nn.State` from `eqx.nn.make_with_state`.
        filter_spec: which leaves are trained: path patterns, a callable or a pytree of
            bools. Frozen leaves get no gradient and no optimizer state. Statistics of a
            frozen BatchNorm move, unless it is in `eqx.nn.inference_mode`.
        precision: "32-true", "32-highest", "bf16-mixed", "bf16-true" or "16-mixed"; see
            docs/precision.md. 32, "bf16" and 16 stand for the first and the mixed ones.
        after_update: a function model -> model, which may name `key` and `step`, called
            in each step after the optimizer. It may change all arrays, frozen ones too.
        accumulate_grad_batches: batches per optimizer step, weighted by their rows.
        gradient_clip_val: the largest global norm that the gradient may have.
        steps_per_execution: optimizer steps per call of the compiled program. Hooks and
            loggers get the metrics of each step, and the state after the last one.
        remat: recompute activations in the backward pass to save memory: True for each
            block of every `Stack`, a policy of `jax.checkpoint_policies` for the same
            blocks, or path patterns of submodules such as `"blocks[*]"`.
        data: with several processes, whether each has the same loader ("global") or a
            loader of its own rows ("local"). One process may ignore it.
        ensemble: how many models lie along the first axis of every array of `model`, or
            a `jaxdp.Ensemble`. Each step trains all of them. See docs/ensembles.md.
        seed: decides all randomness: shuffling, dropout, augmentation.
        reproducible: "run" gives the same bits when the script runs again, on GPUs too;
            `Bitwise(...)` on any number of devices. See docs/reproducibility.md.
        compiler_options: XLA's options for the steps, as a dict, or an effort level:
            from "O1" on, GPUs overlap communication and computation. See docs/speed.md.
        offload: "optimizer" keeps the optimizer's state in the host's memory between
            steps. See docs/strategies.md.
        log_every_n_steps: how often loggers write a row.
        enable_progress_bar: whether to show a progress bar.
        default_root_dir: where callbacks write if they have no path of their own.
    """

    _is_constructed = False  # while `__init__` sets attributes

    @checks_arguments
    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation | Sequence[Part] | None = None,
        *,
        loss: str | losses.Criterion | None = None,
        loss_fn: Callable[..., Any] | None = None,
        metrics: str
        | Metric
        | Iterable[str | Metric]
        | Mapping[str, Metric]
        | None = (),
        strategy: DataParallel | None = None,
        callbacks: Iterable[Callback] | Callback | None = (),
        state: eqx.nn.State | None = None,
        filter_spec: PyTree | Callable[[Any], bool] = eqx.is_inexact_array,
        precision: Precision = "32-true",
        after_update: Callable[..., PyTree] | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        steps_per_execution: int = 1,
        remat: Remat = False,
        data: Literal["global", "local"] = "global",
        ensemble: "int | jaxdp.Ensemble | None" = None,
        seed: int = 0,
        reproducible: Literal["run"] | None = None,
        compiler_options: Mapping[str, Any] | str | None = None,
        offload: Literal["optimizer"] | None = None,
        log_every_n_steps: int = 50,
        enable_progress_bar: bool = True,
        default_root_dir: str | os.PathLike[str] = "runs",
    ):
        passed = {k: v for k, v in locals().items() if k != "self"}
        arguments = checks.validate_arguments(passed)
        checked = checks.check_callbacks(callbacks)
        self.callbacks = add_default_callbacks(
            checked, progress_bar=enable_progress_bar
        )
        self.run = Run(arguments, self.callbacks)
        self.strategy: DataParallel = self.run.config.strategy
        self.record = self.run.record  # for callbacks: docs/reference/record.md
        self.history = self.record.history
        self.log_every_n_steps = int(log_every_n_steps)
        self.default_root_dir = expand_path(default_root_dir)
        self.should_stop = False
        self.is_global_zero = self.run.processes.index == 0
        self.max_epochs: int | None = None
        self.max_steps: int | None = None
        self.num_training_batches: int | None = None  # of an epoch, if that is known
        self._is_constructed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_constructed:
            trainer_methods.check_may_be_set(self.run.arguments, name)
            trainer_methods.check_attribute(self, name)
        super().__setattr__(name, trainer_methods.convert_settable(name, value))

    def __getattr__(self, name: str) -> Any:
        if "run" in vars(self):
            trainer_methods.check_attribute(self, name)
        return super().__getattribute__(name)  # raises, as a property of ours did

    def __reduce__(self) -> Any:  # for `copy` and `pickle`
        raise TypeError(
            "a Trainer can't be copied or pickled: it has compiled programs, and arrays"
            " on devices. For joblib or Ray, send settings to a function that makes the"
            " Trainer, fits it and returns numbers, or the folder of trainer.save()."
        )

    @checks_arguments
    def fit(
        self,
        train_loader: Iterable[Any] | None = None,
        val_loader: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        max_time: Any = None,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        check_val_every_n_epoch: int = 1,
        val_check_interval: int | float | None = None,
        fast_dev_run: bool | int = False,
        overfit_batches: int | float | None = None,
    ) -> History:
        """Trains until a limit is reached; returns the means of epochs over real rows.

            read the first batch, place the state, compile the step
            while epochs, steps and time are left:
                for each batch:
                    step                                  # the device works on it
                    validate, if an interval is up
                validate, if the epoch is due
                append to the history

        Args:
            train_loader: `Arrays(x, y)`, a torch `DataLoader`, or any iterable of
                batches. Without one, `loss_fn(model)` takes no batch, and `max_steps`
                says how often.
            val_loader: used for validation after each epoch. Several loaders have
                names: `{"clean": a, "shifted": b}` logs `val_clean_loss` and so on.
            max_epochs: total number of epochs, including those of earlier fits; 1 by
                default, unless `max_steps` or `max_time` is given. If one of them ends
                an epoch early, the next fit finishes that epoch. -1: no limit.
            max_steps: total number of optimizer steps, including earlier fits; -1 is as
                if not given. Steps that "16-mixed" skips count here, and not in a
                schedule of optax.
            max_time: how long this fit may take, compilation excluded: "DD:HH:MM:SS", a
                timedelta, or seconds.
            min_epochs: until so many are done, `max_time`, callbacks and `should_stop`
                do not end the fit.
            min_steps: the same for optimizer steps.
            ckpt_path: the checkpoint to resume from: a path, or `"last"`, `"best"` or
                `"auto"` (the last, or a fresh start if there is none) among the whole
                ones that the `ModelCheckpoint` callback has saved.
            limit_train_batches: batches per epoch; a float is a share of them.
            limit_val_batches: batches per validation; a float is a share of them.
            check_val_every_n_epoch: validate at the end of every n-th epoch, and of the
                fit.
            val_check_interval: also validate after every so many training batches; a
                float is a share of the epoch.
            fast_dev_run: run one batch (or this many) of training and validation to
                find mistakes, without loggers and checkpoints. It counts as an epoch.
            overfit_batches: train and validate on the first batches only (this many, or
                this share), always the same, to see whether the model can learn at all.
        """
        arguments = {k: v for k, v in locals().items() if k in FitArguments._fields}
        loop.fit(self, train_loader, val_loader, FitArguments(**arguments), ckpt_path)
        return self.history

    @checks_arguments
    def steps(self, train_loader: Iterable[Any] | None = None) -> Iterator[Metrics]:
        """Yields the metrics of each step of one epoch, for a loop of your own.

            for epoch in range(10):
                for metrics in trainer.steps(loader):
                    ...

        `setup`, `teardown` and the batch hooks of callbacks run; validation and the
        rest are up to you. `current_epoch` grows when the generator is exhausted. With
        `steps_per_execution` the batches of so many steps are read first, and the state
        is that after the last one.
        """
        return loop.iterate_steps(self, train_loader)

    @checks_arguments
    def validate(
        self,
        loader: Iterable[Any],
        ckpt_path: str | os.PathLike[str] | None = None,
        limit_batches: int | float | None = None,
    ) -> dict[str, float]:
        """Exact means over the rows of `loader`, or of several: `{"val_loss": ...}`.

        The model is in inference mode: no dropout, running statistics in BatchNorm.
        The validation hooks of callbacks run, unless a fit is running.

        Args:
            loader: as for `fit`; several have names, `{"clean": a, "shifted": b}`.
            ckpt_path: whose weights to take, for this pass alone: the path of a
                checkpoint, or `"best"` or `"last"` of the `ModelCheckpoint` callback.
            limit_batches: how many of each loader; a float is a share of them.
        """
        return evaluation.evaluate_loaders(
            self, "validation", loader, ckpt_path, limit_batches
        )

    @checks_arguments
    def test(
        self,
        loader: Iterable[Any],
        ckpt_path: str | os.PathLike[str] | None = None,
        limit_batches: int | float | None = None,
    ) -> dict[str, float]:
        """Like `validate`, with keys such as `test_loss` and hooks of its own."""
        return evaluation.evaluate_loaders(
            self, "test", loader, ckpt_path, limit_batches
        )

    @checks_arguments
    def plan(
        self,
        loader: Iterable[Any] | None = None,
        devices: int | None = None,
        *,
        topology: str | None = None,
        hardware: "str | jaxdp.plan.Hardware | None" = None,
        hosts: int | None = None,
    ) -> "jaxdp.plan.Plan":
        """Plans a train step: memory, communication, operations, time.

            print(trainer.plan(loader))                      # here
            print(trainer.plan(loader, devices=64))          # with 64 devices
            print(trainer.plan(loader, topology="h100x64"))  # by the compiler for them

        The step is compiled from shapes alone, and nothing runs; the model may be made
        of shapes too. If the peak of memory does not fit (`plan.fits`), a few changes
        that need less are compiled, too: `plan.remedies`.

        Args:
            loader: as for `fit`; one batch is read, to learn the shapes.
            devices: for how many, up to 2048, faked ones if this machine lacks them.
                Default: the devices of the strategy.
            topology: hardware to compile for that is not here: "h100x1024" and the like
                for GPUs, "v5p-2048" for TPU slices. Needs the extra `plan`.
            hardware: the peaks to estimate time with: "h100", "v5e", ..., or a
                `jaxdp.plan.Hardware`. Default: those of the devices, if known.
            hosts: the number of hosts that share the devices equally, unless a topology
                or a job of several processes says it.
        """
        return jaxdp.plan.plan_step(self, loader, devices, topology, hardware, hosts)

    def running_plan(self) -> "jaxdp.plan.Plan | None":
        """The plan of the step in use, or None before there is one; never compiles."""
        return jaxdp.plan.plan_running_step(self)

    @checks_arguments
    def predict(
        self,
        loader: Iterable[Any],
        ckpt_path: str | os.PathLike[str] | None = None,
        limit_batches: int | float | None = None,
        *,
        gather: bool = True,
        return_predictions: bool = True,
    ) -> Any:
        """Predictions of the model in inference mode.

        Args:
            loader: as for `fit`; of a tuple batch such as `(x, y)`, only `x` is used.
            ckpt_path: as for `validate`.
            limit_batches: as for `validate`.
            gather: with several processes, whether each gets the predictions for all
                rows. If not, it gets those for the rows it loaded, and sends nothing.
            return_predictions: if not, callbacks alone get the predictions, in
                `on_predict_batch_end`, and no more than some batches are in memory.

        Returns:
            NumPy arrays shaped `(rows, ...)`, in the structure that the model returns:
            one row for each row of the loader, in the same order. None without
            `return_predictions`.
        """
        return evaluation.predict(
            self, loader, ckpt_path, limit_batches, gather, return_predictions
        )

    def __repr__(self) -> str:
        return trainer_methods.format_repr(self)

    @checks_arguments
    def summary(self) -> "jaxdp.reports.Summary":
        """The layers of the model, their arrays, parameters and bytes, as a table.

        Nothing is placed or compiled for it; the model may be made of shapes.
        """
        return jaxdp.reports.summarize(self)

    @checks_arguments
    def compare(
        self, loader: Iterable[Any], *strategies: DataParallel, steps: int = 5
    ) -> "jaxdp.comparison.Comparison":
        """Runs the same steps under each strategy, and reports what differs.

            trainer.compare(loader, MyStrategy()).assert_close()

        Each, by default `SingleDevice()`, starts from a copy of this trainer's state,
        and takes so many optimizer steps, if the loader has batches for them.
        """
        return jaxdp.comparison.compare_strategies(self, loader, strategies, steps)

    @property
    def model(self) -> Model:
        """The model as trained so far: a live copy, whole, on the default device."""
        return trainer_methods.gather_model(self.run)[0]

    def member(self, index: int) -> PyTree:
        """One model of an ensemble, an ordinary model."""
        return trainer_methods.get_member(self.run, self.model, index)

    @property
    def model_state(self) -> eqx.nn.State | None:
        """The `eqx.nn.State` that belongs to `model`, or None."""
        return trainer_methods.gather_model(self.run)[1]

    @checks_arguments
    def inference_model(self, member: int | None = None) -> InferenceModel:
        """The model in inference mode with its state inside, to call on one example.

            infer = trainer.inference_model()  # an Equinox module
            infer(x), jax.vmap(infer)(xs), eqx.filter_jit(infer)(x)

        Of an ensemble, without a `member`, predictions are `(members, ...)`.
        """
        return trainer_methods.inference_model(self.run, member)

    @property
    def state(self) -> TrainState:
        """The `TrainState` on the devices. The next step overwrites it: `copy.deepcopy`
        it first, also to write into it."""
        return self.run.engine.state

    @property
    def hyperparams(self) -> Mapping[str, Any]:
        """The optimizer's hyperparameters, by name. Waits for the device.

        They are the values in `optax.inject_hyperparams`.
        """
        return fetch_hyperparams(self.run.engine.state)

    def set_hyperparams(self, **values: Any) -> None:
        """Sets hyperparameters of the optimizer, from the next step on.

            optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
            trainer = Trainer(model, optimizer)
            trainer.set_hyperparams(learning_rate=1e-4)  # in a callback, say

        Values keep their shapes and dtypes; schedules can't be set. Nothing is compiled
        again, and checkpoints contain the values. Of several with the same name,
        `hyperparams` shows longer ones: `set_hyperparams(**{"head/learning_rate": 1})`.
        All processes must call it with the same values.
        """
        trainer_methods.set_hyperparams(self.run, values)

    @checks_arguments
    def log(self, name: str, value: Any) -> None:
        """Logs a value of your own; for use in the hooks of callbacks.

            trainer.log("val_auroc", auroc)  # in `on_validation_end`, say

        The history, loggers and every `monitor=` see the value. Validation hooks add it
        to the values of the validation, and all other hooks to those of the epoch. An
        epoch keeps the last value of each name. Batch hooks also add it to the row of
        the step.

        A value on the device is waited for. All processes must call it; rank 0's value
        is taken.
        """
        self.record.log(name, value)

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The last value of everything logged, by name. Waits for the last step."""
        return self.record.last_values()

    @property
    def accumulate_grad_batches(self) -> int:
        """The value passed. For another one, make a new Trainer and `load`."""
        return self.run.config.accumulate_grad_batches

    @property
    def global_step(self) -> int:
        """The number of completed optimizer steps."""
        return self.run.progress.global_step

    @property
    def current_epoch(self) -> int:
        """The present epoch, counted from 0."""
        return self.run.progress.epoch

    @checks_arguments
    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes the `TrainState` and the counters into `path`, a new folder.

        All processes must call it, with the same path in a file system that they share.
        Returns the absolute path, once all is on disk.
        """
        with self.run.interrupts.defer_signals():
            return self.start_saving(path).finish()

    @checks_arguments
    def start_saving(self, path: str | os.PathLike[str]) -> checkpoint.PendingSave:
        """Like `save`, but in the background; call `finish` on what it returns."""
        return checkpointing.start_saving(self, path)

    @checks_arguments
    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads what `save` wrote, under any strategy and on any number of devices.

        If it raises, the state is as it was. A warning names callbacks that it lacks.
        """
        checkpointing.load(self, path)

    @checks_arguments
    def report(self, path: str | os.PathLike[str], plan: Any = None) -> str:
        """Writes one HTML page about the run: curves, settings, plan.

        A `CSVLogger` adds single steps to it, a `ThroughputMonitor` the speed.

        Args:
            path: the file, or a folder for `report.html`; the file is returned.
            plan: a plan to show instead of `running_plan`.
        """
        return jaxdp.reports.report_trainer(self, path, plan)

    def compiled_train_step(self) -> jax.stages.Compiled | None:
        """The compiled train step, or None before there is one."""
        if not self.run.has_engine:
            return None
        program = self.run.engine.get_train_program()
        return None if program is None else program.compiled
