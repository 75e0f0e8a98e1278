"""A pass over a loader without training: `validate`, `test`, `predict`."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import distributed
from ..basics.console import say
from ..basics.tracebacks import UsersFramesFirst, noted
from ..callbacks.base import Hooks
from ..data import Source, inputs_of, shown
from ..engine import Fetching
from ..step import Whole, means_of
from ..supervisor import alive
from .pass_metrics import add_pass_values
from .resume import taken
from .snapshot import weights_at

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
        f"{prefix}_{name}": open_one(each, f"{argument}[{name!r}]", "evaluate")
        for name, each in loader.items()
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
    weights: list[Any] | None = None,
) -> dict[str, float]:
    """Exact means over the rows of a pass over each, as `{"val_loss": ..., ...}`.

    Callbacks hear of them as of one. The `limits` are batches of each, and the
    `weights` others than those of the trainer's state.
    """
    run, totals = trainer.run, {}
    with run.logged.into({}) as logged:
        hooks.on_validation_start(trainer)
        done = itertools.count()
        for prefix, source in sources.items():
            limit = limits.get(prefix)
            totals[prefix] = _totals(
                trainer, source, prefix, limit, hooks, done, weights
            )

    metrics, facts = {}, run.engine.facts["evaluate"]
    for prefix, (each, outputs) in totals.items():
        means = means_of(np.asarray(each), facts)  # waits for the device
        if run.pass_metrics:
            add_pass_values(means, run.pass_metrics, outputs.rows(), run.ensemble)
        names_of(sources, means)
        metrics |= {f"{prefix}_{name}": value for name, value in means.items()}
    metrics |= logged
    with run.logged.into(metrics):
        hooks.on_validation_end(trainer, metrics)
    return metrics


def _totals(
    trainer: "Trainer",
    source: Source,
    prefix: str,
    limit: int | None,
    hooks: Hooks,
    done: Iterator[int],
    weights: list[Any] | None,
) -> tuple[Any, Fetching]:
    """The sums over a pass, and what is kept of its rows; `done` counts the batches of
    all passes."""
    run, batch_idx = trainer.run, -1
    totals = run.engine.programs.steps.new_totals()
    with (
        source.a_pass(),
        run.interrupts,
        distributed.together(prefix),
        run.engine.as_settled(),
    ):
        engine = run.engine
        weights = engine.weights() if weights is None else weights
        outputs = engine.fetching("evaluate")
        for batch_idx, batch in enumerate(_pass(trainer, source, prefix, limit)):
            run.engine_for(batch)
            totals = engine.evaluate(weights, batch, totals, batch_idx, outputs)
            hooks.on_validation_batch_end(trainer, next(done))

    if batch_idx < 0:
        raise ValueError(source.gave_nothing())
    return totals, outputs


def validate(trainer: "Trainer", loader: Iterable[Any]) -> dict[str, float]:
    """`Trainer.validate`; callbacks hear of it unless a fit is running."""
    run = trainer.run
    run.renew_hooks(trainer.callbacks)
    hooks = Hooks(()) if run.is_fitting else run.hooks
    return _evaluate(trainer, loader, "validate", "val", hooks)


def test(trainer: "Trainer", loader: Iterable[Any], ckpt_path: Any) -> dict[str, float]:
    """`Trainer.test`, of the trainer's weights or of a checkpoint's."""
    return _evaluate(trainer, loader, "test", "test", Hooks(()), ckpt_path)


def _evaluate(
    trainer: "Trainer",
    loader: Any,
    method: str,
    prefix: str,
    hooks: Hooks,
    ckpt_path: Any = None,
) -> dict[str, float]:
    trainer.run.settled_engine(f"`{method}`")
    with UsersFramesFirst(), contextlib.ExitStack() as stack:
        sources = open_loaders(trainer, loader, "loader", prefix)
        for source in sources.values():
            stack.callback(source.close)
        weights = None
        if ckpt_path is not None:
            found = taken(trainer, ckpt_path, partial(weights_at, trainer))
            assert found is not None  # as it is for "auto" alone
            path, (step, weights) = found
            say(f"`test` uses the weights of step {step}, from {path}")
        return evaluate(trainer, sources, {}, hooks, weights)


def predict(trainer: "Trainer", loader: Iterable[Any], *, gather: bool) -> Any:
    """`Trainer.predict`."""
    run = trainer.run
    if not callable(run.model):
        raise TypeError(
            "`predict` calls the model on each row, and"
            f" {type(run.model).__name__} has no __call__. Give it one; or call a"
            " part of it, as in jax.vmap(trainer.model.generator)(x)."
        )
    run.settled_engine("`predict`")
    with (
        UsersFramesFirst(),
        contextlib.closing(run.open(loader, "loader", "predict")) as source,
        run.interrupts,
        distributed.together("predict"),
        run.engine.as_settled(),
    ):
        given: list[Any] = []

        def inputs() -> Iterator[Any]:
            for batch in _pass(trainer, source, "predict"):
                given[:] = shown(batch) if isinstance(shown(batch), tuple) else ()
                yield inputs_of(batch)

        try:
            found = run.engine.predict(inputs(), gather=gather)
        except Exception as error:
            if any(isinstance(each, Whole) for each in given[1:]):
                error.add_note(
                    "`predict` gave the model the first element of the batch, without"
                    " the jaxdp.Whole beside it. For both: ((x, Whole(array)), y)."
                )
            raise

    if found is None:
        raise ValueError(source.gave_nothing())
    return found


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
    run.hooks.on_pass_start(trainer)
    run.processes.all(f"the start of {doing}", None)
    batches = source.epoch(run.progress.start_of_pass(source))
    for number, batch in enumerate(itertools.islice(batches, limit)):
        run.processes.step(f"batch {number} of {doing}")
        yield batch
        alive()
        run.interrupts.check()
    run.processes.all(f"the end of {doing}", None)
