"""Saves a trainer to a checkpoint, and restores it."""

import inspect
import json
import os
import re
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import equinox as eqx
import jax

from .. import checkpoint
from ..basics.console import join_some, log_info, warn
from ..basics.fingerprints import compute_fingerprints
from ..basics.tracebacks import NoteOnError
from ..basics.tree import leaf_path
from ..callbacks import Callback
from ..callbacks.base import overrides
from ..callbacks.run_metadata import describe_function, describe_optimizer, plain
from ..callbacks.state_matching import (
    describe_unmatched,
    list_identities,
    match_states,
    name_callbacks,
)
from ..step import mark_trained_alone
from .lifecycle import check_between_dispatches

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Run, TrainerConfig

_RECORDED_ARGUMENTS: Final = (
    "seed",
    "loss",
    "loss_fn",
    "precision",
    "after_update",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "ensemble",
)


def start_saving(
    trainer: "Trainer", path: str | os.PathLike[str]
) -> checkpoint.PendingSave:
    """Starts to write the current state, which the next step may then overwrite."""
    run, saving = trainer.run, None
    try:
        with run.interrupts.defer_signals():
            run.renew_hooks(trainer.callbacks, to_train=True)
            check_between_dispatches(run, "`save`")
            held = run.engine.device_state
            state = held.tree
            run.record.flush()
            meta = make_metadata(trainer)
            time_save = partial(run.record.stopwatch.measure, "checkpoints")
            with time_save():
                saving = checkpoint.start_saving(
                    path,
                    state,
                    meta,
                    partial(run.hooks.on_save_checkpoint, trainer),
                    time_save,
                    held.evaluated,
                    _fingerprint_frozen(run, state),
                )
    except BaseException:
        if saving is not None:  # a signal came, and the caller gets no save to wait for
            saving.thread.join()
        raise
    return saving


def _fingerprint_frozen(run: "Run", state: Any) -> dict[str, str]:
    """Returns fingerprints of the weights beside adapters, which checkpoints omit.

    Returns an empty mapping for a model without adapters. Waits for the device.
    """
    config = run.config
    if mark_trained_alone(config.model) is None or config.arguments["after_update"]:
        return {}
    return compute_fingerprints(checkpoint.get_frozen_leaves(state))


def _check_frozen(
    path: str | os.PathLike[str], meta: dict[str, Any], state: Any
) -> None:
    """Raises if the adapters were trained beside other frozen weights."""
    if meta.get("beside_adapters"):
        now = compute_fingerprints(checkpoint.get_frozen_leaves(state))
        checkpoint.check_omitted_leaves(os.fspath(path), meta, now)


def make_metadata(trainer: "Trainer") -> dict[str, Any]:
    """Returns the metadata of a checkpoint, JSON values beside the state."""
    run, config, states = trainer.run, trainer.run.config, dict[str, Any]()
    for name, callback in name_callbacks(trainer.callbacks):
        states[name] = callback.state_dict()
        try:
            json.dumps(states[name])
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"`state_dict` of the callback {name} must return JSON (dicts with"
                " texts as keys, lists, texts, numbers, bools and None), or no"
                f" checkpoint can hold it: {error}. Write array.tolist() for an array."
            ) from error
    return {
        "run_id": run.record.run_id,
        **run.progress.state_dict(run.make_partition("train")),
        "history": trainer.history.state_dict(),
        "callbacks": states,
        "identities": list_identities(trainer),
        "padded_rows": run.loaded_padding
        or [
            run.record.limits and run.record.limits.steps_per_epoch,
            run.engine.padding,
            config.accumulate_grad_batches,
        ],
        "arguments": config.describe(run.hooks.callbacks),
    }


def load_weights_at(
    trainer: "Trainer", path: str | os.PathLike[str]
) -> tuple[int, list[Any]]:
    """Returns the step of a checkpoint, and its evaluated weights, such as an average.

    The trainer does not change. Its optimizer and callbacks may differ from those in
    the checkpoint.
    """
    held = trainer.run.engine.device_state
    with trainer.run.interrupts.defer_signals():
        state, meta = checkpoint.restore(path, held.tree, evaluated=True)
        _check_frozen(path, meta, held.tree)
        return meta["global_step"], jax.tree.leaves(state.weights)


