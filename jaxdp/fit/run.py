"""What a trainer works with, made when it is first needed."""

import functools
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import jax
import optax
from jax.core import Tracer

from .. import losses
from ..basics.console import say
from ..basics.process import keep_freed_memory, keep_programs
from ..callbacks.base import Callback, Hooks
from ..callbacks.states import take_over
from ..data import (
    ALL,
    NO_LOADER,
    GlobalShare,
    LocalShare,
    Share,
    Source,
    open_loader,
    shown,
    to_host,
)
from ..distributed import Interrupts, Pulse, find_processes
from ..engine import Engine, Kind, hyperparams
from ..record import Record
from ..step import (
    AfterUpdate,
    Batch,
    CriterionObjective,
    Ensemble,
    InferenceModel,
    Objective,
    Steps,
    StepsOfParts,
    find_precision,
    optimizer_of,
    split_batch,
    trained_by,
)
from ..strategies import DataParallel
from ..strategies.compiler_options import DETERMINISTIC, spelled_here
from . import checks
from .description import described
from .pass_metrics import split_metrics
from .progress import Progress

_LIVE: Final = "callbacks", "log_every_n_steps", "default_root_dir"
"""Arguments of a trainer that are looked at anew by every fit."""


class Run:
    """The engine of a trainer, how far it is, and what it hears.

    A callback finds here, as `trainer.run`, what only few of them need.

    Args:
        arguments: what the trainer was made from, checked, by name.
        callbacks: those that may have a part in the compiled step.

    Attributes:
        arguments: as given.
        processes: all of them.
        interrupts: what signals wait in until a fit can answer them.
        hooks: those of the callbacks.
        progress: how far the run is.
        record: what is logged.
        optimizer: with what callbacks have put around it.
        dispatching: held while the state is given to a step, and by what other threads
            make of it.
        ahead: how many steps of the present dispatch have no hooks called yet.
        looks_at: what of the trainer a caller's own loop uses between steps, "" if
            nothing, None if that is not known yet.
        is_fitting: whether `fit` is running.
        doing: what callbacks were set up for and that still goes on; "" if nothing.
        epoch_is_over: whether no batch of the epoch is left, while it is being ended.
        padded_rows: what a checkpoint says of how batches were padded.
        left_behind: callbacks of a checkpoint that was loaded, but not of the trainer.
        pass_metrics: metrics over whole passes, by name.
        parts: the model as (trained leaves, other arrays, the rest), as it was given.
        several: the parts in the place of the optimizer, if there are some.
        steps_per_epoch: optimizer steps of an epoch of the fit, None if not known.
        num_val_batches: batches of a validation, None if not known.
        planned: the compiled train step and its plan, once it was asked for.
    """

    def __init__(self, arguments: Mapping[str, Any], callbacks: Sequence[Callback]):
        keep_programs()
        self.arguments = arguments
        self.model, self.model_state = arguments["model"], arguments["state"]
        self.strategy: DataParallel = arguments["strategy"]
        self.ensemble: Ensemble | None = arguments["ensemble"]
        self.compiler_options = spelled_here(arguments["compiler_options"])
        if arguments["reproducible"]:
            self.compiler_options = {**DETERMINISTIC, **self.compiler_options}
        self.seed, self.data = int(arguments["seed"]), arguments["data"]
        self.accumulate_grad_batches = int(arguments["accumulate_grad_batches"])
        self.steps_per_execution = arguments["steps_per_execution"]

        # Beside the other processes.
        self.processes = find_processes()
        new_id = self.processes.first("a new trainer", lambda: uuid.uuid4().hex)
        self._trainer_id = new_id  # which no checkpoint changes
        self.interrupts = Interrupts(self.processes)
        self.wishes = Pulse(self.processes, "whether to stop")
        self.hooks = Hooks(callbacks)
        self.progress = Progress()
        self.record = Record(new_id, self.processes, self.progress)

        # Where a fit is.
        self.dispatching = threading.RLock()
        self.ahead, self.doing = 0, ""
        self.looks_at: str | None = None
        self._is_with_caller = False
        self.is_fitting = self.epoch_is_over = self.returns_when_preempted = False
        self.padded_rows: Any = None
        self.steps_per_epoch: int | None = None
        self.left_behind = ""
        self.num_val_batches: int | None = None

        # What an engine is made of, once one is needed.
        several = self.several = checks.parts_of(arguments)
        trained = trained_by(several) if several else arguments["filter_spec"]
        self.parts = checks.split_model(self.model, trained)
        if self.ensemble is not None:  # can the optimizer be that of members?
            jax.eval_shape(self._own_optimizer().init, self.parts[0])
        self._after_update = self._checked_after_update()
        self._criteria, self.pass_metrics = split_metrics(arguments["metrics"])
        choose = checks.choose_objective
        self._objective = several[0].objective if several else choose(arguments)
        self._precision = find_precision(arguments["precision"])
        self._engine: Engine | None = None
        self.planned: tuple[Any, Any] | None = None

    @functools.cached_property
    def description(self) -> dict[str, str]:
        """What of the arguments decides the numbers, in words."""
        return described(self)

    @property
    def has_engine(self) -> bool:
        """Whether the state was placed already."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine, its state placed."""
        if self._engine is None:
            checks.check_has_arrays(self.model)
            if jax.default_backend() == "cpu":
                keep_freed_memory()
            # Where a function of the user's is traced, values are computed all the
            # same. Only there: what an optimizer starts from, zeros as large as the
            # model, would be computed before it is part of the compiled `init`.
            is_traced = isinstance(jax.device_put(0), Tracer)
            eagerly = jax.ensure_compile_time_eval() if is_traced else nullcontext()
            with eagerly:
                self._engine = self.new_engine(self.as_asked(self.strategy))
        return self._engine

    def engine_for(self, batch: Batch) -> Engine:
        """The engine, its loss decided: the first batch does it if nobody else has."""
        if self.engine.programs.steps.objective is None:
            self.engine.programs.infer(self._inferred(batch))
        return self.engine

    def objective_for(self, batch: Batch) -> Objective:
        """The loss and metrics, for a step that is only looked at."""
        known = self._engine and self._engine.programs.steps.objective
        return known or self._objective or self._inferred(batch)

    def new_engine(self, strategy: DataParallel, *, abstract: bool = False) -> Engine:
        """Another engine, with the state of a trainer that has not been trained."""
        has_view = type(strategy).evaluated_state is not DataParallel.evaluated_state
        return Engine(
            self.parts,
            self.model_state,
            (StepsOfParts if self.several else Steps)(
                self.parts[2],
                self._objective,
                self.optimizer_for(strategy),
                self.hooks.inside_step(),
                remat=self.arguments["remat"],
                precision=self._precision,
                conjugate_complex=self.arguments["conjugate_complex"],
                after_update=self._after_update,
                after_step=self.hooks.after_step(),
                parts=self.several,
                ensemble=self.ensemble,
            ),
            strategy,
            seed=self.seed,
            micro_batches=self.accumulate_grad_batches,
            steps_per_execution=1 if abstract else self.steps_per_execution,
            view=self.hooks.evaluated_state()
            or (strategy.evaluated_state if has_view else None),
            in_order=self.data == "global",
            abstract=abstract,
        )

    def shapes(self) -> tuple[Any, Any, Any]:
        """Trained leaves, other arrays and the model's state, as shapes.

        With their shardings, before they are placed too, where the strategy tells.
        """
        try:
            if self._engine is not None:
                state = self._engine.held.shapes()
            else:
                strategy = self.as_asked(self.strategy)
                state = self.new_engine(strategy, abstract=True).state
        except NotImplementedError:  # a strategy of the user's, which does not
            return *self.parts[:2], self.model_state
        return state.params, state.buffers, state.model_state

    def model_of(self, state: Any) -> Any:
        """The model with the weights of a placed `state`, as `trainer.model` gives it.

        `trainer.state` has the weights that are trained, which with `WeightAveraging`
        are not those of `trainer.model`.
        """
        return self.engine.held.model_of(state)[0]

    def inference_model(self, member: int | None) -> InferenceModel:
        """`Trainer.inference_model`."""
        self.check_callable("inference_model")
        model_and_state = self.whole_model("`inference_model`")
        if member is not None:
            return InferenceModel(*self.member_of(model_and_state, member))
        return InferenceModel(*model_and_state, is_ensemble=self.ensemble is not None)

    def check_callable(self, method: str) -> None:
        """Raises if the model can't be called on one example, as `method` does."""
        if not callable(self.model):
            name, part = type(self.model).__name__, ".generator"
            if isinstance(self.model, dict | list | tuple):
                part = "['generator']" if isinstance(self.model, dict) else "[0]"
            raise TypeError(
                f"`{method}` calls the model on one example, and {name} has no"
                " __call__. Call a part of `trainer.model`, as in"
                f" jax.vmap(trainer.model{part})(x); or give a class of yours one."
            )

    def member_of(self, model: Any, index: int) -> Any:
        """One model of those that `model` holds."""
        if self.ensemble is None:
            raise ValueError("`member` needs a Trainer with `ensemble`; use `model`.")
        return self.ensemble.member_of(model, index)

    def optimizer_for(
        self, strategy: DataParallel
    ) -> optax.GradientTransformationExtraArgs:
        """The optimizer with what the strategy, and then callbacks, add to it."""
        optimizer = strategy.wrap_optimizer(self._own_optimizer())
        return optax.with_extra_args_support(self.hooks.wrap_optimizer(optimizer))

    def _own_optimizer(self) -> optax.GradientTransformation:
        """The optimizer as the arguments describe it."""
        if self.several:
            return optimizer_of(self.several)
        optimizer = checks.with_clipping(self.arguments)
        if self.ensemble is None:
            return optimizer
        return self.ensemble.wrap_optimizer(optimizer)

    def _checked_after_update(self) -> AfterUpdate | None:
        """What changes weights after each update, if it keeps shapes and dtypes."""
        if (function := self.arguments["after_update"]) is None:
            return None
        *arrays, static = self.parts
        members = None if self.ensemble is None else self.ensemble.size
        change = AfterUpdate(function, static, members)
        jax.eval_shape(change, *arrays, jax.random.key(0), jax.numpy.int32(1))
        return change

    def as_asked(self, strategy: DataParallel) -> DataParallel:
        """`strategy` as the trainer's arguments want it to compile."""
        if self.arguments["offload"]:
            strategy = strategy.with_offload()
        options = self.compiler_options
        return strategy.with_compiler_options(options) if options else strategy

    def open(self, loader: Any, argument: str, kind: Kind) -> Source:
        """What a user passed as `argument`, shared out to the processes.

        None trains a `loss_fn` that takes no batch.
        """
        if self._engine is not None and not self.is_fitting:
            self._engine.follow_settings()
        has_own_loss = self.arguments["loss_fn"] is not None or self.several
        if loader is None and kind == "train" and has_own_loss:
            loader = NO_LOADER
        source = open_loader(
            loader,
            argument,
            self.seed,
            self.share(kind),
            in_order=kind != "train",
            devices=lambda: self.engine.held.arrays[0].sharding.device_set,
        )
        if kind != "predict":
            checks.check_first(loader, argument, needs_pairs=not has_own_loss)
        return source

    def share(self, kind: Kind) -> Share:
        """What of all batches comes to this process."""
        if self.processes.count == 1:
            return ALL
        if self.data == "local":
            return LocalShare(self.processes)
        return GlobalShare(self.processes, lambda: self.engine.packers[kind])

    def whole_model(self, wanted: str) -> tuple[Any, Any]:
        """The model as trained so far, and its `eqx.nn.State`: live copies."""
        if not self.has_engine:
            return self.model, self.model_state
        engine = self.settled_engine(wanted)
        with self.apart():
            return engine.held.gather()

    def settled_engine(self, wanted: str) -> Engine:
        """The engine, whose state is that of the last step that hooks have seen.

        Args:
            wanted: what it is wanted for, for messages: "`trainer.model`".

        Raises:
            RuntimeError: if steps that run as one are past that one already; or where
                code has written into a state that it was handed.
        """
        self.check_is_settled(wanted)
        self.engine.held.check_handed_out()
        return self.engine

    def check_is_settled(self, wanted: str) -> None:
        """Raises in the middle of steps that run as one; notes who uses the trainer."""
        self.progress.note_look(wanted)
        if self._is_with_caller and self.looks_at is None:
            self.looks_at = wanted
        while self.ahead and self.progress.is_elsewhere:
            time.sleep(1e-3)  # the steps are taken by another thread
        if self.ahead:
            remedy = (
                "Use it in `on_boundary` (with `next_stop` at the steps you need) or at"
                " the end of an epoch; or leave `looks_inside_blocks` of the callback"
                " True."
            )
            if self._is_with_caller:
                self.looks_at = wanted
                remedy = (
                    "Use it after the loop; or leave `steps_per_execution` out. The"
                    " trainer's next loops get their steps one by one, as those do that"
                    " use it after its first step."
                )
            raise RuntimeError(
                f"{wanted} was used between steps that run in one call"
                f" (`steps_per_execution`={self.steps_per_execution}), when the"
                f" later ones are already done. {remedy}"
            )

    @contextmanager
    def with_caller(self) -> Iterator[None]:
        """Around what a caller's own loop does between two steps."""
        self._is_with_caller = True
        try:
            yield
        finally:
            self._is_with_caller = False

    def apart(self) -> AbstractContextManager[Any]:
        """Around what uses the state: no step takes it away, if this thread takes none.

        A loader's thread may read ahead, and look at the model.
        """
        return self.dispatching if self.progress.is_elsewhere else nullcontext()

    def hyperparams(self) -> Mapping[str, Any]:
        """`Trainer.hyperparams`."""
        return hyperparams.values_of(self.settled_engine("`trainer.hyperparams`").state)

    def set_hyperparams(self, values: Mapping[str, Any]) -> None:
        """`Trainer.set_hyperparams`."""
        engine = self.settled_engine("`set_hyperparams`")
        self.processes.same("values in `set_hyperparams`", values)
        engine.held.write(hyperparams.to_set(engine.state, values))

    def check_is_free(self, method: str) -> None:
        """Raises if a fit is running, of which another one would know nothing."""
        if self.is_fitting:
            raise RuntimeError(
                f"`{method}` was called while a fit of the same trainer is running,"
                " from a callback perhaps; use a Trainer of its own."
            )
        self.check_is_settled(f"`{method}`")

    def check_may_be_set(self, name: str) -> None:
        """Raises for an argument of the trainer that nothing would look at again."""
        if name in self.arguments and name not in _LIVE:
            raise AttributeError(
                f"`trainer.{name}` can't be set: it is an argument of `Trainer`, and"
                " steps are made of it. For another value make another Trainer, which"
                " may `load` what this one saves."
            )

    def renew_hooks(self, callbacks: Sequence[Callback]) -> None:
        """Callbacks may have been added since the last time, or taken out."""
        checks.check_callbacks(callbacks, self.hooks.callbacks)
        self.hooks = self.hooks.renewed(callbacks)

    def take_over(self, callbacks: Sequence[Callback]) -> None:
        """Renews the hooks; from now on, the state of callbacks is this trainer's."""
        self.renew_hooks(callbacks)
        take_over(callbacks, self._trainer_id)

    # For callbacks: what to set in `setup`, and what to ask for.

    def stop_on(self, *signals: str, returns: bool = False) -> None:
        """Which signals end a fit at the next boundary, saved; for `Callback.setup`.

        Args:
            signals: their names; `"SIGTERM"` and `"SIGHUP"` by default.
            returns: whether `fit` returns then, instead of exiting with code 143.
        """
        self.interrupts.listen(signals)
        self.returns_when_preempted = returns

    @property
    def batch_idx(self) -> int:
        """Optimizer steps done of the present epoch: the number of the next one."""
        return -(-self.progress.done // self.accumulate_grad_batches)

    @property
    def program_digests(self) -> tuple[str, ...]:
        """Digests of the programs compiled so far, in a job of several processes."""
        return () if self._engine is None else self._engine.strategy.program_digests

    def flops_per_example(self, batch: Batch) -> float:
        """Matrix operations per row of a training step: products and convolutions.

        Of the forward and backward pass, without what `remat` computes again and
        without what is element by element. Traces the step once more.

        Args:
            batch: as `on_train_batch_start` has it.
        """
        given = [batch] if self.accumulate_grad_batches == 1 else batch
        window = [to_host(one) for one in given]
        return self.engine_for(window[0]).flops_per_row(window)

    def compiled_train_step(self) -> jax.stages.Compiled | None:
        """The compiled train step, or None before there is one."""
        program = None if self._engine is None else self._engine.programs.of_training()
        return None if program is None else program.compiled

    def _inferred(self, batch: Batch) -> Objective:
        name, reason = losses.infer_loss(split_batch(shown(batch))[1])
        say(f"`loss` is not given: {name!r}, as {reason}")
        keeps = bool(self.pass_metrics)
        loss = losses.LOSSES[name]
        return CriterionObjective(loss, self._criteria, keeps_outputs=keeps)
