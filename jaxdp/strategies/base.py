"""The contract between the training loop and the devices."""

import abc
import contextlib
import copy
import functools
import hashlib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..basics.host_memory import HOST, on_device
from ..basics.tree import is_key
from ..distributed import RowBlocks, put
from ..step import (
    CallsPython,
    Group,
    Products,
    RowsInteract,
    TrainState,
    calls_python,
    products,
    values_mix_rows,
)
from .cpu_options import options_for
from .in_use import compiled_once

Devices = int | Sequence[Any] | None
"""Which devices: the first so many, the `jax.Device`s listed, or all."""

Role = Literal["state", "groups", "rows", "replicated"]
"""What an argument or a result of a step is.

`"state"`: arrays that `place` laid out; they stay where they are. `"groups"`: a list of
`Group`, whose batches are split by rows behind the axis of micro-batches. `"rows"`:
predictions, split by rows. `"replicated"`: small values that every device holds.
"""


Strategy = TypeVar("Strategy", bound="DataParallel")


class Built(NamedTuple):
    """What `DataParallel.build` has found of a program while it made it."""

    products: Products | None
    """Matrix operations of all devices, as traced; None if a part can't be counted."""
    trace_seconds: float
    compile_seconds: float


_BUILT: Final[weakref.WeakKeyDictionary[Any, Built]] = weakref.WeakKeyDictionary()


def found_of(compiled: Any) -> Built | None:
    """What `build` has found of a program, or None if another function made it."""
    return _BUILT.get(compiled) if isinstance(compiled, jax.stages.Compiled) else None


