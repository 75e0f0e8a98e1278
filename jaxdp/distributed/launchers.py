"""Detects the rank of this process and its GPUs, from torchrun or by JAX."""

import glob
import os
import re
import socket
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

_COUNTS: Final = {
    "torchrun": "WORLD_SIZE",
    "srun": "SLURM_STEP_NUM_TASKS",
    "mpirun": "OMPI_COMM_WORLD_SIZE",
    "JAX_NUM_PROCESSES": "JAX_NUM_PROCESSES",
}
"""The variable in which a launcher passes the number of processes."""

_LOCAL: Final = {
    "torchrun": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "srun": ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
"""The variables in which a launcher passes the local rank of a process on its machine,
and the number of processes there."""


class RankInfo(NamedTuple):
    """The rank of a process in its job, and how it reaches process 0."""

    index: int
    count: int
    host: str
    """The host of process 0, as the others reach it."""
    port: int
    devices: Sequence[int] | None = None
    """The GPUs of its machine that this process uses; None: all that it sees."""

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


def detect_rank(
    address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> RankInfo | None:
    """Returns the rank of this process, or None if it was started alone.

    Arguments take precedence over JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, these over torchrun, and torchrun over what JAX detects.

    Raises:
        ValueError: if something is missing or makes no sense.
    """
    is_asked = (address, num_processes, process_id) != (None, None, None)
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    if num_processes is None:
        num_processes = _read_int_variable("JAX_NUM_PROCESSES", 1)
    if process_id is None:
        process_id = _read_int_variable("JAX_PROCESS_ID")
    if process_id is None and num_processes is not None:
        process_id = _read_int_variable("JOB_COMPLETION_INDEX")  # Kubernetes
    if num_processes == 1:
        return None

    devices = None
    if None in (address, num_processes, process_id):
        detected = _detect_torchrun() or _detect_by_jax(
            address, num_processes, process_id, timeout
        )
        address = address or detected[0]
        num_processes = num_processes or detected[1]
        if process_id is None:
            process_id, devices = detected[2:]

    if num_processes == 1:
        return None
    if num_processes is None and not is_asked and detect_launcher() is None:
        return None
    if address is None or num_processes is None or process_id is None:
        names = "coordinator_address", "num_processes", "process_id"
        known = zip(names, (address, num_processes, process_id), strict=True)
        absent = [name for name, value in known if value is None]
        raise ValueError(
            f"`{'`, `'.join(absent)}` is not known: it was not passed, and the"
            " environment (that of torchrun, or what JAX detects: SLURM, Open MPI 4,"
            f" TPUs, Kubernetes) does not say it. Pass all of {', '.join(names)}, or"
            " set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and"
            " JAX_PROCESS_ID for every process."
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"`process_id` must be from 0 to {num_processes - 1}, for"
            f" `num_processes`={num_processes}; got {process_id}."
        )
    host, port = _split_address(address)
    return RankInfo(process_id, num_processes, host, port, devices)


def detect_launcher() -> tuple[str, int] | None:
    """Returns the launcher that has started several processes, and their number."""
    for launcher, name in _COUNTS.items():
        value = os.environ.get(name, "")
        is_used = launcher != "torchrun" or "RANK" in os.environ
        if is_used and value.isdecimal() and int(value) > 1:
            return launcher, int(value)
    return None


_Launched = tuple[str | None, int | None, int | None, list[int] | None]
"""The address, the number of processes, the index, and its GPUs."""


def _detect_torchrun() -> _Launched | None:
    """Reads the variables of torchrun, which a PyTorchJob of Kubeflow sets as well."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    count, local_count, port = (
        _read_int_variable(name, 1)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    )
    host = "127.0.0.1" if count == local_count else os.environ.get("MASTER_ADDR")
    # MASTER_PORT itself belongs to torchrun's store. Linux assigns no port of this
    # range by itself, and another job gets another one.
    address = None if host is None or port is None else f"{host}:{61440 + port % 4096}"
    local = _read_int_variable("LOCAL_RANK")
    devices = None if local is None or local_count == 1 else [local]
    gpus = _choose_local_gpus("torchrun", devices)
    return address, count, _read_int_variable("RANK"), gpus


def _detect_by_jax(
    address: str | None, count: int | None, index: int | None, timeout: float
) -> _Launched:
    from jax._src.clusters import ClusterEnv

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    if in_pod and "JOB_COMPLETION_INDEX" not in os.environ:
        # JAX would take a single pod for a job.
        return address, count, index, None
    detect: Any = ClusterEnv.auto_detect_unset_distributed_params
    address, count, index, devices, *_ = detect(
        address, count, index, None, None, int(timeout)
    )
    launcher = "mpirun" if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ else "srun"
    gpus = _choose_local_gpus(launcher, list(devices or ()) or None)
    return address, count, index, gpus


def _choose_local_gpus(launcher: str, by_default: list[int] | None) -> list[int] | None:
    """Divides the GPUs of a machine evenly among its processes.

    Returns:
        The GPUs of this process, by their indices among those that CUDA shows; None
        for all.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = glob.glob("/dev/nvidia[0-9]*") if visible is None else visible.split(",")
    num_gpus = len([gpu for gpu in shown if gpu.strip() not in ("", "-1")])
    if visible is not None and num_gpus < 2:
        return None  # the launcher has chosen
    local, counts = (os.environ.get(name, "") for name in _LOCAL[launcher])
    # SLURM lists the processes of each machine, "8(x2),4": usable if all are equal.
    each = {re.sub(r"\(x\d+\)", "", part) for part in counts.split(",")}
    if len(each) > 1 or not all(map(str.isdecimal, (local, *each))) or num_gpus == 0:
        return by_default
    index, count = int(local), int(each.pop())
    # With more processes than GPUs, some indices have no GPU, and JAX refuses these.
    share = max(num_gpus // count, 1)
    return None if count == 1 else [*range(index * share, (index + 1) * share)]


def _read_int_variable(name: str, least: int = 0) -> int | None:
    """Returns the value of an environment variable, if it is set."""
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise ValueError(
            f"the environment variable {name} is {value!r}, but must be an integer of"
            f" {least} or more."
        )
    return int(value)


def _split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            "`coordinator_address`, or JAX_COORDINATOR_ADDRESS, must be 'host:port' of"
            f" process 0, such as '10.0.0.1:1234'; got {address!r}."
        )
    return host.strip("[]"), int(port)


def choose_bind_host(host: str) -> str:
    """Returns the address that process 0 binds: local if all are on its machine."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return "127.0.0.1" if host == "localhost" else host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def join_address(host: str, port: int) -> str:
    """Returns an address as JAX takes it: "[fd00::2]:77" for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
