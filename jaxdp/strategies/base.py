"""The contract between the training loop and the devices."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..basics.console import log_info_once
from ..basics.tree import leaf_path
from ..distributed import RowBlocks, find_row_blocks
from ..step import DATA, Collectives, Group, TrainState
from .meshes import get_axis_names
from .offload import jit_with_offload
from .placement import place_copy, put_rows

Role = Literal["state", "groups", "rows", "replicated"]
"""The role of an argument or a result of a step.

`"state"`: arrays that `place` laid out; they stay where they are. `"groups"`: a list of
`Group`s; rows, the axis after that of micro-batches, are split. `"rows"`: predictions,
split by rows. `"replicated"`: small values that every device holds.
"""

Rows = Literal["apart", "together", "replicated"]
"""The division of a step's rows among devices.

`"apart"`: rows are split over the devices, and all functions are written for one
example, so each device may work on its own rows. `"together"`: rows are split, and
something is written for a batch (a `loss_fn`, a model with state), so the step must see
all rows. `"replicated"`: the devices do not divide the rows, so every device gets all
of them and must not sum over devices.
"""

Strategy = TypeVar("Strategy", bound="DataParallel")


NO_MESH: Final = Mesh(np.empty((), dtype=object), ())
"""The mesh of an engine that does not describe the split of leaves."""


class DataParallel:
    """The layout of arrays on devices, and the division of a step's rows.

    The base of all strategies. It never sees a loss, an optimizer or a loop. Everything
    follows from a `mesh` and the split of leaves over it: a subclass defines these and
    inherits the rest, as `Sharded` does. A custom engine overrides `place` and
    `compile` instead, and needs no mesh. `SingleDevice` is the shortest complete
    strategy.
    """

    mesh: Mesh = NO_MESH
    """The devices, along named axes of type Auto."""

    row_axes: tuple[str, ...] = (DATA,)
    """The axes of the mesh that rows are split over."""

    def __copy__(self: Strategy) -> Strategy:
        return replace_attributes(self)

    def __deepcopy__(self: Strategy, memo: dict[int, Any]) -> Strategy:
        return replace_attributes(self)  # devices are not copied

    def __reduce__(self) -> Any:  # for `pickle`
        if self.mesh.empty:
            return super().__reduce__()
        raise TypeError(
            f"a strategy such as {self!r} can't be pickled: its devices belong to this"
            " process. Send the name of its class and its arguments, and make it there."
        )

    def prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a `Trainer`, as this strategy trains with them.

        Called with all of them, by name, after each was checked. A strategy may

        - raise for arguments that it can't train with;
        - replace `strategy` by a copy that knows the model, to split it by its parts;
        - replace `optimizer` by one with additional state, as `LocalSGD` does, which
          keeps a replica of the model for each device there. If that state holds the
          weights to evaluate, a node of it has a method `evaluated_params(params)`,
          which returns them.
        """
        return arguments

    def param_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """Returns the split of a leaf of the model; its optimizer state follows.

        If an axis also splits rows, a parameter is split over it between steps, and
        gathered for each step.

        Args:
            path: as a user writes it, `layers[0].weight`.
            leaf: the array, or its shape and dtype.
        """
        return PartitionSpec()

    def update_spec(self, path: str, leaf: Array) -> PartitionSpec:
        """Returns the split of a parameter's gradient and optimizer state.

        By default that is the split of the parameter. If only the gradient and the
        state are split over an axis of the rows, each device updates a shard of a
        replicated parameter.
        """
        return self.param_spec(path, leaf)

    def batch_spec(self, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        """Returns the split of a leaf of a batch, shaped `(rows, ...)`."""
        return PartitionSpec(self.row_axes)

    def collectives(self, groups: Sequence[Group], rows: Rows) -> Collectives:
        """Returns the object by which a step reaches the rows of other devices.

        Its `over_rows(function, inputs, groups, results)` runs the part of a step that
        looks at rows. The base class calls the function itself: the step sees all rows,
        and XLA inserts the communication.

        Args:
            groups: the batches, or their shapes.
            rows: the division of their rows.
        """
        return Collectives()

    def on(self: Strategy, devices: Sequence[Any]) -> Strategy:
        """Returns this strategy on other devices, even those of another machine."""
        raise NotImplementedError(
            f"`{type(self).__name__}` can't be planned for other devices: it has no"
            " `on(devices)` that returns the same strategy for them."
        )

    def place(self, state: TrainState) -> TrainState:
        """Copies `state` to the devices, in this strategy's layout.

        Every leaf must be a new buffer: the step will overwrite it, and the arrays
        passed in belong to the user. They may come from host memory or from any other
        layout. Leaves that are None stay None.
        """
        shardings = state_shardings(self, state)
        self._report_if_replicated(shardings)
        return place_copy(state, shardings)

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
            arguments: example values or `jax.ShapeDtypeStruct`s. The leaves of an
                argument with the role `"state"` have a `sharding`.
            roles: the role of each argument.
            results: the role of each result, or of the only result. A result with the
                role `"state"` has the layout of that argument.
            donate: positions of arguments whose memory the step may overwrite.
            rows: the division of rows among devices.

        Returns:
            The result of `jax.jit`, which the trainer traces, inspects and compiles
            once.
        """
        by_rows = NamedSharding(self.mesh, PartitionSpec(self.row_axes))
        layouts = {
            "state": get_shardings(arguments[roles.index("state")]),
            "rows": self._replicated if rows == "replicated" else by_rows,
            "replicated": self._replicated,
        }
        of_group = functools.partial(self._group_shardings, split=rows != "replicated")
        call = arguments, roles, results
        shardings = make_shardings(*call, layouts.__getitem__, of_group)
        groups = arguments[roles.index("groups")]
        program = functools.partial(step, self.collectives(groups, rows))
        return jit_with_offload(program, arguments, *shardings, donate)

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

    def _lay_out(self, state: TrainState) -> TrainState:
        """Returns the split of each leaf of a state, by `param_spec` and `update_spec`.

        A leaf of the optimizer's state belongs to a parameter if its path ends with the
        parameter's path, as Adam's `mu.layers[0].weight` does, and its shape with the
        parameter's shape.
        """
        params: dict[tuple[str, ...], tuple[tuple[int, ...], PartitionSpec]] = {}

        def find_spec(path: Any, leaf: Any) -> PartitionSpec:
            name, method = leaf_path(path), "`param_spec`"
            spec = self.param_spec(name, leaf)
            return check_spec(self.mesh, method, spec, name, leaf)

        def record_spec(path: Any, leaf: Any) -> None:
            name, method = leaf_path(path), "`update_spec`"
            spec = self.update_spec(name, leaf)
            spec = check_spec(self.mesh, method, spec, name, leaf)
            params[tuple(map(str, path))] = leaf.shape, spec

        def inherit_spec(path: Any, leaf: Any) -> PartitionSpec:
            # The longest path of a parameter that is a suffix of this path.
            keys = tuple(map(str, path))
            for start in range(len(keys) + 1):
                shape, spec = params.get(keys[start:], (None, None))
                if shape is None or spec is None:
                    continue
                stacked = leaf.ndim - len(shape)
                if stacked >= 0 and leaf.shape[stacked:] == shape:
                    return PartitionSpec(*[None] * stacked, *spec)
            return self._spec_without_parameter(leaf)

        # Parameters come first: the optimizer state follows them.
        with_path = jax.tree_util.tree_map_with_path
        specs = with_path(find_spec, state.params)
        with_path(record_spec, state.params)
        return jax.tree.map(lambda _: PartitionSpec(), state)._replace(
            params=specs,
            buffers=with_path(find_spec, state.buffers),
            opt_state=with_path(inherit_spec, state.opt_state),
        )

    def _report_if_replicated(self, shardings: TrainState) -> None:
        """Logs that a custom `param_spec`, whose paths may be misspelt, splits no
        array."""
        is_custom = not type(self).param_spec.__module__.startswith("jaxdp.")
        layouts = jax.tree.leaves((shardings.params, shardings.buffers))
        is_replicated = all(layout.is_fully_replicated for layout in layouts)
        if is_custom and is_replicated and self.mesh.size > 1:
            log_info_once(
                f"`strategy`: `param_spec` of {self!r} splits no array of the model, so"
                f" each of {self.mesh.size} devices holds all of them;"
                " jaxdp.strategies.find_layouts(trainer.strategy, trainer.state) lists"
                " them by path"
            )

    def _spec_without_parameter(self, leaf: Any) -> PartitionSpec:
        """Returns the split of optimizer state that belongs to no parameter."""
        return PartitionSpec()


def check_spec(
    mesh: Mesh, origin: str, spec: Any, path: str, leaf: Any
) -> PartitionSpec:
    """Returns `spec`, from `origin`; raises if it does not fit the mesh or the leaf."""
    what = f"{origin} gave {spec} for {path} of shape {leaf.shape}"
    if not isinstance(spec, PartitionSpec) or len(spec) > leaf.ndim:
        raise ValueError(
            f"{what}: it must be a PartitionSpec, with one entry for each axis of the"
            " array at most."
        )
    for axis, (size, entry) in enumerate(zip(leaf.shape, spec, strict=False)):
        names = get_axis_names(entry)
        if not {*names} <= {*mesh.axis_names}:
            raise ValueError(f"{what}: the mesh has the axes {mesh.axis_names} only.")
        if size % (parts := math.prod(mesh.shape[name] for name in names)):
            raise ValueError(
                f"{what}: axis {axis} of size {size} is not divisible by {parts}. Give"
                " PartitionSpec() for leaves that do not divide, or make the axis"
                f" {-(-size // parts) * parts} long."
            )
    return spec


def count_shards(strategy: DataParallel) -> int:
    """Returns the number of equal parts that a strategy splits the rows into."""
    if strategy.mesh.empty:
        return 1
    if not {*strategy.row_axes} <= {*strategy.mesh.axis_names}:
        raise ValueError(
            f"`strategy`: {type(strategy).__name__} has `row_axes` {strategy.row_axes},"
            f" and its mesh has the axes {strategy.mesh.axis_names}. Set `row_axes` to"
            " those that rows are split over; () gives every device all rows."
        )
    return math.prod(strategy.mesh.shape[name] for name in strategy.row_axes)


def place_batch(
    strategy: DataParallel, groups: Sequence[Group], *, split: bool
) -> Sequence[Group]:
    """Returns batches as compiled steps take them; unchanged on one process.

    Host arrays go straight into the compiled step, which places them faster than
    `jax.device_put`. With several processes, `groups` have the rows of this process's
    own blocks, and become arrays of the rows of all processes.
    """
    if jax.process_count() == 1 or not strategy.mesh.is_multi_process:
        return groups
    shardings = functools.partial(strategy._group_shardings, split=split)
    return put_rows(groups, make_row_blocks(strategy), shardings, split=split)


def find_layouts(strategy: DataParallel, state: TrainState) -> dict[str, PartitionSpec]:
    """Returns the split of each leaf of a state by name: `params: layers[0].weight`.

        find_layouts(trainer.strategy, trainer.state)

    Args:
        strategy: the strategy.
        state: arrays, or their shapes and dtypes; placed or not.
    """
    leaves = jax.tree_util.tree_leaves_with_path(strategy._lay_out(state))
    return {
        f"{field.name}: {leaf_path(rest)}".removesuffix(": "): spec
        for (field, *rest), spec in leaves
    }


def state_shardings(strategy: DataParallel, state: TrainState) -> TrainState:
    """Returns the sharding of each leaf of `state`, by the strategy's specs."""
    if strategy.mesh.empty:
        raise NotImplementedError(
            f"`{type(strategy).__name__}` can't be planned: it has no `mesh`, over"
            " which `param_spec` and `update_spec` say how each leaf is held."
        )
    shard = functools.partial(NamedSharding, strategy.mesh)
    return jax.tree.map(shard, strategy._lay_out(state))


def make_row_blocks(strategy: DataParallel) -> RowBlocks:
    """Returns the rows of a batch that this process loads, in a job of several
    processes.
    """
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
    """Raises unless the optimizer's state may be in host memory under this strategy."""
    if type(strategy).place is not DataParallel.place or strategy.mesh.empty:
        raise ValueError(
            "`offload`='optimizer' needs a strategy with a mesh that does not override"
            f" `place`, such as SingleDevice() or Sharded(); got {strategy!r}."
        )


def replace_attributes(strategy: Strategy, **attributes: Any) -> Strategy:
    """Returns a copy of a strategy with some attributes replaced."""
    other = object.__new__(type(strategy))
    vars(other).update(vars(strategy) | attributes)
    return other


def get_shardings(state: Any) -> Any:
    """Returns the shardings of a state, parts of which may be in host memory."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def make_shardings(
    arguments: Sequence[Any],
    roles: Sequence[Role],
    results: Role | tuple[Role, ...],
    layout: Callable[[Role], Any],
    of_group: Callable[[Group], Any],
) -> tuple[tuple[Any, ...], Any]:
    """Returns the layouts of a step's arguments, and those of its results.

    `layout` maps a role to its layout. The role "groups" is a list of `Group`s instead:
    `of_group` maps each of them to its layout.
    """
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
    """Returns the shape of one micro-batch's leaf, from a leaf stacked in a group."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
