"""A step of one kind: the cache of its programs, one per shape of batch.

It packs batches, compiles programs for them, and transfers batches to the devices.
"""

import contextlib
import functools
import hashlib
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np

from ..basics.process import pause_gc
from ..basics.tracebacks import NoteOnError
from ..data import Dispatch, Packer, check_targets
from ..distributed import RowBlocks
from ..step import (
    CriterionObjective,
    Facts,
    Group,
    StepFunctions,
    TrainState,
    Weights,
    calls_python,
    gathers_in_branches,
    has_convolutions,
)
from ..strategies import DataParallel
from ..strategies.base import Rows, count_shards, place_batch
from ..strategies.fsdp_units import GATHERED_IN_BRANCH
from ..strategies.placement import fetch
from .debug_settings import get_debug_settings, make_debugged_call
from .flat_functions import FLAT_FUNCTIONS
from .program import PlacedBatches, Program
from .xla_options import options_for

StepKind = Literal["train", "evaluate", "predict"]

KIND_NAMES: Final[dict[StepKind, str]] = {
    "train": "training",
    "evaluate": "validation",
    "predict": "prediction",
}

_DONATED: Final = {"state": (0,), "all": (0, 1), "none": ()}


class StepOptions(NamedTuple):
    """Options of compiling the train step; `Callback.step_options` changes them."""

    donate: str = "state"
    """Buffers that a step may overwrite: "state", "all" (batches, too) or "none"."""
    skip_nonfinite: bool = False
    """Whether a step with NaN or infinity in it keeps the old state."""


class SlowInLoop(ValueError):
    """Raised if single steps are faster than several at a time; says why."""


