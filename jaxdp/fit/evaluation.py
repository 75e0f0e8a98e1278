"""A pass over a loader without training: `validate`, `test`, `predict`."""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jaxtyping import PyTree

from ..basics.console import say, warn
from ..basics.tracebacks import UsersFramesFirst, noted
from ..callbacks.base import Hooks
from ..data import Dispatch, Packer, Source, inputs_of, shown
from ..engine import Engine, Kind, Program
from ..step import IN_FLIGHT, Batch, Whole, means_of
from ..strategies.placing import replicated
from .around import doing, noting
from .limits import capped
from .pass_metrics import add_pass_values
from .resume import taken
from .snapshot import weights_at
from .views import check_callable

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
    """What an evaluation calls its values, of which no two may be the same."""
    names = [f"{prefix}_{name}" for prefix in sources for name in metrics]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"two validation values are named {sorted(twice)}: the name of a"
            " loader followed by the name of a metric equals another name. Rename"
            " the loader."
        )
    return tuple(names)


def evaluate(
    trainer: "Trainer",
    sources: Loaders,
    limits: Mapping[str, int | None],
    hooks: Hooks,
    *,
    weights: list[Any] | None = None,
    kind: str = "validation",
) -> dict[str, float]:
    """Exact means over the rows of a pass over each, as `{"val_loss": ..., ...}`.

    Callbacks hear of them as of one. The `limits` are batches of each, and the
    `weights` others than those of the trainer's state.
    """
    run, totals = trainer.run, {}
    with run.record.into({}) as logged:
        getattr(hooks, f"on_{kind}_start")(trainer)
        after_batch = getattr(hooks, f"on_{kind}_batch_end", lambda *_: None)
        done = itertools.count()
        for prefix, source in sources.items():
            limit = limits.get(prefix)
            totals[prefix] = _totals(
                trainer,
                source,
                prefix,
                limit,
                lambda: after_batch(trainer, next(done)),
                weights,
            )

    metrics, facts = {}, run.engine.steps["evaluate"].facts
    for prefix, (sums, outputs) in totals.items():
        means = means_of(np.asarray(sums), facts)  # waits for the device
        if of_passes := run.recipe.pass_metrics:
            add_pass_values(means, of_passes, outputs.rows(), run.recipe.ensemble)
        names_of(sources, means)
        metrics |= {f"{prefix}_{name}": value for name, value in means.items()}
    metrics |= logged
    with run.record.into(metrics):
        getattr(hooks, f"on_{kind}_end")(trainer, metrics)
    return metrics


def _totals(
    trainer: "Trainer",
    source: Source,
    prefix: str,
    limit: int | None,
    after_batch: Callable[[], None],
    weights: list[Any] | None,
) -> tuple[Any, "_Fetching"]:
    """The sums over a pass, and what is kept of its rows."""
    run, batch_idx = trainer.run, -1
    totals = run.engine.pure.new_totals()
    with source.a_pass(), run.access.apart(), run.interrupts, run.engine.as_settled():
        engine = run.engine
        # Asked for once: they may be many.
        weights = engine.held.weights() if weights is None else weights
        outputs = _Fetching(engine.steps["evaluate"].packer)
        batches = _pass(trainer, source, prefix, limit)
        decide = run.recipe.decide_loss
        batches = (batch for batch in batches if decide(engine, batch))
        ready = _ready(engine, "evaluate", batches)
        for batch_idx, (batch, dispatch, program) in enumerate(ready):
            with noted(f"in batch {batch_idx}"):
                given = weights, totals, np.int32(batch_idx)
                placed, results = engine.run("evaluate", dispatch, program, *given)
                totals, means, *kept = results
            engine.in_flight.add(means, placed.nbytes, placed.checks)
            for values in kept:
                outputs.add(values, batch)
            after_batch()
        engine.in_flight.check_all()

    if batch_idx < 0:
        raise ValueError(source.gave_nothing())
    return totals, outputs


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
        UsersFramesFirst(),
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
        return evaluate(trainer, sources, limits, hooks, weights=weights, kind=kind)


@contextlib.contextmanager
def _asked_for(trainer: "Trainer", method: str) -> Iterator[Hooks]:
    """Around a pass that a user asks for; gives the hooks of those who hear of it."""
    run = trainer.run
    run.renew_hooks(trainer.callbacks)
    if run.doing:  # the callbacks are set up, and hear of what goes wrong
        run.settled_engine(f"`{method}`")
        yield Hooks(()) if run.doing == "a fit" else run.hooks
        return
    hooks = Hooks(
        callback for callback in trainer.callbacks if not callback.only_in_training
    )
    with doing(trainer, method, hooks):
        try:
            hooks.setup(trainer)
            run.settled_engine(f"`{method}`")
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
    say(f"`{method}` uses the weights of step {step}, from {path}")
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
        UsersFramesFirst(),
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
        hooks.on_predict_start(trainer)
        predictions = _predictions(trainer, source, limit, weights, gather)
        if predictions is None:
            raise ValueError(source.gave_nothing())
        hooks.on_predict_end(trainer)
    return predictions


