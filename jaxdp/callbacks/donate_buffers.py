"""What the compiled step may overwrite, and whether it does."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..basics.arguments import check_choice
from ..basics.console import warn
from ..engine import StepOptions
from .base import Callback

if TYPE_CHECKING:
    from jaxdp import Trainer


class DonateBuffers(Callback):
    """Chooses which arrays the compiled step may overwrite with its results.

    A donated state is overwritten by the new one, so a step needs the memory of only
    one state. The arrays of the model that you passed to the Trainer are never
    touched. After the first step, the compiled program is checked: a UserWarning names
    every leaf (array) that was donated but is not overwritten.

    Args:
        what: `"state"` (what the Trainer does without this callback) donates all of
            `trainer.state`; `"all"` the batches too, which frees them as soon as they
            are read; `"none"` nothing.

    Attributes:
        report: None before the first step, then a dict with `donated_bytes` and
            `aliased_bytes` of the state on one device, and `not_aliased`, the paths of
            the leaves that are not overwritten though donated.
    """

    looks_inside_blocks = False

    def __init__(self, what: str = "state"):
        check_choice("what", what, ("state", "all", "none"))
        self.what = what
        self.report: dict[str, Any] | None = None
        self._checked = False

    def step_options(self, options: StepOptions) -> StepOptions:
        return options._replace(donate=self.what)

    def setup(self, trainer: "Trainer") -> None:
        self.report, self._checked = None, False

    def on_train_batch_end(
        self, trainer: "Trainer", metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if self._checked:
            return
        self._checked = True
        compiled = trainer.compiled_train_step()
        if getattr(compiled, "memory_analysis", lambda: None)() is None:
            return  # An engine of the user's own, which need not be XLA's.
        arrays = trainer.run.engine.held.named_arrays() if self.what != "none" else {}
        self.report = _report(compiled, arrays)
        if missing := self.report["not_aliased"]:
            warn(
                f"`DonateBuffers({self.what!r})`: the compiled step does not overwrite"
                f" {len(missing)} of the leaves that were donated to it, and keeps two"
                f" copies of them: {', '.join(missing)}.",
                UserWarning,
                stacklevel=2,
            )


def _report(compiled: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """Compares the bytes of `arrays` on a device with what the program aliases."""
    sizes = {name: _bytes_per_device(array) for name, array in arrays.items()}
    total, missing = sum(sizes.values()), []
    if total != compiled.memory_analysis().alias_size_in_bytes:
        # Printing a large program takes a while, so only when something is amiss, or
        # when a batch is donated too and a result has its shape after all.
        overwritten = _aliased_arguments(compiled)
        missing = [
            path for i, path in enumerate(sizes) if sizes[path] and i not in overwritten
        ]
    return {
        "donated_bytes": total,
        "aliased_bytes": total - sum(sizes[path] for path in missing),
        "not_aliased": missing,
    }


def _bytes_per_device(leaf: jax.Array) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    return int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize


def _aliased_arguments(compiled: Any) -> set[int]:
    """Places, among all flat arguments, of those that a result overwrites."""
    header = compiled.as_text().split("\n", 1)[0]
    start = header.find("input_output_alias={")
    parameters = re.findall(r"\}:\s*\((\d+),", header[start:]) if start >= 0 else []
    # The program lacks the arguments that nothing depends on, and numbers the rest.
    every = range(len(jax.tree.leaves(compiled.args_info)))
    executable = getattr(compiled, "_executable", None)
    kept = sorted(getattr(executable, "_kept_var_idx", every))
    return {kept[int(number)] for number in parameters}
