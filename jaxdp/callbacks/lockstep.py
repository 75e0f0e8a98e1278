"""Keeps the processes of a job in step, and reports where each one is if not."""

from collections.abc import Mapping
from typing import Any

import jax

from .. import checkpoint
from ..basics.arguments import check_count, check_number, checks_arguments
from ..basics.environment import get_versions
from ..basics.fingerprints import compute_fingerprints
from ..basics.tree import leaf_path
from .base import Callback, Trainer

_ARGUMENTS = (
    "strategy",
    "seed",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "steps_per_execution",
    "data",
    "reproducible",
    "compiler_options",
    "offload",
)
"""Arguments of the Trainer that change the numbers of a fit or its order of events."""


class Lockstep(Callback):
    """Stops a fit whose processes are about to do different things.

    Processes that run different programs or have batches of different shapes compute
    wrong numbers without an error, or wait for each other forever. With several
    processes, every trainer has this as its first callback; pass one to change it.

    When a fit starts, the processes compare versions, arguments, the model and the
    compiled step. Then they wait for each other before every step and every batch of an
    evaluation, and at the end; nothing waits for the device. If they are about to do
    different things, all of them raise a RuntimeError that says where each process is.

    Args:
        every_n_steps: the number of steps, or batches of evaluations, between two
            barriers. The next barrier finds any difference since the last one.
        timeout: how many seconds a process waits for another.
        warn_after: after how many seconds it reports the process it waits for.
    """

    @checks_arguments
    def __init__(
        self,
        every_n_steps: int = 1,
        *,
        timeout: float = 600.0,
        warn_after: float = 30.0,
    ):
        check_count("every_n_steps", every_n_steps)
        check_number("timeout", timeout, above=0)
        check_number("warn_after", warn_after, above=0)
        self.every_n_steps = every_n_steps
        self.timeout = timeout
        self.warn_after = warn_after
        self._has_compared_model = self._has_failed = False

    def setup(self, trainer: Trainer) -> None:
        self._has_failed = False
        processes = trainer.run.processes
        if processes.count == 1:
            return
        # All waits of processes for each other use these from now on.
        processes.timeout, processes.warn_after = self.timeout, self.warn_after
        processes.every_n_steps = self.every_n_steps
        arguments = {name: trainer.run.arguments[name] for name in _ARGUMENTS}
        arguments |= {n: getattr(trainer, n) for n in ("max_epochs", "max_steps")}
        facts = {f"the version of {k}": v for k, v in get_versions().items()}
        facts |= {f"`{name}`": repr(value) for name, value in arguments.items()}
        facts["steps done"] = str(trainer.global_step)
        facts["epochs done"] = str(trainer.current_epoch)
        if not self._has_compared_model:
            facts |= _describe_model(trainer.run.arguments["model"])
            self._has_compared_model = True
        _check_equal(trainer, f"the start of {trainer.run.doing}", facts)

    def on_fit_start(self, trainer: Trainer) -> None:
        sizes, _ = trainer.run.compiled_facts()
        rows = {f"rows of a {kind} batch": n for kind, n in sizes.items()}
        _check_equal(trainer, "the first step", rows)

    def on_train_batch_start(
        self, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        processes = trainer.run.processes
        if processes.count > 1:
            # The batch has the rows of this process, whose number differs between
            # processes.
            facts = {"a row of the batch": _shapes(batch, 1)}
            facts["rows before it"] = str(trainer.record.examples)
            step, epoch = trainer.global_step + 1, trainer.current_epoch
            location = f"step {step} of epoch {epoch}"
            processes.sync_step(location, _add_programs(trainer, facts))

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._has_failed = True

    def on_fit_end(self, trainer: Trainer) -> None:
        if not self._has_failed:
            end = f"the end of the fit after step {trainer.global_step}"
            _check_equal(trainer, end, {})


def _check_equal(trainer: Trainer, location: str, facts: Mapping[str, Any]) -> None:
    """Raises unless the processes are about to do the same thing."""
    processes = trainer.run.processes
    if processes.count > 1:
        processes.check_equal(location, _add_programs(trainer, facts))


def _add_programs(trainer: Trainer, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Adds digests of all programs so far to facts."""
    _, programs = trainer.run.compiled_facts()
    return {**facts, "the compiled programs": ", ".join(programs)}


def _describe_model(model: Any) -> dict[str, str]:
    """Returns the shapes of a model's arrays, and fingerprints of their bits."""
    arrays = {
        leaf_path(path): checkpoint.key_to_data(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
        if isinstance(leaf, jax.Array)
    }
    facts = {f"the model's {name}": _shapes(leaf) for name, leaf in arrays.items()}
    local = {n: a for n, a in arrays.items() if a.size and a.is_fully_addressable}
    bits = compute_fingerprints(local)
    return facts | {f"the bits of the model's {name}": bits[name] for name in bits}


def _shapes(tree: Any, axis: int = 0) -> str:
    return ", ".join(
        f"{leaf.dtype}{list(leaf.shape[axis:])}" for leaf in jax.tree.leaves(tree)
    )
