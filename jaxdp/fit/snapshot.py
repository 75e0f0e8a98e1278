"""What a checkpoint keeps of a trainer, and how it is taken up."""

import contextlib
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import equinox as eqx
import jax

from .. import checkpoint
from ..basics.console import join_some, log_info, warn
from ..basics.fingerprints import compute_fingerprints
from ..basics.tree import leaf_path
from ..callbacks import Callback
from ..callbacks.base import overrides
from ..callbacks.run_metadata import describe_function, describe_optimizer, plain
from ..callbacks.state_matching import (
    find_unmatched,
    list_identities,
    match_states,
    name_callbacks,
)
from ..step import trained_alone
from ..strategies.base import adds_state

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Recipe, Run

_AS_THEY_ARE: Final = (
    "seed",
    "loss",
    "loss_fn",
    "precision",
    "after_update",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "ensemble",
)


class Loaded(NamedTuple):
    """What a checkpoint tells the fit that goes on from it."""

    padded_rows: Any
    """How batches were padded: the steps of an epoch, sizes, batches of a step."""
    left_behind: str
    """The callbacks that it has, but the trainer has not."""


def start_saving(trainer: "Trainer", path: str | os.PathLike[str]) -> checkpoint.Saving:
    """Begins to write the state of now, which the next step may overwrite."""
    run = trainer.run

    def saved(path: str) -> None:
        run.hooks.on_save_checkpoint(trainer, path)

    with run.interrupts.defer_signals():
        run.renew_hooks(trainer.callbacks, to_train=True)
        run.check_is_settled("`save`")
        held = run.checked_engine().held
        state = held.tree
        run.record.flush()
        meta = all_but_arrays(trainer)
        with _waiting(run):
            return checkpoint.start_saving(
                path,
                state,
                meta,
                saved,
                lambda: _waiting(run),
                held.evaluated,
                _beside_adapters(run, state),
            )


def _beside_adapters(run: "Run", state: Any) -> dict[str, str]:
    """Fingerprints of the weights that stay as they are, so that no checkpoint need
    have them. Waits for the device."""
    recipe = run.recipe
    if trained_alone(recipe.model) is None or recipe.arguments["after_update"]:
        return {}
    return compute_fingerprints(checkpoint.frozen_leaves(state))


def _check_left_out(
    path: str | os.PathLike[str], meta: dict[str, Any], state: Any
) -> None:
    """Raises where adapters were trained beside other weights than these."""
    if meta.get("beside_adapters"):
        now = compute_fingerprints(checkpoint.frozen_leaves(state))
        checkpoint.check_left_out(os.fspath(path), meta, now)


def all_but_arrays(trainer: "Trainer") -> dict[str, Any]:
    """What a checkpoint has beside the state: JSON values."""
    run, recipe = trainer.run, trainer.run.recipe
    return {
        "run_id": run.record.run_id,
        **run.progress.state_dict(run.share("train")),
        "history": trainer.history.state_dict(),
        "callbacks": {
            name: _check_json(name, callback.state_dict())
            for name, callback in name_callbacks(trainer.callbacks)
        },
        "identities": list_identities(trainer),
        "padded_rows": (run.loaded and run.loaded.padded_rows)
        or [
            run.record.limits and run.record.limits.steps_per_epoch,
            run.engine.padding,
            recipe.accumulate_grad_batches,
        ],
        "arguments": recipe.description(run.hooks.callbacks),
    }


@contextlib.contextmanager
def _waiting(run: "Run") -> Iterator[None]:
    """Where a fit waits for a disk."""
    with run.record.stopwatch.measure("checkpoints"):
        yield


def weights_at(
    trainer: "Trainer", path: str | os.PathLike[str]
) -> tuple[int, list[Any]]:
    """The step of a checkpoint, and the weights that were evaluated, an average say.

    The trainer's own state stays, and all else of the trainer. Its optimizer and
    callbacks may be others.
    """
    held = trainer.run.engine.held
    with trainer.run.interrupts.defer_signals():
        state, meta = checkpoint.restore(path, lambda _: held.tree, evaluated=True)
        _check_left_out(path, meta, held.tree)
        return meta["global_step"], jax.tree.leaves(state.weights)


