"""The compiled steps of a trainer and the placed state that they run on.

The state crosses into the compiled step as a flat list of arrays, and stays one
between steps: flattening a model's tree in Python costs more than a small step.
"""

import collections
import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from .collectives import Collectives
from .console import say
from .data import Packed, Packer, check_labels
from .flops import matmul_flops
from .metrics import Facts, Metrics, means_of, new_totals
from .step import Batch, Group, Steps, TrainState, first_state
from .strategies import DataParallel
from .strategies.base import no_ambient_mesh, with_auto_axes

Kind = Literal["train", "evaluate", "predict"]

IN_FLIGHT: Final = 8
"""Steps handed to the device and not waited for. More would gain nothing, hold more
host batches, and abort the process on jax 0.10.2 with faked devices."""


def wait(array: Array) -> None:
    """Waits for the device to be done with `array`."""
    array.block_until_ready()


class InFlight:
    """Bounds how far the host runs ahead of the device."""

    def __init__(self) -> None:
        self.wait: Callable[[Array], None] = wait
        self._waiting: collections.deque[Array] = collections.deque()

    def add(self, array: Array) -> None:
        """Counts a step by one of its results; waits for the one `IN_FLIGHT` ago."""
        self._waiting.append(array)
        if len(self._waiting) > IN_FLIGHT:
            self.wait(self._waiting.popleft())


