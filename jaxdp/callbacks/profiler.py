"""A trace of a few steps, and what they spent their time on."""

import contextlib
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax

from ..basics.arguments import check_count
from ..basics.files import write_whole
from .base import Callback, Trainer
from .logger import check_writable
from .monitor import announce

_CONTAINERS: Final = ("while", "call", "conditional")
"""Operations that only hold others, which are in the trace themselves."""


class Profiler(Callback):
    """Traces a few steps, and lists the operations that took the most time.

    Writes the trace to `dirpath`, for TensorBoard (`pip install
    tensorboard-plugin-profile`, then `tensorboard --logdir <dirpath>`) and for
    https://ui.perfetto.dev (open `perfetto_trace.json.gz`). `summary.txt` lists the
    operations by their time on all devices, with the part of the program that each
    comes from. The loop waits for the device before and after the traced steps, so that
    all of them are complete.

    Args:
        dirpath: folder to write to; None means `profile` in
            `trainer.default_root_dir`.
        start_step: how many steps of a fit to skip first, as a warm-up.
        num_steps: how many steps to trace; 5 to 20 is common, since traces are large.
        top: how many operations the summary lists.

    Attributes:
        operations: all operations with their times, after the last traced step.
    """

    skip_in_fast_dev_run = True
    looks_inside_blocks = False

    def __init__(
        self,
        dirpath: Any = None,
        start_step: int = 10,
        num_steps: int = 5,
        top: int = 20,
    ):
        check_count("start_step", start_step, least=0)
        check_count("num_steps", num_steps)
        check_count("top", top)
        self.dirpath = dirpath
        self.start_step = start_step
        self.num_steps = num_steps
        self.top = top
        self.operations: list[Operation] = []
        self._folder = Path()
        self._first = start_step  # the trace begins after this step
        self._step = contextlib.ExitStack()
        self._is_tracing = self._done = False

    def setup(self, trainer: Trainer) -> None:
        self._folder = Path(self.dirpath or Path(trainer.default_root_dir) / "profile")
        if trainer.is_global_zero:
            check_writable(self._folder, "Profiler")

    def on_fit_start(self, trainer: Trainer) -> None:
        self._is_tracing, self._done = False, not trainer.is_global_zero
        self._first = trainer.global_step + self.start_step

    def next_stop(self, trainer: Trainer) -> int | None:
        stops = (self._first, self._first + self.num_steps)
        later = (stop for stop in stops if stop > trainer.global_step)
        return None if self._done else next(later, None)

    def on_train_batch_start(
        self, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        if self._done or trainer.global_step < self._first:
            return
        if not self._is_tracing:
            self._start(trainer)
        number = trainer.global_step + 1
        step = jax.profiler.StepTraceAnnotation("train", step_num=number)
        self._step.enter_context(step)

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if self._is_tracing:
            self._step.close()
            if trainer.global_step >= self._first + self.num_steps:
                self._stop(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._is_tracing:
            self._step.close()
            self._stop(trainer)
        elif not self._done:
            done = trainer.global_step - self._first + self.start_step
            text = f"the fit had {done} steps, and `start_step` is {self.start_step}."
            announce(trainer, "Profiler", f"nothing was traced: {text}")

    def _start(self, trainer: Trainer) -> None:
        jax.block_until_ready(trainer.run.engine.held.arrays)  # waits for the device
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's calls would slow the host down
        try:
            jax.profiler.start_trace(
                str(self._folder), create_perfetto_trace=True, profiler_options=options
            )
        except RuntimeError as error:
            error.add_note("`Profiler`: only one trace can run in a process at a time.")
            raise
        self._first, self._is_tracing = trainer.global_step, True

    def _stop(self, trainer: Trainer) -> None:
        self._is_tracing, self._done = False, True
        first, steps = self._first, trainer.global_step - self._first
        try:
            jax.block_until_ready(trainer.run.engine.held.arrays)  # waits for it
        finally:
            jax.profiler.stop_trace()
        if steps == 0:
            return

        traces = self._folder.glob("plugins/profile/*/*.xplane.pb")
        trace = max(traces, key=lambda path: path.stat().st_mtime)
        compiled = trainer.compiled_train_step()
        sources = {} if compiled is None else _sources(compiled.as_text() or "")
        self.operations = operations(trace, sources)
        lines = _table(self.operations, self.top, steps)
        title = f"steps {first + 1} to {trainer.global_step}, traced in {trace}"
        write_whole(self._folder / "summary.txt", "\n".join([title, "", *lines, ""]))
        shown = "\n".join(["", *_table(self.operations, 5, steps)])
        announce(trainer, "Profiler", f"{title}; see {self._folder}/summary.txt{shown}")


class Operation(NamedTuple):
    """An operation of the compiled program, over a traced window."""

    name: str
    """As in the compiled program, `fusion.3` say."""
    seconds: float
    """On all devices together."""
    calls: int
    source: str
    """The part of the traced function that it comes from, if known."""


def operations(
    trace: Path, sources: Mapping[str, str] | None = None
) -> list[Operation]:
    """The operations of an `.xplane.pb` file, those that took longest first."""
    seconds, calls = defaultdict[str, float](float), Counter[str]()
    known = sources or {}
    data = jax.profiler.ProfileData.from_file(str(trace))
    with warnings.catch_warnings():
        # Python 3.12 warns of how jaxlib makes its types; where warnings are errors,
        # that would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for line in (line for plane in data.planes for line in plane.lines):
            for event in line.events:
                # CPUs and GPUs say which operation an event is of; TPUs keep a line.
                name = dict(event.stats).get("hlo_op")
                if name is None and line.name == "XLA Ops":
                    name = event.name.removeprefix("%").split(" ")[0]
                if name is not None and not str(name).startswith(_CONTAINERS):
                    seconds[str(name)] += event.duration_ns * 1e-9
                    calls[str(name)] += 1
    return [
        Operation(name, time, calls[name], known.get(name, ""))
        for name, time in sorted(seconds.items(), key=lambda item: -item[1])
    ]


def _sources(program: str) -> dict[str, str]:
    """From operations of a compiled program to what they were in the traced one."""
    pattern = r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"'
    return {
        name: re.sub(r"^jit\(\w+\)/", "", source)
        for name, source in re.findall(pattern, program, re.M)
    }


def _table(found: list[Operation], top: int, steps: int) -> list[str]:
    total = sum(operation.seconds for operation in found)
    if not total:
        return ["no operations were found in the trace"]
    lines = [f"{'ms/step':>9} {'share':>6} {'calls':>6}  operation"]
    for name, seconds, calls, source in found[:top]:
        short = source if len(source) <= 80 else f"{source[:77]}..."
        lines.append(
            f"{seconds / steps * 1e3:9.3f} {seconds / total:6.1%} {calls:6}  {name}"
            + (f"  ({short})" if source else "")
        )
    others = len(found) - top
    return lines if others <= 0 else [*lines, f"and {others} others"]
