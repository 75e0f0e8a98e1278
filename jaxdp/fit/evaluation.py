"""Passes over a loader without training: `validate`, `test`, `predict`."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jaxtyping import PyTree

from ..basics.console import log_info, warn
from ..basics.tracebacks import NoteOnError, TracebackFilter
from ..callbacks.base import Hooks
from ..data import Dispatch, Source, fetch_real_rows, get_inputs
from ..engine import Program, StepKind
from ..step import IN_FLIGHT, Batch
from ..strategies.placement import replicate
from .checkpointing import load_weights_at
from .lifecycle import attach_second_error, run_with_teardown
from .pass_metrics import add_pass_values
from .progress import resolve_limit
from .resume import load_by_name
from .trainer_methods import check_is_callable

if TYPE_CHECKING:
    from jaxdp import Trainer


Loaders = Mapping[str, Source]
"""Sources by the prefix of their metric names: `"val"`, or `"val_clean"` and
`"val_shifted"`."""


def open_loaders(
    trainer: "Trainer", loader: Any, argument: str, prefix: str
) -> dict[str, Source]:
    """Opens the user's `argument`: one loader, or several by name."""
    open_one = trainer.run.open_source
    if not isinstance(loader, Mapping):
        return {prefix: open_one(loader, argument, "evaluate")}
    if not loader or not all(isinstance(name, str) and name for name in loader):
        raise TypeError(
            f"`{argument}` is a dict with the keys {list(loader)}; if you pass"
            f" several loaders, name each of them, as in {{'clean': a, 'shifted':"
            f" b}}."
        )
    return {
        f"{prefix}_{name}": open_one(one_loader, f"{argument}[{name!r}]", "evaluate")
        for name, one_loader in loader.items()
    }


class Evaluator:
    """Evaluates the model on one or more loaders, each time that it is called.

    Args:
        trainer: the trainer whose model is evaluated.
        sources: one source per loader, by the prefix of its metric names.
        limits: the maximum number of batches per source; None for all.
        hooks: called once for all loaders.
        kind: the word in the names of hooks: "validation" or "test".
    """

    def __init__(
        self,
        trainer: "Trainer",
        sources: Loaders,
        limits: Mapping[str, int | None],
        hooks: Hooks,
        kind: str = "validation",
    ):
        self._trainer, self._run = trainer, trainer.run
        self._sources, self._limits = sources, limits
        self._start = getattr(hooks, f"on_{kind}_start")
        self._after_batch = getattr(hooks, f"on_{kind}_batch_end", lambda *_: None)
        self._end = getattr(hooks, f"on_{kind}_end")

    def __call__(self, weights: list[Any] | None = None) -> dict[str, float]:
        """Returns exact means over the rows, as `{"val_loss": ..., ...}`.

        Args:
            weights: the weights to evaluate; None for the trainer's.
        """
        run, trainer, engine = self._run, self._trainer, self._run.engine
        passes: list[tuple[Any, list[PyTree]]] = []
        with run.record.redirect_logs({}) as logged:
            self._start(trainer)
            if weights is None:
                weights = engine.device_state.get_weights()
            numbers = itertools.count()
            passes += [self._sum_pass(one, weights, numbers) for one in self._sources]

        metrics: dict[str, float] = {}
        facts, pure = engine.steps["evaluate"].facts, engine.pure
        for prefix, (sums, rows) in zip(self._sources, passes, strict=True):
            means = pure.compute_means(np.asarray(sums), facts)  # waits for the device
            if of_passes := run.config.pass_metrics:
                outputs = _join_rows(rows)
                add_pass_values(means, of_passes, outputs, pure.measure_outputs)
            named = {f"{prefix}_{name}": value for name, value in means.items()}
            if twice := {*metrics} & {*named}:
                raise ValueError(
                    f"two values of an evaluation are named {sorted(twice)}: the name"
                    " of a loader followed by that of a metric equals another one."
                    " Rename the loader."
                )
            metrics |= named
        metrics |= logged
        with run.record.redirect_logs(metrics):
            self._end(trainer, metrics)
        return metrics

    def _sum_pass(
        self, prefix: str, weights: list[Any], numbers: Iterator[int]
    ) -> tuple[Any, list[PyTree]]:
        """Returns the sums over a pass, and the rows that a `PassMetric` needs."""
        trainer, engine = self._trainer, self._run.engine
        source, limit = self._sources[prefix], self._limits.get(prefix)
        rows: list[PyTree] = []
        fetcher = _RowFetcher(trainer, "evaluate", rows.append)
        first = totals = engine.place_ahead(engine.device_state.layout.zeros)
        ready = _iterate_prepared(trainer, "evaluate", source, prefix, limit)
        try:
            for number, (batch, dispatch, program) in enumerate(ready):
                inputs = weights, totals, engine.place_ahead(np.int32(number))
                with NoteOnError(f"in batch {number}"):
                    placed, results = engine.run("evaluate", dispatch, program, *inputs)
                totals, means, *outputs = results
                engine.in_flight.add(means, placed.nbytes)
                for values in outputs:
                    fetcher.add(values, batch)
                self._after_batch(trainer, next(numbers))
            fetcher.flush()
        finally:
            source.end_epoch()

        if totals is first:
            raise ValueError(source.explain_no_batches())
        return totals, rows


