"""A pass over a loader without training: `validate`, `test`, `predict`."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .. import distributed
from ..callbacks.base import Hooks
from ..data import Source, inputs_of
from ..step import means_of, new_totals

if TYPE_CHECKING:
    from jaxdp import Trainer


def evaluate(
    trainer: "Trainer", source: Source, prefix: str, limit: int | None, hooks: Hooks
) -> dict[str, float]:
    """Exact means over the rows of a pass, as `{"<prefix>_loss": ..., ...}`."""
    run = trainer.run
    with run.logged.into({}) as logged:
        hooks.on_validation_start(trainer)
        totals = _totals(trainer, source, prefix, limit, hooks)

    # Waits for the device.
    means = means_of(np.asarray(totals), run.engine.facts["evaluate"])
    metrics = {f"{prefix}_{name}": value for name, value in means.items()} | logged
    with run.logged.into(metrics):
        hooks.on_validation_end(trainer, metrics)
    return metrics


def _totals(
    trainer: "Trainer", source: Source, prefix: str, limit: int | None, hooks: Hooks
) -> Any:
    """The sums over a pass, on the device."""
    run, totals, batch_idx = trainer.run, new_totals(), -1
    with (
        source.a_pass(),
        run.interrupts,
        distributed.together(prefix),
        run.engine.as_settled(),
    ):
        engine = run.engine
        weights = engine.weights()
        for batch_idx, batch in enumerate(_pass(trainer, source, prefix, limit)):
            run.engine_for(batch)
            totals = engine.evaluate(weights, batch, totals, batch_idx)
            hooks.on_validation_batch_end(trainer, batch_idx)

    if batch_idx < 0:
        raise ValueError(source.gave_nothing())
    return totals


def validate(trainer: "Trainer", loader: Iterable[Any]) -> dict[str, float]:
    """`Trainer.validate`; callbacks hear of it unless a fit is running."""
    run = trainer.run
    run.renew_hooks(trainer.callbacks)
    hooks = Hooks(()) if run.is_fitting else run.hooks
    run.settled_engine("`validate`")
    with contextlib.closing(run.open(loader, "loader", "evaluate")) as source:
        return evaluate(trainer, source, "val", None, hooks)


def test(trainer: "Trainer", loader: Iterable[Any]) -> dict[str, float]:
    """`Trainer.test`."""
    trainer.run.settled_engine("`test`")
    with contextlib.closing(trainer.run.open(loader, "loader", "evaluate")) as source:
        return evaluate(trainer, source, "test", None, Hooks(()))


def predict(trainer: "Trainer", loader: Iterable[Any], *, gather: bool) -> Any:
    """`Trainer.predict`."""
    run = trainer.run
    run.settled_engine("`predict`")
    with (
        contextlib.closing(run.open(loader, "loader", "predict")) as source,
        run.interrupts,
        distributed.together("predict"),
        run.engine.as_settled(),
    ):
        inputs = (inputs_of(batch) for batch in _pass(trainer, source, "predict"))
        done: list[Any] = []
        for each in run.engine.predict(inputs, gather=gather):
            _check_rows(done[0] if done else each, each, len(done))
            done.append(each)

    if not done:
        raise ValueError(source.gave_nothing())
    return jax.tree.map(lambda *parts: np.concatenate(parts), *done)


def _check_rows(first: Any, found: Any, number: int) -> None:
    """Raises unless the predictions of a batch can be joined to those of the first."""
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(found), strict=True):
        if one.shape[1:] != other.shape[1:]:
            raise ValueError(
                f"`predict`: the prediction for a row is {one.shape[1:]} in batch 0 and"
                f" {other.shape[1:]} in batch {number}, and no array can hold both."
                " Predict batches of one shape at a time, or have the model return one"
                " shape for all."
            )


def compile_ahead(trainer: "Trainer", source: Source | None) -> None:
    """Compiles for validation now, so that what is wrong shows before an epoch."""
    sample = None if source is None else source.sample()
    if sample is not None:
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
        run.interrupts.check()
    run.processes.all(f"the end of {doing}", None)
