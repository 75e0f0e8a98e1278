"""Errors for steps that need more memory than a device has."""

from collections.abc import Sequence
from typing import Any, Final

import jax

from ..basics.hardware import get_smallest_memory
from ..basics.units import format_bytes

_MARK: Final = "RESOURCE_EXHAUSTED"

_REMEDIES: Final = (
    "In this order: a smaller `batch_size` in the loader;"
    " `accumulate_grad_batches=2` with half the rows a batch, for the same gradients;"
    " `remat=True` for the blocks of a jaxdp.Stack, or a path pattern of blocks;"
    " `strategy=FSDP()` on several devices."
    " `trainer.plan(loader).largest_batch()` says what fits."
)


def check_program(step: str, state: Sequence[Any], rows: int, compiled: Any) -> None:
    """Raises if a compiled `step` needs more memory than its devices have.

    A plan without devices, and a program or a device that reports no memory, pass.

    Args:
        step: its name: "the training step".
        state: leaves on the devices, or their shapes.
        rows: of its batch.
        compiled: its program.
    """
    analysis = getattr(compiled, "memory_analysis", lambda: None)()
    if analysis is None or not hasattr(state[0], "is_deleted"):
        return
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    peak = analysis.argument_size_in_bytes + results + temporary
    limit = get_smallest_memory(state[0].sharding.device_set)
    if limit is not None and peak > limit:
        raise jax.errors.JaxRuntimeError(
            f"{_MARK}: {step} needs {format_bytes(peak)} by its plan, and the device"
            f" gives programs {format_bytes(limit)}; {format_bytes(temporary)} are"
            f" temporary, and mostly grow with the {rows} rows of the batch."
            f" {_REMEDIES} Nothing was computed, and the state is as it was."
        )


def check_error(step: str, state: Sequence[Any], error: BaseException) -> None:
    """Raises an error with remedies if `error` says that `step` lacks memory."""
    if any(leaf.is_deleted() for leaf in state):
        check_earlier_step(error, step)
    _raise_with_remedies(step, error, "The state is as it was before the step.")


def check_earlier_step(error: BaseException, step: str = "an earlier step") -> None:
    """As `check_error`, for a step that has overwritten the state."""
    end = "The state is lost with the step: load the last checkpoint to go on."
    _raise_with_remedies(step, error, end)


def _raise_with_remedies(step: str, error: BaseException, end: str) -> None:
    if _MARK in str(error):
        raise jax.errors.JaxRuntimeError(
            f"{_MARK}: {step} does not fit into the device's memory. {_REMEDIES} {end}"
            f" JAX says: {str(error)[:500]}"
        ) from error
