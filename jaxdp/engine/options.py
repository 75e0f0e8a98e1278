"""What callbacks may ask of the compiled train step."""

from typing import NamedTuple


class StepOptions(NamedTuple):
    """How the train step is compiled; `Callback.step_options` changes it."""

    donate: str = "state"
    """What the step may overwrite: "state", "all" (batches, too) or "none"."""
    skip_nonfinite: bool = False
    """Whether a step with NaN or infinity in it keeps the old state."""
