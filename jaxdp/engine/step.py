"""One kind of step: its programs, each compiled once for a form of its batches."""

import contextlib
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..basics.host_memory import no_ambient_mesh, on_device
from ..data import Dispatch, Packer, check_targets, targeted, without_ignored
from ..distributed import RowBlocks
from ..step import (
    OWN_LOOP,
    Collectives,
    CriterionObjective,
    Facts,
    Group,
    Objective,
    RowsInteract,
    Steps,
    TrainState,
    Weights,
    last_function,
    opening,
    products,
    values_mix_rows,
)
from ..strategies import DataParallel
from ..strategies.base import Role, Rows
from ..strategies.placing import fetch
from .compiling import Program
from .pace import Check
from .xla_options import compiled

Kind = Literal["train", "evaluate", "predict"]

WHAT: Final[dict[Kind, str]] = {
    "train": "training",
    "evaluate": "validation",
    "predict": "prediction",
}

_NOTHING_YET: Final = Facts((), False, None)

_DONATED: Final = {"state": (0,), "all": (0, 1), "none": ()}


class Placed(NamedTuple):
    """Batches as a compiled step takes them, put on the devices."""

    step: Any
    groups: Any
    nbytes: int
    """What they take of a device before their step; 0 if the call brings them there."""
    checks: tuple[Check, ...]
    """What raises for targets that were there, given a result of the step."""


class StepOptions(NamedTuple):
    """How the train step is compiled; `Callback.step_options` changes it."""

    donate: str = "state"
    """What the step may overwrite: "state", "all" (batches, too) or "none"."""
    skip_nonfinite: bool = False
    """Whether a step with NaN or infinity in it keeps the old state."""


