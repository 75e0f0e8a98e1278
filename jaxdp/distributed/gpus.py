"""Which GPUs of its machine a process uses, where several share them."""

import glob
import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_LOCAL: Final = {
    "torchrun": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "srun": ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
"""In which variables a launcher tells the number of a process among those of its
machine, and how many these are."""


class Gpus(NamedTuple):
    """The GPUs of a process, and what to say of them."""

    ids: list[int] | None
    """By their numbers among those that CUDA shows; None: all."""
    note: str = ""


def own_gpus(launcher: str, by_default: list[int] | None = None) -> Gpus:
    """The share of this process: as many as each other one on its machine.

    Args:
        launcher: whose variables say which of how many it is.
        by_default: those to take where nothing is known of the machine.
    """
    local, count = _place(launcher, os.environ)
    seen = visible()
    if seen == 0:
        return Gpus(None)  # CUDA_VISIBLE_DEVICES, being empty, says so
    if local is None or count is None or seen is None:
        return Gpus(by_default)
    if count == 1 or (seen == 1 and "CUDA_VISIBLE_DEVICES" in os.environ):
        return Gpus(None)  # alone, or left one by the launcher
    if count > seen:
        return Gpus([local])  # which JAX refuses where there is none of that number
    share = seen // count
    ids = list(range(local * share, (local + 1) * share))
    note = (
        f"process {local} of the {count} on this machine uses GPU"
        f"{'s' * (share > 1)} {', '.join(map(str, ids))} of the {seen} there are"
    )
    if left := seen - share * count:
        note += f"; {left} {'is' if left == 1 else 'are'} left over, since each must"
        note += " have as many as the others"
    return Gpus(ids, f"{note} (`local_device_ids` or JAX_LOCAL_DEVICE_IDS changes it)")


def visible() -> int | None:
    """How many GPUs CUDA shows to this process, or None if that is not known."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(glob.glob("/dev/nvidia[0-9]*")) or None
    count = 0
    for entry in chosen.split(","):  # what comes behind a wrong one does not count
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", entry.strip()):
            break
        count += 1
    return count


def _place(launcher: str, environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """The number among those of the machine, and how many these are."""
    local, count = (environ.get(name, "") for name in _LOCAL[launcher])
    # SLURM has it for each machine, "8(x2),4": known where all have as many.
    counts = {re.sub(r"\(x\d+\)", "", part) for part in count.split(",")}
    same = counts.pop() if len(counts) == 1 else ""
    is_known = local.isdecimal() and same.isdecimal()
    return (int(local), int(same)) if is_known else (None, None)