class CompiledStep:
    """One kind of step under a strategy, compiled once for each shape of batch.

        program = step.programs.get(dispatch.shape) or step.compile(...)
        placed = step.place(dispatch, program, ahead=False)
        results = program.compiled(*inputs, placed.groups)

    Attributes:
        packer: packs the batches of this step.
        facts: the facts of the last trace; without names before the first trace.
        programs: the cache of programs, by the shapes of dispatches. There is no other.
        digests: of the programs' texts, in a job of several processes.
    """

    def __init__(
        self,
        kind: StepKind,
        strategy: DataParallel,
        blocks: RowBlocks,
        in_order: bool,
        *,
        pads: bool,
    ):
        def collect(leaves: list[Any]) -> list[np.ndarray]:
            (group,) = place_batch(strategy, [Group(leaves, None)], split=True)
            return fetch(group.batch)

        self.kind: StepKind = kind
        self.packer = Packer(
            count_shards(strategy),
            KIND_NAMES[kind],
            blocks,
            in_order,
            collect,
            pads,
        )
        self.facts = Facts((), None)
        self.programs: dict[Hashable, Program] = {}
        self.digests: tuple[str, ...] = ()
        self._strategy = strategy

    def compile(
        self,
        step_functions: StepFunctions,
        dispatch: Dispatch,
        inputs: TrainState | Weights,
        donate: str,
        options: Mapping[str, Any],
    ) -> Program:
        """Traces and compiles the step for batches like those of `dispatch`.

        `programs` keeps the program. Under `jax.disable_jit` or `jax_debug_nans` it is
        a call of `jax.jit` instead: see `debug_settings`.

        Args:
            step_functions: the pure functions of the trainer.
            dispatch: batches, or their shapes.
            inputs: the state to train, or else the weights.
            donate: the option of `StepOptions`.
            options: the user's options for XLA.

        Raises:
            ValueError: if the step calls Python that may raise, on several devices or
                in several steps.
            SlowInLoop: for convolutions in several steps on a CPU.
        """
        groups, num_steps = self._get_global_shapes(dispatch), len(dispatch.rows)
        make = FLAT_FUNCTIONS[self.kind]
        flat = make(step_functions, inputs, groups, num_steps, self._set_facts)
        rows = self._choose_rows(step_functions, dispatch)
        make_jitted = functools.partial(self._strategy.compile, *flat, rows=rows)

        is_abstract = not isinstance(jax.tree.leaves(inputs)[0], jax.Array)
        if any(get_debug_settings()) and not is_abstract:
            # With `jax_debug_nans`, JAX runs a step that made NaN again, operation by
            # operation, so its arguments must survive.
            jitted = make_jitted(donate=_DONATED["none"])
            call = make_debugged_call(jitted, flat.arguments)
            program = Program(call, num_steps, groups, "none")
        else:
            unrolls = step_functions.unroll_convolutions
            program = self._compile_ahead(
                make_jitted, flat.arguments, num_steps, unrolls, donate, options
            )

        if isinstance(step_functions.objective, CriterionObjective):
            program.num_classes = self.facts.num_classes
            program.checks_targets = bool(program.num_classes or self.facts.weighted)
        self.programs[dispatch.shape] = program
        return program

    def _compile_ahead(
        self,
        make_jitted: Callable[..., Any],
        arguments: tuple[Any, ...],
        num_steps: int,
        unrolls_convolutions: bool,
        donate: str,
        options: Mapping[str, Any],
    ) -> Program:
        """Traces, checks, lowers and compiles the step of `make_jitted(donate=...)`."""
        before, started = self.facts, time.perf_counter()

        def trace(donate: str) -> Any:
            jitted = make_jitted(donate=_DONATED[donate])
            with pause_gc():
                return jitted.trace(*arguments)

        traced = trace(donate)
        leaf = jax.tree.leaves(arguments)[0]
        may_raise = _check_traced(traced.jaxpr, leaf, num_steps, unrolls_convolutions)
        if may_raise and donate != "none":
            # The state before a step must survive the step's error.
            donate = "none"
            traced = trace(donate)
        compiled = self._lower_and_compile(traced, arguments, donate, options)
        if before.names and self.programs:
            before.merge(self.facts)  # raises for metrics of other names

        *_, groups = arguments
        program = Program(compiled, num_steps, groups, donate)
        program.may_raise = may_raise
        program.compile_seconds = time.perf_counter() - started
        program.jaxpr = traced.jaxpr.jaxpr
        return program

    def _lower_and_compile(
        self,
        traced: Any,
        arguments: tuple[Any, ...],
        donate: str,
        options: Mapping[str, Any],
    ) -> jax.stages.Compiled:
        note = NoteOnError(f"`compiler_options` was {dict(options)}")
        all_options = options_for(traced.jaxpr, arguments, options)
        with warnings.catch_warnings():
            if donate == "all":
                # No result has the shape of a batch. DonateBuffers reports the cases
                # that matter.
                unused = "Some donated buffers were not usable"
                warnings.filterwarnings("ignore", unused)
            with pause_gc():
                lowered = traced.lower()
            with note if options else contextlib.nullcontext():
                compiled = lowered.compile(all_options)
        if jax.process_count() > 1:
            text = lowered.as_text().encode()
            self.digests += (hashlib.blake2b(text, digest_size=6).hexdigest(),)
        return compiled

    def _set_facts(self, facts: Facts) -> None:
        self.facts = facts

    def _choose_rows(self, step_functions: StepFunctions, dispatch: Dispatch) -> Rows:
        """Returns the division of the rows of a dispatch among devices."""
        if not dispatch.split:
            return "replicated"
        # Without jit, a `jax.shard_map` would run on each device in turn.
        is_eager = get_debug_settings().disables_jit
        is_apart = step_functions.is_per_example(self.kind) and not is_eager
        return "apart" if is_apart else "together"

    def _get_global_shapes(self, dispatch: Dispatch) -> list[Group]:
        """Returns the shapes of the global batches that the step is compiled for.

        They have no shardings: arrays on devices are moved to those of the program.
        """
        groups = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), dispatch.groups
        )
        blocks = self.packer.blocks
        if not dispatch.split or blocks.count == 1:
            return groups
        return [blocks.make_global_shapes(group) for group in groups]

    # The transfer of batches to the devices. It does not wait for the device.

    def prefetch(self, dispatch: Dispatch) -> Dispatch:
        """Starts the transfer of the batches, if the step is compiled for them.

        An invalid batch raises later, when its step is due.
        """
        program = self.programs.get(dispatch.shape)
        if program is None or not program.is_compiled:
            return dispatch
        try:
            return dispatch._replace(placed=self.place(dispatch, program, ahead=True))
        except ValueError:
            return dispatch

    def place(
        self, dispatch: Dispatch, program: Program, *, ahead: bool
    ) -> PlacedBatches:
        """Returns the batches of a dispatch, checked, as arguments of its program.

        Args:
            ahead: whether to transfer NumPy's arrays too. On CPUs the compiled call
                moves them faster.
        """
        if dispatch.placed is not None:
            return dispatch.placed
        if program.checks_targets:
            try:
                for group in dispatch.groups:
                    check_targets(group.batch, program.num_classes)
            except ValueError:
                self.packer.reset()  # others are not padded to the size of this batch
                raise
        groups = place_batch(self._strategy, dispatch.groups, split=dispatch.split)
        if program.is_compiled:
            groups = program.reuse_counts(groups)
            if ahead or dispatch.has_device_arrays:
                groups = program.transfer(groups, include_numpy=ahead)
        nbytes = self._count_bytes(dispatch) if ahead else 0
        return PlacedBatches(groups, nbytes)

    def _count_bytes(self, dispatch: Dispatch) -> int:
        """Returns the bytes of a dispatch on one device."""
        blocks = self.packer.blocks
        shards = count_shards(self._strategy) * len(blocks.local) // blocks.count
        return dispatch.nbytes // (max(1, shards) if dispatch.split else 1)


def _check_traced(
    jaxpr: Any, leaf: Any, num_steps: int, unrolls_convolutions: bool
) -> bool:
    """Raises if a traced step must not be compiled.

    Returns True if it calls Python that may raise. `leaf` is one leaf of the step's
    state.
    """
    if gathers_in_branches(jaxpr):
        raise ValueError(GATHERED_IN_BRANCH)
    is_looped = num_steps > 1
    if is_looped and unrolls_convolutions and has_convolutions(jaxpr):
        raise SlowInLoop(
            "`steps_per_execution` should be 1 for convolutions on CPUs: XLA's code"
            " for them is slow inside a loop of steps."
        )
    if not isinstance(leaf, jax.Array) or not calls_python(jaxpr):
        return False
    if is_looped or len(leaf.sharding.device_set) > 1:
        # An error that leaves one device strands the others: with faked devices,
        # jax 0.10.2 aborts the process. In a loop, the state before it is lost.
        raise ValueError(
            "`strategy`: the step calls Python that may raise an error"
            " (jax.pure_callback), as eqx.error_if and every diffrax solver do."
            " An error on one of several devices would leave the others waiting,"
            " and one in a loop of steps would lose the state. Set the environment"
            " variable EQX_ON_ERROR=nan before Python starts, which makes NaN"
            " instead of errors; or pass throw=False to diffrax.diffeqsolve; or use"
            " strategy=SingleDevice() with steps_per_execution=1."
        )
    return True
