"""A run of which nobody reads what it says; `python unheard.py <folder> <steps>`."""

import os
import sys
import time
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"

from toys import batches  # noqa: E402
from toys import on_one_device as make  # noqa: E402

from jaxdp import Callback  # noqa: E402
from jaxdp.basics.console import log_info, warn  # noqa: E402
from jaxdp.callbacks import CSVLogger, ModelCheckpoint, ProgressBar  # noqa: E402


class Terminal:
    """Stderr, as a terminal, on which bars are drawn."""

    def isatty(self):
        return True

    def write(self, text):
        os.write(2, text.encode())

    def flush(self):
        pass


class Talk(Callback):
    """Says something by every way there is, and how far the run is."""

    def __init__(self, folder, pause=0.0):
        self.path, self.pause = os.path.join(folder, "progress"), pause

    def on_boundary(self, trainer):
        log_info(f"step {trainer.global_step}")
        warn(f"step {trainer.global_step}")
        with open(self.path, "w") as file:
            file.write(str(trainer.global_step))
        time.sleep(self.pause)


def fit(folder, steps, pause=0.0):
    trainer = make(
        ProgressBar(1e6, 1e-6),
        ProgressBar(1e6, file=Terminal()),
        Talk(folder, pause),
        ModelCheckpoint(os.path.join(folder, "checkpoints")),
        CSVLogger(folder),
    )
    trainer.fit(batches(*[8] * 10), max_steps=steps, ckpt_path="auto")
    assert trainer.global_step == steps


def fit_under_all_conditions(folder):
    """Stderr is broken, full, or absent."""
    keep, stderr = os.dup(2), sys.stderr
    reader, broken = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for number, descriptor in enumerate((broken, full)):
        os.dup2(descriptor, 2)
        fit(folder, 10 * (number + 1))
    os.dup2(keep, 2)
    sys.stderr = sys.stdout = None
    fit(folder, 30)
    sys.stderr = stderr
    os.dup2(broken, 2)  # until the very end


if __name__ == "__main__":
    warnings.simplefilter("always")
    if sys.argv[2] == "all":
        fit_under_all_conditions(sys.argv[1])
    else:
        print("kept back, as nobody reads it line by line")
        fit(sys.argv[1], int(sys.argv[2]), pause=0.01)
