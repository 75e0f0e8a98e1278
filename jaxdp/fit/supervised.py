"""What a fit does for `python -m jaxdp run`: signs of life, and snapshots."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..basics.console import say
from ..callbacks.base import Callback
from ..callbacks.model_checkpoint import savers_of
from ..checkpoint import Snapshots
from ..supervisor import Channel, find_snapshots, make_snapshots, remove_snapshots
from .snapshot import all_but_arrays

if TYPE_CHECKING:
    from jaxdp import Trainer


class Supervised(Callback):
    """Tells a supervisor how far the fit is, and takes snapshots as it asks."""

    skip_in_fast_dev_run = True
    looks_inside_blocks = False
    only_in_training = True
    fit_end_order = 3

    def __init__(self, line: Channel):
        self._line = line
        # A fault may come while one is being written. With two to an interval, each
        # whole before the next begins, no more than an interval is then repeated.
        self._every = line.every and max(1, line.every // 2)
        self._snapshots: Snapshots | None = None
        self._checkpoints = ""
        self._last = -1

    def setup(self, trainer: "Trainer") -> None:
        self._line.beat(is_slow=True)
        self._snapshots, self._last = None, trainer.global_step
        savers = savers_of(trainer)
        if not savers:
            return
        checkpoints = self._checkpoints = savers[0].folder(trainer).path
        path = find_snapshots(self._line.snapshots, checkpoints)
        if path is not None or self._line.every is not None:
            try:
                make = make_snapshots
                path = make(self._line.snapshots, checkpoints, self._line.session)
            except OSError as error:
                say(f"no snapshots are taken: {error}")
                return
            self._snapshots = Snapshots(path)
            self._snapshots.forget_after(trainer.global_step)

    def next_stop(self, trainer: "Trainer") -> int | None:
        every = self._every
        return every and (trainer.global_step // every + 1) * every

    def on_train_batch_end(
        self, trainer: "Trainer", metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        self._line.beat(trainer.global_step, is_slow=False)

    def on_boundary(self, trainer: "Trainer") -> None:
        self._line.beat()
        step, every = trainer.global_step, self._every
        if every is None or self._snapshots is None or self._last == step:
            return
        if step % every == 0:
            self._last = step
            state = trainer.run.settled_engine("a snapshot").state
            self._snapshots.start(step, state, lambda: all_but_arrays(trainer))
            trainer.run.kept_programs.keep_in(self._checkpoints)
            if self._line.every == 1:
                self._snapshots.finish()

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._line.beat(is_slow=True)
        if (snapshots := self._snapshots) is None:
            return
        snapshots.finish()
        saved = [s for each in savers_of(trainer) for s in each.folder(trainer).steps()]
        if max(saved, default=-1) >= max(snapshots.steps(), default=0):
            remove_snapshots(snapshots.path)
        self._snapshots = None
