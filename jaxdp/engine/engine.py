"""Compiled steps, taken on the placed state of a trainer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ..basics.host_memory import clear_mesh
from ..basics.process import pause_gc
from ..data import Dispatch, Packer, Window
from ..distributed import RowBlocks
from ..step import (
    LONG_IN_FLIGHT,
    Batch,
    Metrics,
    Objective,
    Recomputed,
    Steps,
    TrainState,
    products,
)
from ..strategies import DataParallel
from ..strategies.base import count_shards, make_row_blocks
from .bodies import traced
from .compiling import Compilations, debug_settings
from .out_of_memory import check_memory
from .pace import InFlight, most_bytes_in_flight
from .state import Model, State, first_of, placed_state, shapes_of_first
from .step import (
    WHAT,
    Kind,
    Placed,
    Program,
    SingleStepsOnly,
    Step,
    StepOptions,
    rows_in,
)


class Engine:
    """Runs steps: packs batches, compiles once per shape, keeps the state.

    Args:
        parts: the model as (trained leaves, other arrays, the rest).
        model_state: its `eqx.nn.State`, or None.
        pure: what the steps do.
        strategy: places the state and lays the steps out.
        seed: decides all randomness inside the steps.
        micro_batches: how many batches a train step takes.
        steps_per_execution: train steps per dispatch, at most.
        view: from the state to the one whose weights are evaluated and handed out.
        in_order: whether the real rows of several processes' batches come first, and
            all padding last.
        compiler_options: the user's, of XLA.
        offload: whether large leaves of the optimizer's state are in host memory
            between steps.
        abstract: whether there are only shapes: nothing is placed, no step can run.

    Attributes:
        steps: each kind of step, with its programs.
        tell: says something once.
        puts_ahead: whether the next dispatch is put on the devices before the present
            one is launched: where they are no CPUs. A test on CPUs may set it.
        held: the present state.
        options: how train steps are compiled from now on.
        steps_per_execution: how many steps a dispatch takes at present.
        begins_epoch: whether the next step is the first of an epoch, whose sums begin
            at zero.
    """

    held: State

    def __init__(
        self,
        parts: tuple[PyTree, PyTree, PyTree],
        model_state: PyTree,
        pure: Steps,
        strategy: DataParallel,
        *,
        seed: int,
        micro_batches: int,
        steps_per_execution: int = 1,
        view: Callable[[TrainState], TrainState] | None = None,
        in_order: bool = True,
        compiler_options: Mapping[str, Any] = MappingProxyType({}),
        offload: bool = False,
        abstract: bool = False,
    ):
        self._compiler_options, self._offloads = compiler_options, offload
        self.micro_batches = micro_batches
        self.in_flight = InFlight()
        self.begins_epoch = False
        self.options = StepOptions()
        self._is_inferred, self._settings = False, debug_settings()
        self.pure, self.strategy = pure, strategy
        self._compilations = Compilations(quiet=abstract)
        self.tell = self._compilations.tell
        self._most_steps = self.steps_per_execution = steps_per_execution
        several = not abstract and jax.process_count() > 1
        self._blocks = make_row_blocks(strategy) if several else RowBlocks()
        self.steps: dict[Kind, Step] = {
            kind: Step(
                kind,
                strategy,
                self._blocks,
                in_order,
                pads=functools.partial(pure.is_padded, kind),
            )
            for kind in WHAT
        }
        own = jax.eval_shape(lambda *trees: trees, *parts[:2])
        self._model = Model(parts[2], own, view)
        first = parts, model_state, pure
        with clear_mesh(), pause_gc():
            if abstract:
                self.state = shapes_of_first(*first, strategy, self._offloads)
            else:
                self.state = self.place(first_of(*first, seed, strategy))
        self.puts_ahead = self._devices[0].platform != "cpu" and not abstract
        self.follow_settings()
        if not abstract:
            self.in_flight.most_bytes = most_bytes_in_flight(self._devices)

    def set(self, **fields: Any) -> None:
        """Replaces some fields of `pure`, for what is compiled from now on."""
        self.pure = self.pure._replace(**fields)

    def infer(self, objective: Objective) -> None:
        """Takes the objective that the first batch shows to fit.

        If that does not compile, the next batch may show another.
        """
        self.set(objective=objective)
        self._is_inferred = True

    def place(self, state: TrainState) -> TrainState:
        """A state on the devices: the first one, or one that was saved."""
        return placed_state(self.strategy, state, self._offloads)

    def follow_settings(self) -> None:
        """Adapts to the platform, and to JAX's settings for debugging as they are now.

        On CPUs, XLA rewrites convolutions for its library outside of loops alone.
        Inside a loop they take about five times as long, and round otherwise.
        """
        is_cpu = self._devices[0].platform == "cpu"
        settings = debug_settings()
        self.set(unroll_convolutions=is_cpu and not settings[0])
        self.steps_per_execution = 1 if any(settings) else self._most_steps
        if settings != self._settings:
            self._settings = settings
            for step in self.steps.values():
                step.programs.clear()

    @property
    def state(self) -> TrainState:
        """The placed state. The next step overwrites its arrays: copy what you keep."""
        return self.held.tree

    @state.setter
    def state(self, state: TrainState) -> None:
        self.held = State.of(state, self._model)

    def write(self, leaves: Mapping[int, np.ndarray]) -> None:
        """Sets leaves of the state, by their place in it, to others of their kind."""
        self.held = self.held.with_leaves(leaves)

    @property
    def _devices(self) -> list[Any]:
        return [*self.held.leaves[0].sharding.device_set]

    def set_options(self, options: StepOptions) -> None:
        """How train steps are compiled from now on."""
        if options != self.options:
            self.options = options
            self.set(skip_nonfinite=options.skip_nonfinite)
            self.steps["train"].programs.clear()

    def train_program(self) -> Program | None:
        """The first of the train steps that are in use."""
        return next(iter(self.steps["train"].programs.values()), None)

    @property
    def padding(self) -> dict[str, int]:
        """How many rows batches are padded to, by `"<kind> <form>"`."""
        return {
            f"{kind} {form}": rows
            for kind, step in self.steps.items()
            for form, rows in step.packer.forms.sizes.items()
        }

    def pad_as(self, padding: Mapping[str, int]) -> None:
        """Takes up the `padding` of another engine, or of an earlier state of this one.

        Another size would be another program, whose sums may round differently.
        """
        named = [(*name.partition(" ")[::2], rows) for name, rows in padding.items()]
        for kind, step in self.steps.items():
            sizes = {form: rows for of, form, rows in named if of == kind and rows}
            step.packer.forms.start_from(sizes)

    def pack(self, windows: list[Window]) -> Dispatch:
        """The batches of optimizer steps, for one call of the compiled step."""
        return self.steps["train"].packer.pack(windows, self.micro_batches)

    def prepare_training(self, dispatch: Dispatch) -> list[Dispatch]:
        """Compiles for `dispatch`; returns it, or those it must be taken apart to."""
        try:
            program = self.compiled_for("train", dispatch)
        except SingleStepsOnly:  # so each of the steps is now taken alone
            first, *others = [self.pack([window]) for window in dispatch.windows]
            return [*self.prepare_training(first), *others]
        if self.steps_per_execution > 1 and not self._loops_well(program):
            self._most_steps = self.steps_per_execution = 1
        return [dispatch]

    def prepare(self, kind: Kind, batch: Batch) -> tuple[Dispatch, Program]:
        """`batch` packed for a pass, and the step for its shape, maybe compiled now."""
        step = self.steps[kind]
        dispatch = step.packer.pack([[batch]])
        return dispatch, self.compiled_for(kind, dispatch)

    def train(self, dispatch: Dispatch) -> list[Metrics]:
        """Takes the steps of `dispatch`; returns each one's metrics."""
        # What must hold, before the state is given away.
        step, held = self.steps["train"], self.held
        program = step.programs.get(dispatch.shape)
        if program is None:
            program = self.compiled_for("train", dispatch)
        steps = len(dispatch.rows)
        if held.handed_out is not None:
            held.check_handed_out()  # the last moment: it will be outdated

        # The steps. Nothing here waits for the device.
        inputs = held.leaves_from_zero() if self.begins_epoch else held.leaves
        placed, results = self.run("train", dispatch, program, inputs)
        leaves, (means, inside) = results
        self.held, self.begins_epoch = State(leaves, held.kind), False
        facts = step.facts  # without jit, of this call

        # Not too many at once.
        if steps > 1:
            self.in_flight.add(means, placed.nbytes, LONG_IN_FLIGHT)
            return [Metrics(facts, means, inside, index) for index in range(steps)]
        self.in_flight.add(means, placed.nbytes)
        return [Metrics(facts, means, inside)]

    def run(
        self, kind: Kind, dispatch: Dispatch, of: Program, *inputs: Any
    ) -> tuple[Placed, Any]:
        """The only call of a compiled step, on `inputs` and the placed batches."""
        try:
            placed = self.steps[kind].placed(dispatch, of, ahead=self.puts_ahead)
            results = of.compiled(*inputs, placed.groups)
            if of.may_raise:
                jax.block_until_ready(results)  # waits for the device
            return placed, results
        except jax.errors.JaxRuntimeError as error:
            _raise_as_equinox(error)
            self._check_memory(kind, dispatch, of, error)
            raise

    def _check_memory(
        self, kind: Kind, dispatch: Dispatch, of: Program, error: Any = None
    ) -> None:
        what, leaves = f"the {WHAT[kind]} step", self.held.leaves
        check_memory(what, leaves, sum(dispatch.rows), of.compiled, error)

    def epoch_means(self) -> dict[str, float]:
        """Means over the epoch's rows so far. Waits for the device."""
        facts = self.steps["train"].facts
        return self.pure.compute_means(self.held.fetch_totals(), facts)

    def flops_per_row(self, window: Sequence[Batch]) -> float:
        """Operations of a train step over `window`, per row that is computed."""
        packer = self.steps["train"].packer
        if self._blocks.count > 1:
            packer = Packer(1, packer.what)  # of the rows that are here
        dispatch = packer.pack([list(window)], self.micro_batches)
        pure = self.pure._replace(inside=(), remat=Recomputed())
        jaxpr = traced(pure.train, self.state, dispatch.groups)
        return products(jaxpr).total() / rows_in(dispatch.groups)

    def compiled_for(self, kind: Kind, dispatch: Dispatch) -> Program:
        """The step for batches of this shape, compiled if it is a new one."""
        step = self.steps[kind]
        if (program := step.programs.get(dispatch.shape)) is not None:
            return program
        inputs = self.held.tree if kind == "train" else self.held.evaluated.weights
        donate = self.options.donate if kind == "train" else "none"
        given = dispatch, inputs, donate, self._compiler_options
        try:
            with clear_mesh(), self._compilations.timed(WHAT[kind], dispatch):
                program = step.compile(self.pure, *given)
            self._check_memory(kind, dispatch, program)
        except SingleStepsOnly:
            raise
        except Exception as error:
            if self._is_inferred and not any(s.programs for s in self.steps.values()):
                self.set(objective=None)
            step.explain(error, dispatch)
            raise
        for note in step.facts.notes:
            self.tell(note)
        self._compilations.tell_of_whole(dispatch, count_shards(self.strategy))
        self._compilations.tell_of_program(self._devices, program, self.pure)
        return program

    def _loops_well(self, program: Program) -> bool:
        """Returns whether a loop over steps is as good as they are; says so if not."""
        reason = ""
        if program.may_raise:
            reason = "a step calls Python that may raise, which ends the steps after it"
        elif self.pure.unroll_convolutions and program.convolves:
            reason = (
                "XLA's convolutions are slow inside loops on the CPU, and round"
                " differently there"
            )
        if reason:
            self.tell(f"`steps_per_execution`: 1 at a time, because {reason}")
        return not reason


def _raise_as_equinox(error: Exception) -> None:
    """Raises the error of an `eqx.error_if`, as `eqx.filter_jit` does, if it is one."""
    _, found, text = str(error).partition("_EquinoxRuntimeError: ")
    if found:
        message = text.split("\n\n\n-----")[0]
        where = "for the line that raised it, run it under jax.disable_jit()"
        raise eqx.EquinoxRuntimeError(f"{message} ({where})") from None
