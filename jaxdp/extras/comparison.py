"""The same training steps under several strategies, and what differs between them."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ..basics.arguments import check_count
from ..basics.console import format_columns
from ..basics.tracebacks import TracebackFilter
from ..basics.tree import leaf_path
from ..checkpoint import key_to_data
from ..data import get_local
from ..engine import Engine
from ..fit import TrainerConfig, checks
from ..fit.feed import make_windows
from ..step import Batch
from ..strategies import DataParallel, SingleDevice
from ..strategies.placement import gather_arrays

if TYPE_CHECKING:
    from jaxdp import Trainer

_MAX_LEAVES = 20
"""The number of leaves in a printed table; the rest is counted."""


class Difference(NamedTuple):
    """The largest difference of a value from the reference's, over all steps."""

    largest: float
    """The difference relative to the largest magnitude in the array.

    It is 0.0 for equal bits, and infinite where one value is finite and the other is
    not, and where integers differ."""
    first_step: int | None
    """The first step, counted from 1, after which bits differ; None without one."""

    @property
    def is_equal(self) -> bool:
        """Whether the value has the same bits in every step."""
        return self.first_step is None

    def __str__(self) -> str:
        if self.is_equal:
            return "equal"
        return f"{self.largest:.1e} from step {self.first_step}"


class Run(NamedTuple):
    """The values of the steps under one strategy."""

    strategy: str
    losses: list[float]
    step_seconds: list[float]
    """The seconds of each step, waited for. The first steps warm up caches."""
    compile_seconds: float
    loss: Difference
    leaves: dict[str, Difference]
    """The states by name: `params: layers[0].weight`, model state, optimizer state.
    """


class Comparison:
    """The result of `Trainer.compare`; `print` it, or `assert_close` in a test.

    Attributes:
        reference: the run of the trainer's own strategy.
        runs: those of the requested strategies, in order, compared with it.
    """

    def __init__(self, reference: Run, runs: Sequence[Run]):
        self.reference = reference
        self.runs = list(runs)

    @property
    def is_equal(self) -> bool:
        """Whether all strategies have the same bits in every step."""
        return all(difference.is_equal for _, _, difference in self._differences())

    def assert_close(
        self, rtol: float = 1e-5, leaves_rtol: float | None = None
    ) -> None:
        """Raises unless every strategy gave the reference's numbers.

        Args:
            rtol: largest relative difference of a step's loss.
            leaves_rtol: the same for every leaf. Default: leaves are not compared, as
                Adam turns tiny differences in gradients that should be zero into steps
                of full size.

        Raises:
            AssertionError: naming the strategy, the value and the first step.
        """
        for run, name, difference in self._differences():
            allowed = rtol if name == "loss" else leaves_rtol
            assert allowed is None or difference.largest <= allowed, (
                f"same numbers anywhere: {name} under {run.strategy} differs from"
                f" that under {self.reference.strategy} by {difference.largest:.3g}"
                f" relative, from step {difference.first_step} on; {allowed:g} is"
                f" allowed\n{self}"
            )

    def assert_equal(self) -> None:
        """Raises unless every strategy gave the reference's bits in every step."""
        for run, name, difference in self._differences():
            assert difference.is_equal, (
                f"{name} has other bits under {run.strategy} than under"
                f" {self.reference.strategy}: {difference}\n{self}"
            )

    def _differences(self) -> Iterator[tuple[Run, str, Difference]]:
        for run in self.runs:
            for name, difference in {"loss": run.loss, **run.leaves}.items():
                yield run, name, difference

    def __str__(self) -> str:
        rows = [("strategy", "compiled in", "step", "last loss", "loss differs")]
        rows += [
            (
                run.strategy,
                f"{run.compile_seconds:.1f} s",
                f"{statistics.median(run.step_seconds) * 1e3:.2f} ms",
                f"{run.losses[-1]:.7g}",
                "reference" if run is self.reference else str(run.loss),
            )
            for run in (self.reference, *self.runs)
        ]
        names = [
            name
            for name in self.reference.leaves
            if not all(run.leaves[name].is_equal for run in self.runs)
        ]
        count = len(self.reference.leaves)
        steps = len(self.reference.losses)
        text = f"{steps} steps from the same start\n{_format_table(rows)}\n"
        if not names:
            return f"{text}\nall {count} leaves have equal bits after every step"
        names.sort(key=lambda name: -max(run.leaves[name].largest for run in self.runs))
        rows = [("leaf", *(run.strategy for run in self.runs))]
        rows += [
            (name, *(str(run.leaves[name]) for run in self.runs))
            for name in names[:_MAX_LEAVES]
        ]
        hidden = len(names) - len(rows) + 1
        more = f"\nand {hidden} more that differ less" if hidden else ""
        equal = count - len(names)
        return (
            f"{text}\n{_format_table(rows)}{more}\n{equal} of {count} leaves are equal"
        )

    __repr__ = __str__


