"""What to do where a step needs more memory than a device has."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

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


class Need(NamedTuple):
    """Bytes of one device for a step, as its compiler has laid them out."""

    peak: int
    temporary: int


def need_of(compiled: Any) -> Need | None:
    """What a program needs, or None if it does not say."""
    analysis = getattr(compiled, "memory_analysis", lambda: None)()
    if analysis is None:
        return None
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporary = analysis.temp_size_in_bytes
    return Need(analysis.argument_size_in_bytes + results + temporary, temporary)


def check_memory(
    what: str,
    arrays: Sequence[Any],
    rows: int,
    compiled: Any,
    error: BaseException | None = None,
) -> None:
    """Raises where memory is short: by the plan of a step, or as JAX has found out.

    Args:
        what: of which step: "the training step".
        arrays: the state, which is on the devices, or its shapes.
        rows: of its batch.
        compiled: its program.
        error: what JAX has raised; None before the step.
    """
    if error is not None:
        if _MARK in str(error):
            state_is_lost = any(leaf.is_deleted() for leaf in arrays)
            raise _explained(what, error, state_is_lost=state_is_lost) from error
        return
    is_there = hasattr(arrays[0], "is_deleted")  # and not only planned
    limit = get_smallest_memory(arrays[0].sharding.device_set) if is_there else None
    need = None if limit is None else need_of(compiled)
    if limit is None or need is None or need.peak <= limit:
        return
    raise jax.errors.JaxRuntimeError(
        f"{_MARK}: {what} needs {format_bytes(need.peak)} by its plan, and the device"
        f" gives programs {format_bytes(limit)}; {format_bytes(need.temporary)} are"
        f" temporary, and mostly grow with the {rows} rows of the batch. {_REMEDIES}"
        " Nothing was computed, and the state is as it was."
    )


def check_late(error: BaseException) -> None:
    """Raises where a step that was launched before has run out of memory."""
    if _MARK in str(error):
        raise _explained("an earlier step", error, state_is_lost=True) from error


def _explained(what: str, error: BaseException, *, state_is_lost: bool) -> Exception:
    """The error to raise in the place of JAX's, whose text is its end."""
    end = "The state is as it was before the step."
    if state_is_lost:
        end = "The state is lost with the step: load the last checkpoint to go on."
    return jax.errors.JaxRuntimeError(
        f"{_MARK}: {what} does not fit into the device's memory. {_REMEDIES} {end}"
        f" JAX says: {str(error)[:500]}"
    )
