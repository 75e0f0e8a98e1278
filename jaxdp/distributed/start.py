"""Connects this process to the others of its job.

    import jaxdp

    jaxdp.distributed.initialize()   # first, before anything touches a device
    ...
    Trainer(model).fit(loader)

The rank comes from torchrun, or from what JAX detects. Started alone, the same script
trains alone.
"""

import math
import os
from collections.abc import Sequence

import jax

from ..basics.arguments import check_number
from ..basics.console import log_info
from ..basics.process import is_imported_by_a_worker
from .launchers import choose_bind_host, detect_launcher, detect_rank, join_address
from .rendezvous import exchange_ranks
from .signals import install_exit_hooks

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

    From then on, an uncaught exception is printed and ends the process by
    `os._exit`; if a process dies, JAX ends the others after `heartbeat_timeout`, and a
    launcher such as torchrun at once. None exits with code 0. Nothing is authenticated,
    so the network must be trusted. See docs/reference/processes.md.

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
    check_number("initialization_timeout", initialization_timeout, above=0)
    check_number("heartbeat_timeout", heartbeat_timeout, above=0)
    check_number("shutdown_timeout", shutdown_timeout, above=0)
    rank = detect_rank(
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
    bind = coordinator_bind_address or choose_bind_host(rank.host)
    exchange_ranks(rank, initialization_timeout, bind)
    install_exit_hooks()
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
    if jax.devices()[0].platform == "gpu" and is_shared and rank.devices:
        numbers = ", ".join(map(str, rank.devices))
        log_info(
            f"process {rank.index} of {rank.count} uses, of the GPUs of its machine,"
            f" {numbers} (`local_device_ids` or JAX_LOCAL_DEVICE_IDS changes it)",
            all_processes=True,
        )


def find_missing_initialize() -> str | None:
    """Returns a warning if a launcher has started processes that are not connected."""
    is_started = jax.distributed.is_initialized() or _is_alone_on_purpose
    launched = detect_launcher()
    if is_started or is_imported_by_a_worker() or launched is None:
        return None
    return (
        f"{launched[0]} started {launched[1]} processes, and this one trains alone, as"
        " each of them does. Call `jaxdp.distributed.initialize()` at the top of the"
        " script to train together, or `jaxdp.distributed.initialize(num_processes=1)`"
        " if that is meant."
    )
