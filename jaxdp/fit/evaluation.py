"""A pass over a loader without training: `validate`, `test`, `predict`."""

import collections
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jaxtyping import PyTree

from ..basics.console import log_info, warn
from ..basics.tracebacks import NoteOnError, TracebackFilter
from ..callbacks.base import Hooks
from ..data import Dispatch, Packer, Source, inputs_of, own_of, real_rows
from ..engine import Kind, Program
from ..step import IN_FLIGHT, Batch, Whole
from ..strategies.placement import replicate
from .around import doing, noting
from .pass_metrics import add_pass_values
from .progress import capped
from .resume import taken
from .snapshot import weights_at
from .surface import check_callable

if TYPE_CHECKING:
    from jaxdp import Trainer


Loaders = Mapping[str, Source]
"""What is evaluated on, by what comes before the names of its metrics: `"val"`, or
`"val_clean"` and `"val_shifted"`."""


def open_loaders(
    trainer: "Trainer", loader: Any, argument: str, prefix: str
) -> dict[str, Source]:
    """What a user passed as `argument`: a loader, or several by name."""
    open_one = trainer.run.open
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


def names_of(sources: Loaders, metrics: Iterable[str]) -> tuple[str, ...]:
    """What an evaluation calls its values."""
    return check_names([f"{prefix}_{name}" for prefix in sources for name in metrics])


def check_names(names: list[str]) -> tuple[str, ...]:
    """Raises where two values of an evaluation have one name."""
    if len({*names}) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"two validation values are named {twice}: the name of a loader followed by"
            " the name of a metric equals another name. Rename the loader."
        )
    return tuple(names)


class Evaluation:
    """Passes over loaders, as often as it is called; callbacks hear of them as of one.

    What does not change from one time to the next is worked out once.

    Args:
        trainer: whose model is evaluated.
        sources: of the batches, by what comes before the names of metrics.
        limits: how many batches are taken of each.
        hooks: of those who hear of it.
        kind: how hooks call it: "validation" or "test".
    """

    def __init__(
        self,
        trainer: "Trainer",
        sources: Loaders,
        limits: Mapping[str, int | None],
        hooks: Hooks,
        kind: str = "validation",
    ):
        self._trainer, self._run, self._sources = trainer, trainer.run, sources
        self._limits = limits
        self._start = getattr(hooks, f"on_{kind}_start")
        self._after_batch = getattr(hooks, f"on_{kind}_batch_end", lambda *_: None)
        self._end = getattr(hooks, f"on_{kind}_end")
        self._outputs = {prefix: _Fetching(trainer, "evaluate") for prefix in sources}

    def __call__(self, weights: list[Any] | None = None) -> dict[str, float]:
        """Exact means over the rows of each, as `{"val_loss": ..., ...}`.

        With other `weights` than those of the trainer's state, if some are given.
        """
        run, trainer = self._run, self._trainer
        with run.record.redirect_logs({}) as logged:
            self._start(trainer)
            # Asked for once: they may be many.
            weights = run.engine.held.weights() if weights is None else weights
            numbers = itertools.count()
            totals = [
                self._totals(prefix, weights, numbers) for prefix in self._sources
            ]

        metrics, facts = {}, run.engine.steps["evaluate"].facts
        pure = run.engine.pure
        for prefix, sums in zip(self._sources, totals, strict=True):
            means = pure.compute_means(np.asarray(sums), facts)  # waits for the device
            if of_passes := run.recipe.pass_metrics:
                rows = self._outputs[prefix].rows()
                add_pass_values(means, of_passes, rows, pure.measure_outputs)
            named = {f"{prefix}_{name}": value for name, value in means.items()}
            check_names([*metrics, *named])
            metrics |= named
        metrics |= logged
        with run.record.redirect_logs(metrics):
            self._end(trainer, metrics)
        return metrics

    def _totals(self, prefix: str, weights: list[Any], numbers: Iterator[int]) -> Any:
        """The sums over a pass; of its rows is kept what is asked for."""
        trainer, engine = self._trainer, self._run.engine
        source, outputs = self._sources[prefix], self._outputs[prefix]
        first = totals = engine.held.zeros
        ready = _ready(trainer, "evaluate", source, prefix, self._limits.get(prefix))
        try:
            for number, (batch, dispatch, program) in enumerate(ready):
                given = weights, totals, np.int32(number)
                with NoteOnError(f"in batch {number}"):
                    placed, results = engine.run("evaluate", dispatch, program, *given)
                totals, means, *kept = results
                engine.in_flight.add(means, placed.nbytes)
                for values in kept:
                    outputs.add(values, batch)
                self._after_batch(trainer, next(numbers))
        finally:
            source.end_pass()

        if totals is first:
            raise ValueError(source.gave_nothing())
        return totals


