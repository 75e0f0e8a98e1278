"""One kind of step: its programs, each compiled once for a form of its batches, and how
batches come to the devices."""

import contextlib
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array

from ..basics.process import pause_gc
from ..data import Dispatch, Packer, check_targets, without_ignored
from ..distributed import RowBlocks, make_global_array
from ..step import (
    Batch,
    CriterionObjective,
    Facts,
    Group,
    Products,
    Steps,
    TrainState,
    Weights,
    calls_python,
    gathers_in_branches,
    has_convolutions,
    products,
)
from ..strategies import DataParallel
from ..strategies.base import Rows, count_shards, place_batch
from ..strategies.fsdp_units import GATHERED_IN_BRANCH
from ..strategies.placement import fetch
from .bodies import BODIES, Body, traced
from .compiling import debug_settings
from .xla_options import options_for

Kind = Literal["train", "evaluate", "predict"]

WHAT: Final[dict[Kind, str]] = {
    "train": "training",
    "evaluate": "validation",
    "predict": "prediction",
}

_MOST_COUNTS: Final = 128
"""Of one program that are kept; there are more only if batches have all sizes."""

_NOTHING_YET: Final = Facts((), None)

_DONATED: Final = {"state": (0,), "all": (0, 1), "none": ()}


class Placed(NamedTuple):
    """Batches as a compiled step takes them, put on the devices."""

    step: Any
    groups: Any
    nbytes: int
    """What they take of a device before their step; 0 if the call brings them there."""


class StepOptions(NamedTuple):
    """How the train step is compiled; `Callback.step_options` changes it."""

    donate: str = "state"
    """What the step may overwrite: "state", "all" (batches, too) or "none"."""
    skip_nonfinite: bool = False
    """Whether a step with NaN or infinity in it keeps the old state."""


class SingleStepsOnly(Exception):
    """Several steps at a time were traced, which are better taken one by one."""


class Program:
    """A step compiled for batches of one form.

    Attributes:
        compiled: what runs: a `jax.stages.Compiled`, unless a user's strategy has made
            it.
        steps: how many optimizer steps a call takes. Rows and micro-batches are those
            of all of them, padding included.
        is_known: whether it is a `jax.stages.Compiled`, which tells its layouts.
        donated: whether it may overwrite the state that it is given.
        products: matrix operations of all devices, as traced; None if a part can't be
            counted, or another function has compiled it.
        convolves: whether there are convolutions in it, as far as is known.
        may_raise: whether it calls Python that may raise, so that each call is waited
            for before its results are used.
        compile_seconds: what it took to compile, and to trace if that is not known.
        trace_seconds: what it took to trace.
    """

    products: Products | None = None
    convolves = False
    may_raise = False
    trace_seconds: float | None = None
    compile_seconds = 0.0

    def __init__(
        self, compiled: Any, dispatch: Dispatch, groups: list[Group], donate: str
    ):
        self.compiled = compiled
        self.steps, self.rows = len(dispatch.rows), rows_in(groups)
        self.micro_batches = sum(len(group.counts) for group in groups)
        self.donated = donate != "none"
        # What a step may overwrite is not there for the next one, and a strategy of the
        # user's may return any callable, and counts of its own.
        self.is_known = isinstance(compiled, jax.stages.Compiled)
        self._keeps = self.is_known and donate != "all"
        self._layouts: list[Any] | None = None  # of the leaves of groups, in order
        self._counts: dict[Any, Array] = {}
        self._last_counts: tuple[Any, Any] = (None, None)  # of the call before

    def with_kept(self, groups: Any) -> Any:
        """`groups` with their row counts as they are kept on the devices.

        Most batches have as many rows as one before, and what comes from the host is
        sent to each device by itself: 50 us for four bytes on eight of them.
        """
        group, *others = groups
        before, placed = self._last_counts
        if group.counts is before and group.whole is None and not others:
            return [Group(group.batch, placed, None)]
        if not self._keeps or type(group.counts) is not np.ndarray:
            return groups
        kept = self._counts
        if len(kept) > _MOST_COUNTS:
            kept.clear()
        counted = []
        for place, group in enumerate(groups):
            counts = group.counts
            key = place, counts.tobytes()
            if key not in kept:
                positional, _ = self.compiled.input_shardings
                sharding = positional[-1][place].counts
                # None where the step has no use for them, as prediction has not.
                kept[key] = (
                    counts if sharding is None else make_global_array(counts, sharding)
                )
            counted.append(Group(group.batch, kept[key], group.whole))
            self._last_counts = counts, kept[key]
        return counted

    def moved(self, groups: Sequence[Group], *, all_of_them: bool) -> Sequence[Group]:
        """`groups` with JAX's arrays as it takes them; NumPy's too, if `all_of_them`.

        What is there already, and so laid out, is not copied. Nothing waits for the
        device.
        """
        flat = [jax.tree.flatten((group.batch, group.whole)) for group in groups]
        if self._layouts is None:
            positional, _ = self.compiled.input_shardings
            self._layouts = [
                treedef.flatten_up_to((layout.batch, layout.whole))
                for (_, treedef), layout in zip(flat, positional[-1], strict=True)
            ]
        there = []
        for group, (leaves, treedef), layouts in zip(
            groups, flat, self._layouts, strict=True
        ):
            # None is the layout of what the step has no use for; and what spans
            # processes was placed by the strategy.
            places = [
                place
                for place, (leaf, layout) in enumerate(
                    zip(leaves, layouts, strict=True)
                )
                if layout is not None
                and getattr(leaf, "is_fully_addressable", all_of_them)
            ]
            arrays = [leaves[place] for place in places]
            arrays = jax.device_put(arrays, [layouts[place] for place in places])
            for place, array in zip(places, arrays, strict=True):
                leaves[place] = array
            batch, whole = treedef.unflatten(leaves)
            there.append(group._replace(batch=batch, whole=whole))
        return there


