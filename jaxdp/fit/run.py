"""The resolved arguments of a trainer, and the objects that it works with."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import optax
from jax.core import Tracer
from jaxtyping import PyTree

from .. import losses
from ..basics.console import log_info, warn
from ..basics.process import enable_compilation_cache, keep_freed_memory
from ..callbacks import Lockstep, ProgressBar
from ..callbacks.base import Callback, Hooks
from ..callbacks.state_matching import reset_reused
from ..data import (
    ALL_ROWS,
    NO_LOADER,
    GlobalPartition,
    LocalPartition,
    RowPartition,
    Source,
    get_local,
    open_loader,
)
from ..distributed import SignalHandler, find_missing_initialize, get_process_group
from ..engine import Engine, StepKind
from ..engine.xla_options import DETERMINISTIC, check_options
from ..record import Record
from ..step import (
    AfterUpdate,
    Batch,
    CriterionObjective,
    MultiPartStepFunctions,
    Objective,
    ResolvedPart,
    StepFunctions,
    add_clipping,
    combine_optimizers,
    find_precision,
    resolve_parts,
    resolve_remat,
    split_batch,
    union_masks,
)
from ..strategies import DataParallel
from ..strategies.method_checks import check_mesh
from ..strategies.stack import find_stacks
from . import checks
from .checkpointing import describe_arguments, read_state
from .lifecycle import FIT
from .pass_metrics import split_metrics
from .progress import Progress


class TrainerConfig:
    """The arguments of a trainer, resolved: model, loss, optimizer; makes engines.

    Args:
        arguments: the validated arguments, by name.

    Attributes:
        arguments: as passed.
        strategy: the strategy, as its `prepare` returned it.
        adds_state: whether the strategy wraps the optimizer, and so adds to its state.
        model_parts: the initial model as (trained leaves, other arrays, the rest).
        optimizer_parts: the resolved `Part`s; empty for a single optimizer.
        pass_metrics: the `PassMetric`s, by name.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        self.arguments = arguments
        # Steps use what the strategy makes of the arguments; checkpoints and logs have
        # them as passed.
        arguments = arguments["strategy"].prepare(dict(arguments))
        self.strategy: DataParallel = arguments["strategy"]
        check_mesh(self.strategy)
        self.adds_state = arguments["optimizer"] is not self.arguments["optimizer"]
        self._prepared = arguments
        self.model, self.model_state = arguments["model"], arguments["state"]
        self.ensemble = arguments["ensemble"]
        self.compiler_options = check_options(arguments["compiler_options"])
        if arguments["reproducible"]:
            self.compiler_options = {**DETERMINISTIC, **self.compiler_options}
        self.seed, self.data = int(arguments["seed"]), arguments["data"]
        self.accumulate_grad_batches = int(arguments["accumulate_grad_batches"])
        self.steps_per_execution = arguments["steps_per_execution"]

        self._criteria, self.pass_metrics = split_metrics(arguments["metrics"])
        several: tuple[ResolvedPart, ...] = ()
        optimizer, keeps = arguments["optimizer"], bool(self.pass_metrics)
        if checks.is_list_of_parts(optimizer):
            several = resolve_parts(optimizer, self.model, keeps_outputs=keeps)
        self.optimizer_parts = several
        trained = union_masks(several) if several else arguments["filter_spec"]
        self.model_parts = checks.split_model(self.model, trained)
        if self.ensemble is not None:
            self.ensemble.check_values(self._make_optimizer(), self.model_parts[0])
        self._after_update = self._make_after_update()
        choose = checks.choose_objective
        self._objective = several[0].objective if several else choose(arguments)
        self._precision = find_precision(arguments["precision"])
        blocks = [f"{name}.stacked".lstrip(".") for name in find_stacks(self.model)]
        self._recomputed = resolve_remat(arguments["remat"], self.model, blocks)
        self._description: dict[str, str] | None = None

    def replace(self, **arguments: Any) -> "TrainerConfig":
        """Returns the config of a trainer with other arguments."""
        return TrainerConfig({**self.arguments, **arguments})

    def make_engine(self, hooks: Hooks, *, abstract: bool = False) -> Engine:
        """Makes an engine with the initial state."""
        objectives, strategy = self._objectives(), self.strategy
        make = MultiPartStepFunctions if self.optimizer_parts else StepFunctions
        step_functions = make(
            self.model_parts[2],
            self._objective,
            self.make_optimizer(hooks),
            hooks.list_methods("inside_step"),
            remat=self._recomputed,
            precision=self._precision,
            after_update=self._after_update,
            after_step=hooks.list_methods("after_step"),
            parts=self.optimizer_parts,
            has_state=self.model_state is not None,
            losses_per_example=all(one.is_per_example for one in objectives),
        )
        if self.ensemble is not None:
            step_functions, strategy = self.ensemble.wrap(step_functions, strategy)
        return Engine(
            self.model_parts,
            self.model_state,
            step_functions,
            strategy,
            seed=self.seed,
            num_micro_batches=self.accumulate_grad_batches,
            view=hooks.find_evaluated_state(),
            in_order=self.data == "global",
            compiler_options=self.compiler_options,
            offload=bool(self._prepared["offload"]),
            adds_state=self.adds_state,
            abstract=abstract,
        )

    def make_optimizer(self, hooks: Hooks) -> optax.GradientTransformationExtraArgs:
        """Makes the optimizer, wrapped by callbacks."""
        optimizer = hooks.wrap_optimizer(self._make_optimizer())
        return optax.with_extra_args_support(optimizer)

    def decide_loss(self, engine: Engine, batch: Batch) -> None:
        """Sets the loss of `engine` by its first batch, unless an argument decides it.

        If its step does not compile, another batch may decide on another loss.
        """
        if engine.step_functions.objective is None or (
            self._objective is None and not engine.has_programs
        ):
            engine.replace_step_functions(objective=self.make_objective(batch))

    def make_objective(self, batch: Batch) -> Objective:
        """Returns the loss and metrics of steps over batches such as this."""
        if self._objective is not None:
            return self._objective
        name, reason = losses.infer_loss(split_batch(get_local(batch))[1])
        log_info(f"`loss` is not given: {name!r}, as {reason}")
        keeps = bool(self.pass_metrics)
        loss = losses.LOSSES[name]
        checks.check_ends_in_logits(self.model, loss)
        return CriterionObjective(loss, self._criteria, keeps_outputs=keeps)

    def _objectives(self) -> list[Objective]:
        """Returns the objectives of all parts; a placeholder for an inferred loss."""
        if self.optimizer_parts:
            return [part.objective for part in self.optimizer_parts]
        return [self._objective or CriterionObjective(losses.mse, self._criteria)]

    def describe(self, callbacks: Sequence[Callback]) -> dict[str, str]:
        """Returns the texts of `describe_arguments`, which are made only once."""
        if self._description is None:
            self._description = describe_arguments(self, callbacks)
        return self._description

    def _make_optimizer(self) -> optax.GradientTransformation:
        """Makes the optimizer from the arguments."""
        if self.optimizer_parts:
            return combine_optimizers(self.optimizer_parts)
        arguments = self._prepared
        return add_clipping(arguments["optimizer"], arguments["gradient_clip_val"])

    def _make_after_update(self) -> AfterUpdate | None:
        """Returns `after_update`; raises if it changes shapes or dtypes."""
        if (function := self._prepared["after_update"]) is None:
            return None
        *arrays, static = self.model_parts
        change = AfterUpdate(function, static)
        if self.ensemble is not None:
            arrays = self.ensemble.drop_member_axis(arrays)
        jax.eval_shape(change, *arrays, jax.random.key(0), jax.numpy.int32(1))
        return change


