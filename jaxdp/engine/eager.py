"""Steps under JAX's settings for debugging: uncompiled, or looked at after each one.

`jax.disable_jit()` is for printing values and stopping in one's own code. A step then
runs on one device, operation by operation, on all rows of a batch. `jax_debug_nans`
and `jax_debug_infs`, and calls of Python that may raise, as those of `eqx.error_if`,
leave the step compiled. It is waited for, and overwrites nothing; if something is wrong
the same step runs again, uncompiled, and the error comes from the user's own line.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..basics.console import say
from ..step import (
    Calls,
    CallsPython,
    Collectives,
    TrainState,
    as_raised,
    catching,
)
from ..strategies import DataParallel, SingleDevice
from ..strategies.base import Role, found_of


class Debugging(NamedTuple):
    """What JAX was told to do, of what changes how steps run."""

    without_jit: bool
    finds_nans: bool
    finds_infs: bool


def debugging() -> Debugging:
    """JAX's present settings."""
    config: Any = jax.config
    return Debugging(
        config.jax_disable_jit, config.jax_debug_nans, config.jax_debug_infs
    )


class Uncompiled(DataParallel):
    """What a strategy computes, operation by operation on the first of its devices."""

    compiles = False

    def __init__(self, strategy: DataParallel):
        if jax.process_count() > 1:
            raise RuntimeError(
                "jit is disabled (jax.disable_jit or jax_disable_jit), and there"
                f" are {jax.process_count()} processes, which can only compute"
                " together in compiled steps. Debug in a single process."
            )
        self.strategy = strategy

    def place(self, state: TrainState) -> TrainState:
        try:
            shardings = jax.tree.leaves(self.strategy.state_shardings(state))
            here = min(shardings[0].device_set, key=lambda device: device.id)
        except NotImplementedError:
            here = jax.devices()[0]
        say(
            "jit is disabled: steps run uncompiled, operation by operation, on"
            f" {here}, all rows of a batch at once"
        )
        return SingleDevice(here).place(state)

    def compile(
        self,
        step: Callable[..., Any],
        arguments: tuple[Any, ...],
        roles: tuple[Role, ...],
        results: Role | tuple[Role, ...],
        *,
        donate: tuple[int, ...] = (),
        split: bool = True,
    ) -> Any:
        # It runs once at once, for what it has to tell. Its author should not meet it
        # twice for that.
        known = [(arguments, _run(step, arguments))]

        def program(*given: Any) -> Any:
            first, found = known.pop() if known else (None, None)
            return found if eqx.tree_equal(first, given) else _run(step, given)

        return program

    def __repr__(self) -> str:
        return f"{self.strategy!r}, uncompiled"


def _run(step: Callable[..., Any], arguments: PyTree) -> Any:
    """A step as it is written, with what it raises as it was raised."""
    try:
        return step(Collectives(), *jax.tree.map(jnp.asarray, arguments))
    except Exception as error:
        found = as_raised(error)
        if found is error:
            raise
        raise found from None


class Watched:
    """A compiled step that is waited for, and looked at for what went wrong.

    It must not overwrite what it is given. Otherwise it is as `compiled`.

    Args:
        compiled: made of `step(collectives, *arguments)`.
        step: the same, to run it again for the line of an error.
        fetch: brings arguments to the host.
        calls: who makes its calls of Python.
        functions: those that are its own.
        wanted: what to look for.
    """

    def __init__(
        self,
        compiled: Any,
        step: Callable[..., Any],
        fetch: Callable[[PyTree], PyTree],
        calls: Calls,
        functions: Sequence[Callable[..., Any]],
        wanted: Debugging,
    ):
        self.compiled = compiled
        self._step = step
        self._fetch = fetch
        self._calls, self._functions = calls, functions
        self._wanted = wanted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def __call__(self, *arguments: Any) -> Any:
        with (
            self._calls.made_to(self._functions) as faults,
            jax.debug_nans(False),  # JAX would not say where
            jax.debug_infs(False),
        ):
            # A wait for the device: an error comes before the next step.
            # waits for the device
            results = jax.block_until_ready(self.compiled(*arguments))
        error = faults[0] if faults else self._nonfinite(results)
        if error is not None:
            raise self._traced(as_raised(error), arguments) from None
        return results

    def _nonfinite(self, results: PyTree) -> Exception | None:
        looks = (
            ("NaN", self._wanted.finds_nans, jnp.isnan),
            ("infinity", self._wanted.finds_infs, jnp.isinf),
        )
        shards = [
            shard.data
            for leaf in jax.tree.leaves(results)
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
            for shard in leaf.addressable_shards
        ]
        for what, is_wanted, look in looks:
            if is_wanted and any(look(shard).any() for shard in shards):
                return FloatingPointError(
                    f"a step gave {what}, and `jax_debug_{what[:3].lower()}s` is"
                    " set. Run again without compilation, it did not: an"
                    " operation that XLA fuses rounds differently."
                )
        return None

    def _traced(self, error: BaseException, arguments: PyTree) -> BaseException:
        """The same error from the line it comes from, if the step gives it again."""
        if jax.process_count() > 1:
            return error  # it would need the rows of the others
        try:
            with jax.disable_jit():
                _run(self._step, self._fetch(arguments))
        except Exception as second:
            if type(second) is type(error):
                return second
        return error


def compiled_for_debugging(
    compile_: Callable[..., Any],
    step: Callable[..., Any],
    strategy: DataParallel,
    *,
    donate: tuple[int, ...],
    quiet: bool,
) -> Any:
    """`compile_(step, donate=)`, watched if there is a reason.

    Then it overwrites nothing. With `quiet` it is compiled only to be looked at.
    """
    wanted, calls = debugging(), Calls()
    if not strategy.compiles:
        return compile_(step, donate=())
    looks = not quiet and (wanted.finds_nans or wanted.finds_infs)
    try:
        compiled = compile_(step, donate=() if looks else donate)
        if not looks:
            return compiled
    except CallsPython:
        compiled = compile_(catching(step, calls), donate=())
    if quiet:
        return compiled
    functions, built = calls.functions, found_of(compiled)
    if built is not None and built.calls is not None:
        calls = built.calls  # of the trainer that has compiled it
    return Watched(compiled, step, strategy.fetch, calls, functions, wanted)
