"""A run and what goes on from each of its checkpoints, which must end as it did."""

import pathlib

import jax
import numpy as np
from toys import Recorder

from jaxdp import Callback


class Saves(Callback):
    """Saves at some boundaries of a fit: what a kill right after it would leave."""

    def __init__(self, folder, which=None):
        self.folder, self.which = pathlib.Path(folder), which
        self.paths, self.calls = {}, 0

    def on_boundary(self, trainer):
        self.calls += 1
        if self.which is None or self.calls in self.which:
            path = trainer.save(self.folder / str(self.calls))
            self.paths[path] = trainer.global_step


def outcome(trainer):
    """All that must be the same in the end."""
    return {
        "state": [
            np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.state)
        ],
        "history": trainer.history.state_dict(),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "examples": trainer.run.progress.examples,
        "callbacks": [
            (type(callback), callback.state_dict())
            for callback in trainer.callbacks
            if not hasattr(callback, "dirpath")
        ],
    }


def check_twins(folder, make_trainer, fit, which=None, after=None):
    """Resumes from every boundary of a run, and compares with the run.

    Args:
        folder: to save in.
        make_trainer: from a list of callbacks, which it must have last, a trainer.
        fit: runs a trainer, given further arguments of `fit`; what it returns is passed
            to `after`.
        which: the boundaries to resume from, counted from 1; all by default.
    """
    saves, whole = Saves(folder, which), Recorder()
    expected = make_trainer([whole, saves])
    fit(expected)
    assert saves.paths
    for path, step in saves.paths.items():
        rest = Recorder()
        again = make_trainer([rest, Saves(folder, ())])
        result = fit(again, ckpt_path=path)
        assert whole.losses[step:] == rest.losses, path
        found, wanted = outcome(again), outcome(expected)
        for key in wanted:
            assert found[key] == wanted[key], (path, key)
        if after is not None:
            after(result, step)
