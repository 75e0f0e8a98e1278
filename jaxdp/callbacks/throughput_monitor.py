"""Measures how fast a fit runs, and what it waits for."""

from typing import Any

import jax
import numpy as np

from ..basics.arguments import check_number, checks_arguments
from ..basics.stopwatch import PHASES, Stopwatch
from ..basics.units import format_number, format_seconds
from .base import Callback, Trainer
from .monitor import announce


class ThroughputMonitor(Callback):
    """Measures a fit's speed, and where its time goes, without a wait for the device.

    The clock runs from the first step, which is compiled by then, to the end of the
    fit; it includes validations and checkpoints. Every `trainer.log_every_n_steps`
    steps, these values join the metrics of the step, and so all loggers. They describe
    the time since the last row:

    - `throughput/seconds`, its length, and `throughput/examples`, the rows trained on;
    - `throughput/examples_per_s` and `throughput/steps_per_s`;
    - `throughput/flops_per_s`, if you pass `flops_per_example`, and `throughput/mfu`,
      its share of the hardware's peak, if you pass that too;
    - `throughput/data`, `.../device`, `.../callbacks`, `.../checkpoints`,
      `.../validation` and `.../loop`: the shares of that time, which add up to 1.
      A large share of `data` means that the device waited for batches; of `device`,
      that a faster loader would not help. `loop` is packing batches and calling the
      step. Waiting for other processes is in `callbacks`;
    - `throughput/peak_bytes`, the most memory that a device of this process has had in
      use since the process started, where devices report it (CPUs do not).

    Args:
        flops_per_example: the operations of the training step per row:
            `trainer.plan(loader).flops`, divided by the rows of a batch.
        peak_flops_per_device: the peak of one device per second.
            `jaxdp.plan.hardware_of(jax.devices()[0]).flops` knows those of common GPUs
            and TPUs.

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
        for name, value in (
            ("flops_per_example", flops_per_example),
            ("peak_flops_per_device", peak_flops_per_device),
        ):
            if value is not None:
                check_number(name, value, above=0, suffix=", or None")
        if peak_flops_per_device is not None and flops_per_example is None:
            raise ValueError(
                "`peak_flops_per_device` needs `flops_per_example`, the operations of a"
                " step per row: trainer.plan(loader).flops / batch_size."
            )
        self.flops_per_example = flops_per_example
        self.peak_flops_per_device = peak_flops_per_device
        self.summary: dict[str, float] = {}
        self._stopwatch = Stopwatch()
        self._counts = {"steps": 0, "examples": 0}
        self._start: dict[str, float] = {}  # the totals when the first step began
        self._last: dict[str, float] = {}  # and when the last row was logged

    def setup(self, trainer: Trainer) -> None:
        self._stopwatch = trainer.record.measure_phases()
        self._counts, self._start = {"steps": 0, "examples": 0}, {}

    def on_train_batch_start(
        self, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        if not self._start:
            self._num_devices = len(trainer.state.step.sharding.device_set)
            self._start = self._last = self._read_totals()
        self._examples_before = trainer.record.examples

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Any, batch_idx: int
    ) -> None:
        self._counts["steps"] += 1
        self._counts["examples"] += trainer.record.examples - self._examples_before
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

    def _read_totals(self) -> dict[str, float]:
        """Returns the work done so far, and the seconds by phase."""
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
        if self.flops_per_example is not None:
            values["flops_per_s"] = values["examples_per_s"] * self.flops_per_example
            if self.peak_flops_per_device is not None:
                peak = self.peak_flops_per_device * self._num_devices
                values["mfu"] = values["flops_per_s"] / peak
        values |= {phase: spent[phase] / total for phase in PHASES}
        return values | _read_peak_bytes()


def _read_peak_bytes() -> dict[str, float]:
    """Returns the peak memory of this process's devices; {} if none reports it."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return {"peak_bytes": float(max(peaks))} if peaks else {}
