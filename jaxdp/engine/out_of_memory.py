"""Errors for steps that need more memory than a device has."""

from typing import Any, Final

import jax

from ..basics.units import format_bytes

_MARK: Final = "RESOURCE_EXHAUSTED"

_REMEDIES: Final = (
    "In this order: a smaller `batch_size` in the loader;"
    " `accumulate_grad_batches=2` with half the rows a batch, for the same gradients;"
    " `remat=True` for the blocks of a jaxdp.Stack, or a path pattern of blocks;"
    " `strategy=FSDP()` on several devices."
    " `trainer.plan(loader).largest_batch()` says what fits."
)


def check_program(step: str, limit: float, rows: int, compiled: Any) -> None:
    """Raises if a compiled `step` needs more memory than its devices have.

    Args:
        step: its name: "the training step".
        limit: the bytes of the smallest device.
        rows: the number of rows of its batch.
        compiled: the program of the step. A program that reports no memory passes.
    """
    is_compiled = isinstance(compiled, jax.stages.Compiled)
    analysis: Any = compiled.memory_analysis() if is_compiled else None
    if analysis is None:
        return
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    peak = analysis.argument_size_in_bytes + results + temporary
    if peak > limit:
        raise jax.errors.JaxRuntimeError(
            f"{_MARK}: {step} needs {format_bytes(peak)} by its plan, and the device"
            f" has {format_bytes(limit)}; {format_bytes(temporary)} are temporary, and"
            f" mostly grow with the {rows} rows of the batch. {_REMEDIES}"
        )


def add_remedies(step: str, error: BaseException) -> None:
    """Raises an error with remedies if `error` says that `step` lacks memory."""
    if _MARK in str(error):
        raise jax.errors.JaxRuntimeError(
            f"{_MARK}: {step} does not fit into the device's memory. {_REMEDIES}"
            f" JAX says: {str(error)[:500]}"
        ) from error
