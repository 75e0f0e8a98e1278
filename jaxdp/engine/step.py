"""One kind of step: its programs, one per shape of batch, and the transfer of batches
to the devices."""

import contextlib
import hashlib
import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..basics.process import pause_gc
from ..basics.tracebacks import NoteOnError
from ..data import Dispatch, Packer, check_targets
from ..distributed import RowBlocks, make_global_array
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
from .flat_functions import FLAT_FUNCTIONS, FlatFunction
from .xla_options import options_for

StepKind = Literal["train", "evaluate", "predict"]

KIND_NAMES: Final[dict[StepKind, str]] = {
    "train": "training",
    "evaluate": "validation",
    "predict": "prediction",
}

_MAX_COUNTS: Final = 128
"""Row counts on the devices per program. Only batches of all sizes have more."""

_DONATED: Final = {"state": (0,), "all": (0, 1), "none": ()}


class PlacedBatches(NamedTuple):
    """Batches as the arguments of a compiled step."""

    groups: Any
    nbytes: int
    """Bytes on a device before the step; 0 if the call itself moves them there."""


class StepOptions(NamedTuple):
    """Options of compiling the train step; `Callback.step_options` changes them."""

    donate: str = "state"
    """Buffers that a step may overwrite: "state", "all" (batches, too) or "none"."""
    skip_nonfinite: bool = False
    """Whether a step with NaN or infinity in it keeps the old state."""


class SlowInLoop(ValueError):
    """Raised if single steps are faster than several at a time; says why."""


class Program:
    """A step compiled for batches of one shape.

    Attributes:
        compiled: a `jax.stages.Compiled`, or the jitted step if JAX debugs it.
        steps: the number of optimizer steps of a call.
        groups: the shapes of the batches of all processes, padding included.
        donates: whether it may overwrite the state that it gets.
        is_compiled: whether it is a `jax.stages.Compiled`, which has shardings.
        jaxpr: the traced step, which plans read; None if JAX debugs the step.
        may_raise: whether it calls Python that may raise, so that each call is waited
            for before its results are used.
        checks_targets: whether the labels or weights of batches are checked.
        num_classes: the number of classes that labels may have; None for no labels.
        compile_seconds: the time to trace and compile it.
    """

    jaxpr: Any = None
    may_raise = checks_targets = False
    num_classes: int | None = None
    compile_seconds = 0.0

    def __init__(self, compiled: Any, steps: int, groups: list[Group], donate: str):
        self.compiled, self.steps, self.groups = compiled, steps, groups
        self.donates = donate != "none"
        self.is_compiled = isinstance(compiled, jax.stages.Compiled)
        # A step that overwrites its batches overwrites their counts, so the next step
        # can't reuse these.
        self._reuses_counts = self.is_compiled and donate != "all"
        self._shardings: list[Any] | None = None  # of the groups' leaves
        self._counts: dict[int, tuple[np.ndarray, Any]] = {}

    def reuse_counts(self, groups: Any) -> Any:
        """Returns the groups with their row counts as arrays on the devices.

        Most batches have the rows of an earlier one, and an array of the host is sent
        to each device separately: 50 us for four bytes on eight devices.
        """
        if not self._reuses_counts:
            return groups
        known, placed = self._counts, []
        for batch, counts, whole in groups:
            if type(counts) is np.ndarray:  # the packer has one array for equal counts
                _, counts = known.get(id(counts)) or self._put_counts(counts)
            placed.append(Group(batch, counts, whole))
        return placed

    def _put_counts(self, counts: np.ndarray) -> tuple[np.ndarray, Any]:
        if len(self._counts) > _MAX_COUNTS:
            self._counts.clear()
        *_, (group, *_) = self.compiled.input_shardings[0]  # all groups share them
        # A prediction does not use the counts, and so has no sharding for them.
        is_used = group.counts is not None
        placed = make_global_array(counts, group.counts) if is_used else counts
        # The entry refers to the array, so no other array can have its id.
        self._counts[id(counts)] = counts, placed
        return counts, placed

    def transfer(self, groups: Sequence[Group], *, include_numpy: bool) -> list[Group]:
        """Returns the groups with JAX's arrays in the program's shardings, and with
        NumPy's arrays if `include_numpy`.

        Does not copy an array that already has its sharding. Does not wait for the
        device.
        """
        leaves, treedef = jax.tree.flatten(groups)
        shardings = self._shardings
        if shardings is None:
            *_, of_groups = self.compiled.input_shardings[0]
            shardings = self._shardings = treedef.flatten_up_to(of_groups)
        # An argument that the step does not use has no sharding. The strategy has
        # placed arrays that span processes.
        indices = [
            i
            for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
            if sharding is not None
            and getattr(leaf, "is_fully_addressable", include_numpy)
        ]
        arrays = jax.device_put(
            [leaves[i] for i in indices], [shardings[i] for i in indices]
        )
        for i, array in zip(indices, arrays, strict=True):
            leaves[i] = array
        return treedef.unflatten(leaves)


