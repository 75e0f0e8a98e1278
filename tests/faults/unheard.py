"""A run of which nobody reads what it says; `python unheard.py <folder> <steps>`."""

import os
import pathlib
import sys
import time
import types
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"

from toys import On, batches  # noqa: E402
from toys import on_one_device as make  # noqa: E402

from jaxdp.basics.console import log_info, warn  # noqa: E402
from jaxdp.callbacks import CSVLogger, ModelCheckpoint, ProgressBar  # noqa: E402

TERMINAL = types.SimpleNamespace(
    isatty=lambda: True,
    write=lambda text: os.write(2, text.encode()),
    flush=lambda: None,
)


def fit(folder, steps, pause=0.0):
    def talk(trainer):
        """Says something by every way there is, and how far the run is."""
        log_info(f"step {trainer.global_step}")
        warn(f"step {trainer.global_step}")
        (folder / "progress").write_text(str(trainer.global_step))
        time.sleep(pause)

    bars = ProgressBar(1e6, 1e-6), ProgressBar(1e6, file=TERMINAL)
    savers = ModelCheckpoint(folder / "checkpoints"), CSVLogger(folder)
    trainer = make(*bars, On(on_boundary=talk), *savers)
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
    folder = pathlib.Path(sys.argv[1])
    if sys.argv[2] == "all":
        fit_under_all_conditions(folder)
    else:
        print("kept back, as nobody reads it line by line")
        fit(folder, int(sys.argv[2]), pause=0.01)