def load(trainer: "Trainer", path: str | os.PathLike[str]) -> None:
    """Restores a checkpoint of `start_saving`; if it fails, the state is unchanged."""
    run = trainer.run
    check_between_dispatches(run, "`load`")
    with run.interrupts.defer_signals():
        state, meta = read_state(run, path)
        # Only callbacks may fail to restore their state, so they come first.
        run.renew_hooks(trainer.callbacks, to_train=True)
        with checkpoint.load_together(run.processes, os.fspath(path)):
            matched = _load_callbacks(trainer, path, meta)

        run.engine.state = state
        run.engine.load_padding({})  # forgets batches after the checkpoint
        run.progress.load_state_dict(meta, run.make_partition("train"))
        trainer.history.load_state_dict(meta["history"])
        run.record.rewind(meta["run_id"], meta["global_step"])
        run.loaded_padding = meta["padded_rows"]
        _log_differences(trainer, path, meta)
        if without := describe_unmatched(trainer, matched):
            warn(
                f"`load`: {path} has no state for the callback {without}, so nothing is"
                " loaded there; that of another `monitor`, `mode` or folder is not."
            )


def read_state(run: "Run", path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """Returns the state in a checkpoint, placed like the trainer's, and the metadata.

    The trainer does not change.
    """
    arguments = run.config.describe(run.hooks.callbacks)
    state, meta = checkpoint.restore(path, run.engine.state, arguments=arguments)
    _check_frozen(path, meta, run.engine.state)
    return run.engine.place(state), meta


def _load_callbacks(
    trainer: "Trainer", path: str | os.PathLike[str], meta: dict[str, Any]
) -> dict[str, Any]:
    """Restores the states of callbacks in a checkpoint, and returns them by name."""
    saved = match_states(trainer, meta)
    for name, callback in name_callbacks(trainer.callbacks):
        if name in saved:
            with NoteOnError(
                f"in `load_state_dict` of the callback {name}, with what the checkpoint"
                f" {os.path.abspath(path)} has of it; the trainer's state is as it was"
            ):
                callback.load_state_dict(saved[name])
    return saved


def _log_differences(
    trainer: "Trainer", path: str | os.PathLike[str], meta: dict[str, Any]
) -> None:
    """Logs differing arguments that can affect numbers, even if only the last bits."""
    config = trainer.run.config
    described = config.describe(trainer.run.hooks.callbacks)
    if changed := checkpoint.list_changed_arguments(meta, described):
        lines = "\n".join(changed)
        if "inject_hyperparams(" in lines:
            lines += (
                "\n  The numbers of `inject_hyperparams` are part of the state, and go"
                " on as they were saved; `trainer.set_hyperparams` sets them."
            )
        log_info(f"{path} was saved with other arguments than this trainer's:\n{lines}")


def describe_arguments(
    config: "TrainerConfig", callbacks: Iterable[Callback]
) -> dict[str, str]:
    """Describes the arguments that affect a run's numbers: a text for each name.

    The texts are for comparison with those of a checkpoint.
    """
    _, buffers, rest = config.model_parts
    texts = {name: _describe(config.arguments[name]) for name in _RECORDED_ARGUMENTS}
    options = {name: str(value) for name, value in config.compiler_options.items()}
    texts["compiler_options"] = str(options or None)
    parts = [
        f"{part.name}, every={part.every}: {describe_optimizer(part.optimizer)}"
        for part in config.optimizer_parts
    ]
    optimizer = config.arguments["optimizer"]
    texts["optimizer"] = "; ".join(parts) or describe_optimizer(optimizer)
    leaves = jax.tree_util.tree_leaves_with_path(buffers)
    frozen = [leaf_path(path) for path, leaf in leaves if eqx.is_inexact_array(leaf)]
    texts["filter_spec"] = f"one that freezes {join_some(frozen) or 'nothing'}"
    adding = [
        repr(callback)
        for callback in callbacks
        if overrides(callback, "wrap_optimizer")
        or overrides(callback, "evaluated_state")
    ]
    texts["callbacks"] = _describe(", ".join(adding)) or "none that adds state"
    adds_none = "one that adds no state"
    texts["strategy"] = repr(config.strategy) if config.adds_state else adds_none
    texts["model"] = _describe(eqx.tree_pformat(rest))
    return {name: text for name, text in texts.items() if text not in ("", "None")}


def _describe(value: Any) -> str:
    """Describes a value without addresses, which differ in every process."""
    text = describe_function(value) if inspect.isfunction(value) else str(plain(value))
    return re.sub(r" at 0x[0-9a-f]+", "", text)
