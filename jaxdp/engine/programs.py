"""The compiled steps of an engine: what each is made of, compiled once per shape."""

import math
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..basics.ambient_mesh import no_ambient_mesh
from ..basics.console import say, warn
from ..basics.hardware import note_on_kinds
from ..basics.host_memory import on_device
from ..data import Dispatch
from ..step import (
    BY_DEFAULT,
    OWN_LOOP,
    CallsPython,
    Collectives,
    Facts,
    Group,
    Objective,
    RowsInteract,
    Steps,
    TrainState,
    Weights,
    note_on_products,
    opening,
    values_mix_rows,
)
from ..strategies import DataParallel
from ..strategies.base import Built, Role, found_of
from .compile_messages import Compilations

Kind = Literal["train", "evaluate", "predict"]

WHAT: Final[dict[Kind, str]] = {
    "train": "training",
    "evaluate": "validation",
    "predict": "prediction",
}

Program = Callable[..., Any]
"""What `DataParallel.compile` returned: a `jax.stages.Compiled`, or what stands in."""


class StepOptions(NamedTuple):
    """How the train step is compiled; `Callback.step_options` changes it."""

    donate: str = "state"
    """What the step may overwrite: "state", "all" (batches, too) or "none"."""
    skip_nonfinite: bool = False
    """Whether a step with NaN or infinity in it keeps the old state."""


