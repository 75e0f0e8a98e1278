"""Which of how many processes this one is, with which GPUs: by torchrun or JAX."""

import glob
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

_COUNTS: Final = {
    "torchrun": "WORLD_SIZE",
    "srun": "SLURM_STEP_NUM_TASKS",
    "mpirun": "OMPI_COMM_WORLD_SIZE",
    "JAX_NUM_PROCESSES": "JAX_NUM_PROCESSES",
}
"""The variable in which a launcher tells how many processes it has started."""

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


class Rank(NamedTuple):
    """One process among those of a job."""

    index: int
    count: int
    host: str
    """Where process 0 is, as the others reach it."""
    port: int
    job: str = ""
    """The same for all processes of this start of the job, if it is known."""
    devices: Sequence[int] | None = None
    """The GPUs of its machine that this process uses; None: all that it sees."""
    note: str = ""
    """What to say of these."""

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


def find_rank(
    address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> Rank | None:
    """This process's rank, or None if it was started alone.

    Arguments come first, then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, then torchrun, and last what JAX detects.

    Raises:
        ValueError: if something is missing or makes no sense.
    """
    is_told = (address, num_processes, process_id) != (None, None, None)
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    if num_processes is None:
        num_processes = _number("JAX_NUM_PROCESSES", 1)
    if process_id is None:
        process_id = _number("JAX_PROCESS_ID")
    if process_id is None and num_processes is not None:
        process_id = _number("JOB_COMPLETION_INDEX")  # Kubernetes
    if num_processes == 1:
        return None

    job, gpus = "", Gpus(None)
    if None in (address, num_processes, process_id):
        launched = _torchrun() or _by_jax(address, num_processes, process_id, timeout)
        address = address or launched[0]
        num_processes = num_processes or launched[1]
        if process_id is None:
            process_id, gpus = launched[2], launched[3]
        job = "/".join(
            os.environ.get(f"TORCHELASTIC_{name}", "")
            for name in ("RUN_ID", "RESTART_COUNT")
        )

    known = {
        "coordinator_address": address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    absent = [name for name, value in known.items() if value is None]
    if num_processes == 1:
        return None
    if num_processes is None and not is_told and started_several() is None:
        return None
    if address is None or num_processes is None or process_id is None:
        raise ValueError(
            f"`{'`, `'.join(absent)}` is not known: it was not passed, and the"
            " environment (that of torchrun, or what JAX detects: SLURM, Open MPI 4,"
            f" TPUs, Kubernetes) does not say it. Pass all of {', '.join(known)}, or"
            " set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and"
            " JAX_PROCESS_ID for every process."
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"`process_id` must be from 0 to {num_processes - 1}, for"
            f" `num_processes`={num_processes}; got {process_id}."
        )
    return Rank(process_id, num_processes, *_split(address), job, *gpus)


def started_several() -> tuple[str, int] | None:
    """Which launcher has started several processes, and how many; None if none has."""
    for launcher, name in _COUNTS.items():
        value = os.environ.get(name, "")
        is_there = launcher != "torchrun" or "RANK" in os.environ
        if is_there and value.isdecimal() and int(value) > 1:
            return launcher, int(value)
    return None


_Launched = tuple[str | None, int | None, int | None, Gpus]
"""The address, the number of processes, the index and the GPUs."""


def _torchrun() -> _Launched | None:
    """torchrun, and what sets its variables, such as a PyTorchJob of Kubeflow."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    count, local_count = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1)
    host = os.environ.get("MASTER_ADDR")
    if count == local_count:  # all on this machine
        host = "127.0.0.1"
    # MASTER_PORT itself belongs to torchrun's own store. This port is one that Linux
    # does not hand out, and another job's is another.
    port = _number("MASTER_PORT", 1)
    address = None if host is None or port is None else f"{host}:{61440 + port % 4096}"
    local = _number("LOCAL_RANK")
    alone = None if local is None or local_count == 1 else [local]
    return address, count, _number("RANK"), own_gpus("torchrun", alone)


def _by_jax(
    address: str | None, count: int | None, index: int | None, timeout: float
) -> _Launched:
    from jax._src.clusters import ClusterEnv

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    if in_pod and "JOB_COMPLETION_INDEX" not in os.environ:
        # A pod of its own, which JAX takes for a job.
        return address, count, index, Gpus(None)
    detected = ClusterEnv.auto_detect_unset_distributed_params(
        address, count, index, None, None, int(timeout)
    )
    devices = detected[3]
    is_mpi = "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ
    gpus = own_gpus("mpirun" if is_mpi else "srun", list(devices or ()) or None)
    return *detected[:3], gpus


def _number(name: str, least: int = 0) -> int | None:
    """The value of an environment variable, if it is set."""
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise ValueError(
            f"the environment variable {name} is {value!r}, but must be an integer of"
            f" {least} or more."
        )
    return int(value)


def _split(address: str) -> tuple[str, int]:
    """`"host:port"` in two."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            "`coordinator_address`, or JAX_COORDINATOR_ADDRESS, must be 'host:port' of"
            f" process 0, such as '10.0.0.1:1234'; got {address!r}."
        )
    return host.strip("[]"), int(port)


def bind_host(host: str) -> str:
    """Where process 0 listens: not to other machines, if all are on this one."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return "127.0.0.1" if host == "localhost" else host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def join_address(host: str, port: int) -> str:
    """An address as JAX takes it: "[fd00::2]:77" for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
