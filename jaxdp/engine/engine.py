"""Compiled steps, taken on the placed state of a trainer."""

import collections
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.ambient_mesh import no_ambient_mesh
from ..basics.console import say
from ..basics.tracebacks import noted
from ..data import (
    Dispatch,
    Packer,
)
from ..distributed import RowBlocks
from ..step import (
    LONG_IN_FLIGHT,
    Batch,
    CallsPython,
    Group,
    Metrics,
    Steps,
    TrainState,
    check_gradients,
    has_convolutions,
    matmul_flops,
    means_of,
    tells_of_gradients,
)
from ..strategies import DataParallel
from .dispatch_size import DispatchSize
from .eager import Debugged, Debugging, debugging
from .fetching import Fetching
from .held_state import HeldState, placed_first, shapes_of_first
from .in_flight import InFlight, most_bytes_in_flight
from .out_of_memory import check_memory
from .placing import Placing
from .programs import WHAT, Kind, Program, Programs, StepOptions, rows_in


class Ready(NamedTuple):
    """A batch of a pass, packed, and the step that takes it."""

    batch: Batch
    dispatch: Dispatch
    compiled: Program


class Engine:
    """Runs steps: packs batches, compiles once per shape, keeps the state.

    Args:
        parts: the model as (trained leaves, other arrays, the rest).
        model_state: its `eqx.nn.State`, or None.
        steps: the pure steps.
        strategy: places the state and compiles the steps.
        seed: decides all randomness inside the steps.
        micro_batches: how many batches a train step takes.
        steps_per_execution: train steps per dispatch, or "auto".
        view: from the state to the one whose weights are evaluated and handed out.
        in_order: whether the real rows of several processes' batches come first, and
            all padding last.
        abstract: whether there are only shapes: nothing is placed, no step can run.

    Attributes:
        placing: how batches come to the devices, and when.
        one_by_one: whether a dispatch takes one step, whatever was asked for.
        steps_per_epoch: None if it is not known; "auto" divides it well.
    """

    def __init__(
        self,
        parts: tuple[PyTree, PyTree, PyTree],
        model_state: PyTree,
        steps: Steps,
        strategy: DataParallel,
        *,
        seed: int,
        micro_batches: int,
        steps_per_execution: int | str = 1,
        view: Callable[[TrainState], TrainState] | None = None,
        in_order: bool = True,
        abstract: bool = False,
    ):
        self._is_abstract = abstract
        self.micro_batches = micro_batches
        self.in_flight = InFlight()
        self.one_by_one = False
        self.steps_per_epoch: int | None = None
        self._convolves: bool | None = None
        self._as_asked = strategy, steps_per_execution, in_order
        self._work(steps, debugging())
        strategy = self.strategy
        self.held = HeldState(parts, view)
        if abstract:
            with no_ambient_mesh():
                self.state = shapes_of_first(parts, model_state, steps, strategy)
        else:
            self.state = placed_first(parts, model_state, steps, strategy, seed)
        self._mind_platform()
        if not abstract:
            self.in_flight.most_bytes = most_bytes_in_flight(self._devices)

    def _work(self, steps: Steps, mode: Debugging) -> None:
        """Makes ready for `steps` from the start, as JAX's settings want it."""
        strategy, steps_per_execution, in_order = self._as_asked
        abstract, self._mode = self._is_abstract, mode
        if any(mode) and not abstract:
            strategy, steps_per_execution = Debugged(strategy, mode), 1
        several = not abstract and jax.process_count() > 1
        # Where nothing is compiled for a size, nothing need be padded to one.
        steps = steps._replace(rows_interact=mode.without_jit and not abstract)
        self.strategy = strategy
        self.programs = Programs(steps, strategy, quiet=abstract or mode.without_jit)
        self.facts = self.programs.facts
        self._dispatch_size = DispatchSize(steps_per_execution)
        self._blocks = strategy.row_blocks() if several else RowBlocks()
        self.packers: dict[Kind, Packer] = {
            kind: self._packer(what, in_order) for kind, what in WHAT.items()
        }
        self.placing = Placing(strategy, self.programs, self.packers, self._blocks)

    def follow_settings(self) -> None:
        """Goes on as JAX's settings for debugging are now; see `eager`."""
        self._change(debugging(self._mode.calls_python))

    def _change(self, mode: Debugging) -> None:
        if mode == self._mode:
            return
        state, options = self.strategy.gather(self.state), self.programs.options
        self._work(self.programs.steps, mode)
        self.programs.options = options
        with no_ambient_mesh():
            self.state = self.strategy.place(state)
        self._mind_platform()

    def as_settled(self) -> AbstractContextManager[Any]:
        """Around a pass: jit is disabled in it or not as when the settings were read,
        whatever a callback does in between."""
        return jax.disable_jit(self._mode.without_jit)

    def _mind_platform(self) -> None:
        """Does what is faster on CPUs alone, or on all others.

        XLA rewrites convolutions for the CPU's library outside of loops alone. Inside a
        loop they take about five times as long, and round otherwise.
        """
        is_cpu = self._platform == "cpu"
        self.placing.puts_ahead = not is_cpu and not self._is_abstract
        unroll = is_cpu and not self._mode.without_jit  # else loops are Python's
        self.programs.set(unroll_convolutions=unroll)

    @property
    def state(self) -> TrainState:
        """The placed state. The next step overwrites its arrays: copy what you keep."""
        return self.held.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self.held.put(state, self.strategy)

    @property
    def _devices(self) -> list[Any]:
        return [*self.held.arrays[0].sharding.device_set]

    @property
    def _platform(self) -> str:
        return self._devices[0].platform

    @property
    def steps_per_execution(self) -> int:
        """How many steps a dispatch takes at present."""
        return 1 if self.one_by_one else self._dispatch_size.steps

    def _packer(self, what: str, in_order: bool) -> Packer:
        strategy = self.strategy

        def collect(leaves: list[Any]) -> list[np.ndarray]:
            (group,) = strategy.place_batch([Group(leaves, None)], split=True)
            return strategy.fetch(group.batch)

        return Packer(strategy.num_shards, what, self._blocks, in_order, collect)

    def _shapes(self, dispatch: Dispatch) -> list[Group]:
        """What a step is compiled for: the batches of all processes."""
        if self._is_abstract:
            return jax.tree.map(_shape_of, dispatch.groups)
        # Where JAX's arrays are now is not where the step takes them.
        groups = jax.tree.map(
            lambda leaf: _shape_of(leaf) if isinstance(leaf, jax.Array) else leaf,
            dispatch.groups,
        )
        if not dispatch.split or self._blocks.count == 1:
            return groups
        return [self._blocks.whole(group) for group in groups]

    def set_options(self, options: StepOptions) -> None:
        """How train steps are compiled from now on."""
        if options != self.programs.options:
            self.programs.options = options
            self.programs.set(skip_nonfinite=options.skip_nonfinite)
            self.programs.forget_training()

    @property
    def sizes(self) -> dict[str, int]:
        """How many rows batches of each kind are padded to, at most."""
        return {kind: packer.size for kind, packer in self.packers.items()}

    @property
    def padding(self) -> dict[str, int]:
        """How many rows batches are padded to, by `"<kind> <form>"`."""
        return {
            f"{kind} {form}": rows
            for kind, packer in self.packers.items()
            for form, rows in packer.forms.sizes.items()
        }

    def pad_as(self, padding: Mapping[str, int]) -> None:
        """Takes up the `padding` of another engine, or of an earlier state of this one.

        Another size would be another program, whose sums may round differently.
        """
        named = [(*name.partition(" ")[::2], rows) for name, rows in padding.items()]
        for kind, packer in self.packers.items():
            sizes = {form: rows for of, form, rows in named if of == kind and rows}
            packer.forms.start_from(sizes)
            self.placing.sizes_taken[kind] = sizes

    def dispatches(self, windows: list[list[Batch]]) -> Iterator[Dispatch]:
        """The batches of some optimizer steps, packed as they are dispatched.

        Neighbours of the same forms in one, if they fit together and a program for so
        many steps is there or worth its compilation; otherwise one for each, packed
        when its turn comes.
        """
        if len(windows) == 1:
            yield self._single(windows[0])
            return
        packer = self.packers["train"]
        for run in packer.alike(windows):
            together = (
                packer.pack(run, self.micro_batches) if self._are_one(run) else None
            )
            if together is None or self._has_wrong_targets(together):
                yield from map(self._single, run)  # all before a wrong one are taken
            else:
                yield together

    def _single(self, window: list[Batch]) -> Dispatch:
        return self.packers["train"].pack([window], self.micro_batches)

    def _are_one(self, windows: list[list[Batch]]) -> bool:
        """Whether several steps, which are alike, are to be one dispatch."""
        steps = len(windows)
        if steps < 2 or not self._dispatch_size.is_worth_compiling(steps):
            return False
        return self.packers["train"].can_stack(windows, self.micro_batches)

    def prepare_training(self, dispatch: Dispatch) -> Iterable[Dispatch]:
        """Compiles for `dispatch`; returns it, or those it must be taken apart to."""
        if self.steps_per_execution > 1 and not self._loops_well(dispatch):
            self._dispatch_size.steps = 1
            return self._one_by_one(dispatch)
        try:
            self.compiled_for("train", dispatch)
        except CallsPython:  # in several steps, of which each is now taken alone
            return self._one_by_one(dispatch)

        packer = self.packers["train"]
        if self.facts["train"].rows_interact and not packer.rows_interact:
            # Only tracing tells, and now they may not be padded.
            packer.rows_interact = True
            again = list(self.dispatches(dispatch.windows))
            if all(done_before.shape != dispatch.shape for done_before in again):
                self.programs.forget_training()  # a program that nothing will run
            return again
        if self._has_wrong_targets(dispatch):
            return map(self._single, dispatch.windows)
        return [dispatch]

    def _one_by_one(self, dispatch: Dispatch) -> Iterable[Dispatch]:
        first, *others = dispatch.windows
        prepared = self.prepare_training(self._single(first))
        return itertools.chain(prepared, map(self._single, others))

    def _has_wrong_targets(self, dispatch: Dispatch) -> bool:
        """Whether a dispatch of several steps of one process will be refused."""
        several = len(dispatch.rows) > 1 and self._blocks.count == 1
        if not several or "train" not in self.facts:
            return False
        try:
            self.placing.check_targets("train", dispatch)
        except ValueError:
            return True
        return False

    def train(self, dispatch: Dispatch) -> list[Metrics]:
        """Takes the steps of `dispatch`; returns each one's metrics."""
        # What must hold, before the state is given away.
        compiled = self.programs.find("train", dispatch)
        if is_new := compiled is None:
            compiled = self.compiled_for("train", dispatch)
        facts, steps = self.facts["train"], len(dispatch.rows)
        placed = self.placing.placed("train", dispatch, compiled)
        if is_new and facts.rows_interact > self.packers["train"].rows_interact:
            raise ValueError(
                "in batches of this shape, values of a row depend on other rows."
                " In batches of earlier shapes they did not, so those may have"
                " been padded. Return the mean over the batch, for all shapes."
            )

        # The steps. Nothing here waits for the device.
        self.held.check_handed_out()  # the last moment: it will be outdated
        is_on_trial = self._dispatch_size.is_on_trial and not self.one_by_one
        started = time.perf_counter() if is_on_trial else 0
        arrays, (means, inside) = self._run(
            "train", dispatch, compiled, self.held.arrays, placed.groups
        )
        self.held.replace(arrays)

        # Not too many at once.
        checks = placed.checks
        if tells_of_gradients(facts, means):
            checks = (*checks, check_gradients)
        if steps > 1:
            self.in_flight.add(means, placed.nbytes, checks, LONG_IN_FLIGHT)
            return [Metrics(facts, means, inside, index) for index in range(steps)]
        self.in_flight.add(means, placed.nbytes, checks)
        if started:
            means.block_until_ready()  # waits for the device, in the trial only
            self._dispatch_size.time(
                time.perf_counter() - started,
                dispatch.nbytes,
                self.steps_per_epoch,
                lambda: self._loops_well(dispatch),
            )
        return [Metrics(facts, means, inside)]

    def _run(self, kind: Kind, dispatch: Dispatch, compiled: Any, *inputs: Any) -> Any:
        """The only call of a compiled step."""
        try:
            return compiled(*inputs)
        except jax.errors.JaxRuntimeError as error:
            self._check_memory(kind, dispatch, compiled, error)
            raise

    def _check_memory(self, kind: Kind, dispatch: Dispatch, *of: Any) -> None:
        batch = self.placing.bytes_per_device(dispatch), sum(dispatch.rows)
        check_memory(f"the {WHAT[kind]} step", self.held.arrays, batch, *of)

    def start_epoch(self) -> None:
        """Sets the epoch's sums to zero."""
        self.held.zero_totals()

    def epoch_means(self) -> dict[str, float]:
        """Means over the epoch's rows so far. Waits for the device."""
        self.in_flight.check_all()
        return means_of(self.held.fetch_totals(), self.facts["train"])

    def weights(self) -> list[Array]:
        """The leaves that are evaluated, asked for once per pass: they may be many."""
        return self.held.weights()

    def evaluate(
        self,
        weights: list[Array],
        ready: Ready,
        totals: Any,
        batch_idx: int,
        outputs: Fetching,
    ) -> Any:
        """`totals` with those of a batch added; start from `Steps.new_totals()`.

        Predictions and targets, if they are kept, are added to `outputs`.
        """
        batch, dispatch, compiled = ready
        with noted(f"in batch {batch_idx}"):
            placed = self.placing.placed("evaluate", dispatch, compiled)
            given = weights, totals, np.int32(batch_idx), placed.groups
            totals, means, *kept = self._run("evaluate", dispatch, compiled, *given)
        self.in_flight.add(means, placed.nbytes, placed.checks)
        for values in kept:
            outputs.add(values, batch)
        return totals

    def predict(
        self,
        inputs: Iterable[PyTree],
        weights: list[Array] | None = None,
        *,
        gather: bool = True,
    ) -> PyTree:
        """Predictions of `inputs` as NumPy arrays, without padding; None if no batches.

        With several processes of all their rows, or without `gather` of this one's.
        """
        predictions = self.fetching("predict", gather=gather)
        weights = self.weights() if weights is None else weights
        ready = self.ready("predict", inputs)
        for number, (x, dispatch, compiled) in enumerate(ready):
            with noted(f"in batch {number}"):
                placed = self.placing.placed("predict", dispatch, compiled)
                given = weights, placed.groups
                predicted = self._run("predict", dispatch, compiled, *given)
            if placed.nbytes:
                self.in_flight.add(jax.tree.leaves(predicted)[0], placed.nbytes)
            predictions.add(predicted, x)
        return predictions.rows()

    def fetching(self, kind: Kind, *, gather: bool = True) -> Fetching:
        """Takes what steps of a kind give for each row to the host."""
        return Fetching(self.packers[kind], gather=gather)

    def flops_per_row(self, window: Sequence[Batch]) -> float:
        """Operations of a train step over `window`, per row that is computed."""
        packer = self.packers["train"]
        if self._blocks.count > 1:
            packer = Packer(1, packer.what)  # of the rows that are here
        dispatch = packer.pack([list(window)], self.micro_batches)
        steps = self.programs.steps._replace(inside=(), remat=False)
        jaxpr = self.programs.traced(steps, self.state, dispatch)
        return matmul_flops(jaxpr) / rows_in(dispatch.groups)

    def ready(self, kind: Kind, batches: Iterable[Batch]) -> Iterator[Ready]:
        """The batches of a pass, each packed and with its step; on accelerators once
        the next one is on its way there."""
        waiting: collections.deque[Ready] = collections.deque()
        for number, batch in enumerate(batches):
            with noted(f"in batch {number}"):
                dispatch, compiled = self.prepare(kind, batch)
            if self.placing.puts_ahead:
                dispatch = self.placing.put(kind, dispatch)
            waiting.append(Ready(batch, dispatch, compiled))
            if len(waiting) > self.placing.puts_ahead:
                yield waiting.popleft()
        yield from waiting

    def prepare(self, kind: Kind, batch: Batch) -> tuple[Dispatch, Program]:
        """`batch` packed, and the step for its shape, compiled if it is a new one."""
        packer = self.packers[kind]
        dispatch = packer.pack([[batch]])
        compiled = self.compiled_for(kind, dispatch)
        if kind in self.facts and self.facts[kind].rows_interact > packer.rows_interact:
            packer.rows_interact = True
            dispatch = packer.pack([[batch]])
            compiled = self.compiled_for(kind, dispatch)
        return dispatch, compiled

    def compiled_for(self, kind: Kind, dispatch: Dispatch) -> Program:
        """The step for batches of this shape, compiled if it is a new one."""
        compiled = self.programs.find(kind, dispatch)
        if compiled is not None:
            return compiled
        held = self.held
        inputs = held.state if kind == "train" else held.evaluated.weights
        try:
            shapes = self._shapes(dispatch)
            compiled = self.programs.compile(kind, dispatch, shapes, inputs)
            self._check_memory(kind, dispatch, compiled)
            return compiled
        except CallsPython:
            self._change(self._mode._replace(calls_python=True))
            if len(dispatch.rows) > 1:
                raise
            return self.compiled_for(kind, dispatch)
        except Exception as error:
            self.placing.unpad(kind)
            forms = self.packers[kind].forms
            if not self.programs.has(kind):
                # The first batch did not fit the model; the next one may be another.
                forms.forget()
            for note in filter(None, map(forms.note, dispatch.groups)):
                error.add_note(note)
            raise

    def _loops_well(self, dispatch: Dispatch) -> bool:
        """Whether a loop over steps is as fast as they are; says so where not."""
        steps = self.programs.steps
        if not steps.unroll_convolutions:
            return True
        if self._convolves is None:
            traced = self.programs.traced(steps, self.state, dispatch)
            self._convolves = has_convolutions(traced)
            if self._convolves:
                say(
                    "`steps_per_execution`: 1 at a time, because XLA's"
                    " convolutions are slow inside loops on the CPU, and round"
                    " differently there"
                )
        return not self._convolves


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
