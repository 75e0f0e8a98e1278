"""Traces a few steps, for xprof and Perfetto."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ..basics.arguments import check_count, check_is_local, checks_arguments
from ..basics.files import expand_path
from .base import Callback, Trainer
from .logger import check_writable
from .monitor import announce


class Profiler(Callback):
    """Traces a few steps.

    Writes the trace to `dirpath`, for xprof (`pip install xprof`, then
    `xprof <dirpath>`; also a plugin of TensorBoard) and for https://ui.perfetto.dev
    (open `perfetto_trace.json.gz`), which list operations by their time. The loop waits
    for the device before and after the traced steps, so that all of them are complete.

    Args:
        dirpath: folder to write to; None means `profile` in
            `trainer.default_root_dir`.
        start_step: how many steps of a fit to skip first, as a warm-up.
        num_steps: how many steps to trace; 5 to 20 is common, since traces are large.
            With `steps_per_execution` both are rounded up to whole calls.
    """

    skip_in_fast_dev_run = True
    only_in_training = True

    @checks_arguments
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        start_step: int = 10,
        num_steps: int = 5,
    ):
        if dirpath is not None:
            check_is_local("dirpath", dirpath)
            dirpath = expand_path(dirpath)
        check_count("start_step", start_step, minimum=0)
        check_count("num_steps", num_steps)
        self.dirpath = dirpath
        self.start_step = start_step
        self.num_steps = num_steps
        self._folder = Path()
        self._first = start_step  # the trace begins after this step
        self._step = contextlib.ExitStack()
        self._is_tracing = self._done = False

    def setup(self, trainer: Trainer) -> None:
        root = trainer.default_root_dir
        self._folder = Path(self.dirpath or expand_path(root) + "/profile")
        if trainer.is_global_zero:
            check_writable(self._folder, "Profiler")

    def on_fit_start(self, trainer: Trainer) -> None:
        self._is_tracing, self._done = False, not trainer.is_global_zero
        self._first = trainer.global_step + self.start_step
        self.on_boundary(trainer)

    def on_boundary(self, trainer: Trainer) -> None:
        if self._is_tracing and trainer.global_step >= self._first + self.num_steps:
            self._stop(trainer)
        elif not self._is_tracing and not self._done:
            if trainer.global_step >= self._first:
                self._start(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        if self._is_tracing:
            number = trainer.global_step + 1
            step = jax.profiler.StepTraceAnnotation("train", step_num=number)
            self._step.enter_context(step)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        self._step.close()

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._is_tracing:
            self._step.close()
            self._stop(trainer)
        elif not self._done:
            text = f"nothing was traced: the fit ended before {self.start_step} steps."
            announce(trainer, "Profiler", text)

    def _start(self, trainer: Trainer) -> None:
        jax.block_until_ready(trainer.state)  # waits for the device
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's calls would slow the host down
        jax.profiler.start_trace(
            str(self._folder), create_perfetto_trace=True, profiler_options=options
        )
        self._first, self._is_tracing = trainer.global_step, True

    def _stop(self, trainer: Trainer) -> None:
        self._is_tracing, self._done = False, True
        try:
            jax.block_until_ready(trainer.state)  # waits for the device
        finally:
            jax.profiler.stop_trace()
        if trainer.global_step == self._first:
            text = f"nothing was traced: the fit ended after step {self._first}."
            announce(trainer, "Profiler", text)
            return
        traces = self._folder.glob("plugins/profile/*/perfetto_trace.json.gz")
        trace = max(traces, key=lambda path: path.stat().st_mtime)
        text = f"steps {self._first + 1} to {trainer.global_step} are traced in {trace}"
        announce(trainer, "Profiler", text)
        device, *_ = jax.tree.leaves(trainer.state)[0].sharding.device_set
        if lacks_device_events(trace.parent, device.platform):
            text = "that trace has no operations of the device; GPUs need CUPTI for it."
            announce(trainer, "Profiler", text)


def lacks_device_events(folder: Path, platform: str) -> bool:
    """Returns True if a trace has no events of the devices, only those of the host.

    For CPUs it is always False: their operations are among the host's events.
    """
    if platform == "cpu":
        return False
    planes = [
        plane
        for path in folder.glob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        if plane.name.startswith("/device:")
    ]
    lines = [line for plane in planes for line in plane.lines]
    return not any(True for line in lines for _ in line.events)
