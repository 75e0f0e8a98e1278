"""Starting as one of several processes, and ending at once by an exception.

    import jaxdp

    jaxdp.distributed.initialize()   # first, before anything touches a device
    ...
    Trainer(model).fit(loader)

Under torchrun, and what JAX detects, this finds out which process it is. Started alone,
the same script trains alone.

JAX ends a process without an exception where another one is missing or a port is taken.
So there is a roll call before: process 0 listens where JAX's service will be; each
other one sends it a line of JSON and gets one back when all are there. Then nothing
listens any more. Like JAX's service it asks for no credentials.
"""

import contextlib
import glob
import json
import math
import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax

from ..basics.arguments import check_number
from ..basics.console import listed, say
from ..basics.environment import versions
from ..basics.files import check_fields, parse_json
from ..basics.process import is_imported_by_a_worker
from .signals import end_at_once_by_exceptions

_PATIENCE: Final = 10.0  # seconds after which it is said who is missing
_MORE_TIME: Final = 3.0  # in which processes may still come to hear what is wrong
_SILENCE: Final = 1.0  # in which a caller must have shown its card
_MOST_BYTES: Final = 4096  # of a line; who sends more is none of us

_CARD: Final = {"job": str, "process": int, "of": int, "name": str, "facts": dict}
_ANSWER: Final = {"job": str, "wrong": str, "missing": str}

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


_is_alone_on_purpose = False


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    initialization_timeout: float = 300.0,
    heartbeat_timeout: float = 100.0,
    shutdown_timeout: float = 300.0,
    coordinator_bind_address: str | None = None,
) -> None:
    """Joins the other processes of this job; does nothing if there are none.

    Call it before anything uses a device, and after any `jax.config.update`. Arguments
    that you leave out come from the launcher's environment. A second call does nothing.

    From then on, an exception that nobody catches is printed and ends the process by
    `os._exit`; if a process dies, JAX ends the others after `heartbeat_timeout`, and a
    launcher such as torchrun at once. None exits with code 0: see docs/failures.md.
    Nothing is authenticated, so the network must be trusted.

    Args:
        coordinator_address: "host:port" of process 0, the same for all.
        num_processes: how many there are; 1 trains alone, whatever the environment
            says.
        process_id: the number of this process, from 0.
        local_device_ids: which GPUs of its machine this process uses. By default, the
            processes of a machine share its GPUs evenly, and each says which it has.
        initialization_timeout: seconds that processes wait for each other to start.
        heartbeat_timeout: seconds without a sign of life after which JAX takes a
            process for dead, and ends the others.
        shutdown_timeout: seconds that a process waits for the others when it is done.
        coordinator_bind_address: the address that process 0 listens at; all of its
            machine's by default, or 127.0.0.1 if all processes are on one machine.

    Raises:
        ValueError: if arguments and environment do not give the process's number.
        OSError: if process 0 can't listen at its address.
        TimeoutError: if a process is missing; the message says which.
        RuntimeError: if the processes don't belong together, or JAX has begun already.
    """
    global _is_alone_on_purpose
    if jax.distributed.is_initialized() or is_imported_by_a_worker():
        return
    timeouts = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout": heartbeat_timeout,
        "shutdown_timeout": shutdown_timeout,
    }
    for name, seconds in timeouts.items():
        check_number(name, seconds, above=0)

    rank = find_rank(
        coordinator_address, num_processes, process_id, initialization_timeout
    )
    if rank is None:
        _is_alone_on_purpose = True
        return
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "`jaxdp.distributed.initialize()` was called after the first use of a"
            " device, when JAX can no longer join other processes; call it at the"
            " top of the script, before arrays, keys or jax.devices()."
        )

    is_shared = local_device_ids is None and not os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if is_shared:
        local_device_ids = rank.devices
    bind = coordinator_bind_address or bind_host(rank.host)
    call_the_roll(rank, _facts(), initialization_timeout, bind)
    end_at_once_by_exceptions()
    jax.distributed.initialize(
        rank.address,
        rank.count,
        rank.index,
        local_device_ids=local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(initialization_timeout),
        heartbeat_timeout_seconds=math.ceil(heartbeat_timeout),
        shutdown_timeout_seconds=math.ceil(shutdown_timeout),
        coordinator_bind_address=join_address(bind, rank.port),
    )
    # JAX's backends wait for each other too, and not for long. Now all are here.
    if jax.devices()[0].platform == "gpu" and is_shared and rank.note:
        say(rank.note, everywhere=True)


def forgotten() -> str | None:
    """A warning, if there are other processes in the environment only."""
    is_started = jax.distributed.is_initialized() or _is_alone_on_purpose
    several = _started_several()
    if is_started or is_imported_by_a_worker() or several is None:
        return None
    launcher, count = several
    return (
        f"{launcher} started {count} processes, and this one trains alone, as each of"
        " them does. Call `jaxdp.distributed.initialize()` at the top of the script to"
        " train together, or `jaxdp.distributed.initialize(num_processes=1)` if that is"
        " meant."
    )


