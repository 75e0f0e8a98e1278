"""The same bits on 1, 2, 4 and 8 devices, by a fixed division of the work.

Rounding depends on shapes, on the order of sums, and on the compiler's fusions. So a
batch is always cut into `SHARDS` virtual shards. One loop body, compiled for one shard,
works on each of them, and their results are added in order. Every device computes the
optimizer's full update.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun
from jax.extend.mlir.passmanager import PassManager
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from ..basics.arguments import checks_arguments
from ..basics.console import log_info
from ..step import Collectives, Group, OnRows, PerExample, Results
from ..strategies.base import DataParallel, Role, Rows, get_shardings, make_shardings
from ..strategies.meshes import clear_ambient_mesh
from ..strategies.offload import jit_with_offload
from ..strategies.sharded import Pmap, Sharded, SingleDevice
from .plan.products import make_loop_scope

SHARDS: Final = 8
"""Virtual shards of a batch; the device count must divide it."""

_AXIS: Final = "shards"
_DISABLED: Final = "xla_disable_hlo_passes"
"""XLA's pass "cse" is disabled: in programs for several devices XLA merges equal
operations in other passes, and then fuses other ones. With 2 devices a LayerNorm had
other bits than with 1."""

_SMALL: Final = 4096
"""Every device sums arrays of up to this number of elements; it divides larger ones."""


class Bitwise(DataParallel):
    """Runs another strategy with the same bits on 1, 2, 4 and 8 devices.

        Trainer(model, strategy=Bitwise(Sharded()))

    See docs/reproducibility.md.

    Args:
        strategy: `SingleDevice`, `Sharded` or `Pmap`, which hold the state whole on
            every device.
    """

    row_axes = (_AXIS,)

    @checks_arguments
    def __init__(self, strategy: DataParallel):
        if type(strategy) not in (SingleDevice, Sharded, Pmap):
            raise ValueError(
                "`strategy`: Bitwise needs the state whole on every device, as"
                " SingleDevice, Sharded and Pmap hold it; got"
                f" {strategy!r}. Take one of those."
            )
        devices = np.asarray(strategy.mesh.devices).ravel()
        if SHARDS % devices.size:
            raise ValueError(
                f"`Bitwise` cuts each batch into {SHARDS} virtual shards and gives"
                f" every device the same number; the {devices.size} devices of"
                f" {strategy!r} do not divide {SHARDS}. Use 1, 2, 4 or 8 devices."
            )
        self.strategy = strategy
        self.mesh = Mesh(devices, (_AXIS,), axis_types=(AxisType.Auto,))

    def prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(arguments["optimizer"], optax.GradientTransformation):
            raise ValueError(
                "`strategy`: Bitwise does not work with a list of parts, whose programs"
                f" round differently on other device counts; use {self.strategy!r}: on"
                " the same devices the bits are the same anyway."
            )
        remat = arguments["remat"]
        if remat is not True and remat and not callable(remat):
            raise ValueError(
                f"`strategy`: Bitwise can't keep the bits with `remat`={remat!r}, since"
                " XLA fuses submodules that are computed again otherwise on other"
                " device counts. Put equal blocks into a jaxdp.Stack, and pass"
                " remat=True."
            )
        loss_fn = arguments["loss_fn"]
        if loss_fn is not None and not isinstance(loss_fn, PerExample):
            raise ValueError(
                "`strategy`: Bitwise works on parts of a batch in turn, and a `loss_fn`"
                " is written for the whole batch. Write it for one example,"
                " loss_fn=jaxdp.per_example(fn), or take"
                f" strategy={type(self.strategy).__name__}()."
            )
        if arguments["data"] == "local" and jax.process_count() > 1:
            raise ValueError(
                "`data`='local' with Bitwise: the order of the rows would depend on the"
                " number of processes, and the bits on the order. Use data='global',"
                " where every process is given the same loader."
            )
        return arguments

    def on(self, devices: Sequence[Any]) -> "Bitwise":
        return Bitwise(self.strategy.on(devices))

    def compile(
        self,
        step: Callable[..., Any],
        arguments: tuple[Any, ...],
        roles: tuple[Role, ...],
        results: Role | tuple[Role, ...],
        *,
        donate: tuple[int, ...] = (),
        rows: Rows = "apart",
    ) -> Any:
        call = arguments, roles, results
        full, everywhere = PartitionSpec(), self._replicated
        specs = dict.fromkeys(get_args(Role), full) | {
            "rows": PartitionSpec(None, _AXIS)
        }
        cut_group = Group(PartitionSpec(None, None, _AXIS), full, full)
        in_specs, out_specs = make_shardings(
            *call, specs.__getitem__, lambda _: cut_group
        )
        mapped = jax.shard_map(
            clear_ambient_mesh(functools.partial(step, VirtualShards(self.mesh.size))),
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

        def program(*arguments: Any) -> Any:
            *others, groups = arguments
            if rows != "apart":
                groups = jax.lax.with_sharding_constraint(groups, everywhere)
                return step(Collectives(), *others, groups)
            values = mapped(*others, [self._cut(group) for group in groups])
            num_rows = jax.tree.leaves(groups[0].batch)[0].shape[1]

            def merge_turns(leaf: Array) -> Array:  # (turns, devices * rows, ...)
                return leaf.reshape(-1, *leaf.shape[2:])[:num_rows]

            return _map_row_results(merge_turns, values, results)

        if rows == "together":
            log_info(
                "`Bitwise`: a loss, a metric or a model with state is written for a"
                " batch, so every device computes the whole batch: the same bits, and"
                " no time saved by more devices"
            )
        by_rows = NamedSharding(self.mesh, PartitionSpec(None, _AXIS))
        group = Group(
            everywhere if rows == "replicated" else by_rows, everywhere, everywhere
        )
        layouts = dict.fromkeys(get_args(Role), everywhere)
        layouts["state"] = get_shardings(arguments[roles.index("state")])
        shardings = make_shardings(*call, layouts.__getitem__, lambda _: group)
        jitted = jit_with_offload(program, arguments, *shardings, donate)
        return _DeduplicatedStep(jitted, self.mesh.devices.flat[0].platform)

    def _cut(self, group: Group) -> Group:
        """Returns a group with its rows as (turns, devices, rows of a virtual shard).

        Shard number `turn * devices + device`, so that the sums of one turn come before
        those of the next. Copies of the first row fill the last shards, uncounted.
        """

        def cut(leaf: Array) -> Array:
            micros, rows, *rest = leaf.shape
            if missing := -rows % SHARDS:
                copies = jnp.repeat(leaf[:, :1], missing, axis=1)
                leaf = jnp.concatenate([leaf, copies], axis=1)
            turns, devices = SHARDS // self.mesh.size, self.mesh.size
            return leaf.reshape(micros, turns, devices, -1, *rest)

        return group._replace(batch=jax.tree.map(cut, group.batch))

    def __repr__(self) -> str:
        return f"Bitwise({self.strategy!r})"


class VirtualShards(Collectives):
    """Works on the virtual shards of this device in turn, and adds up all devices'.

    The loop's length is hidden from the compiler: it would inline a loop of one turn,
    as eight devices have, and fuse the body with the operations around it.
    """

    def __init__(self, devices: int):
        self.devices = devices
        self.turns = SHARDS // devices

    def over_rows(
        self, function: OnRows, inputs: Any, groups: Sequence[Group], results: Results
    ) -> Any:
        # One shard more than turns: a stack of one would need no indexing, and the body
        # would be another program.
        stacks = [
            jax.tree.map(lambda x: _stack(x.squeeze(2)), group.batch)
            for group in groups
        ]
        # This is zero, but the compiler can't know it.
        zero = jnp.minimum(jnp.stack([g.counts.sum() for g in groups]).sum(), 0)
        turns = jnp.arange(self.turns + 1, dtype=jnp.int32)
        shards = turns * self.devices + jax.lax.axis_index(_AXIS) + zero

        def one_shard(turn: Array) -> Any:
            picked = jax.tree.map(lambda x: x[turn], stacks)
            shard_groups = [
                group._replace(batch=batch)
                for batch, group in zip(picked, groups, strict=True)
            ]
            return function(_VirtualShard(shards[turn]), inputs, shard_groups)

        traced, shapes = jax.make_jaxpr(one_shard, return_shape=True)(jnp.int32(0))
        leaves, treedef = jax.tree.flatten(shapes)
        latest = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]

        def run_turn(turn: Array, latest: list[Array]) -> list[Array]:
            # In a separate loop of one turn, nothing is fused with later operations.
            once = jaxpr_as_fun(traced)
            return _loop(1, turn, zero, lambda turn, _: once(turn), latest)

        of_rows = _map_row_results(lambda _: True, shapes, results, others=False)
        are_rows = jax.tree.leaves(of_rows)
        sums = [
            _RowBuffer(leaf, self.turns) if is_rows else _RunningSum(leaf, self.devices)
            for leaf, is_rows in zip(leaves, are_rows, strict=True)
        ]

        def add(turn: Array, carry: Any) -> Any:
            totals, latest = carry
            latest = run_turn(turn, latest)
            triples = zip(sums, totals, latest, strict=True)
            return [sum.add(total, one, turn) for sum, total, one in triples], latest

        totals = [one_sum.zero() for one_sum in sums]
        first = jnp.int32(0)
        totals, latest = _loop(self.turns, first, zero, add, (totals, latest))
        if all(are_rows):
            return treedef.unflatten(totals)
        pairs = zip(are_rows, totals, latest, strict=True)
        latest = [total if is_rows else one for is_rows, total, one in pairs]

        def gather(_: Array, __: list[Array]) -> list[Array]:
            # In a loop again: later operations see the same on any device count.
            return [
                one_sum.whole(total)
                for one_sum, total in zip(sums, totals, strict=True)
            ]

        return treedef.unflatten(_loop(1, first, zero, gather, latest))


class _VirtualShard(Collectives):
    """The collectives of a step that works on one virtual shard."""

    num_shards = SHARDS

    def __init__(self, shard: Array):
        self.shard = shard

    def row_ids(self, rows: int) -> Int[Array, " rows"]:
        return self.shard * rows + jnp.arange(rows)


class _RunningSum:
    """A running sum over shards, of one array: in the order of the shards.

    Each device sums its part of the elements of a large array. That moves no more bytes
    than an all-reduce, and needs memory for one more array at most.
    """

    def __init__(self, like: Any, devices: int):
        self.like = like
        self.devices = devices
        self.size = math.prod(like.shape)
        self.is_shared = self.size > _SMALL
        self.part = -(-self.size // devices)

    def zero(self) -> Array:
        shape = (self.part,) if self.is_shared else self.like.shape
        return jnp.zeros(shape, self.like.dtype)

    def add(self, total: Array, value: Array, turn: Array) -> Array:
        """Adds the value of each device in this turn, in their order."""
        if self.is_shared:
            missing = self.part * self.devices - self.size
            parts = jnp.pad(value.ravel(), (0, missing)).reshape(self.devices, -1)
            by_device = jax.lax.all_to_all(parts, _AXIS, 0, 0)
        else:
            by_device = jax.lax.all_gather(value, _AXIS)  # of one device: itself
        for device in range(self.devices):
            total = total + by_device[device]
        return total

    def whole(self, total: Array) -> Array:
        if not self.is_shared:
            return total
        parts = jax.lax.all_gather(total, _AXIS, tiled=True)
        return parts[: self.size].reshape(self.like.shape)


class _RowBuffer:
    """Collects a result that has rows, and is not summed.

    It stores the rows of every virtual shard that a device computes, in the order of
    the turns.
    """

    def __init__(self, like: Any, turns: int):
        self.like, self.turns = like, turns

    def zero(self) -> Array:
        return jnp.zeros((self.turns, *self.like.shape), self.like.dtype)

    def add(self, total: Array, value: Array, turn: Array) -> Array:
        """Stores the rows of this turn."""
        return total.at[turn].set(value)

    def whole(self, total: Array) -> Array:
        return total


def _map_row_results(
    function: Callable[[Any], Any], values: Any, results: Any, others: Any = None
) -> Any:
    """Applies a function to those results that are values of rows.

    The leaves of the rest stay as they are, or become `others` where that is given.
    """

    def one(part: Any, kind: str) -> Any:
        if kind == "rows":
            return jax.tree.map(function, part)
        return part if others is None else jax.tree.map(lambda _: others, part)

    if isinstance(results, str):
        return one(values, results)
    return tuple(map(one, values, results))


class _DeduplicatedStep(NamedTuple):
    """A step whose equal operations are merged before XLA compiles it, in each stage.

    Shardy, which partitions programs for several devices, begins with that, and no
    option prevents it. It changes later passes: XLA inverts a number that two arrays
    are divided by if it is one number, not two equal ones. So the program for one
    device gets the same merge.
    """

    stage: Any
    """The step as JAX has it: jitted, then traced, then lowered."""
    platform: str

    def __call__(self, *arguments: Any) -> Any:
        return self.stage(*arguments)

    def trace(self, *arguments: Any) -> "_DeduplicatedStep":
        return self._replace(stage=self.stage.trace(*arguments))

    @property
    def jaxpr(self) -> Any:
        return self.stage.jaxpr

    def lower(self) -> "_DeduplicatedStep":
        lowered = self.stage.lower()
        module: Any = lowered.compiler_ir()
        with module.context:
            PassManager.parse("builtin.module(cse)").run(module.operation)
        return self._replace(stage=lowered)

    def as_text(self) -> str:
        return self.stage.as_text()

    def compile(self, options: Mapping[str, Any]) -> jax.stages.Compiled:
        return self.stage.compile(_add_options(options, self.platform))


def _add_options(options: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Returns options of XLA with those that give equal work equal bits on a device."""
    passes = ",".join(filter(None, ["cse", options.get(_DISABLED)]))
    own = {"xla_gpu_deterministic_ops": True} if platform == "gpu" else {}
    return {**options, **own, _DISABLED: passes}


def _stack(leaf: Array) -> Array:
    """Returns `(micros, turns, rows, ...)` as `(turns + 1, micros, rows, ...)`."""
    leaf = jnp.swapaxes(leaf, 0, 1)
    return jnp.concatenate([leaf, leaf[:1]])


def _loop(
    times: int, start: Array, zero: Array, body: Callable[[Array, Any], Any], first: Any
) -> Any:
    """Returns the value after `times` turns of `value = body(turn, value)`.

    Turns count from `start`, and the value begins as `first`. `zero` is 0, which the
    compiler can't know, so it can't inline a loop of one turn.
    """

    def run(carry: Any) -> Any:
        turn, value = carry
        return turn + 1, body(turn, value)

    stop = start + times + zero
    with jax.named_scope(make_loop_scope(times)):  # for plans
        return jax.lax.while_loop(lambda c: c[0] < stop, run, (start, first))[1]
