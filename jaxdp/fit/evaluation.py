"""Passes over a loader without training: `validate`, `test`, `predict`."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from ..basics.console import log_info, warn
from ..basics.tracebacks import NoteOnError, TracebackFilter
from ..callbacks.base import Hooks
from ..data import Dispatch, Source, fetch_real_rows, get_inputs
from ..engine import Program, StepKind
from ..step import IN_FLIGHT
from ..strategies.placement import replicate
from .checkpointing import load_weights_at
from .lifecycle import run_activity
from .pass_metrics import measure_pass
from .progress import resolve_limit
from .resume import load_by_name
from .trainer_methods import check_is_callable

if TYPE_CHECKING:
    from jaxdp import Trainer

Item = TypeVar("Item")

Loaders = Mapping[str, Source]
"""Sources by the prefix of their metric names: `"val"`, or `"val_clean"` and
`"val_shifted"`."""

_PREFIXES: Final = {"validation": "val", "test": "test"}
"""The prefix of metric names, by stage."""


def open_loaders(
    trainer: "Trainer", loader: Any, argument: str, prefix: str
) -> dict[str, Source]:
    """Opens the user's `argument`: one loader, or several by name."""
    open_one = partial(trainer.run.open_source, kind="evaluate")
    if not isinstance(loader, Mapping):
        return {prefix: open_one(loader, argument)}
    if not loader or not all(isinstance(name, str) and name for name in loader):
        raise TypeError(
            f"`{argument}` is a dict with the keys {list(loader)}; if you pass"
            f" several loaders, name each of them, as in {{'clean': a, 'shifted':"
            f" b}}."
        )
    return {
        f"{prefix}_{name}": open_one(each, f"{argument}[{name!r}]")
        for name, each in loader.items()
    }


def compile_ahead(trainer: "Trainer", sources: Loaders) -> None:
    """Compiles for validation before the first epoch, so that errors come early."""
    for source in sources.values():
        if source.is_in_memory:
            with NoteOnError(f"in the first batch of `{source.argument}`"):
                trainer.run.engine.prepare_evaluation("evaluate", source.peek_batch())


def evaluate_loaders(
    trainer: "Trainer", stage: str, loader: Any, ckpt_path: Any, limit: Any
) -> dict[str, float]:
    """Implements `Trainer.validate` and `Trainer.test`: means over loaders."""
    method = "validate" if stage == "validation" else stage
    with TracebackFilter(), contextlib.ExitStack() as stack:
        hooks = stack.enter_context(_run_user_pass(trainer, method))
        sources = open_loaders(trainer, loader, "loader", _PREFIXES[stage])
        for source in sources.values():
            stack.callback(source.close)
        limits = {
            name: resolve_limit("limit_batches", limit, source.num_batches)
            for name, source in sources.items()
        }
        weights = _load_weights(trainer, method, ckpt_path)
        stack.enter_context(trainer.run.interrupts)
        return evaluate(trainer, sources, limits, hooks, weights, stage)


def evaluate(
    trainer: "Trainer",
    sources: Loaders,
    limits: Mapping[str, int | None],
    hooks: Hooks,
    weights: list[Any] | None = None,
    stage: str = "validation",
) -> dict[str, float]:
    """Returns exact means over the rows, as `{"val_loss": ..., ...}`.

    Args:
        trainer: the trainer whose model is evaluated.
        sources: one source per loader, by the prefix of its metric names.
        limits: the maximum number of batches per source; None for all.
        hooks: called once for all loaders.
        weights: the weights to evaluate; None for the trainer's.
        stage: "validation" or "test", as in the names of hooks.
    """
    run, engine, numbers = trainer.run, trainer.run.engine, itertools.count()

    def end_batch() -> None:
        if stage == "validation":
            hooks.on_validation_batch_end(trainer, next(numbers))

    with run.record.redirect_logs({}) as logged:
        getattr(hooks, f"on_{stage}_start")(trainer)
        if weights is None:
            weights = engine.device_state.get_weights()
        passes = {
            name: _sum_pass(trainer, name, source, limits[name], weights, end_batch)
            for name, source in sources.items()
        }

    metrics: dict[str, float] = {}
    facts = engine.compiled_steps["evaluate"].facts
    for prefix, (sums, rows) in passes.items():
        sums = np.asarray(sums)  # waits for the device
        pairs = [*engine.step_functions.compute_means(sums, facts).items()]
        if run.config.pass_metrics:
            outputs, measure = _join_rows(rows), engine.step_functions.measure_outputs
            pairs += measure_pass(run.config.pass_metrics, outputs, measure)
        for name, value in pairs:
            if (name := f"{prefix}_{name}") in metrics:
                raise ValueError(
                    f"two values named {[name]}: a name of `metrics` equals that of a"
                    " PassMetric followed by one of its keys, or of a loader followed"
                    " by a metric. Rename one of them."
                )
            metrics[name] = value
    metrics |= logged
    with run.record.redirect_logs(metrics):
        getattr(hooks, f"on_{stage}_end")(trainer, metrics)
    return metrics