class Body(NamedTuple):
    """A step as a function of arrays, and what `DataParallel.compile` is told of it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    roles: tuple[Role, ...]
    results: Role | tuple[Role, ...]


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
        tell: says what is to be said once.
    """

    def __init__(
        self,
        kind: Kind,
        strategy: DataParallel,
        blocks: RowBlocks,
        in_order: bool,
        tell: Callable[[str], None],
    ):
        def collect(leaves: list[Any]) -> list[np.ndarray]:
            (group,) = strategy.place_batch([Group(leaves, None)], split=True)
            return fetch(group.batch)

        shards = strategy.num_shards
        self.kind: Kind = kind
        self.packer = Packer(shards, WHAT[kind], blocks, in_order, collect)
        self.facts = _NOTHING_YET
        self.programs: dict[Hashable, Program] = {}
        self.digests: tuple[str, ...] = ()
        self.tell = tell
        self._strategy = strategy
        # Of named losses: how many classes there are, by the forms of batches whose
        # targets are to be looked at.
        self._classes: dict[tuple[str, ...], int | None] = {}
        self._objective: Objective | None = None

    def compile(
        self,
        steps: Steps,
        dispatch: Dispatch,
        inputs: TrainState | Weights,
        donate: str,
        options: Mapping[str, Any],
    ) -> Program:
        """Traces and compiles a step for batches like those of `dispatch`.

        Args:
            steps: what it does.
            dispatch: batches, or their shapes.
            inputs: what a step takes besides: the state to train, else the weights.
            donate: of `StepOptions`.
            options: the user's, of XLA.

        Raises:
            RowsInteract: if values that must depend on one row depend on others, which
                `steps` don't know yet.
            CallsPython: if the step calls Python that may raise.
        """
        groups = self._of_all_processes(dispatch, inputs)
        body = _BODIES[self.kind](self, steps, inputs, groups, len(dispatch.rows))
        body = body._replace(function=opening(body.function, groups))
        ways: list[Rows] = ["apart", "together"] if dispatch.split else ["whole"]
        if steps.rows_interact or self.packer.rows_interact:
            ways = ways[-1:]
        if ways[0] == "apart" and self._has_one_row_each(groups):
            # Shapes agree that would not, and operations say less, so the step is
            # looked at over all rows first.
            if values_mix_rows(traced(body.function, *body.arguments)):
                raise RowsInteract

        # As if rows were independent, which tracing may refute.
        before, started, step = self.facts, time.perf_counter(), None
        for rows in ways:
            try:
                jitted = self._strategy.compile(
                    *body, donate=_DONATED[donate], rows=rows
                )
                if hasattr(jitted, "trace"):
                    step = jitted.trace(*body.arguments)
                break
            except RowsInteract:
                if rows == ways[-1]:
                    raise
        if step is None:
            program = Program(self._checked(jitted), dispatch, groups, donate)
            if self.facts is before:  # it was not traced yet
                traced(body.function, *body.arguments)
            program.compile_seconds = time.perf_counter() - started
        else:
            if values_mix_rows(step.jaxpr):
                raise RowsInteract
            given = step, jitted, body, dispatch, donate
            program = self._compiled(*given, options, started)

        if self.facts.names:
            if before.names and self.programs:
                before.joined(self.facts)  # which raises if it can't be
            self._objective = steps.objective
            is_named = isinstance(steps.objective, CriterionObjective)
            if is_named and (self.facts.num_classes or self.facts.weighted):
                self._classes[dispatch.forms] = self.facts.num_classes
        self.programs[dispatch.shape] = program
        return program

    def _compiled(
        self,
        step: Any,
        jitted: Any,
        body: Body,
        dispatch: Dispatch,
        donate: str,
        options: Mapping[str, Any],
        started: float,
    ) -> Program:
        begun = time.perf_counter()
        instead = getattr(jitted, "compiler_options", None)
        with warnings.catch_warnings():
            if donate == "all":
                # A batch has no result of its shape to become; DonateBuffers reports
                # what matters.
                unused = "Some donated buffers were not usable"
                warnings.filterwarnings("ignore", unused)
            made, digest = compiled(step, body.arguments, options, instead)
        self.digests += (digest,) if digest else ()
        program = Program(made, dispatch, body.arguments[-1], donate)
        program.trace_seconds = begun - started
        program.compile_seconds = time.perf_counter() - begun
        program.ends = last_function(step.jaxpr)
        with contextlib.suppress(KeyError):  # JAX has renamed something
            program.products = products(step.jaxpr)
        return program

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
        return [blocks.whole(group) for group in groups]

    def _checked(self, made: Any) -> Any:
        if not callable(made):
            raise TypeError(
                f"`strategy`: {type(self._strategy).__name__}.compile returned a"
                f" {type(made).__name__}; it must return the jitted step, which"
                " is called with the arguments of `step` less the first."
            )
        return made

    def _has_one_row_each(self, groups: list[Group]) -> bool:
        batches = jax.tree.leaves([group.batch for group in groups])
        return 1 < self._strategy.num_shards == min(x.shape[1] for x in batches)

    def _train(
        self, pure: Steps, state: TrainState, groups: list[Group], steps: int
    ) -> Body:
        leaves, treedef = jax.tree.flatten(state)

        def train(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
            state = treedef.unflatten(leaves)
            state, metrics = pure.train(collectives, state, groups)
            self.facts = metrics.facts
            return jax.tree.leaves(state), (metrics.means, metrics.inside)

        def train_all(
            collectives: Collectives, leaves: Any, groups: list[Group]
        ) -> Any:
            (group,) = groups
            batches = jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), group)

            def batch(index: Any) -> Group:
                return jax.tree.map(
                    lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False),
                    batches,
                )

            def body(leaves: list[Array], index: Array) -> tuple[Any, Any]:
                # Always the first branch, which XLA does not know. It fuses nothing
                # of the step with what is in one.
                group = jax.lax.cond(index >= 0, batch, lambda _: batch(0), index)
                return train(collectives, leaves, [group])

            # The carry is what crosses into single steps, and so is the batch, so that
            # XLA fuses the same operations in both; other fusions round otherwise.
            with jax.named_scope(OWN_LOOP):
                return jax.lax.scan(body, leaves, jnp.arange(steps))

        function = train if steps == 1 else train_all
        roles = "state", "groups"
        return Body(function, (leaves, groups), roles, ("state", "replicated"))

    def _evaluate(
        self, pure: Steps, weights: Weights, groups: list[Group], _: int
    ) -> Body:
        leaves, treedef = jax.tree.flatten(weights)

        def evaluate(
            collectives: Collectives,
            leaves: list[Array],
            totals: Array,
            batch_idx: Array,
            groups: list[Group],
        ) -> Any:
            totals, metrics, outputs = pure.evaluate(
                collectives, treedef.unflatten(leaves), totals, batch_idx, *groups
            )
            self.facts = metrics.facts
            return totals, metrics.means, *([outputs] if keeps else [])

        keeps = pure.keeps_outputs
        roles = "state", "replicated", "replicated", "groups"
        arguments = leaves, pure.new_totals(), np.int32(0), groups
        results: tuple[Role, ...] = ("replicated", "replicated", "rows")
        return Body(evaluate, arguments, roles, results if keeps else results[:2])

    def _predict(
        self, pure: Steps, weights: Weights, groups: list[Group], _: int
    ) -> Body:
        leaves, treedef = jax.tree.flatten(weights)

        def predict(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
            return pure.predict(collectives, treedef.unflatten(leaves), *groups)

        return Body(predict, (leaves, groups), ("state", "groups"), "rows")

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
        checks = self.check_targets(dispatch) if self._classes else ()
        if self.kind == "train" and self.facts.weighted:
            dispatch = self._without_ignored(dispatch)
        groups = self._strategy.place_batch(dispatch.groups, split=dispatch.split)
        if program.is_known:
            groups = program.with_kept(groups, self.tell)
            if ahead or dispatch.are_there:
                groups = program.moved(groups, all_of_them=ahead)
        nbytes = self.bytes_per_device(dispatch) if ahead else 0
        return Placed(program, groups, nbytes, checks)

    def bytes_per_device(self, dispatch: Dispatch) -> int:
        """Bytes of the rows that a device has of a dispatch."""
        blocks = self.packer.blocks
        shards = self._strategy.num_shards * len(blocks.own) // blocks.count
        return dispatch.nbytes // (max(1, shards) if dispatch.split else 1)

    def check_targets(self, dispatch: Dispatch) -> tuple[Check, ...]:
        """Raises for wrong targets on the host; gives what checks those on devices."""
        if dispatch.forms not in self._classes:
            return ()
        classes = self._classes[dispatch.forms]
        try:
            checks = [
                check_targets(targeted(group, classes), classes)
                for group in dispatch.groups
            ]
        except ValueError:
            self._unpad()
            raise
        return tuple(filter(None, checks))

    def will_refuse(self, dispatch: Dispatch) -> bool:
        """Whether a dispatch of several steps of one process has wrong targets."""
        if len(dispatch.rows) == 1 or self.packer.blocks.count > 1:
            return False
        try:
            self.check_targets(dispatch)
        except ValueError:
            return True
        return False

    def explain(self, error: Exception, dispatch: Dispatch) -> None:
        """Notes what may be wrong with batches that it could not be compiled for."""
        self._unpad()
        if not self.programs:
            # The first batch did not fit the model; the next one may be another.
            self.packer.forms.forget()
        for note in filter(None, map(self.packer.forms.note, dispatch.groups)):
            error.add_note(note)

    def _unpad(self) -> None:
        """No batch is padded to the size of one that is refused."""
        if self.packer.blocks.count == 1:  # several processes must stay of one mind
            self.packer.forms.refuse()

    def _without_ignored(self, dispatch: Dispatch) -> Dispatch:
        """The same with copies of real rows in the place of those of weight 0."""
        objective = self._objective
        if not isinstance(objective, CriterionObjective):
            return dispatch  # only its author knows what in a batch is a weight
        apart = not self.facts.rows_interact
        groups = [
            group._replace(
                batch=without_ignored(group.batch, apart, objective.is_named)
            )
            for group in dispatch.groups
        ]
        return dispatch._replace(groups=groups)


_BODIES: Final[dict[Kind, Callable[..., Body]]] = {
    "train": Step._train,
    "evaluate": Step._evaluate,
    "predict": Step._predict,
}


def traced(step: Callable[..., Any], *arguments: Any) -> Any:
    """A step over all rows, as JAX sees it."""
    with no_ambient_mesh():
        return jax.make_jaxpr(lambda *given: step(Collectives(), *on_device(given)))(
            *arguments
        )