def _predictions(
    trainer: "Trainer",
    source: Source,
    limit: int | None,
    weights: list[Any] | None,
    gather: bool,
) -> Any:
    """The predictions of a pass, or None of one without batches."""
    run = trainer.run
    given: list[Any] = []

    def inputs() -> Iterator[Any]:
        for batch in _pass(trainer, source, "predict", limit):
            given[:] = [batch]
            yield inputs_of(batch)

    with run.access.apart(), run.interrupts, run.engine.as_settled():
        engine = run.engine
        predictions = _Fetching(engine.steps["predict"].packer, gather=gather)
        weights = engine.held.weights() if weights is None else weights
        try:
            ready = _ready(engine, "predict", inputs())
            for number, (x, dispatch, program) in enumerate(ready):
                with noted(f"in batch {number}"):
                    placed, result = engine.run("predict", dispatch, program, weights)
                if placed.nbytes:
                    engine.in_flight.add(jax.tree.leaves(result)[0], placed.nbytes)
                predictions.add(result, x)
            return predictions.rows()
        except Exception as error:
            batch = shown(given[0]) if given else ()
            beside = batch[1:] if isinstance(batch, tuple) else ()
            if any(isinstance(part, Whole) for part in beside):
                error.add_note(
                    "`predict` gave the model the first element of the batch, without"
                    " the jaxdp.Whole beside it. For both: ((x, Whole(array)), y)."
                )
            raise


def compile_ahead(trainer: "Trainer", sources: Loaders) -> None:
    """Compiles for validation now, so that what is wrong shows before an epoch."""
    for source in sources.values():
        if (sample := source.sample()) is not None:
            with noted(f"in the first batch of `{source.argument}`"):
                trainer.run.engine.prepare("evaluate", sample)


def _pass(
    trainer: "Trainer", source: Source, doing: str, limit: int | None = None
) -> Iterator[Any]:
    """The batches of a pass, all processes taking the same ones; signals heard."""
    run = trainer.run
    run.processes.all(f"the start of {doing}", None)
    batches = source.epoch()
    for number, batch in enumerate(itertools.islice(batches, limit)):
        run.processes.step(f"batch {number} of {doing}")
        yield batch
        run.interrupts.check()
    run.processes.all(f"the end of {doing}", None)


def _ready(
    engine: Engine, kind: Kind, batches: Iterable[Batch]
) -> Iterator[tuple[Batch, Dispatch, Program]]:
    """The batches of a pass, each packed and with its step; on accelerators once
    the next one is on its way there."""
    waiting: collections.deque[tuple[Batch, Dispatch, Program]] = collections.deque()
    for number, batch in enumerate(batches):
        with noted(f"in batch {number}"):
            dispatch, program = engine.prepare(kind, batch)
        if engine.puts_ahead:
            dispatch = engine.steps[kind].put(dispatch)
        waiting.append((batch, dispatch, program))
        if len(waiting) > engine.puts_ahead:
            yield waiting.popleft()
    yield from waiting


class _Fetching:
    """Fetches the real rows of what steps give, a few batches late.

    Args:
        packer: of the batches.
        gather: whether, of several processes, each gets all rows, not its own alone.
    """

    def __init__(self, packer: Packer, *, gather: bool = True):
        self._packer, self._gather = packer, gather
        self._waiting: collections.deque[tuple[PyTree, Batch]] = collections.deque()
        self._done: list[PyTree] = []

    def add(self, values: PyTree, batch: Batch) -> None:
        """Takes the values of the rows of `batch`, padding included, on the device."""
        self._waiting.append((replicated(values) if self._gather else values, batch))
        if len(self._waiting) > IN_FLIGHT:
            self._fetch()

    def rows(self) -> PyTree:
        """NumPy arrays of the rows of all batches, or None if there were none."""
        while self._waiting:
            self._fetch()
        if not self._done:
            return None
        return jax.tree.map(lambda *parts: np.concatenate(parts), *self._done)

    def _fetch(self) -> None:
        values, batch = self._waiting.popleft()

        def real(leaf: Any) -> np.ndarray:
            return self._packer.real_rows(leaf, batch, own=not self._gather)

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
