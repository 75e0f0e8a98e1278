"""Which checkpoint is meant by `fit(..., ckpt_path=...)`, and by that of `test`."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .. import checkpoint
from ..basics.arguments import check_is_local
from ..basics.console import log_info, warn
from ..basics.files import expand_path
from ..callbacks import ModelCheckpoint
from ..callbacks.state_matching import find_name, match_state
from ..checkpoint import CheckpointCorrupt

if TYPE_CHECKING:
    from jaxdp import Trainer

WORDS: Final = ("last", "best", "auto")


def resume(trainer: "Trainer", where: str | os.PathLike[str]) -> None:
    """Loads the checkpoint that `where` means into `trainer`, or raises as `taken`.

    It may be `"auto"`, too: the last one if there is any.
    """
    resumed = taken(trainer, where, trainer.load, WORDS)
    if resumed is None:
        return
    path, _ = resumed
    step, epoch = trainer.global_step, trainer.current_epoch
    if where in WORDS and os.path.basename(path) != str(step):
        warn(
            f"`ckpt_path`={where!r}: {path} is the checkpoint of step {step}, under"
            " another name."
        )
    log_info(f"resumed step {step} (epoch {epoch}) from {path}")


def taken(
    trainer: "Trainer",
    where: Any,
    take: Callable[[str], Any],
    words: tuple[str, ...] = ("last", "best"),
) -> tuple[str, Any] | None:
    """What `take` makes of the checkpoint that `where` means, and its path.

    Args:
        where: a checkpoint's folder, or a word for some of those that the
            `ModelCheckpoint` callbacks of the trainer have saved: `"last"`, or
            `"best"` by the first that has a `monitor`. Damaged ones are passed over,
            with a warning.
        words: those that may be used.

    Raises:
        FileNotFoundError: if there is none (but for `"auto"`, which gives None).
        CheckpointCorrupt: if there are some, and none is whole.
        ValueError: for a word that asks for what there can't be; or if a checkpoint
            is of another model or optimizer.
    """
    if isinstance(where, bool) or not isinstance(where, str | os.PathLike):
        raise TypeError(
            f"`ckpt_path` must be the path of a checkpoint or one of {words}; got"
            f" {where!r}."
        )
    if where not in words or not isinstance(where, str):
        check_is_local("ckpt_path", where)
        path = expand_path(where)
        if not os.path.lexists(path):
            raise FileNotFoundError(
                f"`ckpt_path`={os.fspath(where)!r} is none of {words}, and there is"
                f" nothing at {path}."
            )
        return path, take(path)

    # A word: what the callbacks have saved.
    savers = savers_of(trainer)
    if not savers:
        raise ValueError(
            f"`ckpt_path`={where!r} looks where the ModelCheckpoint callback saves, and"
            " this trainer has none; add one, or pass the path of a checkpoint."
        )
    if where == "best":
        savers = [saver for saver in savers if saver.monitor is not None][:1]
        if not savers:
            raise ValueError(
                "`ckpt_path`='best' needs a ModelCheckpoint with a `monitor` to judge"
                " by; use 'last', or ModelCheckpoint(monitor='val_loss')."
            )

    # One process looks, and all try the same ones.
    paths, faults = trainer.run.processes.run_on_rank_zero(
        "which checkpoint is meant",
        lambda: _paths(trainer, where, savers),
        CheckpointCorrupt,
    )
    if not paths and not faults:
        return None
    return _first_whole(where, take, paths, faults)


def how_to_go_on(trainer: "Trainer") -> str:
    """What to say of a fit that Ctrl-C has stopped, between two steps."""
    step = trainer.global_step
    text = f"stopped after step {step}"
    paths = [saver.last_model_path for saver in savers_of(trainer)]
    saved = [path for path in paths if os.path.basename(path) == str(step)]
    if saved:
        return (
            f"{text}, and saved in {saved[0]}: `fit(..., ckpt_path='last')` resumes it"
        )
    return (
        f"{text}, and not saved, which a `ModelCheckpoint` would have done; while this"
        " process lives, `fit` resumes it and `trainer.save(path)` saves it"
    )


def savers_of(trainer: "Trainer") -> list[ModelCheckpoint]:
    """The callbacks of a trainer that save checkpoints."""
    return [made for made in trainer.callbacks if isinstance(made, ModelCheckpoint)]


def _paths(
    trainer: "Trainer", where: str, savers: list[ModelCheckpoint]
) -> list[list[str]]:
    """The checkpoints that a word means, those to be tried first coming first.

    And what stands among them that is no checkpoint.
    """
    folders = [saver.find_folder(trainer) for saver in savers]

    # Of equal steps first the last saver's: it knows of those before it.
    steps = sorted(
        ((step, folder) for folder in reversed(folders) for step in folder.steps()),
        key=lambda pair: -pair[0],
    )

    looked = " and ".join(folder.path for folder in folders)
    faults = [
        f"{folder.path_of(step)} is a symbolic link or a file, but a checkpoint is"
        " a folder."
        for folder in folders
        for step in folder.impostors()
    ]

    if not steps and not faults:
        if where == "auto":
            log_info(f"nothing to resume in {looked}: starting afresh")
            return [[], []]
        raise FileNotFoundError(
            f"`ckpt_path`={where!r}: there are no checkpoints in {looked}. Use 'auto'"
            " to start afresh then."
        )

    if where == "best":
        steps = _best_first(trainer, savers[0], steps)
    for fault in faults:
        warn(f"`ckpt_path`={where!r}: {fault} Skipped.")
    return [[folder.path_of(step) for step, folder in steps], faults]


def _first_whole(
    where: str, take: Callable[[str], Any], paths: list[str], faults: list[str]
) -> tuple[str, Any]:
    for path in paths:
        try:
            return path, take(path)
        except (CheckpointCorrupt, FileNotFoundError) as error:
            text = str(error).removeprefix("`path`: ")
            faults.append(text)
            warn(f"`ckpt_path`={where!r}: {text} Skipped.")
    raise CheckpointCorrupt(
        f"`ckpt_path`={where!r}: there are checkpoints, and none is whole:\n  "
        + "\n  ".join(faults)
        + "\nNothing was changed. Restore them from a copy; or move them away, to start"
        " over with 'auto'."
    )


def _best_first(
    trainer: "Trainer", saver: ModelCheckpoint, found: list[Any]
) -> list[Any]:
    """Steps with a score: by the link to the best, then as the newest whole one says.

    The newest may have been measured after it was saved.
    """
    who, ranked = f"the callback {find_name(trainer, saver)}", None
    for step, folder in found:
        path = folder.path_of(step)
        try:
            state = match_state(trainer, checkpoint.read_meta(path), saver)
            if state is None:
                raise ValueError(
                    f"`ckpt_path`='best': the checkpoint has no state of {who}, so it"
                    " is not known which is best; use 'last' or a path."
                )
            ranked = saver.rank_saved(state)
            break
        except (CheckpointCorrupt, FileNotFoundError) as error:
            warn(f"`ckpt_path`='best': {error} Skipped.")
    if ranked is None:
        return found
    there = dict(found)
    linked = saver.find_folder(trainer).linked("best")
    ranked = [linked, *(step for step in ranked if step != linked)]
    best_first = [(step, there[step]) for step in ranked if step in there]
    if not best_first:
        raise ValueError(
            f"`ckpt_path`='best': of no checkpoint in"
            f" {saver.find_folder(trainer).path} was {saver.monitor!r} measured; use"
            " 'last' or a path."
        )
    return best_first
