"""The train state of a trainer, and the compiled steps that run on it."""

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..basics.hardware import get_smallest_memory
from ..basics.host_memory import clear_mesh
from ..basics.process import pause_gc
from ..data import Dispatch, Window, get_local
from ..distributed import RowBlocks, make_global_array
from ..step import LONG_IN_FLIGHT, Batch, Metrics, StepFunctions, TrainState
from ..strategies import DataParallel
from ..strategies.base import count_shards, make_row_blocks
from .compile_log import CompileLog
from .compiled_step import KIND_NAMES, CompiledStep, StepKind, StepOptions
from .debug_settings import get_debug_settings
from .device_state import (
    DeviceState,
    StateLayout,
    make_first_state,
    make_shapes,
    place_state,
)
from .in_flight import MAX_PART_IN_FLIGHT, InFlightQueue
from .out_of_memory import add_remedies, check_program
from .program import PlacedBatches, Program


class Engine:
    """Packs batches, compiles a step once per shape, and keeps the train state.

    Args:
        model_parts: the model as (trained leaves, other arrays, the rest).
        model_state: the model's `eqx.nn.State`, or None.
        step_functions: the pure functions that are compiled.
        strategy: places the state and lays out the steps.
        seed: decides all randomness inside the steps.
        num_micro_batches: the number of micro-batches of a train step.
        view: the function of a callback that chooses the weights to evaluate.
        in_order: whether the real rows of all processes come first in a global batch,
            and all padding last.
        compiler_options: the user's options for XLA.
        offload: whether large leaves of the optimizer's state are in host memory
            between steps.
        adds_state: whether the strategy adds a state to the optimizer's.
        abstract: whether the state has shapes only; then no step can run.

    Attributes:
        device_state: the current state.
        compiled_steps: by kind of step, each with its cache of programs.
        options: the options for compiling train steps.
        log_once: reports a note unless it was reported before.
        memory: the bytes of the smallest device; None for devices that do not report
            them, such as CPUs, and for a state of shapes.
        prefetches: whether the next dispatch is transferred before the current one is
            launched. True on accelerators; a test on CPUs may set it.
        starts_epoch: whether the next step is the first of an epoch, so that the
            epoch's sums start from zero.
    """

    device_state: DeviceState

    def __init__(
        self,
        model_parts: tuple[PyTree, PyTree, PyTree],
        model_state: PyTree,
        step_functions: StepFunctions,
        strategy: DataParallel,
        *,
        seed: int,
        num_micro_batches: int,
        view: Callable[[TrainState], TrainState] | None = None,
        in_order: bool = True,
        compiler_options: Mapping[str, Any] = MappingProxyType({}),
        offload: bool = False,
        adds_state: bool = False,
        abstract: bool = False,
    ):
        self._compiler_options, self._offload = compiler_options, offload
        self.num_micro_batches = num_micro_batches
        self.in_flight = InFlightQueue()
        self.starts_epoch = False
        self.options = StepOptions()
        self._debug_settings = get_debug_settings()
        self.step_functions, self.strategy = step_functions, strategy
        self._compile_log = CompileLog(quiet=abstract)
        self.log_once = self._compile_log.log_once
        several = not abstract and jax.process_count() > 1
        blocks = make_row_blocks(strategy) if several else RowBlocks()
        self.compiled_steps: dict[StepKind, CompiledStep] = {
            kind: CompiledStep(
                kind,
                strategy,
                blocks,
                in_order,
                pads=step_functions.is_padded(kind),
            )
            for kind in KIND_NAMES
        }
        original = jax.eval_shape(lambda *trees: trees, *model_parts[:2])
        self._layout_arguments = model_parts[2], original, view
        with clear_mesh(), pause_gc():
            if abstract:
                first = make_shapes((*model_parts[:2], model_state), step_functions)
            else:
                arguments = model_parts, model_state, step_functions, seed, strategy
                first = make_first_state(*arguments, adds_state=adds_state)
            self.state = place_state(strategy, first, offload, abstract=abstract)
        # On CPUs, XLA rewrites convolutions for its library only outside of loops.
        # Inside a loop they take about five times as long, and round differently.
        is_cpu = self._devices[0].platform == "cpu"
        self.replace_step_functions(unroll_convolutions=is_cpu)
        self.prefetches = not is_cpu and not abstract
        self.memory = None if abstract else get_smallest_memory(self._devices)
        if self.memory is not None:
            self.in_flight.max_bytes = MAX_PART_IN_FLIGHT * self.memory

    # The state and the settings.

    @property
    def state(self) -> TrainState:
        """The placed state. The next step overwrites its arrays: copy before that."""
        return self.device_state.tree

    @state.setter
    def state(self, state: TrainState) -> None:
        layout = StateLayout(state, *self._layout_arguments)
        self.device_state = DeviceState(jax.tree.leaves(state), layout)

    def place(self, state: TrainState) -> TrainState:
        """Returns a copy of the state on the devices."""
        return place_state(self.strategy, state, self._offload)

    @property
    def _devices(self) -> list[Any]:
        return [*self.device_state.leaves[0].sharding.device_set]

    def replace_step_functions(self, **fields: Any) -> None:
        """Replaces fields of `step_functions`, for steps compiled from now on."""
        self.step_functions = self.step_functions._replace(**fields)

    def set_options(self, options: StepOptions) -> None:
        """Sets the options of train steps that are compiled from now on."""
        if options != self.options:
            self.options = options
            self.replace_step_functions(skip_nonfinite=options.skip_nonfinite)
            self.compiled_steps["train"].programs.clear()

    def discard_outdated_programs(self) -> None:
        """Discards the programs if JAX's settings for debugging have changed."""
        if (settings := get_debug_settings()) != self._debug_settings:
            self._debug_settings = settings
            for step in self.compiled_steps.values():
                step.programs.clear()

    @property
    def has_programs(self) -> bool:
        """Whether any step is compiled."""
        return any(step.programs for step in self.compiled_steps.values())

    @property
    def padding(self) -> dict[str, int]:
        """The number of rows that batches are padded to, by `"<kind> <spec>"`."""
        return {
            f"{kind} {spec}": rows
            for kind, step in self.compiled_steps.items()
            for spec, rows in step.packer.sizes.items()
        }

    def load_padding(self, padding: Mapping[str, int]) -> None:
        """Sets the `padding` to that of another engine, or of an earlier state.

        With other numbers of rows the programs differ, and their sums may round
        differently.
        """
        for kind, step in self.compiled_steps.items():
            start = f"{kind} "
            sizes = {
                name.removeprefix(start): rows
                for name, rows in padding.items()
                if name.startswith(start) and rows
            }
            step.packer.load_sizes(sizes)

    # Compiling.

    def pack(self, windows: list[Window]) -> Dispatch:
        """Packs the batches of optimizer steps for one call of the compiled step."""
        return self.compiled_steps["train"].packer.pack(windows, self.num_micro_batches)

    def prepare_evaluation(
        self, kind: StepKind, batch: Batch
    ) -> tuple[Dispatch, Program]:
        """Returns `batch` packed for an evaluation, and the program for its shape."""
        dispatch = self.compiled_steps[kind].packer.pack([[batch]])
        return dispatch, self.get_program(kind, dispatch)

    def get_train_program(self) -> Program | None:
        """Returns the first program of the current train step."""
        return next(iter(self.compiled_steps["train"].programs.values()), None)

    def get_program(self, kind: StepKind, dispatch: Dispatch) -> Program:
        """Returns the program for batches of this shape; compiles it if it is new."""
        step = self.compiled_steps[kind]
        if (program := step.programs.get(dispatch.shape)) is not None:
            return program
        state, name = self.device_state, KIND_NAMES[kind]
        inputs = state.tree if kind == "train" else state.evaluated.weights
        donate = self.options.donate if kind == "train" else "none"
        try:
            with clear_mesh(), self._compile_log.time_compile(name, dispatch):
                program = step.compile(
                    self.step_functions,
                    dispatch,
                    inputs,
                    donate,
                    self._compiler_options,
                )
            if self.memory is not None:
                step_name, rows = f"the {name} step", sum(dispatch.rows)
                check_program(step_name, self.memory, rows, program.compiled)
        except Exception as error:
            batches = map(get_local, itertools.chain.from_iterable(dispatch.windows))
            for note in filter(None, map(step.packer.describe_change, batches)):
                error.add_note(note)
            step.packer.reset()  # others are not padded to the size of this batch
            # `check_program` may have refused it: it must not run next time.
            step.programs.pop(dispatch.shape, None)
            raise
        for note in step.facts.notes:
            self.log_once(note)
        if not dispatch.split:
            self._compile_log.log_unsplit(dispatch, count_shards(self.strategy))
        precision = self.step_functions.precision
        self._compile_log.log_program(self._devices, program, precision)
        return program

    # Running.

    def train(self, dispatch: Dispatch) -> list[Metrics]:
        """Runs the steps of `dispatch`; returns the metrics of each."""
        # Everything that may raise runs before the step overwrites the state.
        step, state = self.compiled_steps["train"], self.device_state
        program = step.programs.get(dispatch.shape)
        if program is None:
            program = self.get_program("train", dispatch)
        if state.made_tree is not None:
            state.check_not_written()  # the last moment before the step outdates it

        # The steps. Nothing here waits for the device.
        leaves: list[Any] = state.leaves
        if self.starts_epoch:
            leaves = list(leaves)
            leaves[state.layout.totals] = self.place_ahead(state.layout.zeros)
        placed, results = self.run("train", dispatch, program, leaves)
        leaves, (means, inside) = results
        self.device_state, self.starts_epoch = DeviceState(leaves, state.layout), False
        facts = step.facts  # without jit, the facts are those of this call

        # Bounds the dispatches in flight.
        num_steps = len(dispatch.rows)
        if num_steps > 1:
            self.in_flight.add(means, placed.nbytes, LONG_IN_FLIGHT)
            return [Metrics(facts, means, inside, index) for index in range(num_steps)]
        self.in_flight.add(means, placed.nbytes)
        return [Metrics(facts, means, inside)]

    def run(
        self, kind: StepKind, dispatch: Dispatch, program: Program, *inputs: Any
    ) -> tuple[PlacedBatches, Any]:
        """Calls a program with `inputs` and the batches of a dispatch.

        Returns the placed batches and the results. No other code calls a program.
        """
        try:
            placed = self.compiled_steps[kind].place(
                dispatch, program, ahead=self.prefetches
            )
            results = program.compiled(*inputs, placed.groups)
            if program.may_raise:
                jax.block_until_ready(results)  # waits for the device
            return placed, results
        except jax.errors.JaxRuntimeError as error:
            add_remedies(f"the {KIND_NAMES[kind]} step", error)
            raise

    def place_ahead(self, array: Any) -> Any:
        """Returns a small host array on the devices; on CPUs, the array itself.

        `jax.transfer_guard("disallow")` forbids a call to move its arguments. On CPUs,
        placing an array takes as long as a small step.
        """
        if not self.prefetches:
            return array
        totals = self.device_state.leaves[self.device_state.layout.totals]
        return make_global_array(array, totals.sharding)

    def fetch_epoch_means(self) -> dict[str, float]:
        """Returns the means over the epoch's rows so far. Waits for the device."""
        state, facts = self.device_state, self.compiled_steps["train"].facts
        totals = np.asarray(state.leaves[state.layout.totals])  # waits for the device
        return self.step_functions.compute_means(totals, facts)
