"""Finds and loads the checkpoint that `ckpt_path` of `fit`, `test`, ... names."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .. import checkpoint
from ..basics.arguments import check_is_local
from ..basics.console import log_info, warn
from ..basics.files import expand_path
from ..basics.tracebacks import NoteOnError
from ..callbacks import ModelCheckpoint
from ..callbacks.state_matching import match_state
from ..checkpoint import CheckpointCorrupt

if TYPE_CHECKING:
    from jaxdp import Trainer

CHECKPOINT_NAMES: Final = ("last", "best", "auto")


def resume(trainer: "Trainer", where: str | os.PathLike[str]) -> None:
    """Loads the checkpoint that `where` names; "auto" names the last one, if any
    exists.

    Raises the errors of `load_by_name`.
    """
    loaded = load_by_name(trainer, where, trainer.load, CHECKPOINT_NAMES)
    if loaded is None:
        return
    path, _ = loaded
    step, epoch = trainer.global_step, trainer.current_epoch
    if where in CHECKPOINT_NAMES and os.path.basename(path) != str(step):
        warn(f"`ckpt_path`={where!r}: {path} has step {step}, and not that of its name")
    log_info(f"resumed step {step} (epoch {epoch}) from {path}")


def load_by_name(
    trainer: "Trainer",
    where: Any,
    load: Callable[[str], Any],
    words: tuple[str, ...] = ("last", "best"),
) -> tuple[str, Any] | None:
    """Returns the path of the checkpoint that `where` names, and the result of `load`.

    Args:
        where: the folder of a checkpoint, or a word. `"last"` names the newest
            checkpoint that a `ModelCheckpoint` of the trainer saved. `"best"` names the
            best one of the first `ModelCheckpoint` with a `monitor`. Damaged
            checkpoints are skipped with a warning.
        load: called with one path after another, until a call does not raise.
        words: the allowed words.

    Raises:
        FileNotFoundError: if there is no checkpoint (for "auto", None is returned).
        CheckpointCorrupt: if there are checkpoints, and all of them are damaged.
        ValueError: for a word without a callback that saves such checkpoints; or if a
            checkpoint is of another model or optimizer.
    """
    if where not in words:
        check_is_local("ckpt_path", where)
        path = expand_path(where)
        if not os.path.lexists(path):
            raise FileNotFoundError(
                f"`ckpt_path`={os.fspath(where)!r} is none of {words}, and there is"
                f" nothing at {path}."
            )
        with NoteOnError(f"`path` is the argument `ckpt_path`={os.fspath(where)!r}"):
            return path, load(path)

    # A word names one of the checkpoints that the callbacks have saved.
    savers, kind = find_savers(trainer), "a ModelCheckpoint"
    if where == "best":
        kind = "a ModelCheckpoint with a `monitor`"
        savers = [saver for saver in savers if saver.monitor is not None][:1]
    if not savers:
        raise ValueError(
            f"`ckpt_path`={where!r} looks where {kind} saves, and this trainer has"
            " none; add one, or pass the path of a checkpoint."
        )

    # One process looks for checkpoints, so that all processes try the same ones.
    paths = trainer.run.processes.run_on_rank_zero(
        "which checkpoint is meant", lambda: _find_paths(trainer, str(where), savers)
    )
    faults: list[str] = []
    for path in paths:
        try:
            if os.path.islink(path) or os.path.isfile(path):
                raise CheckpointCorrupt(
                    f"{path} is a symbolic link or a file, but a checkpoint is a"
                    " folder."
                )
            return path, load(path)
        except (CheckpointCorrupt, FileNotFoundError) as error:
            faults.append(str(error).removeprefix("`path`: "))
            warn(f"`ckpt_path`={where!r}: {faults[-1]} Skipped.")
    if not paths:
        return None  # of "auto"
    raise CheckpointCorrupt(
        f"`ckpt_path`={where!r}: there are checkpoints, and none is whole:\n  "
        + "\n  ".join(faults)
        + "\nNothing was changed. Restore them from a copy; or move them away, to start"
        " over with 'auto'."
    )


def format_resume_hint(trainer: "Trainer") -> str:
    """Returns how to resume a fit that Ctrl-C has stopped between two steps."""
    step = trainer.global_step
    paths = [saver.last_model_path for saver in find_savers(trainer)]
    saved = [path for path in paths if os.path.basename(path) == str(step)]
    if saved:
        return (
            f"stopped after step {step}, and saved in {saved[0]}: `fit(...,"
            " ckpt_path='last')` resumes it"
        )
    return (
        f"stopped after step {step}, and not saved, which a `ModelCheckpoint` would"
        " have done: in this process `fit` resumes it, and `trainer.save(path)` saves"
        " it"
    )


def find_savers(trainer: "Trainer") -> list[ModelCheckpoint]:
    """Returns the callbacks of a trainer that save checkpoints."""
    return [
        callback
        for callback in trainer.callbacks
        if isinstance(callback, ModelCheckpoint)
    ]


def _find_paths(
    trainer: "Trainer", where: str, savers: list[ModelCheckpoint]
) -> list[str]:
    """Returns the checkpoints that a word names, in the order to try them.

    Links and files are among them: a run whose folder has nothing else does not start
    over.
    """
    folders = [saver.find_folder(trainer) for saver in savers]

    # If savers have the same step, the last saver's checkpoint comes first: it was
    # saved last.
    steps = [
        (step, folder)
        for folder in reversed(folders)
        for step in (*folder.list_steps(), *folder.find_non_folders())
    ]
    steps.sort(key=lambda pair: -pair[0])
    if not steps:
        looked = " and ".join(folder.path for folder in folders)
        if where == "auto":
            log_info(f"nothing to resume in {looked}: starting afresh")
            return []
        raise FileNotFoundError(
            f"`ckpt_path`={where!r}: there are no checkpoints in {looked}. Use 'auto'"
            " to start afresh then."
        )
    if where == "best":
        return _sort_best_first(trainer, savers[0], [step for step, _ in steps])
    return [folder.get_path(step) for step, folder in steps]


def _sort_best_first(
    trainer: "Trainer", saver: ModelCheckpoint, steps: list[int]
) -> list[str]:
    """Returns the paths of the steps that have a score, best first.

    The link `best` comes first, because the newest checkpoint may have been measured
    after it was saved. The order of the others comes from the newest valid checkpoint.
    """
    folder = saver.find_folder(trainer)
    for step in steps:
        try:
            meta = checkpoint.read_meta(folder.get_path(step))
        except (CheckpointCorrupt, FileNotFoundError) as error:
            warn(f"`ckpt_path`='best': {error} Skipped.")
            continue
        ranked = []
        # No state: the checkpoints are of another `monitor`, and so is the link.
        if state := match_state(trainer, meta, saver):
            ranked = [folder.read_link("best"), *saver.rank_saved(state)]
        best_first = [step for step in dict.fromkeys(ranked) if step in steps]
        if not best_first:
            raise ValueError(
                f"`ckpt_path`='best': of no checkpoint in {folder.path} was"
                f" {saver.monitor!r} measured; use 'last' or a path."
            )
        return list(map(folder.get_path, best_first))
    return list(map(folder.get_path, steps))  # all are damaged, as their errors say