class DataParallel(abc.ABC):
    """Where arrays live and how a step is compiled. The base of all strategies.

    A strategy answers four questions: into how many parts rows are split
    (`num_shards`), where the state lives (`place`), how a step becomes a program
    (`compile`), and how to get whole arrays back (`gather`). It never sees a loss,
    an optimizer or a loop. `SingleDevice` is the shortest complete answer.
    """

    num_shards: int = 1
    """A batch is split into this many equal parts. The trainer pads batches to a
    multiple of it, or asks `compile` for a step with whole batches everywhere."""

    bubble: float = 0.0
    """The share of the time in split layers that devices spend waiting for each other,
    by the strategy's schedule. `Trainer.plan` reports it."""

    branch_every: int = 1
    """Every how many steps the collectives in a branch of the program run.
    `Trainer.plan` divides their bytes by it."""

    program_digests: tuple[str, ...] = ()
    """Digests of the programs built so far, in a job of several processes."""

    compiler_options: Mapping[str, Any] = MappingProxyType({})
    """More options of XLA for `build`; see `Trainer(compiler_options=...)`."""

    def with_compiler_options(self, options: Mapping[str, Any]) -> "DataParallel":
        """A copy of this strategy that compiles programs with these options of XLA."""
        return changed(self, compiler_options=options)

    offloads: bool = False
    """Whether large leaves of the optimizer's state wait in host memory for a step."""

    def with_offload(self) -> "DataParallel":
        """A copy of this strategy that keeps optimizer state on the host between steps.

        Raises:
            ValueError: if the strategy cannot do that.
        """
        raise ValueError(
            "`offload`='optimizer' needs a strategy that says where each leaf of the"
            f" state is held, as SingleDevice and Sharded do; `strategy` is {self!r}."
            " Take one of those, or leave `offload` out."
        )

    def check(self, arguments: Mapping[str, Any]) -> None:  # noqa: B027
        """Raises for arguments of `Trainer`, by name, that it can't train with.

        Called with all of them, in `Trainer(...)`, after each was checked by itself.
        """

    def wrap_optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """The optimizer, or one whose state also has what this strategy needs."""
        return optimizer

    def evaluated_state(self, state: TrainState) -> TrainState:
        """The state whose weights are evaluated and returned as `trainer.model`."""
        return state

    def as_held(self, state: TrainState) -> TrainState:
        """`state` in the shapes that it has once `place` has placed it."""
        return state

    def as_saved(
        self, state: TrainState, shapes: Mapping[str, tuple[int, ...]]
    ) -> TrainState:
        """`state` in the shapes of a checkpoint, if `place` can start from those.

        Args:
            state: a placed state.
            shapes: shapes of the checkpoint's leaves by name, such as
                `opt_state: 0.mu.weight`.
        """
        return state

    @abc.abstractmethod
    def place(self, state: TrainState) -> TrainState:
        """Copies `state` to the devices, in this strategy's layout.

        Every leaf must be a new buffer, because the step will overwrite it and the
        arrays passed in belong to the user. They may come from host memory or from any
        other layout. Leaves that are None stay None.
        """

    @abc.abstractmethod
    def compile(
        self,
        step: Callable[..., Any],
        arguments: tuple[Any, ...],
        roles: tuple[Role, ...],
        results: Role | tuple[Role, ...],
        *,
        donate: tuple[int, ...] = (),
        split: bool = True,
    ) -> jax.stages.Compiled:
        """Compiles `step(collectives, *arguments)` for arguments like these.

        Args:
            step: a pure function. Its first argument is the `Collectives` that fit how
                this strategy splits the batch.
            arguments: example values or `jax.ShapeDtypeStruct`s; the leaves of an
                argument `"state"` have a `sharding`.
            roles: what each argument is.
            results: what each result is, or the only result. A result `"state"` has
                the layout of the argument `"state"`.
            donate: positions of arguments whose memory the step may overwrite.
            split: whether rows are split over the devices. False if rows interact and
                the devices do not divide their number: then every device works on the
                whole batch, and must not sum over devices. If it is True, rows may
                still interact: with `AxisCollectives` the step then raises
                `RowsInteract`, and must be compiled with `Collectives()`.

        Returns:
            A callable that takes the arguments of `step` without the first. Return what
            `build` returns, so that plans and the checks of donation can read what the
            step does.
        """

    def build(
        self,
        program: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any] | None = None,
    ) -> jax.stages.Compiled:
        """The last step of `compile`: compiles a jitted program for its arguments.

        Call it from `compile`: it finds rows that interact (see `trace`), and keeps
        what was traced for plans. `options` are XLA's; by default those that are fast
        on the hardware.

        Raises:
            CallsPython: if the program calls Python that may raise. An error that
                leaves it would strand the other devices (with several faked ones, jax
                0.10.2 aborts the process), so the engine takes one device.
        """
        started = time.perf_counter()
        traced = self.trace(program, arguments)
        is_to_run = any(isinstance(x, jax.Array) for x in jax.tree.leaves(arguments))
        if is_to_run and jax.process_count() == 1 and calls_python(traced.jaxpr):
            raise CallsPython("a step calls Python that may raise")
        options = options_for(traced.jaxpr, arguments, options, self.compiler_options)
        lowered = self.lower(traced)

        begun = time.perf_counter()
        compiled = compiled_once(traced, lowered, options, _devices_of(arguments))
        ended = time.perf_counter()
        if compiled in _BUILT:  # by another trainer
            return compiled

        counted = None
        with contextlib.suppress(KeyError):  # JAX has renamed something
            counted = products(traced.jaxpr)
        _BUILT[compiled] = Built(counted, begun - started, ended - begun)
        return compiled

    def trace(self, program: Any, arguments: tuple[Any, ...]) -> Any:
        """A jitted program traced for its arguments.

        Raises:
            RowsInteract: if values that must depend on one row depend on others.
        """
        traced = program.trace(*arguments)
        if values_mix_rows(traced.jaxpr):
            raise RowsInteract
        return traced

    def lower(self, traced: Any) -> Any:
        """Lowers a program. With several processes, each notes a digest of its text for
        `Lockstep` to compare."""
        lowered = traced.lower()
        self.rewrite(lowered)
        if jax.process_count() > 1:
            text = lowered.as_text().encode()
            digest = hashlib.blake2b(text, digest_size=6).hexdigest()
            self.program_digests = (*self.program_digests, digest)
        return lowered

    def rewrite(self, lowered: Any) -> None:  # noqa: B027
        """Changes a program in place before it is compiled. The base does nothing."""

    def state_shardings(self, state: TrainState) -> TrainState:
        """The sharding that `place` gives each leaf of `state`, from shapes alone.

        Only `Trainer.plan` needs this and `on`; without them a strategy can't be
        planned.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` can't be planned: it has no"
            " `state_shardings(state)` that says, from shapes alone, where each leaf is"
            " held."
        )

    def on(self, devices: Sequence[Any]) -> "DataParallel":
        """This strategy on other devices: more, fewer, or some that are not here."""
        raise NotImplementedError(
            f"`{type(self).__name__}` can't be planned for other devices: it has no"
            " `on(devices)` that returns the same strategy for them."
        )

    def place_batch(self, groups: Sequence[Group], *, split: bool) -> Sequence[Group]:
        """Prepares batches for compiled steps. On one process it returns them as is.

        Host arrays go straight into the compiled step, which places them faster than
        `jax.device_put`. With several processes, `groups` have the rows of this
        process's own blocks, and become arrays of the rows of all.
        """
        return groups

    def row_blocks(self) -> RowBlocks:
        """Which rows of a batch this process loads, if there are several processes."""
        if jax.process_count() == 1:
            return RowBlocks()
        raise ValueError(
            f"`strategy`: {self!r} can't train with {jax.process_count()} processes: it"
            " has no `row_blocks()` that says which rows each of them loads. Use"
            " Sharded() or another strategy that spans them."
        )

    def gather(self, tree: PyTree) -> PyTree:
        """Returns new whole arrays, on the default device, from arrays in this layout.

        If anything is split between processes, all of them must call it.
        """
        return jax.tree.map(jnp.asarray, self.fetch(tree))

    def fetch(self, tree: PyTree) -> PyTree:
        """Like `gather`, but returns NumPy arrays, and typed PRNG keys unchanged."""
        return jax.tree.map(_fetch_leaf, tree)


def changed(strategy: Strategy, **attributes: Any) -> Strategy:
    """A copy of a strategy with some attributes replaced."""
    other = copy.copy(strategy)
    vars(other).update(attributes)
    return other


def _devices_of(arguments: tuple[Any, ...]) -> list[Any]:
    """What a program runs on that takes these, in its order."""
    leaves = jax.tree.leaves(arguments)
    sharding = next(leaf.sharding for leaf in leaves if hasattr(leaf, "sharding"))
    if isinstance(sharding, NamedSharding):
        return np.asarray(sharding.mesh.devices).ravel().tolist()
    return sorted(sharding.device_set, key=lambda device: device.id)


def find_devices(devices: Devices) -> list[Any]:
    """The devices meant: all, the first `devices`, or the ones listed."""
    available = jax.devices()
    if devices is None:
        return available
    if isinstance(devices, int):
        if not 1 <= devices <= len(available):
            raise ValueError(
                f"`devices`: {devices} asked for, but there are {len(available)}"
                f" ({available[0].platform}). To fake more on the CPU, call"
                f' jax.config.update("jax_num_cpu_devices", {max(devices, 1)}) before'
                " any JAX array is made."
            )
        return available[:devices]
    devices = list(devices) if isinstance(devices, Iterable) else [devices]
    if not devices or not all(isinstance(device, jax.Device) for device in devices):
        raise TypeError(
            "`devices` must be a number or a list of jax.Device (a mesh is passed by"
            f" name, `mesh=...`); got {devices!r}."
        )
    if len(set(devices)) < len(devices):
        raise ValueError(f"`devices` names a device twice: {devices!r}.")
    return devices


def mesh_on(devices: Sequence[Any], shape: Mapping[str, int]) -> Mesh:
    """A mesh over devices, by the sizes of its axes.

    Axes are Auto: under Explicit ones (the default of `jax.make_mesh`) embeddings,
    dropout keys and reshapes in ordinary models raise.
    """
    array = np.empty(len(devices), dtype=object)
    array[:] = list(devices)
    array = array.reshape(tuple(shape.values()))
    return Mesh(array, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def draws_by_row() -> bool:
    """Whether the keys of rows draw the same however many rows are drawn for at once.

    The default generator, threefry, does; what others draw depends on it.
    """
    return jax.config.jax_default_prng_impl == "threefry2x32"  # pyright: ignore


def with_auto_axes(tree: PyTree) -> PyTree:
    """Arrays on meshes with Explicit axes, as on the same meshes with Auto axes."""

    def auto(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return leaf
        mesh = Mesh(np.asarray(sharding.mesh.devices), sharding.mesh.axis_names)
        return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))

    return jax.tree.map(auto, tree)


def place_copy(tree: PyTree, shardings: PyTree) -> PyTree:
    """New buffers for every leaf of `tree`, laid out by `shardings`.

    Not `jax.device_put` alone: it may hand back the caller's own buffer, which donation
    would then delete, even with `may_alias=False`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    layouts = treedef.flatten_up_to(shardings)
    here = [
        i
        for i, layout_of_leaf in enumerate(layouts)
        if layout_of_leaf.memory_kind != HOST
    ]
    copied = _copies([leaves[i] for i in here], [layouts[i] for i in here])

    placed = dict(zip(here, copied, strict=True))
    for i, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
        if i not in placed:  # one by one: devices may not have room for all of them
            moved = put(on_device(leaf), layout.with_memory_kind("device"))
            placed[i] = _identity(layout)(moved)
    return treedef.unflatten(placed[i] for i in range(len(leaves)))


