"""Starting as one of several processes, and ending with them.

    import jaxdp

    jaxdp.distributed.initialize()   # first, before anything touches a device
    ...
    Trainer(model).fit(loader)

Under torchrun, mpirun, srun or Kubernetes this finds out which process it is. Started
alone, the same script trains alone.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence

import jax

from ..basics.arguments import check_number
from ..basics.environment import versions
from ..basics.process import is_imported_by_a_worker, put_off_aborts
from .ending import abandon, end_with_the_others, first_line
from .launchers import Place, find_place
from .lifeline import Lifeline
from .roll_call import call_the_roll
from .signals import is_stop

_lifeline: Lifeline | None = None
_is_alone_on_purpose = False


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    initialization_timeout: float = 300.0,
    heartbeat_timeout: float = 60.0,
    shutdown_timeout: float = 300.0,
    coordinator_bind_address: str | None = None,
) -> None:
    """Joins the other processes of this job; does nothing if there are none.

    Call it before anything uses a device, and after any `jax.config.update`. Arguments
    that you leave out come from the launcher's environment. A second call does nothing.

    From then on, if a process dies or fails, the others end within seconds. They say
    which process it was, and never exit with code 0: see docs/failures.md. After an
    exception that nobody catches, the process prints its traceback and ends by
    `os._exit`. Nothing is authenticated, so the network must be trusted.

    Args:
        coordinator_address: "host:port" of process 0, the same for all.
        num_processes: how many there are; 1 trains alone, whatever the environment
            says.
        process_id: the number of this process, from 0.
        local_device_ids: which GPUs of its machine this process uses. By default, if
            several processes run on one machine, each uses the one of its local number.
        initialization_timeout: seconds that processes wait for each other to start.
        heartbeat_timeout: seconds without a sign of life after which a process counts
            as dead. A process that was killed is noticed at once.
        shutdown_timeout: seconds that a process waits for the others when it is done.
        coordinator_bind_address: the address that process 0 listens at, if it differs
            from `coordinator_address`, as behind a proxy.

    Raises:
        ValueError: if arguments and environment do not give the process's number.
        OSError: if process 0 can't listen at its address.
        TimeoutError: if a process is missing; the message says which.
        RuntimeError: if the processes don't belong together, or JAX has begun already.
    """
    global _lifeline, _is_alone_on_purpose
    if jax.distributed.is_initialized() or is_imported_by_a_worker():
        return
    timeouts = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout": heartbeat_timeout,
        "shutdown_timeout": shutdown_timeout,
    }
    for name, seconds in timeouts.items():
        check_number(name, seconds, above=0)

    place = find_place(coordinator_address, num_processes, process_id)
    if place is None:
        _is_alone_on_purpose = True
        return
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "`jaxdp.distributed.initialize()` was called after the first use of a"
            " device, when JAX can no longer join other processes; call it at the"
            " top of the script, before arrays, keys or jax.devices()."
        )

    # All are there, and from now on none dies or fails unheard.
    roll = call_the_roll(
        place, _facts(), initialization_timeout, coordinator_bind_address
    )
    _lifeline = Lifeline(place, roll, heartbeat_timeout, abandon)
    _lifeline.start()
    end_with_the_others(_lifeline)
    put_off_aborts()

    jax.distributed.initialize(
        roll.address,
        place.num_processes,
        place.process_id,
        local_device_ids=_local_devices(place, local_device_ids),
        cluster_detection_method="deactivate",
        initialization_timeout=int(initialization_timeout) + 1,
        # What JAX finds ends the process without a word: the lifeline comes first.
        heartbeat_timeout_seconds=int(heartbeat_timeout) + 15,
        shutdown_timeout_seconds=int(shutdown_timeout) + 1,
        coordinator_bind_address=roll.bind_address or None,
    )
    # JAX's backends wait for each other too, and not for long. Now all are here.
    jax.devices()


@contextlib.contextmanager
def together(doing: str) -> Iterator[None]:
    """While this lasts no other process may leave, or fail alone."""
    line = _lifeline
    if line is None or line.is_fitting:
        yield
        return
    line.where = f"in {doing}"
    line.begin_fit()
    try:
        yield
    except BaseException as error:
        line.end_fit(None if is_stop(error) else first_line(error))
        raise
    line.end_fit()
    line.where = f"after {doing}"


def lifeline() -> Lifeline | None:
    """That of this process, if `initialize` has joined it to others."""
    return _lifeline


def forgotten() -> str | None:
    """A warning, if there are other processes in the environment only."""
    is_started = jax.distributed.is_initialized() or _is_alone_on_purpose
    if is_started or is_imported_by_a_worker():
        return None
    place = None
    with contextlib.suppress(ValueError):
        place = find_place(ask_jax=False)
    if place is None:
        return None
    return (
        f"{place.launcher} started {place.num_processes} processes, and this one,"
        f" {place.process_id}, trains alone, as each of them does. Call"
        " `jaxdp.distributed.initialize()` at the top of the script to train together,"
        " or `jaxdp.distributed.initialize(num_processes=1)` if that is meant."
    )


def _facts() -> dict[str, str]:
    """What must be the same everywhere for processes to understand each other."""
    found = versions()
    python = found["python"].rpartition(".")[0]
    packages = {f"the version of {n}": found[n] for n in ("jax", "jaxlib", "jaxdp")}
    return {"the version of Python": python, **packages}


def _local_devices(
    place: Place, given: int | Sequence[int] | None
) -> int | Sequence[int] | None:
    """One GPU for each process, where several share a machine."""
    if given is not None or os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return given
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    has_one = visible and "," not in visible  # from the launcher
    if has_one or place.local_id is None or place.local_count in (None, 1):
        return None
    return [place.local_id]