def _sum_pass(
    trainer: "Trainer",
    name: str,
    source: Source,
    limit: int | None,
    weights: list[Any],
    end_batch: Callable[[], None],
) -> tuple[Any, list[PyTree]]:
    """Returns the sums over a pass, and the rows that a `PassMetric` needs."""
    engine = trainer.run.engine
    totals = engine.place_ahead(engine.device_state.layout.zeros)

    def run_step(number: int, dispatch: Dispatch, program: Program) -> PyTree:
        nonlocal totals
        inputs = weights, totals, engine.place_ahead(np.int32(number))
        placed, results = engine.run("evaluate", dispatch, program, *inputs)
        totals, means, *outputs = results
        engine.in_flight.add(means, placed.nbytes)
        end_batch()
        return outputs[0] if outputs else None

    try:
        rows = [*_run_pass(trainer, "evaluate", source, name, limit, run_step)]
    finally:
        source.end_epoch()
    return totals, rows


def predict(
    trainer: "Trainer",
    loader: Iterable[Any],
    ckpt_path: Any,
    limit: Any,
    gather: bool,
    returns: bool,
) -> Any:
    """Implements `Trainer.predict`."""
    run, predictions = trainer.run, list[PyTree]()
    check_is_callable(run, "predict")
    with (
        TracebackFilter(),
        _run_user_pass(trainer, "predict") as hooks,
        contextlib.closing(run.open_source(loader, "loader", "predict")) as source,
        run.interrupts,
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
        weights, engine = _load_weights(trainer, "predict", ckpt_path), run.engine
        hooks.on_predict_start(trainer)
        if weights is None:
            weights = engine.device_state.get_weights()

        def run_step(number: int, dispatch: Dispatch, program: Program) -> PyTree:
            placed, outputs = engine.run("predict", dispatch, program, weights)
            if placed.nbytes:
                engine.in_flight.add(jax.tree.leaves(outputs)[0], placed.nbytes)
            return outputs

        arguments = trainer, "predict", source, "predict", limit, run_step
        for number, rows in enumerate(_run_pass(*arguments, gather=gather)):
            if returns:
                predictions.append(rows)
                _check_rows_join(predictions[0], rows, number)
            hooks.on_predict_batch_end(trainer, rows, number)
        joined = _join_rows(predictions)
        hooks.on_predict_end(trainer)
    return joined


@contextlib.contextmanager
def _run_user_pass(trainer: "Trainer", method: str) -> Iterator[Hooks]:
    """Sets callbacks up for a pass outside of a fit; yields the hooks to call."""
    run = trainer.run
    run.renew_hooks(trainer.callbacks)
    if run.doing:  # the fit has set callbacks up already, and reports errors to them
        yield Hooks(()) if run.is_fitting else run.hooks
        return
    hooks = Hooks(
        callback for callback in trainer.callbacks if not callback.only_in_training
    )
    with run_activity(trainer, method, hooks):
        hooks.setup(trainer)
        yield hooks


def _load_weights(trainer: "Trainer", method: str, ckpt_path: Any) -> list[Any] | None:
    """Loads the weights of a checkpoint for a pass; None if `ckpt_path` is None."""
    if ckpt_path is None:
        return None
    checkpoint = load_by_name(trainer, ckpt_path, partial(load_weights_at, trainer))
    assert checkpoint is not None  # only "auto" may find no checkpoint
    path, (step, weights) = checkpoint
    log_info(f"`{method}` uses the weights of step {step}, from {path}")
    return weights


def _run_pass(
    trainer: "Trainer",
    kind: StepKind,
    source: Source,
    name: str,
    limit: int | None,
    run_step: Callable[[int, Dispatch, Program], PyTree],
    *,
    gather: bool = True,
) -> Iterator[PyTree]:
    """Runs a step for each batch; yields its output of real rows as NumPy arrays.

    Args:
        kind: the kind of step, "evaluate" or "predict".
        name: names the pass for other processes.
        limit: the maximum number of batches; None for all.
        run_step: called with the number of a batch, the packed batch and its program.
            Returns arrays of all rows, padding included, on the device; or None.
        gather: whether each process gets all rows, instead of its local rows.
    """
    run, engine, is_empty = trainer.run, trainer.run.engine, True
    run.processes.all_gather(f"the start of {name}", None)
    batches = itertools.islice(source.read_epoch(), limit)
    prepared = _prepare_batches(trainer, kind, batches, name)
    # On accelerators, the transfer of the next batch starts before the step of a batch.
    prepared = _delay(prepared, int(engine.prefetches))

    def run_steps() -> Iterator[tuple[Any, PyTree]]:
        nonlocal is_empty
        for number, batch, *arguments in prepared:
            with NoteOnError(f"in batch {number}"):
                outputs = run_step(number, *arguments)
            is_empty = False
            if outputs is not None:
                yield batch, replicate(outputs) if gather else outputs

    # Outputs are fetched late, so that nothing waits for a step that was just launched.
    for batch, outputs in _delay(run_steps(), IN_FLIGHT):
        blocks, local = engine.compiled_steps[kind].packer.blocks, not gather
        fetch = partial(fetch_real_rows, batch=batch, blocks=blocks, local=local)
        yield jax.tree.map(fetch, outputs)  # waits for the device
    run.processes.all_gather(f"the end of {name}", None)
    if is_empty:
        raise ValueError(source.explain_no_batches())


def _prepare_batches(
    trainer: "Trainer", kind: StepKind, batches: Iterable[Any], name: str
) -> Iterator[tuple[Any, ...]]:
    """Yields the number of each batch, the batch, its dispatch and its program.

    All processes take the same batches. A pending signal is raised after each batch.
    """
    run, engine = trainer.run, trainer.run.engine
    for number, batch in enumerate(batches):
        run.processes.sync_step(f"batch {number} of {name}")
        with NoteOnError(f"in batch {number}"):
            inputs = get_inputs(batch) if kind == "predict" else batch
            if kind == "evaluate":
                run.config.decide_loss(engine, batch)
            dispatch, program = engine.prepare_evaluation(kind, inputs)
        if engine.prefetches:
            dispatch = engine.compiled_steps[kind].prefetch(dispatch)
        yield number, batch, dispatch, program
        run.interrupts.check()


def _delay(items: Iterable[Item], count: int) -> Iterator[Item]:
    """Yields each item when the next `count` items have been read."""
    waiting: collections.deque[Item] = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def _check_rows_join(first: PyTree, rows: PyTree, number: int) -> None:
    """Raises if the rows of a batch have other shapes than those of the first one."""
    shapes = [[leaf.shape[1:] for leaf in jax.tree.leaves(t)] for t in (first, rows)]
    if shapes[0] != shapes[1]:
        listed, others = (", ".join(map(str, each)) for each in shapes)
        raise ValueError(
            f"`loader`: a prediction has the shape {others} in batch {number} and"
            f" {listed} in batch 0, so the rows can't be joined. Pad the inputs to one"
            " length, or write each batch in a callback's `on_predict_batch_end` and"
            " pass `return_predictions=False`."
        )


def _join_rows(batches: list[PyTree]) -> PyTree:
    """Returns one array of the rows of all batches, or a tree of arrays; None if there
    are no batches.
    """
    return jax.tree.map(lambda *rows: np.concatenate(rows), *batches or [None])
