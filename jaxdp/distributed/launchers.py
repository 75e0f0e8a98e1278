"""Which of how many processes this one is, by arguments or its launcher's environment.

JAX's own detection is asked last. It knows neither torchrun nor Open MPI 5, takes an
interactive shell of SLURM for a job, and has no word for what is missing, for which
start of a job this is, or for how many processes share the machine.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_NUM_PORTS: Final = 8
"""How many ports are tried where the launcher names none for us."""

_ADDRESS: Final = "JAX_COORDINATOR_ADDRESS"


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


def choose_place(
    address: str | None, num_processes: int | None, process_id: int | None
) -> Place | None:
    """The place by the arguments, and by the environment where they leave it open."""
    if num_processes == 1:
        return None
    given = {
        "coordinator_address": address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    absent = [name for name, value in given.items() if value is None]
    place = find_place() if absent else Place("the arguments", 0, 0, "", (), "")
    if place is None and len(absent) == len(given):
        return None
    if place is None:
        raise ValueError(
            f"`{'`, `'.join(absent)}` can't be found out: the environment is not that"
            " of torchrun, mpirun, srun or Kubernetes. Pass all of"
            " `coordinator_address`, `num_processes` and `process_id`."
        )
    if num_processes is not None:
        place = place._replace(num_processes=num_processes, local_count=None)
    if process_id is not None:
        place = place._replace(process_id=process_id, local_id=None)
    if address is not None:
        host, port = split_address(address, "coordinator_address")
        place = place._replace(host=host, ports=(port,))
    if not 0 <= place.process_id < place.num_processes:
        raise ValueError(
            f"`process_id` must be from 0 to {place.num_processes - 1}, for"
            f" `num_processes`={place.num_processes}; got {place.process_id}."
        )
    return place


def find_place(
    environ: Mapping[str, str] | None = None, *, ask_jax: bool = True
) -> Place | None:
    """This process's place by the environment, or None if it was plainly started alone.

    What the user has set comes first: `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Then
    what starts processes before what gave it the machines: torchrun, mpirun, srun.

    Args:
        environ: `os.environ` by default.
        ask_jax: whether to go on to what only JAX knows to find, over the network:
            indexed jobs of Kubernetes and Cloud TPUs.

    Raises:
        ValueError: if a variable that must be there is missing or makes no sense.
    """
    environ = os.environ if environ is None else environ
    launchers = (_by_hand, _torchrun, _open_mpi, _mpich, _slurm)
    for find in (*launchers, _by_jax) if ask_jax else launchers:
        place = find(_Environment(environ))
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


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Environment:
    """Reads the variables of a launcher, and says which of them is wrong.

    Attributes:
        launcher: what it is called in errors; set once it is found.
    """

    def __init__(self, environ: Mapping[str, str]):
        self.environ = environ
        self.launcher = ""

    def has(self, *names: str) -> bool:
        return all(name in self.environ for name in names)

    def get(self, name: str) -> str:
        return self.environ.get(name, "")

    def text(self, name: str, remedy: str = "") -> str:
        if not self.get(name):
            raise ValueError(
                f"{self.launcher} was found in the environment, but the variable {name}"
                f" is not set.{remedy}"
            )
        return self.environ[name]

    def count(self, name: str, least: int = 0) -> int:
        value = self.text(name)
        if not value.isdecimal() or int(value) < least:
            raise ValueError(
                f"{self.launcher} was found in the environment, but its variable {name}"
                f" is {value!r}, and must be an integer of {least} or more."
            )
        return int(value)

    def ranks(self, process: str, count: str) -> tuple[int, int]:
        """The number of a process, and how many there are, from these variables."""
        num_processes, process_id = self.count(count, 1), self.count(process)
        if process_id >= num_processes:
            raise ValueError(
                f"{self.launcher}: the variable {process} is {process_id}, and must be"
                f" less than {count}, which is {num_processes}."
            )
        return process_id, num_processes

    def place(
        self,
        ranks: tuple[str, str],
        local: tuple[str, str],
        job: str,
        host: str,
        ports: tuple[int, ...] = (),
        remedy: str = "",
    ) -> Place:
        """The place that a launcher gives, unless the user has chosen the address.

        Args:
            ranks: the variables for `self.ranks`.
            local: the same for the processes of this machine.
            job: names this start of the job.
            host: of process 0; "" if the launcher does not say.
            ports: of `host`; by default such as hardly another job has.
            remedy: how to pass an address where there is no `host`.
        """
        here = self.ranks(*ranks)
        on_machine = self.ranks(*local) if self.has(*local) else (None, None)
        if on_machine[1] == here[1]:
            host = "127.0.0.1"
        ports = ports or _ports_of(job)
        if address := self.get(_ADDRESS):
            host, port = split_address(address, _ADDRESS)
            ports = (port,)
        if not host:
            raise ValueError(
                f"{self.launcher} does not say where process 0 runs; pass its address:"
                f" {remedy}."
            )
        return Place(self.launcher, *here, host, ports, job, *on_machine)


def _by_hand(read: _Environment) -> Place | None:
    # JOB_COMPLETION_INDEX is that of an indexed job of Kubernetes.
    numbers = [n for n in ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX") if read.has(n)]
    if not read.has("JAX_NUM_PROCESSES") or not numbers:
        return None  # or the launcher knows which one this is
    read.launcher, ranks = "JAX_NUM_PROCESSES", (numbers[0], "JAX_NUM_PROCESSES")
    if read.ranks(*ranks) == (0, 1):
        return Place(read.launcher, 0, 1, "", (), "")
    job = read.text(_ADDRESS, " It is 'host:port' of process 0.")
    return read.place(ranks, ("", ""), job, "")


def _torchrun(read: _Environment) -> Place | None:
    """torchrun, and what sets its variables, such as a PyTorchJob of Kubeflow."""
    if not (read.has("RANK", "WORLD_SIZE") or read.has("TORCHELASTIC_RUN_ID")):
        return None
    read.launcher = "torchrun"
    host, port = read.text("MASTER_ADDR"), read.count("MASTER_PORT", 1)
    # MASTER_PORT itself belongs to torchrun's own store.
    first = port + 1 if port + _NUM_PORTS < 65536 else port - _NUM_PORTS
    ports = tuple(range(first, first + _NUM_PORTS))
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    job = "/".join([*map(read.get, names), host, str(port)])
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return read.place(("RANK", "WORLD_SIZE"), local, job, host, ports)


def _open_mpi(read: _Environment) -> Place | None:
    if not read.has("OMPI_COMM_WORLD_SIZE"):
        return None
    read.launcher = "Open MPI's mpirun"
    job = read.text("PMIX_NAMESPACE")
    if uri := read.get("OMPI_MCA_orte_hnp_uri"):
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
        host = uri.partition("://")[2].partition(",")[0].partition(":")[0]
    else:
        # Version 5: "prterun-HOST-PID@1" is the machine that mpirun runs on.
        host = job.partition("-")[2].rpartition("-")[0]
    return read.place(
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job,
        host,
        remedy=f"mpirun -x {_ADDRESS}=host:port",
    )


def _mpich(read: _Environment) -> Place | None:
    """mpirun of MPICH and of Intel MPI (Hydra)."""
    if not read.has("PMI_SIZE", "MPI_LOCALNRANKS"):
        return None
    read.launcher = "MPICH's mpirun"
    # Nothing names the job, but on one machine all of it are children of one process.
    job = "mpich" if read.get(_ADDRESS) else f"mpich/{os.getppid()}"
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    remedy = f"mpirun -genv {_ADDRESS} host:port"
    return read.place(("PMI_RANK", "PMI_SIZE"), local, job, "", remedy=remedy)


def _slurm(read: _Environment) -> Place | None:
    """srun. Not sbatch and salloc, whose own shell is one process with its variables"""
    if not read.has("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"):
        return None
    if read.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    read.launcher = "srun"
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job = "/".join(["slurm", *map(read.get, names)])
    # node001 of "node001", "node001,node7", "node[001-015],x" and "node[001,7],x".
    nodes = re.sub(r"\[(\d+)[^\]]*\]", r"\1", read.text("SLURM_STEP_NODELIST"))
    is_one = read.get("SLURM_STEP_NUM_NODES") == "1"
    host = "127.0.0.1" if is_one else nodes.partition(",")[0]
    in_step = read.has("SLURM_STEP_NUM_TASKS")  # less than the job's, perhaps
    count = "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS"
    place = read.place(("SLURM_PROCID", count), ("", ""), job, host)
    each = {"1": place.num_processes, str(place.num_processes): 1}
    return place._replace(
        local_id=read.count("SLURM_LOCALID"),
        local_count=each.get(read.get("SLURM_STEP_NUM_NODES")),
    )


def _by_jax(read: _Environment) -> Place | None:
    """Cloud TPUs and indexed jobs of Kubernetes, whose services JAX asks."""
    from jax._src import cloud_tpu_init
    from jax._src.clusters import ClusterEnv

    is_indexed = read.has("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")
    if not (cloud_tpu_init.running_in_cloud_tpu_vm or is_indexed):
        return None
    address, num_processes, process_id, _ = (
        ClusterEnv.auto_detect_unset_distributed_params(*[None] * 6)
    )
    if address is None or num_processes is None or process_id is None:
        raise ValueError(
            "an indexed job of Kubernetes was found in the environment"
            " (JOB_COMPLETION_INDEX), but not where process 0 is: set"
            " JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES in the manifest, or"
            " install jax[k8s] to have the cluster asked. If every pod trains for"
            " itself, pass `num_processes=1`."
        )
    host, port = split_address(address, _ADDRESS)
    return Place("JAX", process_id, num_processes, host, (port,), address)


def _ports_of(job: str) -> tuple[int, ...]:
    """Ports that hardly another job has, above those that Linux hands out by itself."""
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    first = 61000 + digest % (65536 - 61000 - _NUM_PORTS)
    return tuple(range(first, first + _NUM_PORTS))