class _Step(NamedTuple):
    """What `DataParallel.compile` is given."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    roles: tuple[Role, ...]
    results: Role | tuple[Role, ...]


class TrainProgram(NamedTuple):
    """A compiled train step, and what it was compiled for."""

    compiled: jax.stages.Compiled
    steps: int
    """How many optimizer steps a call takes. The next two are of all of them."""
    rows: int
    """Padding included."""
    micro_batches: int
    donated: bool
    """Whether it may overwrite the state that it is given."""
    seconds: float
    """What it took to trace and compile."""
    built: Built | None
    """What `DataParallel.build` has found of it, if that has made it."""


class Programs:
    """Compiles steps and keeps them; if `quiet`, nothing is said of it.

    Attributes:
        steps: those that are compiled next.
        options: how train steps are compiled next.
        facts: what tracing has told of each kind, the last time.
        facts_of: what it has told of each kind and the forms of its batches.
    """

    def __init__(self, steps: Steps, strategy: DataParallel, *, quiet: bool):
        self.steps = steps
        self.strategy = strategy
        self.options = StepOptions()
        self.facts: dict[Kind, Facts] = {}
        self.facts_of: dict[tuple[Kind, tuple[str, ...]], Facts] = {}
        self._objective_is_inferred = False
        self._quiet = quiet
        self._told: set[str] = set()
        self._compilations = Compilations(quiet=quiet)
        self._compiled: dict[tuple[Kind, Hashable], Program] = {}
        self._of_training: dict[Hashable, TrainProgram] = {}

    def set(self, **fields: Any) -> None:
        """Replaces some fields of `steps`, for what is compiled from now on."""
        self.steps = self.steps._replace(**fields)

    def tell(self, note: str) -> None:
        """Says it, unless it was said before."""
        if note not in self._told:
            say(note)
        self._told.add(note)

    def find(self, kind: Kind, packed: Dispatch) -> Program | None:
        """The step for batches of this shape, if it was compiled."""
        return self._compiled.get((kind, packed.shape))

    def compile(
        self,
        kind: Kind,
        packed: Dispatch,
        groups: list[Group],
        inputs: TrainState | Weights,
    ) -> Program:
        """Compiles what `find` will give.

        Args:
            packed: a batch, or its shapes.
            groups: the same of all processes.
            inputs: what a step takes besides: the state to train, else the weights.
        """
        before, known = self._compilations.seconds, self.facts.get(kind)
        try:
            compiled = self._compile(kind, packed, groups, inputs)
        except CallsPython:
            raise
        except Exception:
            if self._objective_is_inferred and not self._compiled:
                self.set(objective=None)
            raise
        if kind in self.facts:
            if known is not None and self.has(kind):
                known.joined(self.facts[kind])  # which raises if it can't be
            self.facts_of[kind, packed.forms] = self.facts[kind]
        if kind in self.facts and not self._quiet:
            for note in self.facts[kind].notes:
                self.tell(note)
        if not self._quiet:
            self._tell_of_devices(compiled, inputs)

        self._compiled[kind, packed.shape] = compiled
        if kind == "train":
            self._of_training[packed.shape] = TrainProgram(
                compiled,  # pyright: ignore
                len(packed.rows),
                rows_in(groups),
                sum(len(group.counts) for group in groups),
                self.options.donate != "none",
                self._compilations.seconds - before,
                found_of(compiled),
            )
        return compiled

    def _tell_of_devices(self, compiled: Program, inputs: Any) -> None:
        """Says what products are computed in, and that devices are of several kinds."""
        devices = jax.tree.leaves(inputs)[0].sharding.device_set
        kinds = note_on_kinds(devices)
        if kinds is not None and kinds not in self._told:
            self._told.add(kinds)
            warn(kinds)
        built = found_of(compiled)
        if built and built.products and built.products[BY_DEFAULT]:
            if note := note_on_products(self.steps.precision, next(iter(devices))):
                self.tell(note)

    def has(self, kind: Kind) -> bool:
        """Whether any step of a kind was compiled."""
        return any(key[0] == kind for key in self._compiled)

    def of_training(self) -> TrainProgram | None:
        """The first of the train steps that are in use."""
        return next(iter(self._of_training.values()), None)

    def infer(self, objective: Objective) -> None:
        """Takes the objective that the first batch shows to fit.

        If that does not compile, the next batch may show another.
        """
        self.set(objective=objective)
        self._objective_is_inferred = True

    def forget_training(self) -> None:
        """The next train step is compiled anew."""
        self._of_training.clear()
        self._compiled = {k: v for k, v in self._compiled.items() if k[0] != "train"}

    def traced(self, steps: Steps, state: PyTree, packed: Dispatch) -> Any:
        """A train step for batches like `packed`, as JAX sees it."""
        with no_ambient_mesh():
            return _traced(opening(steps.train, packed.groups), state, packed.groups)

    def _compile(
        self, kind: Kind, packed: Dispatch, groups: list[Group], inputs: Any
    ) -> Program:
        def attempt() -> Program:
            if kind == "train":
                step = self._train(inputs, groups, steps=len(packed.rows))
                donate = {"state": (0,), "all": (0, 1), "none": ()}
                with warnings.catch_warnings():
                    if self.options.donate == "all":
                        # A batch has no result of its shape to become; DonateBuffers
                        # reports what matters.
                        unused = "Some donated buffers were not usable"
                        warnings.filterwarnings("ignore", unused)
                    return self._made(step, packed.split, donate[self.options.donate])
            make = self._evaluate if kind == "evaluate" else self._predict
            return self._made(make(inputs, groups), packed.split)

        # As if rows were independent, which tracing may refute.
        with no_ambient_mesh(), self._compilations.timed(WHAT[kind], packed):
            try:
                return attempt()
            except RowsInteract:
                self.set(rows_interact=True)
            try:
                program = attempt()
            except RowsInteract:
                raise ValueError(
                    f"`strategy`: {self.strategy!r} shows each device only its own"
                    " rows, but in this step rows interact (a scalar loss or"
                    " metric, a model with state, one `key` for all, or values"
                    " that depend on other rows). Catch RowsInteract in its"
                    " `compile` and compile the step with Collectives(), as Pmap"
                    " does; or use Sharded()."
                ) from None
            say(
                "the loss or a metric has values per row that depend on other"
                " rows, as in a contrastive loss: batches are not padded and rows"
                " are not computed separately, as if you had returned the mean"
            )
            return program

    def _made(self, step: _Step, split: bool, donate: tuple[int, ...] = ()) -> Program:
        """`DataParallel.compile`, and `RowsInteract` where it could not tell."""
        groups = step.arguments[-1]
        step = step._replace(function=opening(step.function, groups))
        batches = jax.tree.leaves([group.batch for group in groups])
        if split and 1 < self.strategy.num_shards == min(x.shape[1] for x in batches):
            # One row for each device: shapes agree that would not, and operations say
            # less, so the step is looked at over all rows first.
            if values_mix_rows(_traced(step.function, *step.arguments)):
                raise RowsInteract
        compiled: Any = self.strategy.compile(*step, donate=donate, split=split)
        if not callable(compiled):
            raise TypeError(
                f"`strategy`: {type(self.strategy).__name__}.compile returned a"
                f" {type(compiled).__name__}; it must return the compiled step, which"
                " is called with the arguments of `step` less the first."
            )
        return compiled

    def _train(self, state: TrainState, groups: list[Group], *, steps: int) -> _Step:
        leaves, treedef = jax.tree.flatten(state)

        def train(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
            state = treedef.unflatten(leaves)
            state, metrics = self.steps.train(collectives, state, groups)
            self.facts["train"] = metrics.facts
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
        return _Step(function, (leaves, groups), roles, ("state", "replicated"))

    def _evaluate(self, weights: Weights, groups: list[Group]) -> _Step:
        leaves, treedef = jax.tree.flatten(weights)

        def evaluate(
            collectives: Collectives,
            leaves: list[Array],
            totals: Array,
            batch_idx: Array,
            groups: list[Group],
        ) -> Any:
            totals, metrics, outputs = self.steps.evaluate(
                collectives, treedef.unflatten(leaves), totals, batch_idx, *groups
            )
            self.facts["evaluate"] = metrics.facts
            return totals, metrics.means, *([outputs] if keeps else [])

        keeps = self.steps.keeps_outputs
        roles = "state", "replicated", "replicated", "groups"
        arguments = leaves, self.steps.new_totals(), np.int32(0), groups
        results: tuple[Role, ...] = ("replicated", "replicated", "rows")
        return _Step(evaluate, arguments, roles, results if keeps else results[:2])

    def _predict(self, weights: Weights, groups: list[Group]) -> _Step:
        leaves, treedef = jax.tree.flatten(weights)

        def predict(collectives: Collectives, leaves: Any, groups: list[Group]) -> Any:
            return self.steps.predict(collectives, treedef.unflatten(leaves), *groups)

        return _Step(predict, (leaves, groups), ("state", "groups"), "rows")


def _traced(step: Callable[..., Any], *arguments: Any) -> Any:
    """A step over all rows, as JAX sees it."""
    return jax.make_jaxpr(lambda *given: step(Collectives(), *on_device(given)))(
        *arguments
    )


def rows_in(groups: list[Group]) -> int:
    """All rows of the micro-batches, padding included."""
    return sum(math.prod(jax.tree.leaves(group.batch)[0].shape[:2]) for group in groups)
