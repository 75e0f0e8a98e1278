"""Which of how many processes this one is, by arguments or its launcher's environment.

JAX's own detection is asked last: it knows neither torchrun nor Open MPI 5, takes an
interactive shell of SLURM for a job, and has no word for what is missing, for the start
of a job, or for how many share the machine.
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

    # What is not given, the launcher's variables tell.
    absent = [name for name, value in given.items() if value is None]
    place = find_place() if absent else Place("the arguments", 0, 0, "", (), "")
    if place is None and len(absent) == len(given):
        return None
    if place is None:
        raise ValueError(
            f"`{'`, `'.join(absent)}` is not known: the environment does not come"
            " from torchrun, mpirun, srun or Kubernetes. Pass all of"
            f" {', '.join(given)}."
        )

    # What is given comes first.
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
    what starts processes before what gave it the machines: torchrun, mpirun, srun. And
    with `ask_jax` what JAX finds over the network: Kubernetes and Cloud TPUs. Raises a
    ValueError if a variable that must be there is missing or makes no sense.
    """
    environ = os.environ if environ is None else environ
    launchers = (_by_hand, _torchrun, _open_mpi, _slurm)
    for find in (*launchers, _by_jax) if ask_jax else launchers:
        place = find(environ)
        if place is not None:
            return None if place.num_processes == 1 else place
    return None


def _by_hand(environ: Mapping[str, str]) -> Place | None:
    # JOB_COMPLETION_INDEX is that of an indexed job of Kubernetes.
    numbers = [n for n in ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX") if n in environ]
    if "JAX_NUM_PROCESSES" not in environ or not numbers:
        return None  # or the launcher knows which one this is
    read = _Reader("JAX_NUM_PROCESSES", environ)
    if read.count("JAX_NUM_PROCESSES", 1) == 1:
        return Place(read.launcher, 0, 1, "", (), "")
    job = read.text(_ADDRESS, " It is 'host:port' of process 0.")
    return read.place((numbers[0], "JAX_NUM_PROCESSES"), None, job, "")


def _torchrun(environ: Mapping[str, str]) -> Place | None:
    """torchrun, and what sets its variables, such as a PyTorchJob of Kubeflow."""
    is_there = "RANK" in environ and "WORLD_SIZE" in environ
    if not is_there and "TORCHELASTIC_RUN_ID" not in environ:
        return None
    read = _Reader("torchrun", environ)
    host, port = read.text("MASTER_ADDR"), read.count("MASTER_PORT", 1)
    # MASTER_PORT itself belongs to torchrun's own store.
    first = port + 1 if port + _NUM_PORTS < 65536 else port - _NUM_PORTS
    ports = tuple(range(first, first + _NUM_PORTS))
    job = read.joined("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    job += f"/{host}/{port}"
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return read.place(("RANK", "WORLD_SIZE"), local, job, host, ports)


def _open_mpi(environ: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    read = _Reader("Open MPI's mpirun", environ, f"mpirun -x {_ADDRESS}=host:port")
    job = read.text("PMIX_NAMESPACE")
    if uri := environ.get("OMPI_MCA_orte_hnp_uri"):
        # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
        host = uri.partition("://")[2].partition(",")[0].partition(":")[0]
    else:
        # Version 5: "prterun-HOST-PID@1" is the machine that mpirun runs on.
        host = job.partition("-")[2].rpartition("-")[0]
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return read.place(ranks, local, job, host)


def _slurm(environ: Mapping[str, str]) -> Place | None:
    """srun. Not sbatch and salloc, whose own shell is one process with its variables"""
    variables = "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID"
    is_shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if is_shell or any(name not in environ for name in variables):
        return None
    read = _Reader("srun", environ)
    job = "slurm/"
    job += read.joined("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    # node001 of "node001", "node001,node7", "node[001-015],x" and "node[001,7],x".
    nodes = re.sub(r"\[(\d+)[^\]]*\]", r"\1", read.text("SLURM_STEP_NODELIST"))
    num_nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    host = "127.0.0.1" if num_nodes == "1" else nodes.partition(",")[0]
    in_step = "SLURM_STEP_NUM_TASKS" in environ  # less than the job's, perhaps
    count = "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS"

    place = read.place(("SLURM_PROCID", count), None, job, host)
    each = {"1": place.num_processes, str(place.num_processes): 1}
    local_id = read.count("SLURM_LOCALID")
    return place._replace(local_id=local_id, local_count=each.get(num_nodes))


def _by_jax(environ: Mapping[str, str]) -> Place | None:
    """Cloud TPUs and indexed jobs of Kubernetes, whose services JAX asks."""
    from jax._src import cloud_tpu_init
    from jax._src.clusters import ClusterEnv

    is_indexed = "KUBERNETES_SERVICE_HOST" in environ
    is_indexed = is_indexed and "JOB_COMPLETION_INDEX" in environ
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
    host, port = split_address(address, _ADDRESS)
    return Place("JAX", process_id, num_processes, host, (port,), address)


def _ports_of(job: str) -> tuple[int, ...]:
    """Ports that hardly another job has, above those that Linux hands out by itself."""
    digest = int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")
    first = 61000 + digest % (65536 - 61000 - _NUM_PORTS)
    return tuple(range(first, first + _NUM_PORTS))


class _Reader(NamedTuple):
    """Reads the variables of a launcher, and says which of them is wrong."""

    launcher: str
    environ: Mapping[str, str]
    remedy: str = ""
    """How to pass the address of process 0, where the launcher may not say it."""

    def joined(self, *names: str) -> str:
        return "/".join(self.environ.get(name, "") for name in names)

    def text(self, name: str, remedy: str = "") -> str:
        if not self.environ.get(name):
            raise ValueError(
                f"{self.launcher} was found in the environment, but the variable {name}"
                f" is not set.{remedy}"
            )
        return self.environ[name]

    def count(self, name: str, least: int = 0) -> int:
        value = self.text(name)
        if not value.isdecimal() or int(value) < least:
            raise ValueError(
                f"{self.launcher} was found in the environment; its variable"
                f" {name} is {value!r}, but must be an integer of {least} or more."
            )
        return int(value)

    def place(
        self,
        ranks: tuple[str, str],
        local: tuple[str, str] | None,
        job: str,
        host: str,
        ports: tuple[int, ...] = (),
    ) -> Place:
        """The place that a launcher gives, unless the user has chosen the address.

        `ranks` are the variables of its number and of how many there are, `local` of
        the same on this machine. `job` names this start of the job; `host` is that of
        process 0, or "" if the launcher does not say.
        """
        process_id, num_processes = self.count(ranks[0]), self.count(ranks[1], 1)
        local_id = local_count = None
        if local is not None and all(name in self.environ for name in local):
            local_id, local_count = self.count(local[0]), self.count(local[1], 1)
        if local_count == num_processes:
            host = "127.0.0.1"
        ports = ports or _ports_of(job)
        if address := self.environ.get(_ADDRESS):
            host, port = split_address(address, _ADDRESS)
            ports = (port,)
        if not host:
            raise ValueError(
                f"{self.launcher} does not say where process 0 runs; pass its address:"
                f" {self.remedy}."
            )
        here = self.launcher, process_id, num_processes
        return Place(*here, host, ports, job, local_id, local_count)


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
