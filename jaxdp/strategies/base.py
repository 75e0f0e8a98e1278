"""The contract between the training loop and the devices."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..basics.tree import leaf_path
from ..distributed import RowBlocks, find_row_blocks
from ..step import DATA, Collectives, Group, TrainState
from .meshes import get_axis_names
from .offload import jit_with_offload
from .placement import place_copy, put_rows

Role = Literal["state", "groups", "rows", "replicated"]
"""What an argument or a result of a step is.

`"state"`: arrays that `place` laid out; they stay where they are. `"groups"`: a list of
`Group`, whose batches are split by rows behind the axis of micro-batches. `"rows"`:
predictions, split by rows. `"replicated"`: small values that every device holds.
"""

Rows = Literal["apart", "together", "whole"]
"""How the devices work on the rows of a step's batches.

`"apart"`: rows are split over the devices, and all functions are written for one
example, so each device may work on its own rows. `"together"`: rows are split, and
something is written for a batch (a `loss_fn`, a model with state), so the step must see
all of them. `"whole"`: the devices do not divide the rows, so every device is given all
of them and must not sum over devices.
"""

Strategy = TypeVar("Strategy", bound="DataParallel")


NO_MESH: Final = Mesh(np.empty((), dtype=object), ())
"""That of an engine which does not say how leaves are split."""


class DataParallel:
    """Where arrays live and how devices share the rows of a step.

    The base of all strategies. It never sees a loss, an optimizer or a loop. All that
    it does follows from a `mesh` and how leaves are split over it: a subclass gives
    those and leaves the rest as it is, as `Sharded` does. An engine of one's own
    overrides `place` and `compile` instead, and needs no mesh. `SingleDevice` is the
    shortest complete strategy.
    """

    mesh: Mesh = NO_MESH
    """The devices, along named axes of type Auto."""

    row_axes: tuple[str, ...] = (DATA,)
    """The axes of the mesh that rows are split over."""

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """How a leaf of the model is split; its optimizer state follows.

        Over an axis that rows are split over too, a parameter is split between steps
        and gathered for each.

        Args:
            path: as a user writes it, `layers[0].weight`.
            leaf: the array, or its shape and dtype.
        """
        return PartitionSpec()

    def update_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """How a parameter's gradient and optimizer state are split: like the parameter.

        If only they are split over an axis of the rows, each device updates a shard of
        a parameter that all of them then hold whole.
        """
        return self.param_spec(path, leaf)

    def batch_spec(self, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        """How a leaf of a batch, shaped `(rows, ...)`, is split."""
        return PartitionSpec(self.row_axes)

    def collectives(self, groups: Sequence[Group], rows: Rows) -> Collectives:
        """The object by which a step works on its rows and reaches other devices.

        Its `over_rows(function, inputs, groups, results)` runs the part of a step that
        looks at rows. In the base that is the function itself: the step sees all rows,
        and XLA inserts what has to be sent.

        Args:
            groups: the batches, or their shapes.
            rows: how they are worked on.
        """
        return Collectives()

    def on(self: Strategy, devices: Sequence[Any]) -> Strategy:
        """This strategy on other devices: more, fewer, or some that are not here."""
        raise NotImplementedError(
            f"`{type(self).__name__}` can't be planned for other devices: it has no"
            " `on(devices)` that returns the same strategy for them."
        )

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises for arguments of `Trainer`, by name, that it can't train with.

        Called with all of them, in `Trainer(...)`, after each was checked by itself.
        """

    def wrap_optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        """The optimizer, with what this strategy needs in its state.

        For strategies that change what is trained, such as `LocalSGD`, which keeps a
        replica for each device there. If the weights to evaluate are in that state, a
        node of it has a method `evaluated_params(params)`, which returns them.
        """
        return optimizer

    def layouts(self, state: TrainState) -> dict[str, PartitionSpec]:
        """How each leaf of a state is split, by name, `params: layers[0].weight`.

        A leaf of the optimizer state belongs to the parameter whose path its own path
        ends with, if it has that parameter's shape too, or a stack of such; Adam's
        `mu.layers[0].weight` does. A subclass overrides it to look at the whole state
        first, or to split leaves that its other methods are not asked about.

        Args:
            state: arrays, or their shapes and dtypes; placed or not.
        """
        params: dict[tuple[Any, ...], tuple[tuple[int, ...], PartitionSpec]] = {}

        def own(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            return self._checked_param_spec(leaf_path(path), leaf)

        def updated(path: tuple[Any, ...], leaf: Any) -> None:
            spec = self._checked_update_spec(leaf_path(path), leaf)
            params[tuple(map(str, path))] = leaf.shape, spec

        def inherited(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            # The longest path of a parameter that this one ends with.
            keys = tuple(map(str, path))
            for start in range(len(keys) + 1):
                shape, spec = params.get(keys[start:], (None, None))
                if shape is None or spec is None:
                    continue
                stacked = leaf.ndim - len(shape)
                if stacked >= 0 and leaf.shape[stacked:] == shape:
                    return PartitionSpec(*[None] * stacked, *spec)
            return self._spec_without_parameter(leaf)

        # Parameters first: the others follow them.
        with_path = jax.tree_util.tree_map_with_path
        with_path(updated, state.params)
        layouts = jax.tree.map(lambda _: PartitionSpec(), state)._replace(
            params=with_path(own, state.params),
            buffers=with_path(own, state.buffers),
            opt_state=with_path(inherited, state.opt_state),
        )
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        leaves = jax.tree_util.tree_flatten_with_path(layouts, is_leaf=is_spec)[0]
        return {state_name(path): spec for path, spec in leaves}

    def place(self, state: TrainState) -> TrainState:
        """Copies `state` to the devices, in this strategy's layout.

        Every leaf must be a new buffer, because the step will overwrite it and the
        arrays passed in belong to the user. They may come from host memory or from any
        other layout. Leaves that are None stay None.
        """
        return place_copy(state, state_shardings(self, state))

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
        """Makes a jitted function of `step(collectives, *arguments)`.

        Args:
            step: a pure function. Its first argument is the `Collectives` that fit how
                this strategy splits the batch.
            arguments: example values or `jax.ShapeDtypeStruct`s; the leaves of an
                argument `"state"` have a `sharding`.
            roles: what each argument is.
            results: what each result is, or the only result. A result `"state"` has
                the layout of the argument `"state"`.
            donate: positions of arguments whose memory the step may overwrite.
            rows: how rows are worked on.

        Returns:
            The result of `jax.jit`, which the trainer then traces, looks through and
            compiles once. If it has an attribute `compiler_options`, that replaces the
            trainer's fast options of XLA. Any other callable that takes the arguments
            of `step` without the first is called as it is, and tells plans nothing.
        """
        state = arguments[roles.index("state")]
        by_rows = NamedSharding(self.mesh, PartitionSpec(self.row_axes))
        layouts = {
            "state": jax.tree.map(lambda leaf: leaf.sharding, state),
            "rows": self._replicated if rows == "whole" else by_rows,
            "replicated": self._replicated,
        }
        of_group = functools.partial(self._group_shardings, split=rows != "whole")
        call = arguments, roles, results
        shardings = make_shardings(*call, layouts.__getitem__, of_group)
        groups = arguments[roles.index("groups")]
        program = functools.partial(step, self.collectives(groups, rows))
        return jit_with_offload(program, *call, *shardings, donate)

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def _group_shardings(self, group: Group, split: bool) -> Group:
        def leaf_sharding(leaf: Any) -> NamedSharding:
            if not split:
                return self._replicated
            spec = PartitionSpec(None, *self.batch_spec(drop_micro_batch_axis(leaf)))
            return NamedSharding(self.mesh, spec)

        batch = jax.tree.map(leaf_sharding, group.batch)
        return Group(batch, self._replicated, self._replicated)

    def _checked_param_spec(self, path: str, leaf: Any) -> PartitionSpec:
        return self._check_spec("`param_spec`", self.param_spec(path, leaf), path, leaf)

    def _checked_update_spec(self, path: str, leaf: Any) -> PartitionSpec:
        spec = self.update_spec(path, leaf)
        return self._check_spec("`update_spec`", spec, path, leaf)

    def _spec_without_parameter(self, leaf: Any) -> PartitionSpec:
        """How optimizer state is split that belongs to no parameter."""
        return PartitionSpec()

    def _check_spec(
        self, origin: str, spec: PartitionSpec, path: str, leaf: Any
    ) -> PartitionSpec:
        """`spec`, which came from `origin`, if it fits the leaf."""
        what = f"{origin} gave {spec} for {path} of shape {leaf.shape}"
        if len(spec) > leaf.ndim:
            raise ValueError(f"{what}: more entries than the array has axes.")
        for axis, entry in enumerate(spec):
            for name in get_axis_names(entry):
                if name not in self.mesh.shape:
                    raise ValueError(
                        f"{what}: the mesh has no axis {name!r}, only"
                        f" {self.mesh.axis_names}."
                    )
            parts = math.prod(self.mesh.shape[name] for name in get_axis_names(entry))
            if leaf.shape[axis] % parts:
                raise ValueError(
                    f"{what}: axis {axis} of size {leaf.shape[axis]} is not divisible"
                    f" by {parts}. Give PartitionSpec() for leaves that do not divide."
                )
        return spec


def count_shards(strategy: DataParallel) -> int:
    """Returns the number of equal parts that a strategy splits the rows into."""
    if strategy.mesh.empty:
        return 1
    return math.prod(strategy.mesh.shape[name] for name in strategy.row_axes)


def place_batch(
    strategy: DataParallel, groups: Sequence[Group], *, split: bool
) -> Sequence[Group]:
    """Returns batches as compiled steps take them. On one process it changes nothing.

    Host arrays go straight into the compiled step, which places them faster than
    `jax.device_put`. With several processes, `groups` have the rows of this process's
    own blocks, and become arrays of the rows of all processes.
    """
    if jax.process_count() == 1 or not strategy.mesh.is_multi_process:
        return groups
    shardings = functools.partial(strategy._group_shardings, split=split)
    return put_rows(groups, make_row_blocks(strategy), shardings, split=split)


def adds_state(strategy: DataParallel) -> bool:
    """Returns True if a strategy keeps something in the state of the optimizer."""
    return type(strategy).wrap_optimizer is not DataParallel.wrap_optimizer


def state_shardings(strategy: DataParallel, state: TrainState) -> TrainState:
    """The sharding of each leaf of `state`, from its shape and the strategy's specs."""
    if strategy.mesh.empty:
        raise NotImplementedError(
            f"`{type(strategy).__name__}` can't be planned: it has no `mesh`, over"
            " which `param_spec` and `update_spec` say how each leaf is held."
        )

    layouts = strategy.layouts(state)

    def held(path: tuple[Any, ...], _: Any) -> NamedSharding:
        return NamedSharding(strategy.mesh, layouts[state_name(path)])

    return jax.tree_util.tree_map_with_path(held, state)


def state_name(path: Sequence[Any]) -> str:
    """The name of a leaf of a state, by its JAX key path: `params: layers[0].weight`"""
    field, *rest = path
    return f"{field.name}: {leaf_path(rest)}".removesuffix(": ")


def make_row_blocks(strategy: DataParallel) -> RowBlocks:
    """Which rows of a batch this process loads, if there are several processes."""
    if jax.process_count() == 1:
        return RowBlocks()
    if strategy.mesh.empty:
        raise ValueError(
            f"`strategy`: {strategy!r} can't train with {jax.process_count()}"
            " processes: it has no `mesh` that says which rows each of them loads. Use"
            " Sharded() or another strategy that spans them."
        )
    return _row_blocks(strategy.mesh, strategy.row_axes)


def check_offload(strategy: DataParallel) -> None:
    """Raises unless the strategy's state may be held in host memory, too."""
    if type(strategy).place is not DataParallel.place or strategy.mesh.empty:
        raise ValueError(
            "`offload`='optimizer' needs a strategy that says where each leaf of the"
            " state is held, by a mesh and `param_spec`, and does not `place` it"
            " otherwise, as SingleDevice and Sharded do; `strategy` is"
            f" {strategy!r}. Take one of those, or leave `offload` out."
        )


def replace_attributes(strategy: Strategy, **attributes: Any) -> Strategy:
    """A copy of a strategy with some attributes replaced."""
    other = copy.copy(strategy)
    vars(other).update(attributes)
    return other


def is_rng_row_independent() -> bool:
    """Whether the keys of rows draw the same however many rows are drawn for at once.

    The default generator, threefry, does; what others draw depends on it.
    """
    return jax.config.jax_default_prng_impl == "threefry2x32"  # pyright: ignore


def make_shardings(
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


@functools.lru_cache
def _row_blocks(mesh: Mesh, row_axes: tuple[str, ...]) -> RowBlocks:
    sizes = [mesh.shape[name] for name in row_axes]
    places = [mesh.axis_names.index(name) for name in row_axes]
    shards = [
        (int(np.ravel_multi_index([index[i] for i in places], sizes)), device)
        for index, device in np.ndenumerate(mesh.devices)
    ]
    return find_row_blocks(shards, math.prod(sizes))


def drop_micro_batch_axis(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf of one micro-batch, of those stacked in a group."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