class Step:
    """One kind of step under a strategy, compiled once for each shape of batch.

        program = step.programs.get(dispatch.shape) or step.compile(...)
        placed = step.place(dispatch, program, ahead=False)
        results = program.compiled(*inputs, placed.groups)

    Attributes:
        packer: packs the batches of this step.
        facts: the facts of the last trace; without names before the first trace.
        programs: the programs by the shapes of dispatches. There is no other cache of
            programs.
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
        steps: StepFunctions,
        dispatch: Dispatch,
        inputs: TrainState | Weights,
        donate: str,
        options: Mapping[str, Any],
    ) -> Program:
        """Traces and compiles the step for batches like those of `dispatch`.

        Under `jax.disable_jit` and `jax_debug_nans`, `jax.jit` is called instead. It
        runs the step operation by operation, or finds the line that makes NaN.

        Args:
            steps: the pure functions.
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
        function = make(steps, inputs, groups, num_steps, self._set_facts)
        is_eager, finds_nan = get_debug_settings()
        leaf = jax.tree.leaves(inputs)[0]
        is_debugged = isinstance(leaf, jax.Array) and (is_eager or finds_nan)
        # Without jit, a `jax.shard_map` would run on each device in turn.
        is_apart = steps.is_per_example(self.kind) and not is_eager
        rows: Rows = "apart" if is_apart else "together"
        if is_debugged:  # a step that fails is run again
            donate = "none"
        before, started = self.facts, time.perf_counter()
        jitted = self._strategy.compile(
            *function, donate=_DONATED[donate], rows=rows if dispatch.split else "whole"
        )
        if is_debugged:
            if not is_eager:
                jitted.trace(*function.arguments)  # tracing finds the names of metrics
            # The functions of users get JAX's arrays, also where jit is disabled.
            run = lambda *args: jitted(*jax.tree.map(jnp.asarray, args))  # noqa: E731
            program = Program(run, num_steps, groups, donate)
        else:
            with pause_gc():
                traced = jitted.trace(*function.arguments)
            may_raise = self._check_traced(traced.jaxpr, steps, num_steps, leaf)
            if may_raise and donate != "none":
                # The state before a step must survive the step's error.
                self.facts = before
                return self.compile(steps, dispatch, inputs, "none", options)
            compiled = self._compile_traced(traced, function, donate, options)
            program = Program(compiled, num_steps, groups, donate)
            program.may_raise = may_raise
            program.compile_seconds = time.perf_counter() - started
            program.jaxpr = traced.jaxpr.jaxpr
            if before.names and self.programs:
                before.merge(self.facts)  # raises for metrics of other names
        if isinstance(steps.objective, CriterionObjective):
            program.num_classes = self.facts.num_classes
            program.checks_targets = bool(program.num_classes or self.facts.weighted)
        self.programs[dispatch.shape] = program
        return program

    def _check_traced(
        self, jaxpr: Any, steps: StepFunctions, num_steps: int, leaf: Any
    ) -> bool:
        """Raises if a traced step must not be compiled.

        Returns True if it calls Python that may raise. `leaf` is one leaf of the step's
        state.
        """
        if gathers_in_branches(jaxpr):
            raise ValueError(GATHERED_IN_BRANCH)
        is_looped = num_steps > 1
        if is_looped and steps.unroll_convolutions and has_convolutions(jaxpr):
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

    def _compile_traced(
        self,
        traced: Any,
        function: FlatFunction,
        donate: str,
        options: Mapping[str, Any],
    ) -> jax.stages.Compiled:
        note = NoteOnError(f"`compiler_options` was {dict(options)}")
        all_options = options_for(traced.jaxpr, function.arguments, options)
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


def get_debug_settings() -> tuple[bool, bool]:
    """Returns whether JAX's jit is disabled, and whether JAX looks for NaN."""
    config: Any = jax.config
    return config.jax_disable_jit, config.jax_debug_nans or config.jax_debug_infs
