"""Measures how fast a fit runs, and what it waits for."""

from typing import Any

import jax
import numpy as np

from ..basics.arguments import check_number, checks_arguments
from ..basics.stopwatch import NO_STOPWATCH, PHASES
from ..basics.units import format_number, format_seconds
from .base import Callback, Trainer
from .monitor import announce


class ThroughputMonitor(Callback):
    """Measures a fit's speed, and where its time goes.

    The clock runs from the first step to the end of the fit, where callbacks before
    this one have done their work. It includes validations and checkpoints, but not the
    compilation before the first step. Every `trainer.log_every_n_steps` steps, these
    values join the metrics of the step, and so all loggers. They describe the time
    since the last row:

    - `throughput/seconds`, its length, and `throughput/examples`, the rows trained on;
    - `throughput/examples_per_s` and `throughput/steps_per_s`;
    - `throughput/flops_per_s`: matrix operations (products and convolutions) of the
      model's forward and backward pass, counted in the traced step, without those that
      `remat` repeats; and `throughput/mfu`, their share of the hardware's peak;
    - `throughput/data`, `.../device`, `.../callbacks`, `.../checkpoints`,
      `.../validation` and `.../loop`: the shares of that time, which add up to 1.
      `loop` is packing batches and calling the step. Of several processes, the wait for
      others is in `callbacks`;
    - `throughput/peak_bytes`, the most memory that a device of this process has had in
      use since the process started, where devices report it (CPUs do not).

    A large share of `data` means that the device waited for batches; of `device`, that
    a faster loader would not help. Nothing here waits for the device.

    Args:
        flops_per_example: matrix operations of the training step per row, if you know
            them; otherwise they are counted by tracing the step once more. 0 leaves
            them out.
        peak_flops_per_device: the peak of one device per second, for `mfu`, which is
            left out without it. `jaxdp.plan.hardware_of(jax.devices()[0]).flops` knows
            those of common GPUs and TPUs.

    Attributes:
        summary: the same values for the whole fit, without the prefix, and `steps`.
    """

    only_in_training = True

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
        self._stopwatch = NO_STOPWATCH
        self._reset()

    def setup(self, trainer: Trainer) -> None:
        self._stopwatch, self._flops = trainer.record.measure_phases(), {}
        self._reset()

    def on_train_batch_start(
        self, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        shapes = frozenset([leaf.shape[1:] for leaf in jax.tree.leaves(batch)])
        if shapes not in self._flops:
            is_first, flops = not self._flops, self.flops_per_example
            if flops is None:
                try:
                    flops = trainer.run.flops_per_example(batch)
                except Exception:
                    if is_first:
                        raise
                    return  # the step says what is wrong with another shape
            self._flops[shapes] = flops
            if is_first:  # the run does not include the tracing above
                num_devices = len(trainer.state.step.sharding.device_set)
                peak = self.peak_flops_per_device
                self._peak = None if peak is None else peak * num_devices
                self._reset()
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
        if not self._counts["steps"]:
            return
        values = self._compute_rates(self._start, self._read_totals())
        self.summary = {"steps": self._counts["steps"], **values}
        seconds = format_seconds(values["seconds"])
        text = [
            f"{values['examples']:,.0f} examples in {seconds}",
            f"{format_number(values['examples_per_s'])} examples/s",
        ]
        if "mfu" in values:
            text.append(f"MFU {100 * values['mfu']:.3g}%")
        shares = sorted(PHASES, key=lambda phase: -values[phase])
        text += [f"{name} {values[name]:.0%}" for name in shares if values[name] > 5e-3]
        announce(trainer, "ThroughputMonitor", ", ".join(text))

    def _reset(self) -> None:
        self._counts = {"steps": 0, "examples": 0, "operations": 0.0}
        self._start = self._last = self._read_totals()

    def _read_totals(self) -> dict[str, float]:
        """Returns the work done since `_reset`, and the seconds by phase."""
        return {**self._counts, **self._stopwatch.read()}

    def _compute_rates(
        self, start: dict[str, float], end: dict[str, float]
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
            if self._peak is not None:
                values["mfu"] = values["flops_per_s"] / self._peak
        values |= {phase: spent[phase] / total for phase in PHASES}
        return values | _read_peak_bytes()


def _read_peak_bytes() -> dict[str, float]:
    """Returns the peak memory of this process's devices; {} if none reports it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"peak_bytes": float(max(peaks))} if peaks else {}
