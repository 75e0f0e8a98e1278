"""Measures how fast a fit runs, and what it waits for."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import jax
import numpy as np

import jaxdp

from ..basics import coordination
from ..basics.arguments import check_number, checks_arguments
from ..basics.stopwatch import NO_STOPWATCH, PHASES
from ..basics.units import format_number, format_seconds
from ..distributed import process_group
from .base import Callback, Trainer
from .monitor import announce

_RATES: Final = "examples_per_s", "steps_per_s", "flops_per_s", "mfu"
"""Values that the last row lacks: a wait for a checkpoint trains nothing."""


class ThroughputMonitor(Callback):
    """Measures a fit's speed, and where its time goes.

    The clock runs from the first step to the end of the fit. It includes validations
    and checkpoints, but not the compilation before the first step. Every
    `trainer.log_every_n_steps` steps, these values join the metrics of the step, and so
    all loggers. They describe the time since the last row:

    - `throughput/seconds`, its length, and `throughput/examples`, the rows trained on;
    - `throughput/examples_per_s` and `throughput/steps_per_s`;
    - `throughput/flops_per_s`: matrix operations (products and convolutions) of the
      model's forward and backward pass, counted in the traced step, without those that
      `remat` repeats; and `throughput/mfu`, their share of the hardware's peak;
    - `throughput/data`, `.../device`, `.../callbacks`, `.../checkpoints`,
      `.../validation` and `.../loop`: the shares of that time, which add up to 1.
      `loop` is packing batches and calling the step;
    - `throughput/peak_bytes`, the most memory that a device of this process has had in
      use since the process started, where devices report it (CPUs do not).

    The last row, at the end of the fit, has the rest, so the rows add up to the whole.
    `summary`, the line in the terminal, `trainer.report` and `python -m jaxdp compare`
    divide all examples by all seconds.

    With several processes, `throughput/others` is the share of time that this process
    waited for others.

    The progress bar shows the largest share. "input-bound 43%" means that the device
    waited for batches; "device-bound" means that a faster loader would not help.
    Nothing here waits for the device.

    Args:
        flops_per_example: matrix operations of the training step per row, if you know
            them; otherwise they are counted by tracing the step once more. 0 leaves
            them out.
        peak_flops_per_device: the peak of one device per second, for `mfu`. It is known
            for common GPUs and TPUs: the dense bfloat16 peak, as is usual for MFU. On
            other devices, CPUs included, there is no `mfu` without it.

    Attributes:
        summary: the same values for the whole fit, without the prefix, and `steps`.
    """

    only_in_training = True

    fit_end_order = 1
    needs_fit = False

    @checks_arguments
    def __init__(
        self,
        flops_per_example: float | None = None,
        peak_flops_per_device: float | None = None,
    ):
        flops, peak, none = flops_per_example, peak_flops_per_device, ", or None"
        if flops is not None:
            check_number("flops_per_example", flops, minimum=0, suffix=none)
        if peak is not None:
            check_number("peak_flops_per_device", peak, above=0, suffix=none)
        self.flops_per_example = flops_per_example
        self.peak_flops_per_device = peak_flops_per_device
        self.summary: dict[str, float] = {}
        self._flops: dict[Any, float] = {}  # per row, by the shapes of the batch
        self._peak: float | None = None
        self._devices: list[Any] = []
        self._stopwatch = NO_STOPWATCH
        self._reset()

    def setup(self, trainer: Trainer) -> None:
        self._stopwatch = trainer.record.measure_phases()
        self._flops = {}
        self._reset()

    def on_train_batch_start(
        self, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        shapes = frozenset([leaf.shape[1:] for leaf in jax.tree.leaves(batch)])
        is_first = not self._flops
        if shapes not in self._flops:
            try:
                flops = self.flops_per_example
                if flops is None:
                    flops = trainer.run.flops_per_example(batch)
                self._flops[shapes] = flops
            except Exception:
                if is_first:
                    raise
                return  # the step will say what is wrong with this shape
        if is_first:
            devices = trainer.state.step.sharding.device_set
            profile = jaxdp.plan.hardware_of(next(iter(devices)))
            peak = self.peak_flops_per_device or (profile and profile.flops)
            self._peak = peak and peak * len(devices)
            self._devices = [
                d for d in devices if d.process_index == jax.process_index()
            ]
            self._reset()  # the run does not include the tracing above
        self._flops_of_row = self._flops[shapes]
        self._examples_before = trainer.record.examples

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Any, batch_idx: int
    ) -> None:
        rows = trainer.record.examples - self._examples_before
        self._counts["steps"] += 1
        self._counts["examples"] += rows
        self._counts["operations"] += rows * self._flops_of_row
        if trainer.global_step % trainer.log_every_n_steps == 0:
            start, self._last = self._last, self._read_totals()
            values = self._compute_rates(start, self._last)
            metrics.add({f"throughput/{k}": np.float32(v) for k, v in values.items()})

    def on_fit_end(self, trainer: Trainer) -> None:
        end = self._read_totals()
        if not end["steps"]:
            return
        values = self._compute_rates(self._start, end)
        self.summary = {"steps": end["steps"], **values}
        last = {
            f"throughput/{name}": value
            for name, value in self._compute_rates(self._last, end).items()
            if name not in _RATES
        }
        trainer.record.put("fit", last)
        text = [
            f"{end['examples']:,.0f} examples in {format_seconds(values['seconds'])}",
            f"{format_number(values['examples_per_s'])} examples/s",
        ]
        if "flops_per_s" in values:
            text.append(f"{format_number(values['flops_per_s'])} FLOP/s of the model")
        if "mfu" in values:
            text.append(f"MFU {100 * values['mfu']:.3g}%")
        shares = sorted(PHASES, key=lambda phase: -values[phase])
        text += [f"{name} {values[name]:.0%}" for name in shares if values[name] > 5e-3]
        if "others" in values:
            text.append(f"waiting for other processes {values['others']:.0%}")
        announce(trainer, "ThroughputMonitor", ", ".join(text))
        self._reset()  # the bar of a later pass shows nothing of this fit

    def bar_note(self) -> str:
        """Returns the phase that takes most of the time since the last logged step."""
        now = self._read_totals()
        start = self._last if now["steps"] > self._last["steps"] else self._start
        if now["steps"] == start["steps"]:
            return ""
        values = self._compute_rates(start, now)
        name = max(PHASES, key=lambda phase: values[phase])
        text = f"{PHASES[name][1]} {values[name]:.0%}"
        return f"MFU {values['mfu']:.0%}, {text}" if "mfu" in values else text

    def _reset(self) -> None:
        self._counts = {"steps": 0, "examples": 0, "operations": 0.0}
        self._start = self._last = self._read_totals()

    def _read_totals(self) -> dict[str, float]:
        """Returns the work done and the seconds by phase, since `_reset`."""
        waited = process_group.get_barrier().wait_seconds
        return {**self._counts, **self._stopwatch.read(), "waited": waited}

    def _compute_rates(
        self, start: Mapping[str, float], end: Mapping[str, float]
    ) -> dict[str, float]:
        spent = {name: end[name] - start[name] for name in end}
        total = max(sum(spent[phase] for phase in PHASES), 1e-9)
        values = {
            "seconds": total,
            "examples": spent["examples"],
            "examples_per_s": spent["examples"] / total,
            "steps_per_s": spent["steps"] / total,
        }
        if any(self._flops.values()):
            values["flops_per_s"] = spent["operations"] / total
            if self._peak:
                values["mfu"] = values["flops_per_s"] / self._peak
        values |= {phase: spent[phase] / total for phase in PHASES}
        values |= _read_peak_bytes(self._devices)
        if coordination.has_peers():  # in the hooks of `Lockstep`, most of it
            values["others"] = spent["waited"] / total
            values["callbacks"] = max(0.0, values["callbacks"] - values["others"])
        return values


def _read_peak_bytes(devices: Iterable[Any]) -> dict[str, float]:
    """Returns the peak memory of the devices that report it; {} if none does."""
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"peak_bytes": float(max(peaks))} if peaks else {}
