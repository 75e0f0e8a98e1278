"""The optimizer's state in the host's memory between steps."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from ..basics.host_memory import HOST, is_on_host, move_to_device
from ..step import TrainState

_SMALL: Final = 1024
"""Leaves of up to this number of elements stay on the device: to move them would save
next to nothing."""


def offload_optimizer(shardings: TrainState, state: TrainState) -> TrainState:
    """Returns the shardings with large leaves of the optimizer in host memory."""

    def move_to_host(sharding: Any, leaf: Any) -> Any:
        if leaf.size <= _SMALL:
            return sharding
        on_host = sharding.with_memory_kind(HOST)
        if on_host.memory_kind != HOST:  # JAX ignores it where there is none
            device = min(sharding.device_set, key=lambda device: device.id)
            raise ValueError(
                "`offload`='optimizer' needs devices that reach the host's memory"
                f" as {HOST!r}, which {device.device_kind} here does not. Leave"
                " `offload` out; or, to plan for GPUs, plan on a machine that has"
                " them, because their compiler does not know the host's memory"
                " elsewhere."
            )
        return on_host

    held_by = jax.tree.map(move_to_host, shardings.opt_state, state.opt_state)
    return shardings._replace(opt_state=held_by)


def jit_with_offload(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    roles: Sequence[str],
    results: str | tuple[str, ...],
    in_shardings: Sequence[Any],
    out_shardings: Any,
    donate: tuple[int, ...],
) -> Any:
    """Returns `jax.jit` of a step, whose state may be in host memory around it.

    The state is moved outside of the step: a dispatch of several steps moves it once.
    """
    if any(map(is_on_host, jax.tree.leaves(arguments))):
        state = arguments[roles.index("state")]
        of_state = jax.tree.map(lambda leaf: leaf.sharding, state)
        in_shardings = _use_state_shardings(of_state, roles, in_shardings)
        if isinstance(results, tuple):
            out_shardings = _use_state_shardings(of_state, results, out_shardings)
        function = functools.partial(_run_on_device, function)

    return jax.jit(
        function,
        in_shardings=tuple(in_shardings),
        out_shardings=out_shardings,
        donate_argnums=donate,
    )


def _run_on_device(step: Callable[..., Any], *arguments: Any) -> Any:
    return step(*move_to_device(arguments))


def _use_state_shardings(
    own: Any, roles: Sequence[str], shardings: Any
) -> tuple[Any, ...]:
    pairs = zip(roles, shardings, strict=True)
    return tuple(own if role == "state" else other for role, other in pairs)