@jax.disable_jit(False)
def compare_strategies(
    trainer: "Trainer",
    loader: Iterable[Any],
    strategies: tuple[DataParallel, ...],
    steps: int,
) -> Comparison:
    """`Trainer.compare`: the same steps from the present state, under each strategy."""
    run, config = trainer.run, trainer.run.config
    check_count("steps", steps)
    if run.processes.count > 1:
        raise RuntimeError(
            f"`compare` was called in a job of {run.processes.count} processes; it"
            " compares strategies on the devices of one. Call it in a program that"
            " runs alone, with as many faked devices if need be."
        )
    for strategy in strategies:
        checks.check_strategy_argument(strategy)
    configs = [
        config.replace(strategy=other) for other in strategies or (SingleDevice(),)
    ]
    for each in (config, *configs):
        if each.adds_state:
            raise ValueError(
                f"`compare`: {each.strategy!r} trains by another algorithm, and keeps"
                " a state of its own. Compare the losses of two fits instead."
            )

    with TracebackFilter():
        source = run.open_source(loader, "loader", "train")
        with contextlib.closing(source):
            batches = map(get_local, source.read_epoch())
            all_windows = make_windows(batches, config.accumulate_grad_batches)
            first = list(itertools.islice(all_windows, steps))
        if not first:
            raise ValueError(source.explain_no_batches())

        config.decide_loss(run.engine, first[0][0])
        engine_here = run.engine
        start = gather_arrays(engine_here.state)

        def trace_under(config: TrainerConfig) -> Trace:
            engine = config.make_engine(run.hooks)
            engine.step_functions = engine_here.step_functions._replace(inside_step=())
            engine.state = engine.place(start)
            return trace(engine, config.strategy, first)

        return compare(trace_under(config), [*map(trace_under, configs)])


Trace = tuple[Run, list[dict[str, np.ndarray]]]
"""A run not yet compared, and the loss and all of the state by name after each step."""


def trace(engine: Engine, strategy: Any, windows: Iterable[Sequence[Batch]]) -> Trace:
    """Takes a step for each of `windows`; fetches all of the state after each."""
    run = Run(repr(strategy), [], [], 0.0, Difference(0.0, None), {})
    values, compiling = [], 0.0
    for window in windows:
        start = time.perf_counter()
        dispatch = engine.pack([window])
        engine.get_program("train", dispatch)
        prepared = time.perf_counter()
        (metrics,) = engine.train(dispatch)
        jax.block_until_ready(engine.state)  # waits for the device
        compiling += prepared - start
        run.step_seconds.append(time.perf_counter() - prepared)
        run.losses.append(float(metrics["loss"]))  # on the host

        parts = {
            "params": engine.state.params,
            "model state": engine.state.model_state,
            "optimizer": engine.state.opt_state,
        }
        named = {
            f"{part}: {leaf_path(path)}": np.asarray(key_to_data(leaf))  # on the host
            for part, tree in gather_arrays(parts).items()
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        values.append({"loss": np.asarray(metrics["loss"]), **named})  # on the host
    return run._replace(compile_seconds=compiling), values


def compare(reference: Trace, others: Sequence[Trace]) -> Comparison:
    """Returns the differences between traces of the same steps."""
    expected = reference[1]
    runs = []
    for run, traced in (reference, *others):
        differences = {
            name: _describe_difference(
                [values[name] for values in traced],
                [values[name] for values in expected],
            )
            for name in expected[0]
        }
        loss = differences.pop("loss")
        runs.append(run._replace(loss=loss, leaves=differences))
    return Comparison(runs[0], runs[1:])


def _describe_difference(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> Difference:
    """Returns the largest difference of two sequences of arrays, one per step."""
    first, largest = None, 0.0
    for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True), 1):
        if ours.tobytes() == theirs.tobytes():
            continue
        first = step if first is None else first
        largest = max(largest, _compute_relative_error(ours, theirs))
    return Difference(largest, first)


def _compute_relative_error(values: np.ndarray, expected: np.ndarray) -> float:
    if np.issubdtype(expected.dtype, np.integer) or expected.dtype == np.bool_:
        return float("inf")
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    values, expected = values.astype(wide), expected.astype(wide)
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(values)):
        return float("inf")
    if not finite.any():
        return 0.0
    apart = np.abs(values[finite] - expected[finite]).max()
    size = np.abs(expected[finite]).max()
    return float(apart / size) if size else float(apart and np.inf)


def _format_table(rows: Sequence[tuple[str, ...]]) -> str:
    head, *others = format_columns(rows)
    width = max(map(len, (head, *others)))
    return "\n".join([head, "-" * width, *others])