class Step:
    """One kind of step under a strategy, compiled once for each form of batches.

        program = step.programs.get(dispatch.shape) or step.compile(...)
        placed = step.placed(dispatch, program, ahead=False)
        results = program.compiled(*inputs, placed.groups)

    Attributes:
        packer: of its batches.
        facts: what tracing has told, the last time; no names before.
        programs: by the shapes of dispatches. There is no other cache of them.
        digests: of the programs' texts, in a job of several processes.
    """

    def __init__(
        self,
        kind: Kind,
        strategy: DataParallel,
        blocks: RowBlocks,
        in_order: bool,
        *,
        pads: Callable[[Batch], bool] | None,
    ):
        def collect(leaves: list[Any]) -> list[np.ndarray]:
            (group,) = place_batch(strategy, [Group(leaves, None)], split=True)
            return fetch(group.batch)

        shards = count_shards(strategy)
        self.kind: Kind = kind
        self.packer = Packer(shards, WHAT[kind], blocks, in_order, collect, pads=pads)
        self.facts = _NOTHING_YET
        self.programs: dict[Hashable, Program] = {}
        self.digests: tuple[str, ...] = ()
        self._strategy = strategy
        # Of named losses: how many classes there are, by the forms of batches whose
        # targets are to be looked at.
        self._classes: dict[tuple[str, ...], int | None] = {}
        self._steps: Steps | None = None  # those that were compiled last

    def compile(
        self,
        steps: Steps,
        dispatch: Dispatch,
        inputs: TrainState | Weights,
        donate: str,
        options: Mapping[str, Any],
    ) -> Program:
        """Traces and compiles a step for batches like those of `dispatch`.

        Under `jax.disable_jit` and `jax_debug_nans` it is left to `jax.jit`, which then
        runs it operation by operation, or finds the line that makes NaN.

        Args:
            steps: what it does.
            dispatch: batches, or their shapes.
            inputs: what a step takes besides: the state to train, else the weights.
            donate: of `StepOptions`.
            options: the user's, of XLA.

        Raises:
            ValueError: if the step calls Python that may raise, on several devices.
            SingleStepsOnly: if it is better compiled for one step at a time.
        """
        groups = self._of_all_processes(dispatch, inputs)
        body = BODIES[self.kind](steps, inputs, groups, len(dispatch.rows), self._note)
        without_jit, looks_for_nan = debug_settings()
        # Without jit, a `jax.shard_map` would run on each device in turn.
        is_apart = steps.is_per_example(self.kind) and not without_jit
        rows: Rows = "apart" if is_apart else "together"
        if without_jit or looks_for_nan:  # what has failed is run once more
            donate = "none"
        before, started = self.facts, time.perf_counter()
        jitted = self._strategy.compile(
            *body, donate=_DONATED[donate], rows=rows if dispatch.split else "whole"
        )
        if not callable(jitted):
            raise TypeError(
                f"`strategy`: {type(self._strategy).__name__}.compile returned a"
                f" {type(jitted).__name__}; it must return the jitted step, which"
                " is called with the arguments of `step` less the first."
            )
        step = jaxpr = None
        if hasattr(jitted, "trace") and not (without_jit or looks_for_nan):
            with pause_gc():
                step = jitted.trace(*body.arguments)
            jaxpr = step.jaxpr
        elif self.facts is before and not without_jit:  # it was not traced yet
            jaxpr = traced(body.function, *body.arguments)
        convolves = jaxpr is not None and has_convolutions(jaxpr)
        if convolves and steps.unroll_convolutions and len(dispatch.rows) > 1:
            raise SingleStepsOnly

        seconds = time.perf_counter() - started
        if step is None:
            jitted = _with_arrays(jitted) if without_jit else jitted
            program = Program(jitted, dispatch, groups, donate)
            program.compile_seconds = seconds
        else:
            instead = getattr(jitted, "compiler_options", None)
            program = self._compiled(step, body, dispatch, donate, options, instead)
            program.trace_seconds = seconds
        program.convolves = convolves

        if self.facts.names:
            if before.names and self.programs:
                before.merge(self.facts)  # which raises if it can't be
            self._steps = steps
            is_named = isinstance(steps.objective, CriterionObjective)
            if is_named and (self.facts.num_classes or self.facts.weighted):
                self._classes[dispatch.forms] = self.facts.num_classes
        self.programs[dispatch.shape] = program
        return program

    def _compiled(
        self,
        step: Any,
        body: Body,
        dispatch: Dispatch,
        donate: str,
        options: Mapping[str, Any],
        instead: dict[str, Any] | None,
    ) -> Program:
        """The program of a traced step; `instead` has a strategy's options of XLA."""
        started, leaves = time.perf_counter(), jax.tree.leaves(body.arguments)
        is_to_run = any(isinstance(leaf, jax.Array) for leaf in leaves)
        if gathers_in_branches(step.jaxpr):
            raise ValueError(GATHERED_IN_BRANCH)
        if may_raise := is_to_run and calls_python(step.jaxpr):
            _check_is_alone(self._strategy, step, leaves)
            if len(dispatch.rows) > 1:  # the state before an error would be lost
                raise SingleStepsOnly
            # The state that a step began with must survive its error.
            step, donate = _not_donating(step, body.arguments), "none"
        options = options_for(step.jaxpr, body.arguments, instead, options)
        with warnings.catch_warnings():
            if donate == "all":
                # A batch has no result of its shape to become; DonateBuffers reports
                # what matters.
                unused = "Some donated buffers were not usable"
                warnings.filterwarnings("ignore", unused)
            with pause_gc():
                lowered = step.lower()
            compiled = lowered.compile(dict(options))
        if jax.process_count() > 1:
            text = lowered.as_text().encode()
            self.digests += (hashlib.blake2b(text, digest_size=6).hexdigest(),)

        program = Program(compiled, dispatch, body.arguments[-1], donate)
        program.compile_seconds = time.perf_counter() - started
        program.may_raise = may_raise
        with contextlib.suppress(KeyError):  # JAX has renamed something
            program.products = products(step.jaxpr)
        return program

    def _note(self, facts: Facts) -> None:
        self.facts = facts

    def _of_all_processes(self, dispatch: Dispatch, inputs: Any) -> list[Group]:
        """What it is compiled for: the batches of all processes."""
        # Where JAX's arrays are now is not where the step takes them.
        is_abstract = not isinstance(jax.tree.leaves(inputs)[0], jax.Array)
        all_of_them = is_abstract or jax.process_count() > 1
        kinds: Any = object if all_of_them else jax.Array

        def shape_of(leaf: Any) -> Any:
            if not isinstance(leaf, kinds):
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

        groups = jax.tree.map(shape_of, dispatch.groups)
        blocks = self.packer.blocks
        if not dispatch.split or blocks.count == 1:
            return groups
        return [blocks.make_global_shapes(group) for group in groups]

    # How batches come to the devices. Nothing here waits for the device.

    def put(self, dispatch: Dispatch) -> Dispatch:
        """The same with its batches on the way to the devices, if its step is known.

        What is wrong with them is told when their turn comes.
        """
        program = self.programs.get(dispatch.shape)
        if program is None or not program.is_known:
            return dispatch
        try:
            return dispatch._replace(placed=self.placed(dispatch, program, ahead=True))
        except ValueError:
            return dispatch

    def placed(self, dispatch: Dispatch, program: Program, *, ahead: bool) -> Placed:
        """The batches of a dispatch, checked, as its program takes them.

        Args:
            ahead: whether to bring what is on the host to the devices, too, which on
                CPUs the compiled call does sooner.
        """
        if dispatch.placed is not None and dispatch.placed.step is program:
            return dispatch.placed
        if dispatch.forms in self._classes:
            classes = self._classes[dispatch.forms]
            try:
                for group in dispatch.groups:
                    check_targets(group.batch, classes)
            except ValueError:
                self._unpad()
                raise
        if self.kind == "train" and self.facts.weighted:
            dispatch = self._without_ignored(dispatch)
        groups = place_batch(self._strategy, dispatch.groups, split=dispatch.split)
        if program.is_known:
            groups = program.with_kept(groups)
            if ahead or dispatch.are_there:
                groups = program.moved(groups, all_of_them=ahead)
        nbytes = self.bytes_per_device(dispatch) if ahead else 0
        return Placed(program, groups, nbytes)

    def bytes_per_device(self, dispatch: Dispatch) -> int:
        """Bytes of the rows that a device has of a dispatch."""
        blocks = self.packer.blocks
        shards = count_shards(self._strategy) * len(blocks.local) // blocks.count
        return dispatch.nbytes // (max(1, shards) if dispatch.split else 1)

    def explain(self, error: Exception, dispatch: Dispatch) -> None:
        """Notes what may be wrong with batches that it could not be compiled for."""
        self._unpad()
        if not self.programs:
            # The first batch did not fit the model; the next one may be another.
            self.packer.forget()
        for note in filter(None, map(self.packer.forms.note, dispatch.groups)):
            error.add_note(note)

    def _unpad(self) -> None:
        """No batch is padded to the size of one that is refused."""
        if self.packer.blocks.count == 1:  # several processes must stay of one mind
            self.packer.forms.refuse()

    def _without_ignored(self, dispatch: Dispatch) -> Dispatch:
        """The same with copies of real rows in the place of those of weight 0."""
        assert self._steps is not None
        objective = self._steps.objective
        if not isinstance(objective, CriterionObjective):
            return dispatch  # only its author knows what in a batch is a weight
        which = self._steps.is_per_example(self.kind), objective.is_per_example
        groups = [
            group._replace(batch=without_ignored(group.batch, *which))
            for group in dispatch.groups
        ]
        return dispatch._replace(groups=groups)


