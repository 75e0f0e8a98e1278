"""Which of how many processes this one is, by arguments or its launcher's environment.

JAX's own detection is asked last: it knows neither torchrun nor Open MPI 5, takes an
interactive shell of SLURM for a job, and has no word for the start of a job, or for how
many share the machine.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_NUM_PORTS: Final = 8
"""How many ports are tried where nobody has chosen one."""

Environ = Mapping[str, str]


class Place(NamedTuple):
    """One process among those of a job; what is not known yet is as it is here."""

    launcher: str = "JAX_NUM_PROCESSES"
    process_id: int = -1
    num_processes: int = 0
    host: str = ""
    """Where process 0 is, as the others reach it."""
    ports: tuple[int, ...] = ()
    """Of `host`, in the order in which they are tried."""
    job: str = ""
    """The same for all processes of this start of the job, and for no others."""
    local_id: int | None = None
    """Which one of this machine's processes it is."""
    local_count: int | None = None

    @property
    def is_on_one_host(self) -> bool:
        return self.local_count == self.num_processes


def find_place(
    address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    environ: Environ | None = None,
    ask_jax: bool = True,
) -> Place | None:
    """This process's place, or None if it was plainly started alone.

    Arguments come first, then what the user has set in the environment, and last what
    the launcher has set there. With `ask_jax` also what JAX finds over the network.

    Raises:
        ValueError: if something is missing or makes no sense.
    """
    environ = os.environ if environ is None else environ
    is_told = any(each is not None for each in (address, num_processes, process_id))

    # What the user says.
    if address is None:
        address = environ.get("JAX_COORDINATOR_ADDRESS") or None
    if num_processes is None:
        num_processes = _number(environ, "JAX_NUM_PROCESSES", 1)
    if process_id is None:
        process_id = _number(environ, "JAX_PROCESS_ID")
    if process_id is None and num_processes is not None:
        process_id = _number(environ, "JOB_COMPLETION_INDEX")  # Kubernetes
    if num_processes == 1:
        return None

    # What the launcher says, unless that is all.
    launched = None
    if address is None or num_processes is None or process_id is None:
        launched = _launched(environ, ask_jax)
    place = launched or Place()
    if num_processes is not None:
        place = place._replace(num_processes=num_processes, local_count=None)
    if process_id is not None:
        place = place._replace(process_id=process_id, local_id=None)
    if address is not None:
        host, port = split_address(address)
        place = place._replace(host=host, ports=(port,))
    elif place.is_on_one_host:
        place = place._replace(host="127.0.0.1")

    if place.num_processes == 1:
        return None
    absent = {
        "coordinator_address": not place.host,
        "num_processes": not place.num_processes,
        "process_id": place.process_id < 0,
    }
    is_unknown = absent["num_processes"] or absent["process_id"]
    if is_unknown and launched is None and not is_told:
        return None
    if any(absent.values()):
        names = "`, `".join(name for name, is_absent in absent.items() if is_absent)
        raise ValueError(
            f"`{names}` is not known: it was not passed, and the environment (that of"
            " torchrun, mpirun, srun or Kubernetes) does not say it. Pass all of"
            f" {', '.join(absent)}, or set JAX_COORDINATOR_ADDRESS=host:port,"
            " JAX_NUM_PROCESSES and JAX_PROCESS_ID for every process, as `mpirun -x"
            " JAX_COORDINATOR_ADDRESS=host:port` does."
        )
    if not 0 <= place.process_id < place.num_processes:
        raise ValueError(
            f"`process_id` must be from 0 to {place.num_processes - 1}, for"
            f" `num_processes`={place.num_processes}; got {place.process_id}."
        )
    return place


def _launched(environ: Environ, ask_jax: bool) -> Place | None:
    """What starts processes comes before what gave it the machines."""
    for find in (_torchrun, _open_mpi, _slurm):
        place = find(environ)
        if place is not None:
            return place._replace(ports=place.ports or _ports_of(place.job))
    return _by_jax(environ) if ask_jax else None