_NAMES: Final = {"validate": ("val", "validation"), "test": ("test", "test")}
"""What methods put before the names of metrics, and how callbacks call them."""


def means(
    trainer: "Trainer", method: str, loader: Any, ckpt_path: Any, limit: Any
) -> dict[str, float]:
    """`Trainer.validate` or `Trainer.test`: means over a loader or several.

    Callbacks hear of it unless a fit is running.
    """
    prefix, kind = _NAMES[method]
    with (
        TracebackFilter(),
        _asked_for(trainer, method) as hooks,
        contextlib.ExitStack() as stack,
    ):
        sources = open_loaders(trainer, loader, "loader", prefix)
        for source in sources.values():
            stack.callback(source.close)
        limits = {
            name: capped("limit_batches", limit, source.num_batches)
            for name, source in sources.items()
        }
        weights = _weights(trainer, method, ckpt_path)
        evaluate = Evaluation(trainer, sources, limits, hooks, kind)
        with trainer.run.interrupts:
            return evaluate(weights)


@contextlib.contextmanager
def _asked_for(trainer: "Trainer", method: str) -> Iterator[Hooks]:
    """Around a pass that a user asks for; gives the hooks of those who hear of it."""
    run = trainer.run
    run.renew_hooks(trainer.callbacks)
    if run.doing:  # the callbacks are set up, and hear of what goes wrong
        run.checked_engine()
        yield Hooks(()) if run.doing == "a fit" else run.hooks
        return
    hooks = Hooks(
        callback for callback in trainer.callbacks if not callback.only_in_training
    )
    with doing(trainer, method, hooks):
        try:
            hooks.setup(trainer)
            run.checked_engine()
            yield hooks
        except BaseException as exception:
            with noting(exception):
                hooks.on_exception(trainer, exception)
            raise


def _weights(trainer: "Trainer", method: str, ckpt_path: Any) -> list[Any] | None:
    """The weights of a checkpoint that a pass is to use, if one is named."""
    if ckpt_path is None:
        return None
    checkpoint = taken(trainer, ckpt_path, partial(weights_at, trainer))
    assert checkpoint is not None  # as it is for "auto" alone
    path, (step, weights) = checkpoint
    log_info(f"`{method}` uses the weights of step {step}, from {path}")
    return weights


def predict(
    trainer: "Trainer",
    loader: Iterable[Any],
    ckpt_path: Any,
    limit: Any,
    *,
    gather: bool,
) -> Any:
    """`Trainer.predict`."""
    run = trainer.run
    check_callable(run, "predict")
    with (
        TracebackFilter(),
        _asked_for(trainer, "predict") as hooks,
        contextlib.closing(run.open(loader, "loader", "predict")) as source,
    ):
        if source.shuffles:
            warn(
                "`loader` shuffles: the predictions are in the order in which it gives"
                " the rows, not in that of its dataset. Pass a loader with"
                " shuffle=False."
            )
        limit = capped("limit_batches", limit, source.num_batches)
        weights = _weights(trainer, "predict", ckpt_path)
        engine, predictions = run.engine, _Fetching(trainer, "predict", gather=gather)
        hooks.on_predict_start(trainer)
        with run.interrupts:
            weights = engine.held.weights() if weights is None else weights
            ready = _ready(trainer, "predict", source, "predict", limit)
            for number, (batch, dispatch, program) in enumerate(ready):
                with NoteOnError(f"in batch {number}"):
                    placed, result = engine.run("predict", dispatch, program, weights)
                if placed.nbytes:
                    engine.in_flight.add(jax.tree.leaves(result)[0], placed.nbytes)
                predictions.add(result, batch)
            rows = predictions.rows()
        if rows is None:
            raise ValueError(source.gave_nothing())
        hooks.on_predict_end(trainer)
    return rows


