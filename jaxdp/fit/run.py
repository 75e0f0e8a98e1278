"""What a trainer works with: what its arguments decide, and what it is doing now."""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    ALL,
    NO_LOADER,
    GlobalShare,
    LocalShare,
    Share,
    Source,
    open_loader,
    own_of,
    to_host,
)
from ..distributed import SignalHandler, find_missing_initialize, get_process_group
from ..engine import Engine, Kind
from ..engine.xla_options import DETERMINISTIC, check_options
from ..record import Record
from ..step import (
    AfterUpdate,
    Batch,
    CriterionObjective,
    MultiPartSteps,
    Objective,
    Steps,
    add_clipping,
    combine_optimizers,
    find_precision,
    split_batch,
    union_masks,
)
from ..strategies import DataParallel
from . import checks
from .pass_metrics import split_metrics
from .progress import Progress
from .snapshot import Loaded, described, read_placed


class Recipe:
    """What the arguments of a trainer decide: model, loss, optimizer, and engines.

    Args:
        arguments: checked, by name.

    Attributes:
        arguments: as given.
        parts: the model as (trained leaves, other arrays, the rest), as it was given.
        several: the parts in the place of the optimizer, if there are some.
        pass_metrics: metrics over whole passes, by name.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        self.arguments = arguments
        self.model, self.model_state = arguments["model"], arguments["state"]
        self.strategy: DataParallel = arguments["strategy"]
        self.ensemble = arguments["ensemble"]
        self.compiler_options = check_options(arguments["compiler_options"])
        if arguments["reproducible"]:
            self.compiler_options = {**DETERMINISTIC, **self.compiler_options}
        self.seed, self.data = int(arguments["seed"]), arguments["data"]
        self.accumulate_grad_batches = int(arguments["accumulate_grad_batches"])
        self.steps_per_execution = arguments["steps_per_execution"]

        several = self.several = checks.parts_of(arguments)
        trained = union_masks(several) if several else arguments["filter_spec"]
        self.parts = checks.split_model(self.model, trained)
        if self.ensemble is not None:
            self.ensemble.check_values(self._own_optimizer(), self.parts[0])
        self._after_update = self._checked_after_update()
        self._criteria, self.pass_metrics = split_metrics(arguments["metrics"])
        choose = checks.choose_objective
        self._objective = several[0].objective if several else choose(arguments)
        self._precision = find_precision(arguments["precision"])
        self._recomputed = checks.find_recomputed_in(self.model, arguments["remat"])
        self._description: dict[str, str] | None = None

    def new_engine(
        self, strategy: DataParallel, hooks: Hooks, *, abstract: bool = False
    ) -> Engine:
        """Another engine, with the state of a trainer that has not been trained."""
        objectives = self._objectives()
        steps = (MultiPartSteps if self.several else Steps)(
            self.parts[2],
            self._objective,
            self.optimizer_for(strategy, hooks),
            hooks.inside_step(),
            remat=self._recomputed,
            precision=self._precision,
            conjugate_complex=self.arguments["conjugate_complex"],
            after_update=self._after_update,
            after_step=hooks.after_step(),
            parts=self.several,
            has_state=self.model_state is not None,
            losses_per_example=all(one.is_per_example for one in objectives),
        )
        if self.ensemble is not None:
            steps, strategy = self.ensemble.wrap(steps, strategy)
        return Engine(
            self.parts,
            self.model_state,
            steps,
            strategy,
            seed=self.seed,
            micro_batches=self.accumulate_grad_batches,
            steps_per_execution=1 if abstract else self.steps_per_execution,
            view=hooks.evaluated_state(),
            in_order=self.data == "global",
            compiler_options=self.compiler_options,
            offload=bool(self.arguments["offload"]),
            abstract=abstract,
        )

    def optimizer_for(
        self, strategy: DataParallel, hooks: Hooks
    ) -> optax.GradientTransformationExtraArgs:
        """The optimizer with what the strategy, and then callbacks, add to it."""
        optimizer = strategy.wrap_optimizer(self._own_optimizer())
        return optax.with_extra_args_support(hooks.wrap_optimizer(optimizer))

    def decide_loss(self, engine: Engine, batch: Batch) -> Engine:
        """`engine`, whose loss the first batch decides if nobody else has."""
        if engine.pure.objective is None:
            engine.infer(self.objective_for(batch))
        return engine

    def objective_for(self, batch: Batch) -> Objective:
        """The loss and metrics of steps over batches such as this."""
        if self._objective is not None:
            return self._objective
        name, reason = losses.infer_loss(split_batch(own_of(batch))[1])
        log_info(f"`loss` is not given: {name!r}, as {reason}")
        keeps = bool(self.pass_metrics)
        loss = losses.LOSSES[name]
        return CriterionObjective(loss, self._criteria, keeps_outputs=keeps)

    def _objectives(self) -> list[Objective]:
        """The objectives of all parts; before a loss is inferred, one of its kind."""
        if self.several:
            return [part.objective for part in self.several]
        return [self._objective or CriterionObjective(losses.mse, self._criteria)]

    def description(self, callbacks: Sequence[Callback]) -> dict[str, str]:
        """What decides the numbers, in words, to compare later."""
        if self._description is None:
            self._description = described(self, callbacks)
        return self._description

    def _own_optimizer(self) -> optax.GradientTransformation:
        """The optimizer as the arguments describe it."""
        if self.several:
            return combine_optimizers(self.several)
        given = self.arguments
        return add_clipping(given["optimizer"], given["gradient_clip_val"])

    def _checked_after_update(self) -> AfterUpdate | None:
        """What changes weights after each update, if it keeps shapes and dtypes."""
        if (function := self.arguments["after_update"]) is None:
            return None
        *arrays, static = self.parts
        change = AfterUpdate(function, static)
        if self.ensemble is not None:
            arrays = self.ensemble.drop_member_axis(arrays)
        jax.eval_shape(change, *arrays, jax.random.key(0), jax.numpy.int32(1))
        return change


class Run:
    """What a trainer works with, made when it is first needed.

    Args:
        arguments: what the trainer was made from, checked, by name.
        callbacks: those that may have a part in the compiled step.

    Attributes:
        arguments: as given.
        recipe: what they decide.
        processes: all of them.
        interrupts: what signals wait in until a fit can answer them.
        hooks: those of the callbacks.
        progress: how far the run is.
        record: what it logs.
        has_looped: whether a caller's own loop was begun before.
        doing: what callbacks were set up for and that still goes on, such as "a fit";
            "" if nothing.
        loaded: what the next fit is to know of the checkpoint that it goes on from.
    """

    def __init__(self, arguments: Mapping[str, Any], callbacks: Sequence[Callback]):
        enable_compilation_cache()
        self.arguments, self.hooks = arguments, Hooks(callbacks)
        self.recipe = recipe = Recipe(arguments)
        self.processes = get_process_group()
        new_id = self.processes.run_on_rank_zero(
            "a new trainer", lambda: uuid.uuid4().hex
        )
        self._trainer_id = new_id  # which no checkpoint changes
        self.interrupts = SignalHandler(self.processes)
        self.progress = Progress()
        every = recipe.accumulate_grad_batches
        self.record = Record(new_id, self.processes, self.progress, every)
        self.has_looped = False
        self.doing = ""
        self.loaded: Loaded | None = None
        self._engine: Engine | None = None

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer with what the strategy and callbacks have put around it."""
        return self.recipe.optimizer_for(self.recipe.strategy, self.hooks)

    @property
    def has_engine(self) -> bool:
        """Whether the state was placed already."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine, its state placed."""
        if self._engine is None:
            recipe = self.recipe
            checks.check_has_arrays(recipe.model)
            if jax.default_backend() == "cpu":
                keep_freed_memory()
            # Where a function of the user's is traced, values are computed all the
            # same. Only there: what an optimizer starts from, zeros as large as the
            # model, would be computed before it is part of the compiled `init`.
            is_traced = isinstance(jax.device_put(0), Tracer)
            eagerly = jax.ensure_compile_time_eval() if is_traced else nullcontext()
            with eagerly:
                strategy = recipe.strategy
                self._engine = recipe.new_engine(strategy, self.hooks)
        return self._engine

    def checked_engine(self) -> Engine:
        """The engine; raises where code has written into a state it was handed."""
        self.engine.held.check_handed_out()
        return self.engine

    def check_is_settled(self, what: str) -> None:
        """Raises between steps that run as one: the counters are not the state's."""
        step, ahead = self.progress.global_step, self.progress.ahead
        if ahead:
            raise RuntimeError(
                f"{what} was called after step {step}, but the state is that of step"
                f" {step + ahead}, with which the call of several steps ends"
                f" (`steps_per_execution`): do it there, as `on_boundary` does."
            )

    def open(self, loader: Any, argument: str, kind: Kind) -> Source:
        """What a user passed as `argument`, shared out to the processes.

        None trains a `loss_fn` that takes no batch.
        """
        if self._engine is not None and self.doing != "a fit":
            self._engine.follow_settings()
        recipe = self.recipe
        has_own_loss = self.arguments["loss_fn"] is not None or recipe.several
        if loader is None and kind == "train" and has_own_loss:
            loader = NO_LOADER
        source = open_loader(
            loader,
            argument,
            recipe.seed,
            self.share(kind),
            in_order=kind != "train",
        )
        if kind != "predict":
            checks.check_first(loader, argument, needs_pairs=not has_own_loss)
        return source

    def share(self, kind: Kind) -> Share:
        """What of all batches comes to this process."""
        if self.processes.count == 1:
            return ALL
        if self.recipe.data == "local":
            return LocalShare(self.processes)
        return GlobalShare(self.processes, lambda: self.engine.steps[kind].packer)

    def renew_hooks(
        self, callbacks: Sequence[Callback], *, to_train: bool = False
    ) -> None:
        """Callbacks may have been added since the last time, or taken out.

        Args:
            callbacks: those of now.
            to_train: whether their state is this trainer's from now on.
        """
        checks.check_callbacks(callbacks, self.hooks.callbacks)
        self.hooks = self.hooks.with_callbacks(callbacks)
        if to_train:
            reset_reused(callbacks, self._trainer_id)

    # For callbacks: see docs/reference/record.md.

    def stop_on(self, *signals: str, returns: bool = False) -> None:
        """Which signals end a fit at the next boundary, saved; for `Callback.setup`.

        Args:
            signals: their names; `"SIGTERM"` and `"SIGHUP"` by default.
            returns: whether `fit` returns then, instead of exiting with code 143.
        """
        self.interrupts.set_signals(signals)
        self.interrupts.returns = returns

    def compiled_facts(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """The rows that batches of each kind are padded to, and digests of the programs
        compiled so far, in a job of several processes."""
        if self._engine is None:
            return {}, ()
        steps = self._engine.steps.items()
        sizes = {kind: step.packer.size for kind, step in steps}
        return sizes, tuple(digest for _, step in steps for digest in step.digests)

    def flops_per_example(self, batch: Batch) -> float:
        """Matrix operations per row of a training step: products and convolutions.

        Of the forward and backward pass, without what `remat` computes again and
        without what is element by element. Traces the step once more.

        Args:
            batch: as `on_train_batch_start` has it.
        """
        given = [batch] if self.recipe.accumulate_grad_batches == 1 else batch
        window = [to_host(one) for one in given]
        return self.recipe.decide_loss(self.engine, window[0]).flops_per_row(window)

    def model_of(self, state: Any) -> Any:
        """The model with the weights of a placed `state`, as `trainer.model` gives it.

        `trainer.state` has the weights that are trained, which with `WeightAveraging`
        are not those of `trainer.model`.
        """
        return self.engine.held.model_of(state)[0]

    def shapes(self) -> Any:
        """The state as shapes with shardings, also between steps that run as one."""
        return self.engine.held.shapes()

    def put_back(self, names: Iterable[str], source: Mapping[str, Any] | str) -> None:
        """Puts parts of an earlier state, by their names, into this.

        Args:
            names: of fields of the state: "params".
            source: has them by name, as `gather_arrays` gave them; or the path of a
                checkpoint.
        """
        engine = self.engine
        if isinstance(source, str):
            earlier, _ = read_placed(self, source)
            parts = {name: getattr(earlier, name) for name in names}
            engine.state = engine.state._replace(**parts)
        else:
            parts = {name: source[name] for name in names}
            engine.state = engine.place(engine.state._replace(**parts))


def begin_anew(run: Run, wanted: str) -> Callable[[PyTree, Any], None]:
    """Lets others set the weights that a trainer begins with.

    Args:
        run: of the trainer.
        wanted: by whom, for messages: "`load_weights`".

    Returns:
        What takes a model and its `eqx.nn.State`, or None, of the structure that they
        have, wherever their arrays lie.

    Raises:
        RuntimeError: where training has begun.
    """
    if run.doing or run.progress.global_step:
        steps = run.progress.global_step
        when = f"after {steps} steps" if steps else f"during {run.doing}"
        raise RuntimeError(
            f"{wanted} sets the weights that a trainer begins with, and was called"
            f" {when}. Call it before, or make a new Trainer."
        )

    def begin(model: PyTree, model_state: Any) -> None:
        run.arguments = {**run.arguments, "model": model, "state": model_state}
        run.recipe, run._engine = Recipe(run.arguments), None

    return begin


def with_defaults(
    callbacks: Iterable[Callback], *, progress_bar: bool
) -> list[Callback]:
    """The user's callbacks, and what they lack, with several processes too."""
    complete, in_lockstep = list(callbacks), jax.process_count() > 1
    if not in_lockstep and (warning := find_missing_initialize()):
        warn(warning)
    if progress_bar and not any(isinstance(own, ProgressBar) for own in complete):
        # First, so that it has cleared its line before the others print.
        complete.insert(0, ProgressBar())
    if in_lockstep:
        # Before the others, so that processes meet before anything happens at a hook.
        guards = [callback for callback in complete if isinstance(callback, Lockstep)]
        others = [
            callback for callback in complete if not isinstance(callback, Lockstep)
        ]
        complete = (guards or [Lockstep()]) + others
    return complete
