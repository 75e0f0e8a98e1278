"""Which of how many processes this one is, as its launcher's environment says."""

import hashlib
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

_NUM_PORTS: Final = 8
"""How many ports are tried where the launcher names none for us."""


class Place(NamedTuple):
    """One process among those of a job."""

    launcher: str
    process_id: int
    num_processes: int
    host: str
    """Where process 0 is, as the others reach it."""
    ports: tuple[int, ...]
    """Of `host`, in the order in which they are tried."""
    job: str
    """The same for all processes of this start of the job, and for no others."""
    local_id: int | None = None
    """Which one of this machine's processes it is."""
    local_count: int | None = None

    @property
    def is_on_one_host(self) -> bool:
        return self.local_count == self.num_processes


def find_place(
    environ: Mapping[str, str] | None = None, *, ask_jax: bool = True
) -> Place | None:
    """This process's place, or None if it was plainly started alone.

    What the user has set comes first: `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Then
    what starts processes before what gave it the machines: torchrun, mpirun, srun.

    Args:
        environ: `os.environ` by default.
        ask_jax: whether to go on to what only JAX knows to find, over the network:
            indexed jobs of Kubernetes and Cloud TPUs.

    Raises:
        ValueError: if a variable that must be there is missing or makes no sense.
    """
    read = _Environment(os.environ if environ is None else environ)
    launchers = (_by_hand, _torchrun, _open_mpi, _mpich, _slurm)
    for find in (*launchers, _by_jax) if ask_jax else launchers:
        place = find(read)
        if place is not None:
            return None if place.num_processes == 1 else place
    return None


