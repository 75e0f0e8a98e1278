"""Chooses the signals that end a fit."""

import signal
from collections.abc import Sequence
from typing import Literal

from ..basics.arguments import checks_arguments
from ..distributed import SIGNALS
from .base import Callback, Trainer


class Preemption(Callback):
    """Chooses which signals end a fit at the next boundary, and what happens then.

    Without this callback, these are SIGTERM (which SLURM, Kubernetes and spot machines
    send before they take the machine away) and SIGHUP (the terminal was closed, unless
    under `nohup`): the step finishes, `ModelCheckpoint` saves, and the process exits
    with code 143. A second signal ends the process at once; the last checkpoint stays
    intact.

    Args:
        signals: names of signals, such as `("SIGTERM", "SIGUSR1")` for
            `sbatch --signal=USR1@120`. With `"SIGINT"` Ctrl-C is one of them, and no
            KeyboardInterrupt.
        action: `"exit"` with code 143, or `"return"` from `fit` with the history so
            far.

    Attributes:
        received: the name of the signal that ended the last fit, or None. A signal
            that comes during the last save of a complete fit leaves it None.
    """

    @checks_arguments
    def __init__(
        self,
        signals: str | Sequence[str] = SIGNALS,
        action: Literal["exit", "return"] = "exit",
    ):
        signals = (signals,) if isinstance(signals, str) else tuple(signals)
        for name in signals:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise ValueError(
                    f"`signals`: {name!r} is not the name of a signal that a process"
                    " can answer, such as 'SIGTERM'."
                )
        self.signals = signals
        self.action = action
        self.received: str | None = None

    def setup(self, trainer: Trainer) -> None:
        self.received = None
        trainer.run.stop_on(*self.signals, returns=self.action == "return")

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self.received = getattr(exception, "signal", None)
