"""Chooses the buffers that the compiled step may overwrite, and checks that it does."""

from collections.abc import Mapping
from typing import Any, Literal

import jax

from ..basics.arguments import checks_arguments
from ..basics.console import warn
from ..basics.donation import find_donated, parse_aliases
from ..basics.tree import leaf_path, nbytes
from ..engine import StepOptions
from .base import Callback, Trainer


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

    only_in_training = True

    @checks_arguments
    def __init__(self, what: Literal["state", "all", "none"] = "state"):
        self.what = what
        self.report: dict[str, Any] | None = None
        self._checked = False

    def step_options(self, options: StepOptions) -> StepOptions:
        return options._replace(donate=self.what)

    def setup(self, trainer: Trainer) -> None:
        self.report, self._checked = None, False

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        if self._checked:
            return
        self._checked = True
        compiled: Any = trainer.compiled_train_step()
        if not isinstance(compiled, jax.stages.Compiled):
            return  # a compiled object of a custom strategy, which XLA need not know

        # `trainer.state` cannot be read between the steps of one dispatch.
        leaves = jax.tree_util.tree_leaves_with_path(trainer.run.shapes())
        sizes = {
            leaf_path(path): nbytes(leaf, leaf.sharding.shard_shape(leaf.shape))
            for path, leaf in (leaves if self.what != "none" else ())
        }
        header = (compiled.as_text() or "").partition("\n")[0]
        places = find_donated(compiled, parse_aliases(header))
        missing = {
            path: size
            for place, (path, size) in enumerate(sizes.items())
            if size and place not in places
        }
        total = sum(sizes.values())
        self.report = {
            "donated_bytes": total,
            "aliased_bytes": total - sum(missing.values()),
            "not_aliased": list(missing),
        }
        if missing:
            warn(
                f"`DonateBuffers({self.what!r})`: the compiled step does not overwrite"
                f" {len(missing)} of the leaves that were donated to it, and keeps two"
                f" copies of them: {', '.join(missing)}."
            )