def _facts() -> dict[str, str]:
    """What must be the same everywhere for processes to understand each other."""
    installed = versions()
    python = installed["python"].rpartition(".")[0]
    packages = {f"the version of {n}": installed[n] for n in ("jax", "jaxlib", "jaxdp")}
    return {"the version of Python": python, **packages}


def call_the_roll(rank: Rank, facts: dict[str, str], timeout: float, bind: str) -> None:
    """Waits until all processes are there, and raises unless their `facts` agree."""
    name = f"{socket.gethostname()}, pid {os.getpid()}"
    card = {"job": rank.job, "process": rank.index, "of": rank.count, "name": name}
    take_part = _as_guest if rank.index else _as_host
    answer = take_part(rank, {**card, "facts": facts}, timeout, bind)
    if answer["wrong"]:
        raise RuntimeError(f"the processes don't belong together: {answer['wrong']}.")
    if answer["missing"]:
        raise TimeoutError(
            f"after {timeout:g} s {answer['missing']} of {rank.count} not there. Was"
            f" every process started, with the address of process 0, {rank.address}?"
            " Look at their own output. `initialization_timeout` is how long to wait."
        )


def _as_host(rank: Rank, me: Any, timeout: float, bind: str) -> dict[str, str]:
    cards, wrong, missing, said = {0: me}, "", "", False
    everybody, guests = set(range(rank.count)), list[socket.socket]()
    deadline = (start := time.monotonic()) + timeout
    with _listener(rank, bind) as listener:
        while (absent := everybody - set(cards)) and time.monotonic() < deadline:
            missing = listed("process", absent)[:1000]
            if time.monotonic() > start + _PATIENCE and not said:
                said = True
                say(f"process 0 waits at {rank.address} for {missing}")
            with contextlib.suppress(TimeoutError, ConnectionError):
                guest = listener.accept()[0]
                card = _received(guest, _SILENCE, _CARD, rank.job)
                if card is None or not 0 < card["process"] < card["of"]:
                    guest.close()  # a stranger
                    continue
                guests.append(guest)
                if not wrong and (wrong := _what_is_wrong(cards, card)):
                    deadline = min(deadline, time.monotonic() + _MORE_TIME)
                cards.setdefault(card["process"], card)
    answer = {"wrong": wrong[:1000], "missing": missing if absent else ""}
    for guest in guests:
        with guest:
            _send(guest, {"job": rank.job, **answer})
    return answer


def _as_guest(rank: Rank, me: Any, timeout: float, bind: str) -> dict[str, str]:
    start, said = time.monotonic(), False
    while True:
        why = "another program, or process 0 of another job, listens there"
        try:
            with socket.create_connection((rank.host, rank.port), 5.0) as host:
                _send(host, me)
                seconds = timeout + 2 * _MORE_TIME  # process 0 has less
                answer = _received(host, seconds, _ANSWER, rank.job)
            if answer is not None:
                return answer
        except OSError as error:
            why = str(error)

        waited, who = time.monotonic() - start, f"process {rank.index} of {rank.count}"
        text = f"{who} does not reach process 0 at {rank.address}: {why}"
        if waited > timeout:
            more = "Is that its machine, and does a firewall let others in?"
            raise TimeoutError(f"{text}. {more} (`initialization_timeout`)")
        if waited > _PATIENCE and not said:
            said = True
            say(text, everywhere=True)
        time.sleep(0.1)


def _send(sock: socket.socket, message: Any) -> None:
    with contextlib.suppress(OSError):  # the other side is gone: reading tells that
        sock.sendall(json.dumps(message).encode() + b"\n")


def _received(sock: socket.socket, seconds: float, types: Any, job: str) -> Any:
    """The line of JSON of this job that comes in time, or None."""
    sock.settimeout(seconds)
    with contextlib.suppress(OSError, ValueError), sock.makefile("rb") as lines:
        message = parse_json(lines.readline(_MOST_BYTES))
        check_fields(message, types, "message")
        return message if message["job"] == job else None
    return None


def _what_is_wrong(cards: dict[int, Any], card: Any) -> str:
    """Why the one with this card can't join those that are there, or nothing."""
    me, who = cards[0], f"process {card['process']} ({card['name']})"
    if card["process"] in cards:
        return f"{who} has the number of {cards[card['process']]['name']}"
    mine, theirs = (
        {"the number of processes": c["of"], **c["facts"]} for c in (me, card)
    )
    for name in mine:
        if mine[name] != (its := theirs.get(name)):
            both = f"{mine[name]} for process 0 ({me['name']}), but {its} for {who}"
            return f"{name} is {both}; all must run the same"
    return ""