class Run:
    """One run of a trainer (see the glossary): its arguments, progress, record, engine.

    The engine is made when first needed.

    Args:
        arguments: the validated arguments of the trainer, by name.
        callbacks: the callbacks that may have a part in the compiled step.

    Attributes:
        arguments: as passed.
        config: the resolved arguments.
        processes: the processes that train together.
        interrupts: holds signals back until a fit can handle them.
        hooks: the hooks of the callbacks.
        progress: the completed steps and epochs of the run.
        record: the logged values of the run.
        doing: the activity that callbacks are set up for: `FIT`, `STEPS`, or a method
            such as "validate"; "" for none.
        loaded_padding: the padding of batches in a loaded checkpoint, for the next
            fit: steps per epoch, sizes, micro-batches per step.
    """

    def __init__(self, arguments: Mapping[str, Any], callbacks: Sequence[Callback]):
        enable_compilation_cache()
        self.arguments, self.hooks = arguments, Hooks(callbacks)
        self.config = config = TrainerConfig(arguments)
        self.processes = get_process_group()
        new_id = self.processes.run_on_rank_zero(
            "a new trainer", lambda: uuid.uuid4().hex
        )
        self._trainer_id = new_id  # a checkpoint does not change this value
        self.interrupts = SignalHandler(self.processes)
        self.progress = Progress()
        every = config.accumulate_grad_batches
        self.record = Record(new_id, self.processes, self.progress, every)
        self.doing = ""
        self.loaded_padding: Any = None
        self._engine: Engine | None = None

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer, wrapped by the strategy and by callbacks."""
        return self.config.make_optimizer(self.hooks)

    @property
    def has_engine(self) -> bool:
        """Whether the engine was made."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine, with its state on the devices."""
        if self._engine is None:
            config = self.config
            checks.check_arrays(config.model)
            if jax.default_backend() == "cpu":
                keep_freed_memory()
            # While a function of the user is traced, compute values all the same. Only
            # then: this would also compute the zeros of an optimizer's state, as large
            # as the model, outside of the compiled `init`.
            is_traced = isinstance(jax.device_put(0), Tracer)
            eagerly = jax.ensure_compile_time_eval() if is_traced else nullcontext()
            with eagerly:
                self._engine = config.make_engine(self.hooks)
        return self._engine

    @property
    def is_fitting(self) -> bool:
        """Whether a fit is running, and not a loop of steps or `validate`, say."""
        return self.doing == FIT

    def open_source(
        self, loader: Any, argument: str, kind: StepKind, *, in_order: bool = False
    ) -> Source:
        """Opens the loader that a user passed as `argument`.

        None trains a `loss_fn` that takes no batch. Only for training, and unless it
        is `in_order`, `Arrays` are shuffled.
        """
        if self._engine is not None and not self.is_fitting:
            self._engine.discard_outdated_programs()
        has_own_loss = (
            self.arguments["loss_fn"] is not None or self.config.optimizer_parts
        )
        if loader is None and kind == "train" and has_own_loss:
            loader = NO_LOADER
        return open_loader(
            loader,
            argument,
            self.config.seed,
            self.make_partition(kind),
            in_order=in_order or kind != "train",
        )

    def make_partition(self, kind: StepKind) -> RowPartition:
        """Returns the partition of the rows over the processes."""
        if self.processes.count == 1:
            return ALL_ROWS
        if self.config.data == "local":
            return LocalPartition(self.processes)
        return GlobalPartition(
            self.processes, lambda: self.engine.compiled_steps[kind].packer
        )

    def renew_hooks(
        self, callbacks: Sequence[Callback], *, to_train: bool = False
    ) -> None:
        """Updates the hooks; callbacks may have been added or removed.

        Args:
            callbacks: the current callbacks.
            to_train: whether this trainer takes over the state of the callbacks.
        """
        checks.check_callbacks(callbacks, self.hooks.callbacks)
        self.hooks = self.hooks.with_callbacks(callbacks)
        if to_train:
            reset_reused(callbacks, self._trainer_id)

    # For callbacks: see docs/reference/record.md.

    def stop_on(self, *signals: str, returns: bool = False) -> None:
        """Sets the signals that end a fit at the next boundary; for `Callback.setup`.

        Args:
            signals: their names, such as `"SIGTERM"`.
            returns: whether `fit` returns then, instead of exiting with code 143.
        """
        self.interrupts.set_signals(signals)
        self.interrupts.returns = returns

    def compiled_facts(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """Returns the rows that batches of each kind are padded to, and, in a job of
        several processes, digests of the programs compiled so far."""
        if self._engine is None:
            return {}, ()
        steps = self._engine.compiled_steps.items()
        sizes = {kind: step.packer.size for kind, step in steps}
        return sizes, tuple(digest for _, step in steps for digest in step.digests)

    def model_of(self, state: Any) -> Any:
        """Returns the model with the weights of a placed `state`, like `trainer.model`.

        `trainer.state` has the trained weights. With `WeightAveraging`, `trainer.model`
        has others.
        """
        return self.engine.device_state.layout.gather_model(state)[0]

    def shapes(self) -> Any:
        """Returns the state as shapes with shardings, also within a dispatch."""
        return self.engine.device_state.get_shapes()

    def set_initial_weights(self, model: PyTree, model_state: Any) -> None:
        """Sets the initial weights of training; their arrays may be on any device or
        host.
        """
        self.arguments = {**self.arguments, "model": model, "state": model_state}
        self.config, self._engine = TrainerConfig(self.arguments), None

    def put_back(self, names: Iterable[str], source: Mapping[str, Any] | str) -> None:
        """Restores fields of an earlier state into the current one.

        Args:
            names: names of fields of the state, such as "params".
            source: the values of these fields by name, from `gather_arrays`; or the
                path of a checkpoint.
        """
        engine = self.engine
        if isinstance(source, str):
            earlier, _ = read_state(self, source)
            parts = {name: getattr(earlier, name) for name in names}
            engine.state = engine.state._replace(**parts)
        else:
            parts = {name: source[name] for name in names}
            engine.state = engine.place(engine.state._replace(**parts))


def add_default_callbacks(
    callbacks: Iterable[Callback], *, progress_bar: bool
) -> list[Callback]:
    """Returns the callbacks with a `ProgressBar`, and a `Lockstep` if there are several
    processes."""
    complete, has_peers = list(callbacks), jax.process_count() > 1
    if not has_peers and (warning := find_missing_initialize()):
        warn(warning)
    if progress_bar and not any(isinstance(one, ProgressBar) for one in complete):
        # It comes first, so that it has cleared its line before other callbacks print.
        complete.insert(0, ProgressBar())
    if has_peers:
        # It comes first, so that processes wait for each other before other hooks run.
        if not any(isinstance(one, Lockstep) for one in complete):
            complete.append(Lockstep())
        complete.sort(key=lambda one: not isinstance(one, Lockstep))
    return complete