_NAMES: Final = {"validate": ("val", "validation"), "test": ("test", "test")}
"""The prefix of metric names, and the word in the names of hooks, by method."""


def evaluate_loaders(
    trainer: "Trainer", method: str, loader: Any, ckpt_path: Any, limit: Any
) -> dict[str, float]:
    """Implements `Trainer.validate` and `Trainer.test`: means over loaders."""
    prefix, kind = _NAMES[method]
    with (
        TracebackFilter(),
        _run_user_pass(trainer, method) as hooks,
        contextlib.ExitStack() as stack,
    ):
        sources = open_loaders(trainer, loader, "loader", prefix)
        for source in sources.values():
            stack.callback(source.close)
        limits = {
            name: resolve_limit("limit_batches", limit, source.num_batches)
            for name, source in sources.items()
        }
        weights = _load_weights(trainer, method, ckpt_path)
        evaluate = Evaluator(trainer, sources, limits, hooks, kind)
        with trainer.run.interrupts:
            return evaluate(weights)


@contextlib.contextmanager
def _run_user_pass(trainer: "Trainer", method: str) -> Iterator[Hooks]:
    """Sets callbacks up for a pass outside of a fit; yields the hooks to call."""
    run = trainer.run
    run.renew_hooks(trainer.callbacks)
    if run.doing:  # the fit has set callbacks up already, and reports errors to them
        yield Hooks(()) if run.doing == "a fit" else run.hooks
        return
    hooks = Hooks(
        callback for callback in trainer.callbacks if not callback.only_in_training
    )
    with run_with_teardown(trainer, method, hooks):
        try:
            hooks.setup(trainer)
            yield hooks
        except BaseException as exception:
            with attach_second_error(exception):
                hooks.on_exception(trainer, exception)
            raise


def _load_weights(trainer: "Trainer", method: str, ckpt_path: Any) -> list[Any] | None:
    """Loads the weights of a checkpoint for a pass; None if `ckpt_path` is None."""
    if ckpt_path is None:
        return None
    checkpoint = load_by_name(trainer, ckpt_path, partial(load_weights_at, trainer))
    assert checkpoint is not None  # only "auto" may find no checkpoint
    path, (step, weights) = checkpoint
    log_info(f"`{method}` uses the weights of step {step}, from {path}")
    return weights


def predict(
    trainer: "Trainer",
    loader: Iterable[Any],
    ckpt_path: Any,
    limit: Any,
    gather: bool,
    returns: bool,
) -> Any:
    """Implements `Trainer.predict`."""
    run = trainer.run
    check_is_callable(run, "predict")
    with (
        TracebackFilter(),
        _run_user_pass(trainer, "predict") as hooks,
        contextlib.closing(run.open_source(loader, "loader", "predict")) as source,
    ):
        if source.shuffles:
            warn(
                "`loader` shuffles: the predictions are in the order of its rows, not"
                " in that of its dataset. Pass a loader with shuffle=False."
            )
        parts = loader, getattr(loader, "batch_sampler", None)
        if any(getattr(part, "drop_last", False) is True for part in parts):
            warn(
                "`loader` has drop_last=True: the rows of a last, smaller batch get no"
                " prediction. Pass a loader with drop_last=False."
            )
        limit = resolve_limit("limit_batches", limit, source.num_batches)
        weights = _load_weights(trainer, "predict", ckpt_path)
        engine, predictions, numbers = run.engine, [], itertools.count()

        def receive(rows: PyTree) -> None:
            if returns:
                predictions.append(rows)
            hooks.on_predict_batch_end(trainer, rows, next(numbers))

        fetcher = _RowFetcher(trainer, "predict", receive, gather=gather)
        hooks.on_predict_start(trainer)
        with run.interrupts:
            if weights is None:
                weights = engine.device_state.get_weights()
            ready = _iterate_prepared(trainer, "predict", source, "predict", limit)
            for number, (batch, dispatch, program) in enumerate(ready):
                with NoteOnError(f"in batch {number}"):
                    placed, result = engine.run("predict", dispatch, program, weights)
                if placed.nbytes:
                    engine.in_flight.add(jax.tree.leaves(result)[0], placed.nbytes)
                fetcher.add(result, batch)
            fetcher.flush()
            joined = _join_rows(predictions)
        if next(numbers) == 0:
            raise ValueError(source.explain_no_batches())
        hooks.on_predict_end(trainer)
    return joined