class Engine:
    """Runs steps: packs batches, compiles once per shape, keeps the state.

    Args:
        parts: the model as (trained leaves, other arrays, the rest).
        model_state: its `eqx.nn.State`, or None.
        steps: the pure steps.
        strategy: places the state and compiles the steps.
        seed: decides all randomness inside the steps.
        micro_batches: how many batches a train step takes.
        view: from the state to the one whose weights are evaluated and handed out.
        abstract: whether there are only shapes: nothing is placed, and no step can run.
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
        view: Callable[[TrainState], TrainState] | None = None,
        abstract: bool = False,
    ):
        if jax.config.jax_disable_jit:  # pyright: ignore
            raise RuntimeError(
                "jit is disabled (jax.disable_jit or jax_disable_jit), and the trainer"
                " compiles its steps; call the model by hand to debug it."
            )
        self.steps = steps
        self.strategy = strategy
        self.donate = "state"
        self.micro_batches = micro_batches
        self.in_flight = InFlight()
        self.facts: dict[Kind, Facts] = {}
        self._packers: dict[Kind, Packer] = {
            "train": Packer(strategy.num_shards, "training"),
            "evaluate": Packer(strategy.num_shards, "validation"),
            "predict": Packer(strategy.num_shards, "prediction"),
        }
        self._compiled: dict[tuple[Kind, Hashable], jax.stages.Compiled] = {}
        self._gathered: tuple[Any, tuple[PyTree, PyTree]] | None = None
        self._view = view
        self._viewed: tuple[Any, TrainState] | None = None
        if abstract:
            with no_ambient_mesh():
                self.state = _shapes_of_state(parts, model_state, steps, strategy)
            return
        params, buffers, _ = with_auto_axes(parts)
        model_state = with_auto_axes(model_state)
        with no_ambient_mesh():
            state = first_state(params, buffers, model_state, steps.optimizer, seed)
            self.state = strategy.place(state)

    @property
    def state(self) -> TrainState:
        """The placed state. The next step overwrites its arrays: copy what you keep."""
        return jax.tree.unflatten(self._treedef, self._leaves)

    @state.setter
    def state(self, state: TrainState) -> None:
        self._leaves, self._treedef = jax.tree.flatten(state)

    @property
    def evaluated(self) -> TrainState:
        """The state whose weights are evaluated; looked for once per step."""
        if self._view is None:
            return self.state
        if self._viewed is None or self._viewed[0] is not self._leaves:
            self._viewed = self._leaves, self._view(self.state)
        return self._viewed[1]

    def gather(self) -> tuple[PyTree, PyTree]:
        """The model and its state, whole and live; gathered once per step."""
        if self._gathered is None or self._gathered[0] is not self._leaves:
            self._gathered = self._leaves, self.model_of(self.evaluated)
        return self._gathered[1]

    def model_of(self, state: TrainState) -> tuple[PyTree, PyTree]:
        """The model and its state as `state` has them, whole and live."""
        params, buffers, model_state = self.strategy.gather(
            (state.params, state.buffers, state.model_state)
        )
        return eqx.combine(params, buffers, self.steps.static), model_state

    def set_options(self, donate: str, skip_nonfinite: bool) -> None:
        """What callbacks decide before compilation.

        Args:
            donate: what the train step may overwrite: "state", "all" or "none".
            skip_nonfinite: whether a step that is not finite keeps the old state.
        """
        if (donate, skip_nonfinite) != (self.donate, self.steps.skip_nonfinite):
            self.donate = donate
            self.steps = self.steps._replace(skip_nonfinite=skip_nonfinite)
            self._compiled = {
                k: v for k, v in self._compiled.items() if k[0] != "train"
            }

    def train(self, window: Sequence[Batch]) -> tuple[Metrics, int]:
        """One optimizer step; returns its metrics and how many real rows it had."""
        packed, compiled = self.prepare("train", window)
        groups = self.strategy.place_batch(packed.groups, split=packed.split)
        self._leaves, metrics = compiled(self._leaves, groups)
        self.in_flight.add(metrics.means)
        return metrics, packed.rows

    def start_epoch(self) -> None:
        """Sets the epoch's sums to zero."""
        totals = jax.device_put(new_totals(), self.state.totals.sharding)
        self.state = self.state._replace(totals=totals)

    def epoch_means(self) -> dict[str, float]:
        """Means over the epoch's rows so far. Waits for the device."""
        totals = np.asarray(self.state.totals)
        return means_of(totals, self.facts["train"].names)

    def evaluate(self, batch: Batch, totals: Any, batch_idx: int) -> Any:
        """`totals` with those of `batch` added; start from `new_totals()`."""
        packed, compiled = self.prepare("evaluate", [batch])
        groups = self.strategy.place_batch(packed.groups, split=packed.split)
        weights = jax.tree.leaves(self.evaluated.weights)
        totals, metrics = compiled(weights, totals, np.int32(batch_idx), groups)
        self.in_flight.add(metrics.means)
        return totals

    def predict(self, inputs: Iterable[PyTree]) -> Iterator[PyTree]:
        """Predictions of each of `inputs` as NumPy arrays, without padding."""
        waiting: collections.deque[tuple[PyTree, int]] = collections.deque()

        def fetch() -> PyTree:
            prediction, rows = waiting.popleft()
            # Waits for the device, `IN_FLIGHT` batches late.
            return jax.tree.map(lambda leaf: np.asarray(leaf)[:rows], prediction)

        weights = jax.tree.leaves(self.evaluated.weights)
        for x in inputs:
            packed, compiled = self.prepare("predict", [x])
            groups = self.strategy.place_batch(packed.groups, split=packed.split)
            waiting.append((compiled(weights, groups), packed.rows))
            if len(waiting) > IN_FLIGHT:
                yield fetch()
        while waiting:
            yield fetch()

    def flops_per_row(self, window: Sequence[Batch]) -> float:
        """Operations of a train step over `window`, per row that is computed."""
        slots = self.micro_batches
        packed = self._packers["train"].pack(window, slots)
        steps = self.steps._replace(inside=(), remat=False)
        with no_ambient_mesh():
            train = functools.partial(steps.train, Collectives())
            jaxpr = jax.make_jaxpr(train)(self.state, packed.groups)
        rows = sum(
            math.prod(jax.tree.leaves(group.batch)[0].shape[:2])
            for group in packed.groups
        )
        return matmul_flops(jaxpr) / rows

    def compiled_train_step(self) -> jax.stages.Compiled | None:
        """The train step for the largest batch so far."""
        steps = [step for (kind, _), step in self._compiled.items() if kind == "train"]
        return steps[0] if steps else None

    def prepare(
        self, kind: Kind, window: Sequence[Batch]
    ) -> tuple[Packed, jax.stages.Compiled]:
        """`window` packed, and the step for its shape, compiled if it is a new one."""
        packer = self._packers[kind]
        slots = self.micro_batches if kind == "train" else 1
        packed = packer.pack(window, slots)
        compiled = self._compiled.get((kind, packed.shape))
        if compiled is None:
            compiled = self._compile(kind, packed)
            # Only tracing tells whether rows interact, and so may not be padded.
            if kind in self.facts and self.facts[kind].rows_interact:
                packer.rows_interact = True
                shape, packed = packed.shape, packer.pack(window, slots)
                if packed.shape != shape:
                    compiled = self._compile(kind, packed)
        classes = self.facts[kind].num_classes if kind in self.facts else None
        if classes is not None:
            for batch in window:
                check_labels(batch, classes)
        return packed, compiled

    def _compile(self, kind: Kind, packed: Packed) -> jax.stages.Compiled:
        compile_kind = {
            "train": self._compile_train,
            "evaluate": self._compile_evaluate,
            "predict": self._compile_predict,
        }[kind]
        with no_ambient_mesh():
            compiled = compile_kind(packed)
        if kind != "predict":
            self.facts[kind] = compiled.out_info[1].facts
        self._compiled[kind, packed.shape] = compiled
        shapes = sum(known == kind for known, _ in self._compiled)
        if shapes == 4:
            say(
                f"the {kind} step was compiled for a fourth batch size, {packed.rows}"
                " rows. A loss that returns one value per row is padded to one size; a"
                " scalar loss, or BatchNorm, needs batches of few sizes."
            )
        return compiled

    def _compile_train(self, packed: Packed) -> jax.stages.Compiled:
        treedef = self._treedef

        def train(collectives: Collectives, leaves: list[Array], groups: list[Group]):
            state = jax.tree.unflatten(treedef, leaves)
            state, metrics = self.steps.train(collectives, state, groups)
            return jax.tree.leaves(state), metrics

        with warnings.catch_warnings():
            if self.donate == "all":
                # A batch has no result of its shape to become; DonateBuffers reports.
                warnings.filterwarnings(
                    "ignore", "Some donated buffers were not usable"
                )
            return self.strategy.compile(
                train,
                (self._leaves, packed.groups),
                ("state", "groups"),
                ("state", "whole"),
                donate={"state": (0,), "all": (0, 1), "none": ()}[self.donate],
                split=packed.split,
            )

    def _compile_evaluate(self, packed: Packed) -> jax.stages.Compiled:
        weights, treedef = jax.tree.flatten(self.state.weights)

        def evaluate(
            collectives: Collectives,
            leaves: list[Array],
            totals: Array,
            batch_idx: Array,
            groups: list[Group],
        ) -> Any:
            weights = jax.tree.unflatten(treedef, leaves)
            (group,) = groups
            return self.steps.evaluate(collectives, weights, totals, batch_idx, group)

        return self.strategy.compile(
            evaluate,
            (weights, new_totals(), np.int32(0), packed.groups),
            ("state", "whole", "whole", "groups"),
            ("whole", "whole"),
            split=packed.split,
        )

    def _compile_predict(self, packed: Packed) -> jax.stages.Compiled:
        weights, treedef = jax.tree.flatten(self.state.weights)

        def predict(
            collectives: Collectives, leaves: list[Array], groups: list[Group]
        ) -> PyTree:
            weights = jax.tree.unflatten(treedef, leaves)
            (group,) = groups
            return self.steps.predict(collectives, weights, group)

        return self.strategy.compile(
            predict,
            (weights, packed.groups),
            ("state", "groups"),
            "rows",
            split=packed.split,
        )


def _shapes_of_state(
    parts: tuple[PyTree, PyTree, PyTree],
    model_state: PyTree,
    steps: Steps,
    strategy: DataParallel,
) -> TrainState:
    """The first state as shapes and shardings; nothing is computed or moved."""

    def first(params: PyTree, buffers: PyTree, model_state: PyTree) -> TrainState:
        return first_state(params, buffers, model_state, steps.optimizer, seed=0)

    state = jax.eval_shape(first, parts[0], parts[1], model_state)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        state,
        strategy.state_shardings(state),
    )