def _with_arrays(jitted: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that is given JAX's arrays, also where jit is disabled."""
    return lambda *given: jitted(*jax.tree.map(jnp.asarray, given))


def _not_donating(step: Any, arguments: tuple[Any, ...]) -> Any:
    """Returns a traced step of one device without its donation."""
    flat, tree = jaxpr_as_fun(step.jaxpr), jax.tree.structure(step.out_info)

    def run(*arguments: Any) -> Any:
        return tree.unflatten(flat(*jax.tree.leaves(arguments)))

    return jax.jit(run).trace(*arguments)


def _check_is_alone(
    strategy: DataParallel, step: Any, arguments: Sequence[Any]
) -> None:
    """Raises if a step that calls Python is to run on several devices.

    An error that leaves one device strands the others: with faked devices, jax 0.10.2
    aborts the process.
    """
    devices = next(x.sharding.device_set for x in arguments if hasattr(x, "sharding"))
    if len(devices) > 1 or not isinstance(step, jax.stages.Traced):  # as of Bitwise
        raise ValueError(
            "`strategy`: the step calls Python that may raise an error"
            " (jax.pure_callback): eqx.error_if does, and so does every diffrax solver."
            f" {strategy!r} can't run it: an error on one of several devices would"
            " leave the others waiting. Set the environment variable EQX_ON_ERROR=nan"
            " before Python starts, which makes NaN instead of errors; or pass"
            " throw=False to diffrax.diffeqsolve (SaveAt(ts=...) and Brownian trees"
            " have checks besides); or use strategy=SingleDevice(), where errors are"
            " raised."
        )


def rows_in(groups: list[Group]) -> int:
    """All rows of the micro-batches, padding included."""
    return sum(math.prod(jax.tree.leaves(group.batch)[0].shape[:2]) for group in groups)