def compile_ahead(trainer: "Trainer", sources: Loaders) -> None:
    """Compiles for validation now, so that what is wrong shows before an epoch."""
    for source in sources.values():
        if source.is_at_hand:
            with NoteOnError(f"in the first batch of `{source.argument}`"):
                trainer.run.engine.prepare("evaluate", source.peek())


def _ready(
    trainer: "Trainer", kind: Kind, source: Source, doing: str, limit: int | None
) -> Iterator[tuple[Batch, Dispatch, Program]]:
    """The batches of a pass, each packed and with its step; on accelerators once
    the next one is on its way there.

    All processes take the same ones, and signals are heard after each.
    """
    run, engine = trainer.run, trainer.run.engine
    run.processes.all_gather(f"the start of {doing}", None)
    waiting: collections.deque[tuple[Batch, Dispatch, Program]] = collections.deque()
    for number, batch in enumerate(itertools.islice(source.epoch(), limit)):
        run.processes.sync_step(f"batch {number} of {doing}")
        with NoteOnError(f"in batch {number}"):
            dispatch, program = _prepared(trainer, kind, batch)
        if engine.puts_ahead:
            dispatch = engine.steps[kind].put(dispatch)
        waiting.append((batch, dispatch, program))
        if len(waiting) > engine.puts_ahead:
            yield waiting.popleft()
        run.interrupts.check()
    yield from waiting
    run.processes.all_gather(f"the end of {doing}", None)


def _prepared(trainer: "Trainer", kind: Kind, batch: Any) -> tuple[Dispatch, Program]:
    engine = trainer.run.engine
    if kind != "predict":
        return trainer.run.recipe.decide_loss(engine, batch).prepare(kind, batch)
    try:
        return engine.prepare(kind, inputs_of(batch))
    except Exception as error:
        rows = own_of(batch)
        beside = rows[1:] if isinstance(rows, tuple) else ()
        if any(isinstance(part, Whole) for part in beside):
            error.add_note(
                "`predict` gave the model the first element of the batch, without"
                " the jaxdp.Whole beside it. For both: ((x, Whole(array)), y)."
            )
        raise


class _Fetching:
    """Fetches the real rows of what steps give, a few batches late.

    Args:
        trainer: whose steps.
        kind: which of them.
        gather: whether, of several processes, each gets all rows, not its own alone.
    """

    def __init__(self, trainer: "Trainer", kind: Kind, *, gather: bool = True):
        self._engine, self._gather = trainer.run.engine, gather
        self._kind: Kind = kind
        self._waiting: collections.deque[tuple[PyTree, Batch]] = collections.deque()
        self._done: list[PyTree] = []

    def add(self, values: PyTree, batch: Batch) -> None:
        """Takes the values of the rows of `batch`, padding included, on the device."""
        self._waiting.append((replicate(values) if self._gather else values, batch))
        if len(self._waiting) > IN_FLIGHT:
            self._fetch()

    def rows(self) -> PyTree:
        """NumPy arrays of the rows of all batches since the last time, or None if
        there were none."""
        while self._waiting:
            self._fetch()
        done, self._done = self._done, []
        return jax.tree.map(lambda *rows: np.concatenate(rows), *done) if done else None

    @property
    def _packer(self) -> Packer:
        return self._engine.steps[self._kind].packer

    def _fetch(self) -> None:
        values, batch = self._waiting.popleft()

        def real(leaf: Any) -> np.ndarray:
            return real_rows(leaf, batch, self._packer.blocks, own=not self._gather)

        # Waits for the device, `IN_FLIGHT` batches late.
        rows = jax.tree.map(real, values)
        self._check(rows)
        self._done.append(rows)

    def _check(self, found: PyTree) -> None:
        """Raises unless the rows of a batch can be joined to those of the first."""
        first, number = self._done[0] if self._done else found, len(self._done)
        for one, other in zip(
            jax.tree.leaves(first), jax.tree.leaves(found), strict=True
        ):
            if one.shape[1:] != other.shape[1:]:
                raise ValueError(
                    f"in {self._packer.what} the model returns {one.shape[1:]} for"
                    f" a row of batch 0 and {other.shape[1:]} for one of batch"
                    f" {number}, and one array can't hold both. Predict batches of"
                    " one shape at a time, or let the model return one shape for"
                    " all."
                )
