"""What a checkpoint keeps of a trainer, and how it is taken up."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from .. import checkpoint
from ..basics.console import say, warn
from ..callbacks.states import identities, misfits, named, saved_states
from ..checkpoint import undone_if_it_fails
from .checks import check_json
from .resume import taking_up

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Run


def start_saving(trainer: "Trainer", path: str | os.PathLike[str]) -> checkpoint.Saving:
    """Begins to write the state of now, which the next step may overwrite."""
    run = trainer.run

    def saved(path: str) -> None:
        run.hooks.on_save_checkpoint(trainer, path)

    with run.interrupts.uninterrupted():
        run.take_over(trainer.callbacks)
        held = run.settled_engine("`save`").held
        state = held.state
        meta = all_but_arrays(trainer)
        with _waiting(run):
            return checkpoint.start_saving(
                path, state, meta, saved, lambda: _waiting(run), held.evaluated
            )


def all_but_arrays(trainer: "Trainer") -> dict[str, Any]:
    """What a checkpoint has beside the state: JSON values."""
    run = trainer.run
    return {
        "run_id": run.id,
        **run.progress.state_dict(run.share("train")),
        "seed": run.seed,
        "history": trainer.history.state_dict(),
        "callbacks": {
            name: check_json(name, callback.state_dict())
            for name, callback in named(trainer.callbacks)
        },
        "identities": identities(trainer),
        "padded_rows": run.padded_rows
        or [
            run.steps_per_epoch,
            run.engine.padding,
            run.accumulate_grad_batches,
        ],
        "arguments": run.description,
        "strategy": repr(run.strategy),
        "compiler_options": {k: str(v) for k, v in run.compiler_options.items()},
        "devices": len(run.engine.state.step.sharding.device_set),
    }


@contextlib.contextmanager
def _waiting(run: "Run") -> Iterator[None]:
    """Where a fit waits for a disk."""
    with run.stopwatch.phase("checkpoints"):
        yield


def weights_at(
    trainer: "Trainer", path: str | os.PathLike[str]
) -> tuple[int, list[Any]]:
    """The step of a checkpoint, and the weights that were evaluated, an average say.

    The trainer's own state stays, and all else of the trainer. Its optimizer and
    callbacks may be others.
    """
    held = trainer.run.engine.held
    with trainer.run.interrupts.uninterrupted():
        state, meta = checkpoint.restore(path, lambda _: held.state, evaluated=True)
        return meta["global_step"], jax.tree.leaves(state.weights)


def load(trainer: "Trainer", path: str | os.PathLike[str]) -> None:
    """Takes up what `start_saving` has written: all of it, or if it fails nothing."""
    run = trainer.run
    run.check_is_settled("`load`")
    with run.interrupts.uninterrupted():
        with undone_if_it_fails(run.progress, trainer.history, *trainer.callbacks):
            run.take_over(trainer.callbacks)
            strategy = run.engine.strategy
            state, meta = checkpoint.restore(
                path,
                lambda shapes: strategy.as_saved(run.engine.state, shapes),
                lambda meta: _take_up(trainer, path, meta),
                arguments=run.description,
            )
            state = strategy.place(state)

        run.engine.state = state
        run.engine.pad_as({})  # larger batches since then are none of that run's
        run.id = meta["run_id"]
        run.padded_rows = meta["padded_rows"]
        run.epoch_is_over = False


def _take_up(
    trainer: "Trainer", path: str | os.PathLike[str], meta: dict[str, Any]
) -> None:
    """The counters, history and callbacks of a checkpoint."""
    run = trainer.run
    take_up: Callable[..., None] = run.progress.load_state_dict
    with taking_up(path, "the loaders' positions", take_up):
        run.progress.check(meta)
        take_up(meta, run.share("train"))
    trainer.history.load_state_dict(meta["history"])

    if meta["seed"] != run.seed:
        warn(
            f"`load`: {path} was saved with `seed`={meta['seed']}, and this trainer"
            f" has `seed`={run.seed}, which decides the order of data."
        )

    # What decides the numbers, or their last bits.
    if changed := checkpoint.changed_arguments(meta, run.description):
        lines = "\n".join(changed)
        say(f"{path} was saved with other arguments than this trainer's:\n{lines}")
    options = {name: str(value) for name, value in run.compiler_options.items()}
    if meta.get("compiler_options", {}) != options:
        say(
            f"{path} was saved with `compiler_options`="
            f"{meta.get('compiler_options', {})}, and this trainer has {options}: last"
            " bits may differ"
        )

    saved = saved_states(trainer, meta)
    for name, callback in named(trainer.callbacks):
        if name in saved:
            take_up = callback.load_state_dict
            with taking_up(path, f"the callback {name}", take_up):
                take_up(saved[name])
    text, run.left_behind = misfits(trainer, meta)
    if text:
        warn(f"`load`: {path} has {text}.")
