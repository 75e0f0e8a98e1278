"""What a plan is made of. Bytes are those of one device, unless it says otherwise."""

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


class Leaf(NamedTuple):
    """An array that is held between steps, or a batch's."""

    group: str
    """One of `GROUPS`: `"parameters"`, `"frozen leaves"`, ..."""
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    """How it is split: `"('data', None)"`; `"whole"` on every device."""
    parts: int
    """Into how many different pieces."""
    shard: tuple[int, ...]
    """The shape that one device holds."""
    bytes: int
    """Of the whole array."""
    bytes_per_device: int
    overwritten: bool
    """Whether the step writes a result over it."""
    on_host: bool
    """Whether it is in the host's memory between steps, and not in the device's."""


class Memory(NamedTuple):
    """Bytes per device."""

    parameters: int
    frozen: int
    model_state: int
    optimizer: int
    other: int
    """The key, the step's number and the sums of metrics."""
    batch: int
    gradients: int
    """All together: as large as the trained parameters that the step works with, of
    those that are gathered block by block the shares. How many there are at a time, in
    `temporary` or where results go, is the compiler's choice; so they are not added to
    the peak, which has them already."""
    temporary: int
    """What is neither argument nor result where that is most: activations, buffers of
    collectives, and gradients."""
    arguments: int
    """All that goes in, as the compiler says."""
    results: int
    overwritten: int
    """How much of the results lies where arguments lay."""
    program: int
    peak: int
    """arguments + results - overwritten + temporary."""
    host: int
    """Optimizer state in the host's memory between steps, beside all that is above."""


class Traffic(NamedTuple):
    """Collectives of one kind, from one place. Bytes are per device and step."""

    kind: str
    axes: tuple[str, ...] | None
    group_size: int
    dtype: str
    part: str
    """Where in the step, by the names that the program's operations have: `"gradients"`
    that are summed, `"parameters"` that are gathered, `"backward: eqx.nn.Linear"`."""
    count: int = 0
    """How many instructions, each run `times` times."""
    times: int | None = 1
    """None: in a loop whose length the program does not tell; counted once."""
    operand_bytes: int = 0
    wire_bytes: float = 0.0
    """What a device sends by the best ring algorithm."""
    overlapped: bool = False
    """Whether it has a start and an end, so that computation may run in between."""
    hidden: bool = False
    """Whether matrix products or convolutions do."""
    optional: bool = False
    crosses: bool = False
    """Whether it is between devices of several hosts."""


class Bound(NamedTuple):
    """A lower bound of this layout, and the value of the compiled program."""

    what: str
    least: float
    found: float

    @property
    def ratio(self) -> float:
        """The value divided by the bound: 1.0 is optimal."""
        return self.found / self.least if self.least else float(self.found == 0) or 1.0


class Split(NamedTuple):
    """A leaf that is whole on every device and need not be."""

    path: str
    axis: int
    bytes_saved: int


class Estimate(NamedTuple):
    """A roofline estimate: the seconds of a step at the hardware's peaks. Real steps
    take longer.

    It is computed in the same way for every compiler, so that estimates for GPUs, TPUs
    and faked CPU devices can be compared. It does not use the bytes that compilers
    report, because each compiler counts them differently.
    """

    hardware: str
    compute: float
    """Matrix operations, or compiled ones where those are not known."""
    memory: float
    """Arguments read once, results written once, temporary memory both."""
    communication: float
    best: float
    """Communication wholly beside computation."""
    worst: float
    """Communication wholly after it."""
    efficiency: float
    """Least share of `worst` that is not communication; 1.0 on one device."""
    fits: bool
    """Whether the peak is no more than what JAX takes of the hardware's memory."""


class Row(NamedTuple):
    """A line of `Plan.scaling`."""

    devices: int
    rows: int
    """Of the global batch."""
    peak: int
    wire_bytes: float
    step: float | None = None
    """Seconds, the worst case of the roofline; None without a hardware profile."""
    rows_per_second: float | None = None
    efficiency: float | None = None