def compile_ahead(trainer: "Trainer", sources: Loaders) -> None:
    """Compiles for validation before the first epoch, so that errors come early."""
    for source in sources.values():
        if source.is_in_memory:
            with NoteOnError(f"in the first batch of `{source.argument}`"):
                trainer.run.engine.prepare_evaluation("evaluate", source.peek_batch())


def _iterate_prepared(
    trainer: "Trainer",
    kind: StepKind,
    source: Source,
    activity: str,
    limit: int | None,
) -> Iterator[tuple[Batch, Dispatch, Program]]:
    """Yields the batches of a pass, packed, each with its program.

    On accelerators, the transfer of the next batch has started when a batch is yielded.
    All processes take the same batches. A pending signal is raised after each batch.
    """
    run, engine = trainer.run, trainer.run.engine
    run.processes.all_gather(f"the start of {activity}", None)
    waiting: collections.deque[tuple[Batch, Dispatch, Program]] = collections.deque()
    for number, batch in enumerate(itertools.islice(source.read_epoch(), limit)):
        run.processes.sync_step(f"batch {number} of {activity}")
        with NoteOnError(f"in batch {number}"):
            if kind == "predict":
                dispatch, program = engine.prepare_evaluation(kind, get_inputs(batch))
            else:
                engine = run.config.decide_loss(engine, batch)
                dispatch, program = engine.prepare_evaluation(kind, batch)
        if engine.prefetches:
            dispatch = engine.steps[kind].prefetch(dispatch)
        waiting.append((batch, dispatch, program))
        if len(waiting) > engine.prefetches:
            yield waiting.popleft()
        run.interrupts.check()
    yield from waiting
    run.processes.all_gather(f"the end of {activity}", None)


class _RowFetcher:
    """Fetches the real rows of step outputs, a few batches late.

    Args:
        trainer: the trainer that runs the steps.
        kind: the kind of the steps.
        receive: called with NumPy arrays of the rows of each batch.
        gather: whether each process gets all rows, instead of its local rows.
    """

    def __init__(
        self,
        trainer: "Trainer",
        kind: StepKind,
        receive: Callable[[PyTree], None],
        *,
        gather: bool = True,
    ):
        self._packer = trainer.run.engine.steps[kind].packer
        self._receive, self._gather = receive, gather
        self._waiting: collections.deque[tuple[PyTree, Batch]] = collections.deque()

    def add(self, values: PyTree, batch: Batch) -> None:
        """Adds the outputs for `batch`, with padding rows, on the device."""
        self._waiting.append((replicate(values) if self._gather else values, batch))
        if len(self._waiting) > IN_FLIGHT:
            self._fetch()

    def flush(self) -> None:
        """Fetches the rows that are left. Waits for the device."""
        while self._waiting:
            self._fetch()

    def _fetch(self) -> None:
        values, batch = self._waiting.popleft()
        blocks, local = self._packer.blocks, not self._gather
        fetch = partial(fetch_real_rows, batch=batch, blocks=blocks, local=local)
        # Waits for the device, `IN_FLIGHT` batches late.
        self._receive(jax.tree.map(fetch, values))


def _join_rows(batches: list[PyTree]) -> PyTree:
    """Returns one array of the rows of all batches, or a tree of arrays; None if there
    are no batches.
    """
    with NoteOnError("where the rows of all batches are joined, whose shapes differ"):
        return jax.tree.map(lambda *rows: np.concatenate(rows), *batches or [None])