def split_address(address: str, name: str) -> tuple[str, int]:
    """`"host:port"` in two; raises for what is none, calling it `name`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"`{name}` must be 'host:port', the address of process 0, such as"
            f" '10.0.0.1:1234'; got {address!r}."
        )
    return host.strip("[]"), int(port)


class _Environment:
    """Reads variables for the launcher at hand, and says which of them is wrong."""

    def __init__(self, environ: Mapping[str, str]):
        self.environ = environ

    def has(self, *names: str) -> bool:
        return all(name in self.environ for name in names)

    def get(self, name: str) -> str | None:
        return self.environ.get(name)

    def text(self, name: str, launcher: str, remedy: str = "") -> str:
        if not self.environ.get(name):
            raise ValueError(
                f"{launcher} was found in the environment, but the variable {name} is"
                f" not set.{remedy}"
            )
        return self.environ[name]

    def count(self, name: str, launcher: str, least: int = 0) -> int:
        value = self.text(name, launcher)
        if not value.isdecimal() or int(value) < least:
            raise ValueError(
                f"{launcher} was found in the environment, but its variable {name} is"
                f" {value!r}, and must be an integer of {least} or more."
            )
        return int(value)

    def ranks(self, launcher: str, process: str, count: str) -> tuple[int, int]:
        num_processes = self.count(count, launcher, 1)
        process_id = self.count(process, launcher)
        if process_id >= num_processes:
            raise ValueError(
                f"{launcher}: the variable {process} is {process_id}, and must be less"
                f" than {count}, which is {num_processes}."
            )
        return process_id, num_processes

    def locals(
        self, launcher: str, process: str, count: str
    ) -> tuple[int | None, int | None]:
        if not self.has(process, count):
            return None, None
        return self.ranks(launcher, process, count)

    def given_address(self) -> tuple[str, tuple[int, ...]] | None:
        """What the user has chosen, whatever the launcher."""
        address = self.get("JAX_COORDINATOR_ADDRESS")
        if not address:
            return None
        host, port = split_address(address, "JAX_COORDINATOR_ADDRESS")
        return host, (port,)


def _by_hand(read: _Environment) -> Place | None:
    if not read.has("JAX_NUM_PROCESSES"):
        return None
    launcher = "JAX_NUM_PROCESSES"
    if read.has("JAX_PROCESS_ID"):
        number = "JAX_PROCESS_ID"
    elif read.has("JOB_COMPLETION_INDEX"):  # of Kubernetes
        number = "JOB_COMPLETION_INDEX"
    else:
        return None  # the launcher knows
    process_id, num_processes = read.ranks(launcher, number, "JAX_NUM_PROCESSES")
    if num_processes == 1:
        return Place(launcher, 0, 1, "", (), "")
    address = read.text(
        "JAX_COORDINATOR_ADDRESS", launcher, " It is 'host:port' of process 0."
    )
    host, port = split_address(address, "JAX_COORDINATOR_ADDRESS")
    return Place(launcher, process_id, num_processes, host, (port,), address)


def _torchrun(read: _Environment) -> Place | None:
    """torchrun, and what sets its variables, such as a PyTorchJob of Kubeflow."""
    if not (read.has("RANK", "WORLD_SIZE") or read.has("TORCHELASTIC_RUN_ID")):
        return None
    process_id, num_processes = read.ranks("torchrun", "RANK", "WORLD_SIZE")
    local_id, local_count = read.locals("torchrun", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    host = read.text("MASTER_ADDR", "torchrun")
    port = read.count("MASTER_PORT", "torchrun", 1)
    # MASTER_PORT itself belongs to torchrun's own store.
    first = port + 1 if port + _NUM_PORTS < 65536 else port - _NUM_PORTS
    ports = tuple(range(first, first + _NUM_PORTS))
    if local_count == num_processes:
        host = "127.0.0.1"
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR")
    job = "/".join([*(read.get(name) or "" for name in names), str(port)])
    host, ports = read.given_address() or (host, ports)
    return Place(
        "torchrun", process_id, num_processes, host, ports, job, local_id, local_count
    )


def _open_mpi(read: _Environment) -> Place | None:
    if not read.has("OMPI_COMM_WORLD_SIZE"):
        return None
    launcher = "Open MPI's mpirun"
    process_id, num_processes = read.ranks(
        launcher, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    )
    local_id, local_count = read.locals(
        launcher, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    )
    job = read.text("PMIX_NAMESPACE", launcher)
    if local_count == num_processes:
        host = "127.0.0.1"
    elif uri := read.get("OMPI_MCA_orte_hnp_uri"):
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
        host = uri.partition("://")[2].partition(",")[0].partition(":")[0]
    else:
        # Version 5: "prterun-HOST-PID@1" is the machine that mpirun runs on.
        host = job.partition("-")[2].rpartition("-")[0]
    address = read.given_address()
    if address is None and not host:
        raise ValueError(
            f"{launcher} does not say in PMIX_NAMESPACE={job!r} where it runs; pass"
            " the address of process 0: mpirun -x JAX_COORDINATOR_ADDRESS=host:port."
        )
    host, ports = address or (host, _ports_of(job))
    return Place(
        launcher, process_id, num_processes, host, ports, job, local_id, local_count
    )


def _mpich(read: _Environment) -> Place | None:
    """mpirun of MPICH and of Intel MPI (Hydra)."""
    if not read.has("PMI_SIZE", "MPI_LOCALNRANKS"):
        return None
    launcher = "MPICH's mpirun"
    process_id, num_processes = read.ranks(launcher, "PMI_RANK", "PMI_SIZE")
    local_id, local_count = read.locals(launcher, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    address, job = read.given_address(), "mpich"
    if address is None and local_count != num_processes:
        raise ValueError(
            f"{launcher} does not say where process 0 runs; pass its address: mpirun"
            " -genv JAX_COORDINATOR_ADDRESS host:port."
        )
    if address is None:
        # Nothing names the job, but all of its processes are children of one.
        job = f"mpich/{os.getppid()}"
        address = "127.0.0.1", _ports_of(job)
    host, ports = address
    return Place(
        launcher, process_id, num_processes, host, ports, job, local_id, local_count
    )


def _slurm(read: _Environment) -> Place | None:
    """srun. Not sbatch and salloc, whose own shell is one process with its variables"""
    if not read.has("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"):
        return None
    if read.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    in_step = read.has("SLURM_STEP_NUM_TASKS")  # less than the job's, perhaps
    count = "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS"
    process_id, num_processes = read.ranks("srun", "SLURM_PROCID", count)
    nodes = None
    if read.has("SLURM_STEP_NUM_NODES"):
        nodes = read.count("SLURM_STEP_NUM_NODES", "srun", 1)
    local_count = {1: num_processes, num_processes: 1}.get(nodes or 0)
    local_id = read.count("SLURM_LOCALID", "srun")
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job = "/".join(["slurm", *(read.get(name) or "" for name in names)])
    host = _first_node(read.text("SLURM_STEP_NODELIST", "srun"))
    host, ports = read.given_address() or (
        "127.0.0.1" if nodes == 1 else host,
        _ports_of(job),
    )
    return Place(
        "srun", process_id, num_processes, host, ports, job, local_id, local_count
    )


def _first_node(nodes: str) -> str:
    """node001 of "node001", "node001,node7", "node[001-015],x" and "node[001,7],x"."""
    prefix, bracket, rest = nodes.partition("[")
    if "," in prefix or not bracket:
        return prefix.partition(",")[0]
    digits = rest.partition("]")[0].partition(",")[0].partition("-")[0]
    return prefix + digits + rest.partition("]")[2].partition(",")[0]


def _by_jax(read: _Environment) -> Place | None:
    """Cloud TPUs and indexed jobs of Kubernetes, whose services JAX asks."""
    from jax._src import cloud_tpu_init
    from jax._src.clusters import ClusterEnv

    is_indexed = read.has("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
    if not (cloud_tpu_init.running_in_cloud_tpu_vm or is_indexed):
        return None
    address, num_processes, process_id, _ = (
        ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, None
        )
    )
    if address is None or num_processes is None or process_id is None:
        raise ValueError(
            "an indexed job of Kubernetes was found in the environment"
            " (JOB_COMPLETION_INDEX), but not where process 0 is: set"
            " JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES in the manifest, or"
            " install jax[k8s] to have the cluster asked. If every pod trains for"
            " itself, pass `num_processes=1`."
        )
    host, port = split_address(address, "JAX_COORDINATOR_ADDRESS")
    return Place("JAX", process_id, num_processes, host, (port,), address)


def _ports_of(job: str) -> tuple[int, ...]:
    """Ports that hardly another job has, above those that Linux hands out by itself."""
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    first = 61000 + digest % (65536 - 61000 - _NUM_PORTS)
    return tuple(range(first, first + _NUM_PORTS))