def _listener(rank: Rank, host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    options: Any = {"family": family, "dualstack_ipv6": host == "::"}
    try:  # the port of a job that has just ended is free, as for JAX's service
        server = socket.create_server((host, rank.port), backlog=rank.count, **options)
    except OSError as error:
        raise OSError(
            f"process 0 can't listen at {host}, port {rank.port}: {error}. If an"
            " earlier run has not ended, end it, or pass another"
            " `coordinator_address`='host:port' to all processes."
        ) from error
    server.settimeout(0.5)
    return server


# Which of how many processes this one is, with which GPUs: by torchrun or JAX.


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

    job, devices, note = "", None, ""
    if None in (address, num_processes, process_id):
        launched = _torchrun() or _by_jax(address, num_processes, process_id, timeout)
        address = address or launched[0]
        num_processes = num_processes or launched[1]
        if process_id is None:
            process_id, (devices, note) = launched[2:]
        job = "/".join(
            os.environ.get(f"TORCHELASTIC_{name}", "")
            for name in ("RUN_ID", "RESTART_COUNT")
        )

    if num_processes == 1:
        return None
    if num_processes is None and not is_told and _started_several() is None:
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
    host, port = _split(address)
    return Rank(process_id, num_processes, host, port, job, devices, note)


def _started_several() -> tuple[str, int] | None:
    """Which launcher has started several processes, and how many; None if none has."""
    for launcher, name in _COUNTS.items():
        value = os.environ.get(name, "")
        is_there = launcher != "torchrun" or "RANK" in os.environ
        if is_there and value.isdecimal() and int(value) > 1:
            return launcher, int(value)
    return None


_Launched = tuple[str | None, int | None, int | None, tuple[list[int] | None, str]]
"""The address, the number of processes, the index, and what `_own_gpus` gives."""


def _torchrun() -> _Launched | None:
    """torchrun, and what sets its variables, such as a PyTorchJob of Kubeflow."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    count, local_count = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1)
    is_one_machine = count == local_count
    host = "127.0.0.1" if is_one_machine else os.environ.get("MASTER_ADDR")
    # MASTER_PORT itself belongs to torchrun's own store. This port is one that Linux
    # does not hand out, and another job's is another.
    port = _number("MASTER_PORT", 1)
    address = None if host is None or port is None else f"{host}:{61440 + port % 4096}"
    local = _number("LOCAL_RANK")
    alone = None if local is None or local_count == 1 else [local]
    return address, count, _number("RANK"), _own_gpus("torchrun", alone)


def _by_jax(
    address: str | None, count: int | None, index: int | None, timeout: float
) -> _Launched:
    from jax._src.clusters import ClusterEnv

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    if in_pod and "JOB_COMPLETION_INDEX" not in os.environ:
        # A pod of its own, which JAX takes for a job.
        return address, count, index, (None, "")
    detected = ClusterEnv.auto_detect_unset_distributed_params(
        address, count, index, None, None, int(timeout)
    )
    devices = detected[3]
    is_mpi = "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ
    gpus = _own_gpus("mpirun" if is_mpi else "srun", list(devices or ()) or None)
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


def _own_gpus(
    launcher: str, by_default: list[int] | None
) -> tuple[list[int] | None, str]:
    """The share of this process, as many as each other one on its machine, by their
    numbers among those that CUDA shows; None for all. And what to say of them."""
    number, counts = (os.environ.get(name, "") for name in _LOCAL[launcher])
    # SLURM has it for each machine, "8(x2),4": known where all have as many.
    each = {re.sub(r"\(x\d+\)", "", part) for part in counts.split(",")}
    seen = _visible()
    if seen == 0:
        return None, ""  # CUDA_VISIBLE_DEVICES, being empty, says so
    is_known = len(each) == 1 and all(map(str.isdecimal, (number, *each)))
    if not is_known or seen is None:
        return by_default, ""
    local, count = int(number), int(each.pop())
    if count == 1 or (seen == 1 and "CUDA_VISIBLE_DEVICES" in os.environ):
        return None, ""  # alone, or left one by the launcher
    if count > seen:
        return [local], ""  # which JAX refuses where there is none of that number
    share = seen // count
    ids = list(range(local * share, (local + 1) * share))
    note = (
        f"process {local} of the {count} on this machine uses GPU"
        f"{'s' * (share > 1)} {', '.join(map(str, ids))} of the {seen} there are"
    )
    if left := seen - share * count:
        note += f"; {left} {'is' if left == 1 else 'are'} left over, since each must"
        note += " have as many as the others"
    return ids, f"{note} (`local_device_ids` or JAX_LOCAL_DEVICE_IDS changes it)"


def _visible() -> int | None:
    """How many GPUs CUDA shows to this process, or None if that is not known."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(glob.glob("/dev/nvidia[0-9]*")) or None
    known = [
        re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", x.strip()) for x in chosen.split(",")
    ]
    # What comes behind a wrong one does not count.
    return [*known, None].index(None)