def load(trainer: "Trainer", path: str | os.PathLike[str]) -> None:
    """Takes up what `start_saving` has written; if that fails, the state stays."""
    run = trainer.run
    run.check_is_settled("`load`")
    with run.interrupts.defer_signals():
        state, meta = read_placed(run, path)
        # Users' callbacks alone may fail to take something up: they are first.
        run.renew_hooks(trainer.callbacks, to_train=True)
        with checkpoint.all_or_none(run.processes, os.fspath(path)):
            _load_callbacks(trainer, path, meta)
        without, left_behind = find_unmatched(trainer, meta)

        run.engine.state = state
        run.engine.pad_as({})  # larger batches since then are none of that run's
        run.progress.load_state_dict(meta, run.share("train"))
        trainer.history.load_state_dict(meta["history"])
        run.record.rewind(meta["run_id"], meta["global_step"])
        run.loaded = Loaded(meta["padded_rows"], left_behind)
        _tell_differences(trainer, path, meta)
        if without:
            warn(
                f"`load`: {path} has no state for the callback {without}, so nothing is"
                " loaded there; that of another `monitor`, `mode` or folder is not."
            )


def read_placed(run: "Run", path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """The state in a checkpoint, laid out as the trainer's, and its metadata.

    The trainer's own state stays.
    """

    arguments = run.recipe.description(run.hooks.callbacks)
    state, meta = checkpoint.restore(
        path, lambda _: run.engine.state, arguments=arguments
    )
    _check_left_out(path, meta, run.engine.state)
    return run.engine.place(state), meta


def _load_callbacks(
    trainer: "Trainer", path: str | os.PathLike[str], meta: dict[str, Any]
) -> None:
    saved = match_states(trainer, meta)
    for name, callback in name_callbacks(trainer.callbacks):
        if name not in saved:
            continue
        try:
            callback.load_state_dict(saved[name])
        except Exception as error:
            error.add_note(
                f"while the callback {name} took up what the checkpoint"
                f" {os.path.abspath(path)} has of it; the state is as it was"
            )
            raise


def _tell_differences(
    trainer: "Trainer", path: str | os.PathLike[str], meta: dict[str, Any]
) -> None:
    """Says what decides the numbers, or their last bits, and is another one now."""
    recipe = trainer.run.recipe
    described = recipe.description(trainer.run.hooks.callbacks)
    if changed := checkpoint.changed_arguments(meta, described):
        lines = "\n".join(changed)
        if "inject_hyperparams(" in lines:
            lines += (
                "\n  The numbers of `inject_hyperparams` are part of the state, and go"
                " on as they were saved; `trainer.set_hyperparams` sets them."
            )
        log_info(f"{path} was saved with other arguments than this trainer's:\n{lines}")


def _check_json(callback_name: str, state: Any) -> Any:
    """Returns what a callback's `state_dict` gave, if a checkpoint can keep it."""
    try:
        json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"`state_dict` of the callback {callback_name} returned what is not"
            f" JSON: {error}. Use dicts, lists, strings, numbers, bools and None."
        ) from error
    return state


def described(recipe: "Recipe", callbacks: Iterable[Callback]) -> dict[str, str]:
    """Returns the texts of the arguments that decide numbers, by name, for comparison
    with those of another process."""
    _, buffers, rest = recipe.parts
    texts = {name: _text(recipe.arguments[name]) for name in _AS_THEY_ARE}
    options = {name: str(value) for name, value in recipe.compiler_options.items()}
    texts["compiler_options"] = str(options or None)
    texts["optimizer"] = _optimizer(recipe)
    texts["filter_spec"] = _frozen(buffers)
    parts = map(_text_of, filter(_is_part, callbacks))
    texts["callbacks"] = ", ".join(parts) or "none that adds state"
    adds = adds_state(recipe.strategy)
    texts["strategy"] = repr(recipe.strategy) if adds else "one that adds no state"
    texts["model"] = _text(eqx.tree_pformat(rest))
    return {name: text for name, text in texts.items() if text not in ("", "None")}


def _optimizer(recipe: "Recipe") -> str:
    parts = recipe.several or ()
    if not parts:
        return describe_optimizer(recipe.arguments["optimizer"])
    return "; ".join(
        f"{p.name}, every={p.every}: {describe_optimizer(p.optimizer)}" for p in parts
    )


def _frozen(buffers: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(buffers)
    names = [leaf_path(path) for path, leaf in leaves if eqx.is_inexact_array(leaf)]
    return (
        f"one that freezes {join_some(names)}" if names else "one that freezes nothing"
    )


def _is_part(callback: Callback) -> bool:
    return any(overrides(callback, n) for n in ("wrap_optimizer", "evaluated_state"))


def _text_of(callback: Callback) -> str:
    public = {n: v for n, v in vars(callback).items() if not n.startswith("_")}
    simple = (int, float, str, type(None))
    shown = [f"{name}={v!r}" for name, v in public.items() if isinstance(v, simple)]
    return f"{type(callback).__name__}({', '.join(shown)})"


def _text(value: Any) -> str:
    """Without addresses, which differ in every process."""
    text = describe_function(value) if inspect.isfunction(value) else str(plain(value))
    return re.sub(r" at 0x[0-9a-f]+", "", text)
