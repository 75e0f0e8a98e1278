"""What to do where a step needs more memory than a device has."""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax

from ..basics.hardware import least_memory
from ..basics.units import in_bytes

_MARK: Final = "RESOURCE_EXHAUSTED"
_ASKED: Final = re.compile(r"allocat\w* (?:of )?([\d.]+) ?([KMGT]?i?B|bytes)\b")

_REMEDIES: Final = (
    "a smaller `batch_size` in the loader",
    "`accumulate_grad_batches=2` with half the rows a batch: the same gradients",
    "`remat=True`, which computes the activations of each block of a jaxdp.Stack twice"
    " instead of keeping them (or a path pattern of blocks, `remat='blocks[*]'`)",
    "`strategy=FSDP()` on several devices, which splits weights and optimizer state",
)


class Need(NamedTuple):
    """Bytes of one device for a step, as its compiler has laid them out."""

    peak: int
    arguments: int
    temporary: int


def need_of(compiled: Any) -> Need | None:
    """What a program needs, or None if it does not say."""
    analysis = getattr(compiled, "memory_analysis", lambda: None)()
    if analysis is None:
        return None
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return Need(arguments + results + temporary, arguments, temporary)


def fits(compiled: Any, arrays: Sequence[Any]) -> bool:
    """Whether a program's peak is within the memory of the devices, if both are known.

    Args:
        compiled: the program.
        arrays: the state, which is on the devices, or its shapes.
    """
    is_there = hasattr(arrays[0], "is_deleted")  # and not only planned
    limit = least_memory(arrays[0].sharding.device_set) if is_there else None
    need = None if limit is None else need_of(compiled)
    return limit is None or need is None or need.peak <= limit


def check_memory(
    what: str,
    arrays: Sequence[Any],
    batch: tuple[int, int],
    compiled: Any,
    error: BaseException | None = None,
) -> None:
    """Raises where memory is short; see `explained`.

    Args:
        what: of which step: "the training step".
        arrays: the state, which is on the devices, or its shapes.
        batch: bytes of the batch on a device, and how many rows it has.
        compiled: its program.
        error: what JAX has raised; None before the step.
    """
    is_short = not fits(compiled, arrays) if error is None else _MARK in str(error)
    if is_short:
        raise explained(
            what,
            error=error,
            need=need_of(compiled),
            limit=least_memory(arrays[0].sharding.device_set),
            batch=batch,
            state_is_lost=any(leaf.is_deleted() for leaf in arrays),
        ) from error


def check_late(error: BaseException) -> None:
    """Raises where a step that was launched before has run out of memory."""
    if _MARK in str(error):
        raise explained("an earlier step", error=error, state_is_lost=True) from error


def explained(
    what: str,
    *,
    error: BaseException | None = None,
    need: Need | None = None,
    limit: int | None = None,
    batch: tuple[int, int] | None = None,
    state_is_lost: bool = False,
) -> RuntimeError:
    """The error to raise: how much is asked for, how much there is, and what to do.

    Args:
        what: of which step: "the training step".
        error: what JAX has raised; None before it could.
        need: of the step, if it is known.
        limit: what the device gives programs, if it says it.
        batch: bytes of the batch on a device, and how many rows it has.
        state_is_lost: whether the step has taken the state along.
    """
    facts = []
    asked = _ASKED.search(str(error)) if error is not None else None
    if asked:
        facts.append(f"XLA asked for {asked[1]} {asked[2]} more")
    if limit:
        facts.append(f"the device gives programs {in_bytes(limit)}")
    if need:
        facts.append(
            f"by its plan the step needs {in_bytes(need.peak)} at its peak, of which"
            f" {in_bytes(need.temporary)} are temporary and mostly grow with the rows"
        )
    if batch:
        facts.append(f"the batch of {batch[1]} rows has {in_bytes(batch[0])} of it")
    of_facts = f": {', '.join(facts)}" if facts else ""
    remedies = "; ".join(f"{place}. {text}" for place, text in enumerate(_REMEDIES, 1))
    if error is None:
        end = "Nothing was computed, and the state is as it was."
    elif state_is_lost:
        end = "The state is lost with the step: load the last checkpoint to go on."
    else:
        end = "The state is as it was before the step."
    first = "" if error is None else f" JAX says: {str(error)[:500]}"
    return jax.errors.JaxRuntimeError(
        f"{_MARK}: {what} does not fit into the device's memory{of_facts}."
        f" What helps, in this order: {remedies}."
        f" `trainer.plan(loader).largest_batch()` says what fits. {end}{first}"
    )