def _copies(leaves: list[Any], layouts: list[Any]) -> list[Any]:
    if all(leaf_layout.is_fully_addressable for leaf_layout in layouts):
        moved = jax.device_put(leaves, layouts)
    else:
        moved = jax.tree.map(put, leaves, layouts)
    # JAX keeps the program of a function that stays, for the next trainer.
    return jax.jit(_copied, out_shardings=layouts)(moved)


def _copied(leaves: list[Any]) -> list[Any]:
    return [jnp.copy(leaf) for leaf in leaves]


def laid_out(
    arguments: Sequence[Any],
    roles: Sequence[Role],
    results: Role | tuple[Role, ...],
    layout: Callable[[Role], Any],
    of_group: Callable[[Group], Any],
) -> tuple[tuple[Any, ...], Any]:
    """How the arguments and results of a step are laid out, by their roles."""
    layouts = tuple(
        [of_group(group) for group in argument] if role == "groups" else layout(role)
        for argument, role in zip(arguments, roles, strict=True)
    )
    if isinstance(results, tuple):
        return layouts, tuple(map(layout, results))
    return layouts, layout(results)


def put_rows(
    groups: Sequence[Group],
    blocks: RowBlocks,
    shardings: Callable[[Group], Group],
    *,
    split: bool,
    axis: int = 1,
) -> list[Group]:
    """Batches of which each process has the rows of its blocks, as global arrays.

    Without `split` every process has all rows, which are along `axis`. `shardings` are
    those of a group, from the shapes of the whole one.
    """
    blocks = blocks if split else RowBlocks()

    def put_leaf(own: Any, shape: Any, sharding: Any) -> Any:
        size = shape.shape[axis] // blocks.count

        def part(index: Any) -> Any:
            start, stop, _ = index[axis].indices(shape.shape[axis])
            if blocks.count > 1:
                here = blocks.own.index(start // size) * size
                start, stop = here + start % size, here + start % size + stop - start
            return own[(*index[:axis], slice(start, stop), *index[axis + 1 :])]

        return jax.make_array_from_callback(shape.shape, sharding, part)

    # Each batch, all its leaves.
    placed = []
    for group in groups:
        shapes = blocks.whole(group, axis) if split else group
        layouts = shardings(shapes).batch
        batch = jax.tree.map(put_leaf, group.batch, shapes.batch, layouts)
        placed.append(group._replace(batch=batch))
    return placed


def replicated(tree: PyTree) -> PyTree:
    """Arrays that are split between processes, whole on all their devices.

    All processes must call it. Others are as they are.
    """

    def whole(leaf: Any) -> Any:
        is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
        if is_here or leaf.is_fully_replicated:
            return leaf
        sharding: Any = leaf.sharding
        return _identity(NamedSharding(sharding.mesh, PartitionSpec()))(leaf)

    return jax.tree.map(whole, tree)


@functools.lru_cache
def _identity(sharding: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x, out_shardings=sharding)


def _fetch_leaf(leaf: Any) -> Any:
    if is_key(leaf):
        data = _fetch_leaf(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # np.array waits for the device, and copies: later steps overwrite the buffer.
    return np.array(replicated(leaf))