def _torchrun(environ: Environ) -> Place | None:
    """torchrun, and what sets its variables, such as a PyTorchJob of Kubeflow."""
    is_there = "RANK" in environ and "WORLD_SIZE" in environ
    if not is_there and "TORCHELASTIC_RUN_ID" not in environ:
        return None
    # MASTER_PORT itself belongs to torchrun's own store.
    port = _number(environ, "MASTER_PORT", 1) or 0
    first = port + 1 if port + _NUM_PORTS < 65536 else port - _NUM_PORTS
    names = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
    return Place(
        "torchrun",
        *_numbers(environ, "RANK", "WORLD_SIZE"),
        environ.get("MASTER_ADDR", ""),
        tuple(range(first, first + _NUM_PORTS)) if port else (),
        _joined(environ, *names, "MASTER_ADDR", "MASTER_PORT"),
        _number(environ, "LOCAL_RANK"),
        _number(environ, "LOCAL_WORLD_SIZE"),
    )


def _open_mpi(environ: Environ) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    job = environ.get("PMIX_NAMESPACE", "")
    if uri := environ.get("OMPI_MCA_orte_hnp_uri"):
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
        host = uri.partition("://")[2].partition(",")[0].partition(":")[0]
    else:
        # Version 5: "prterun-HOST-PID@1" is the machine that mpirun runs on.
        host = job.partition("-")[2].rpartition("-")[0]
    return Place(
        "mpirun",
        *_numbers(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        host,
        (),
        job,
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _slurm(environ: Environ) -> Place | None:
    """srun. Not sbatch and salloc, whose own shell is one process with its variables"""
    is_shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if is_shell or "SLURM_STEP_NODELIST" not in environ:
        return None
    # node001 of "node001", "node001,node7", "node[001-015],x" and "node[001,7],x".
    nodes = re.sub(r"\[(\d+)[^\]]*\]", r"\1", environ["SLURM_STEP_NODELIST"])
    in_step = "SLURM_STEP_NUM_TASKS" in environ  # less than the job's, perhaps
    count = "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS"
    # "8(x2),7" is eight on each of two, and seven on the last.
    on_nodes = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    each = re.findall(r"\d+", re.sub(r"\(x\d+\)", "", on_nodes))
    return Place(
        "srun",
        *_numbers(environ, "SLURM_PROCID", count),
        nodes.partition(",")[0],
        (),
        _joined(environ, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        _number(environ, "SLURM_LOCALID"),
        max(map(int, each), default=None),
    )


def _by_jax(environ: Environ) -> Place | None:
    """Cloud TPUs and indexed jobs of Kubernetes, whose services JAX asks."""
    from jax._src import cloud_tpu_init
    from jax._src.clusters import ClusterEnv

    is_indexed = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys()
    if not (cloud_tpu_init.running_in_cloud_tpu_vm or is_indexed):
        return None
    address, num_processes, process_id, _ = (
        ClusterEnv.auto_detect_unset_distributed_params(*[None] * 6)
    )
    if address is None or num_processes is None or process_id is None:
        raise ValueError(
            "JOB_COMPLETION_INDEX comes from an indexed job of Kubernetes, but"
            " the address of process 0 was not found: set JAX_COORDINATOR_ADDRESS"
            " and JAX_NUM_PROCESSES in the manifest, or ask the cluster by"
            " installing jax[k8s]. If every pod trains for itself, pass"
            " `num_processes=1`."
        )
    host, port = split_address(address)
    return Place("JAX", process_id, num_processes, host, (port,), address)


def _numbers(environ: Environ, index: str, count: str) -> tuple[int, int]:
    """Which process this is, and of how many; unknown where it is not set."""
    which, of = _number(environ, index), _number(environ, count, 1)
    return -1 if which is None else which, of or 0


def _number(environ: Environ, name: str, least: int = 0) -> int | None:
    """The value of a variable, if it is set."""
    value = environ.get(name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise ValueError(
            f"the environment variable {name} is {value!r}, but must be an integer of"
            f" {least} or more."
        )
    return int(value)


def _joined(environ: Environ, *names: str) -> str:
    return "/".join(environ.get(name, "") for name in names)


def _ports_of(job: str) -> tuple[int, ...]:
    """Ports that hardly another job has, above those that Linux hands out by itself."""
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    first = 61000 + digest % (65536 - 61000 - _NUM_PORTS)
    return tuple(range(first, first + _NUM_PORTS))


def split_address(address: str) -> tuple[str, int]:
    """`"host:port"` in two."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            "`coordinator_address`, or JAX_COORDINATOR_ADDRESS, must be 'host:port' of"
            f" process 0, such as '10.0.0.1:1234'; got {address!r}."
        )
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
