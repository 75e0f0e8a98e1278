"""The parts of a plan. Bytes are per device, unless it says otherwise."""

from typing import Final, NamedTuple

GROUPS: Final = {
    "parameters": "parameters",
    "frozen": "frozen leaves",
    "model_state": "model state",
    "optimizer": "optimizer state",
    "other": "other",
    "batch": "batch",
}
"""The groups of leaves, by the fields of `Memory` that have their bytes."""


class PlanLeaf(NamedTuple):
    """An array of the state, which is held between steps, or of a batch."""

    group: str
    """One of `GROUPS`: `"parameters"`, `"frozen leaves"`, ..."""
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    """Its layout: `"('data', None)"`, or `"replicated"` on every device."""
    parts: int
    """The number of different shards."""
    shard: tuple[int, ...]
    """The shape that one device holds."""
    bytes: int
    """The bytes of the full array."""
    bytes_per_device: int
    overwritten: bool
    """Whether the step writes a result over it."""
    on_host: bool
    """Whether the host's memory holds it between steps, not the device's."""


class Memory(NamedTuple):
    """Bytes per device."""

    parameters: int
    frozen: int
    model_state: int
    optimizer: int
    other: int
    """The key, the step's number and the sums of metrics."""
    batch: int
    temporary: int
    """The peak of activations, gradients, and buffers of collectives."""
    arguments: int
    """The bytes of all arguments, according to the compiler."""
    results: int
    overwritten: int
    """The bytes of results that overwrite arguments."""
    program: int
    in_flight: int
    """The batches on an accelerator that wait for their step.

    As many wait as fit into 5 % of its memory, for 2 to 8 dispatches. The batch of the
    running step is not among them."""
    peak: int
    """arguments + results - overwritten + temporary + in_flight."""
    host: int
    """Optimizer state in the host's memory between steps; not counted above."""


class Traffic(NamedTuple):
    """Collectives of one kind, from one place. Bytes are per device and step."""

    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    dtype: str
    part: str
    """The part of the step, from the names of the program's operations.

    `"gradients"` are summed, `"parameters"` are gathered; a layer has its own name:
    `"backward: eqx.nn.Linear"`."""
    count: int = 0
    """The number of instructions; each runs `times` times."""
    times: int | None = 1
    """None if it is in a loop of unknown length; then it is counted once."""
    operand_bytes: int = 0
    wire_bytes: float = 0.0
    """The bytes that a device sends by the best ring algorithm."""
    overlapped: bool = False
    """Whether computation may run between its start and its end."""
    hidden: bool = False
    """Whether matrix products or convolutions run in between."""
    optional: bool = False
    crosses: bool = False
    """Whether devices of several hosts take part."""


class Bound(NamedTuple):
    """A lower bound of this layout, and the value of the compiled program."""

    what: str
    least: float
    found: float

    @property
    def ratio(self) -> float:
        """The value divided by the bound: 1.0 is optimal."""
        return self.found / self.least if self.least else float(self.found == 0) or 1.0


class Estimate(NamedTuple):
    """The seconds of a step at the hardware's peaks, by a roofline.

    Real steps take longer. Estimates for GPUs, TPUs and faked CPU devices can be
    compared with each other. They leave out the bytes that compilers report, because
    each compiler counts those in its own way.
    """

    hardware: str
    compute: float
    """Time for matrix operations; 0 if they are unknown."""
    memory: float
    """Time to read arguments, write results, and do both with temporary memory."""
    communication: float
    best: float
    """The seconds if all communication runs beside computation."""
    worst: float
    """The seconds if all communication runs after computation."""
    efficiency: float
    """The share of `worst` that is not communication; 1.0 on one device."""
    fits: bool
    """Whether the peak fits into the memory that JAX takes."""


class Remedy(NamedTuple):
    """A change of arguments with which the compiled step needs less memory."""

    change: str
    """The code to write: `"`strategy=FSDP()`"`."""
    peak: int
    fits: bool


class ScalingRow(NamedTuple):
    """A line of `Plan.scaling`."""

    devices: int
    rows: int
    """The rows of the global batch."""
    peak: int
    wire_bytes: float
    step: float | None = None
    """Seconds, the worst case of the roofline; None without a hardware profile."""
    rows_per_second: float | None = None
    efficiency: float | None = None
