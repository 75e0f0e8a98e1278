"""One kind of step: its programs, each compiled once for a form of its batches."""

import contextlib
import math
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..basics.ambient_mesh import no_ambient_mesh
from ..basics.host_memory import on_device
from ..data import Dispatch, Packer
from ..distributed import put
from ..step import (
    OWN_LOOP,
    Collectives,
    Facts,
    Group,
    Products,
    RowsInteract,
    Steps,
    Table,
    TrainState,
    Weights,
    opening,
    products,
    values_mix_rows,
)
from ..strategies import DataParallel
from ..strategies.base import Role, Rows
from .compiling import compiled

Kind = Literal["train", "evaluate", "predict"]

WHAT: Final[dict[Kind, str]] = {
    "train": "training",
    "evaluate": "validation",
    "predict": "prediction",
}

_MOST_COUNTS: Final = 128
"""Of one program that are kept; there are more only if batches have all sizes."""

_NOTHING_YET: Final = Facts((), False, None)

_DONATED: Final = {"state": (0,), "all": (0, 1), "none": ()}


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


class Program:
    """A step compiled for batches of one form.

    Attributes:
        compiled: what runs: a `jax.stages.Compiled`, unless a user's strategy has made
            it.
        steps: how many optimizer steps a call takes. Rows and micro-batches are those
            of all of them, padding included.
        donated: whether it may overwrite the state that it is given.
        seconds: what it took to trace and compile.
        products: matrix operations of all devices, as traced; None if a part can't be
            counted, or another function has compiled it.
        trace_seconds, compile_seconds: the two parts of `seconds`.
        layouts: how it takes the leaves of its groups, in order, once that is known.
    """

    products: Products | None = None
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    seconds = 0.0
    layouts: list[Any] | None = None

    def __init__(
        self, compiled: Any, dispatch: Dispatch, groups: list[Group], donate: str
    ):
        self.compiled = compiled
        self.steps, self.rows = len(dispatch.rows), rows_in(groups)
        self.micro_batches = sum(len(group.counts) for group in groups)
        self.donated = donate != "none"
        # What a step may overwrite is not there for the next one, and a strategy of the
        # user's may return any callable, and counts of its own.
        is_known = isinstance(compiled, jax.stages.Compiled)
        self._keeps = is_known and donate != "all"
        self._counts: dict[Any, Array] = {}
        self._last_counts: tuple[Any, Any] = (None, None)  # of the call before

    def with_kept(self, groups: Any, tell: Callable[[str], None]) -> Any:
        """`groups` with what of them stays on the devices: row counts, and tables.

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
            counts, whole = group.counts, group.whole
            key = place, counts.tobytes()
            if key not in kept:
                sharding = self._shardings(place).counts
                # None where the step has no use for them, as prediction has not.
                kept[key] = counts if sharding is None else put(counts, sharding)
            if type(whole) is Table:
                if not whole.placed:
                    tell(_kept(whole))
                whole = self._placed(whole, place)
            counted.append(Group(group.batch, kept[key], whole))
            self._last_counts = counts, kept[key]
        return counted

    def _placed(self, table: Table, place: int) -> Table:
        """A table as this program takes it, placed once for all that take it so."""
        known = table.placed.setdefault("programs", weakref.WeakKeyDictionary())
        if self not in known:
            layouts = self._shardings(place).whole
            layouts = jax.tree.leaves(layouts, is_leaf=lambda x: x is None)
            leaves, treedef = jax.tree.flatten(table.tree)
            placed = []
            for number, (leaf, sharding) in enumerate(
                zip(leaves, layouts, strict=True)
            ):
                if sharding is not None and (number, sharding) not in table.placed:
                    table.placed[number, sharding] = put(leaf, sharding)
                placed.append(table.placed.get((number, sharding), leaf))
            known[self] = Table(treedef.unflatten(placed))
        return known[self]

    def _shardings(self, place: int) -> Group:
        positional, _ = self.compiled.input_shardings
        return positional[-1][place]


class Step:
    """One kind of step under a strategy, compiled once for each form of batches.

        program = step.programs.get(dispatch.shape) or step.compile(...)
        results = program.compiled(*inputs, groups)

    Attributes:
        packer: of its batches.
        facts: what tracing has told, the last time; no names before.
        facts_of: what it has told, by the forms of the batches.
        programs: by the shapes of dispatches. There is no other cache of them.
        digests: of the programs' texts, in a job of several processes.
        tell: says what is to be said once.
    """

    def __init__(
        self,
        kind: Kind,
        strategy: DataParallel,
        packer: Packer,
        compiler_options: Mapping[str, Any],
        tell: Callable[[str], None],
    ):
        self.kind: Kind = kind
        self.packer = packer
        self.facts = _NOTHING_YET
        self.facts_of: dict[tuple[str, ...], Facts] = {}
        self.programs: dict[Hashable, Program] = {}
        self.digests: tuple[str, ...] = ()
        self._strategy = strategy
        self._compiler_options = compiler_options
        self.tell = tell

    def compile(
        self,
        steps: Steps,
        dispatch: Dispatch,
        groups: list[Group],
        inputs: TrainState | Weights,
        donate: str = "none",
    ) -> Program:
        """Traces and compiles a step for batches like those of `dispatch`.

        Args:
            steps: what it does.
            dispatch: batches, or their shapes.
            groups: the same of all processes.
            inputs: what a step takes besides: the state to train, else the weights.
            donate: of `StepOptions`.

        Raises:
            RowsInteract: if values that must depend on one row depend on others, which
                `steps` don't know yet.
            CallsPython: if the step calls Python that may raise.
        """
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
        else:
            if values_mix_rows(step.jaxpr):
                raise RowsInteract
            program = self._compiled(step, jitted, body, dispatch, donate, started)
        program.seconds = time.perf_counter() - started

        if self.facts.names:
            if before.names and self.programs:
                before.joined(self.facts)  # which raises if it can't be
            self.facts_of[dispatch.forms] = self.facts
        self.programs[dispatch.shape] = program
        return program

    def _compiled(
        self,
        step: Any,
        jitted: Any,
        body: Body,
        dispatch: Dispatch,
        donate: str,
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
            made, digest = compiled(
                step, body.arguments, self._compiler_options, instead
            )
        self.digests += (digest,) if digest else ()
        program = Program(made, dispatch, body.arguments[-1], donate)
        program.trace_seconds = begun - started
        program.compile_seconds = time.perf_counter() - begun
        with contextlib.suppress(KeyError):  # JAX has renamed something
            program.products = products(step.jaxpr)
        return program

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


def _kept(table: Table) -> str:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(table.tree))
    return (
        f"`jaxdp.Arrays`: {size / 1e6:.3g} MB are kept on each device, where"
        " the steps take their rows; on_device=False leaves them on the host"
    )


def rows_in(groups: list[Group]) -> int:
    """All rows of the micro-batches, padding included."""
    return sum(math.prod(jax.tree.leaves(group.batch)[0].shape[:2]) for group in groups)
