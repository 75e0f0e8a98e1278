"""Steps under JAX's settings for debugging: jit disabled, or NaN looked for.

They are not compiled ahead: `jax.jit` runs them operation by operation, or finds the
line that makes NaN.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class DebugSettings(NamedTuple):
    """JAX's settings that prevent compiling a step."""

    disables_jit: bool
    """`jax_disable_jit`."""
    finds_nan: bool
    """`jax_debug_nans` or `jax_debug_infs`."""


def get_debug_settings() -> DebugSettings:
    """Returns the current settings."""
    config: Any = jax.config
    return DebugSettings(
        config.jax_disable_jit, config.jax_debug_nans or config.jax_debug_infs
    )


def make_debugged_call(jitted: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns a function that calls a jitted step, which is not compiled ahead.

    Args:
        jitted: the result of `jax.jit`.
        arguments: of the step, or their shapes.
    """
    if not get_debug_settings().disables_jit:
        jitted.trace(*arguments)  # tracing finds the names of metrics
    # The functions of users get JAX's arrays, also where jit is disabled.
    return lambda *args: jitted(*jax.tree.map(jnp.asarray, args))
