"""The optimizer's state in the host's memory between steps."""

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
        if on_host.memory_kind != HOST:  # JAX ignores it on devices without host memory
            device, *_ = sharding.device_set
            raise ValueError(
                "`offload`='optimizer' needs devices that reach the host's memory"
                f" as {HOST!r}, which {device.device_kind} here does not. Leave"
                " `offload` out."
            )
        return on_host

    held_by = jax.tree.map(move_to_host, shardings.opt_state, state.opt_state)
    return shardings._replace(opt_state=held_by)


def jit_with_offload(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    in_shardings: Sequence[Any],
    out_shardings: Any,
    donate: tuple[int, ...],
) -> Any:
    """Returns `jax.jit` of a step, whose state may be in host memory around it.

    The state is moved outside of the step: a dispatch of several steps moves it once.
    """
    step = function
    if any(map(is_on_host, jax.tree.leaves(arguments))):
        step = lambda *arguments: function(*move_to_device(arguments))  # noqa: E731
    return jax.jit(
        step,
        in_shardings=tuple(in_shardings),
        out_shardings=out_shardings,
        donate_argnums=donate,
    )
