"""Parameters that stay split, and are gathered where they are used.

A block of a `Stack`, or another submodule, gathers its own when it is called, and once
more in its backward pass, where the gradient is summed straight into shards. Where each
device works on its own rows, it is given its shards, and that is what `jax.grad` makes
of `all_gather`. Where all rows are worked on together, parameters are global arrays,
and XLA is told by constraints where they are whole.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..basics.tree import at_path, leaf_path
from ..step import (
    equations_in,
    is_recomputed,
    opened,
    programs_in,
    with_call,
    without_call,
)
from .meshes import names_of

_MADE_ANEW: Final = {
    "all_gather",
    "sharding_constraint",
    "name",
    "convert_element_type",
    "transpose",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
}
"""What is not kept for a backward pass: gathered parameters, and views of arrays."""


class Gatherers(NamedTuple):
    """The modules of a model that gather their arrays when they are called."""

    paths: Mapping[str, Any] = MappingProxyType({})
    """Where they are in the model, by name; none is inside another."""
    stacked: Mapping[str, int] = MappingProxyType({})
    """How many axes of blocks their arrays have, of which a call sees one block."""

    def owner(self, name: str) -> str | None:
        """The one that the array of that name is in."""
        return next((path for path in self.paths if name.startswith(f"{path}.")), None)

    def gather(self, name: str, spec: PartitionSpec, axes: tuple[str, ...]) -> bool:
        """Whether one of them gathers the array of that name, split like this.

        Over `axes` of the mesh, that is; over others it stays split.
        """
        owner = self.owner(name)
        ours = [[axis in axes for axis in names_of(names)] for names in spec]
        # Not if an axis is split by others, too: a gathered part is no part of theirs.
        if owner is None or any(any(axis) and not all(axis) for axis in ours):
            return False
        stacked = self.stacked[owner]
        return any(map(any, ours[stacked:])) and not any(map(any, ours[:stacked]))

    def arranged(
        self,
        model: PyTree,
        specs: Mapping[str, PartitionSpec],
        axes: tuple[str, ...],
        mesh: Mesh | None = None,
    ) -> PyTree:
        """The model, with calls of them that gather.

        Args:
            model: with one device's shards; or, on a `mesh`, with global arrays.
            specs: how its arrays are split that they gather, by name.
            axes: of the mesh, over which they gather.
            mesh: where XLA gathers.
        """
        for name, path in self.paths.items():
            of_parameters = {
                leaf.removeprefix(f"{name}."): PartitionSpec(
                    *spec[self.stacked[name] :]
                )
                for leaf, spec in specs.items()
                if self.owner(leaf) == name
            }
            gathered = _Gathered(
                tuple(of_parameters.items()), self.stacked[name] > 0, axes, mesh
            )
            model = eqx.tree_at(
                lambda tree, path=path: at_path(tree, path),
                model,
                replace_fn=lambda module, call=gathered: with_call(module, call),
            )
        return model


class _Gathered(NamedTuple):
    """The call of a module that gathers its arrays first; see `with_call`."""

    specs: tuple[tuple[str, PartitionSpec], ...]
    """How they are split, by their names in the module; none, and nothing is."""
    in_loop: bool
    axes: tuple[str, ...] = ()
    """Those of the mesh that they are gathered over."""
    mesh: Mesh | None = None
    """Of global arrays. Without one, they are a device's shards."""

    def __call__(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        keeps_nothing = is_recomputed(module)

        def call(module: Any, *arguments: Any, **keywords: Any) -> Any:
            whole = self._whole(module)
            if keeps_nothing:
                # Once is enough. In a second `checkpoint`, XLA for TPUs would not
                # gather a block while the one before it is computed.
                whole = without_call(whole)
            return whole(*arguments, **keywords)

        recomputed = eqx.filter_checkpoint(
            call,
            policy=None if keeps_nothing else _is_kept,
            # A turn of a loop has nothing in it that XLA could compute once for both.
            prevent_cse=not self.in_loop,
        )
        return recomputed(module, *arguments, **keywords)

    def _whole(self, module: PyTree) -> PyTree:
        specs = dict(self.specs)

        def gather(path: Any, leaf: Any) -> Any:
            spec = specs.get(leaf_path(path))
            if spec is None:
                return leaf
            ours, others = only(self.axes, spec), without(self.axes, spec)
            if self.mesh is None:
                is_all = not _left_to_xla()
                return (_all_gathered if is_all else _parts_gathered)(
                    ours, others, leaf
                )
            kept = others if any(others) else PartitionSpec()
            split, whole = (NamedSharding(self.mesh, each) for each in (spec, kept))
            return _used_whole(leaf, split, whole)

        with jax.named_scope("parameters"):
            return jax.tree_util.tree_map_with_path(gather, module)


def _all_gathered(spec: PartitionSpec, _: PartitionSpec, leaf: Array) -> Array:
    """What devices have shards of, split like this."""
    for axis, names in enumerate(spec):
        if names is not None:
            leaf = jax.lax.all_gather(leaf, names, axis=axis, tiled=True)
    return leaf


def _summed_to_shards(spec: PartitionSpec, gradient: Array) -> Array:
    for axis, names in enumerate(spec):
        if names is not None:
            gradient = jax.lax.psum_scatter(
                gradient, names, scatter_dimension=axis, tiled=True
            )
    return gradient


def by_parts(
    function: Callable[[Array], Array], others: PartitionSpec
) -> Callable[[Array], Array]:
    """`function`, which exchanges shards, of the part of an array that a device has.

    Over the axes that are left to XLA arrays are split like `others`, and stay so. XLA
    would gather them over those axes first, and for CPUs it can't reduce bfloat16 where
    any are left: it aborts the process.
    """
    if not (left := _left_to_xla()):
        return function
    return jax.shard_map(
        function, in_specs=others, out_specs=others, axis_names=left, check_vma=False
    )


def _left_to_xla() -> set[str]:
    """The axes of the mesh over which this device's program is one of whole arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in axes if kind == AxisType.Auto}


def _each_part_gathered(
    ours: PartitionSpec, others: PartitionSpec, leaf: Array
) -> Array:
    return by_parts(functools.partial(_all_gathered, ours, others), others)(leaf)


# JAX's own derivative would sum what is whole over the axes left to XLA over those.
_parts_gathered = jax.custom_vjp(_each_part_gathered, nondiff_argnums=(0, 1))
_parts_gathered.defvjp(
    lambda ours, others, leaf: (_each_part_gathered(ours, others, leaf), None),
    lambda ours, others, _, gradient: (
        by_parts(functools.partial(_summed_to_shards, ours), others)(gradient),
    ),
)


def _gathered_by_xla(leaf: Array, split: NamedSharding, whole: NamedSharding) -> Array:
    """A global array that is split, and then whole."""
    leaf = jax.lax.with_sharding_constraint(leaf, split)
    return jax.lax.with_sharding_constraint(leaf, whole)


_used_whole = jax.custom_jvp(_gathered_by_xla, nondiff_argnums=(1, 2))


@_used_whole.defjvp
def _(
    split: NamedSharding, whole: NamedSharding, leaves: Any, tangents: Any
) -> tuple[Array, Array]:
    # The transpose of a constraint is itself: gradients are summed straight into
    # shards, and those of whole arrays are never asked for.
    (leaf,), (tangent,) = leaves, tangents
    tangent = jax.lax.with_sharding_constraint(tangent, split)
    return _gathered_by_xla(leaf, split, whole), tangent


def without(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """`spec` with arrays whole over `axes`."""
    others = {name for names in spec for name in names_of(names)} - {*axes}
    return only(tuple(others), spec)


def only(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """`spec`, where it splits over `axes`."""
    kept = (tuple(n for n in names_of(names) if n in axes) for names in spec)
    return PartitionSpec(*(names or None for names in kept))


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _MADE_ANEW


# A step takes shards for whole arrays wherever it does not gather them: in a penalty
# on all weights, or where it asks for a shape. So what it computes forwards is compared
# with what it computes from whole arrays, operation by operation.

_CARRIERS: Final = {"convert_element_type", "name", "reduce_precision", "copy"}
"""Operations that make of a shard the shard of what they make of the whole."""


_KERNELS: Final = {"pallas_call", "ffi_call"}


class ShardsEscape(Exception):
    """A step does not compute the same from shards as from whole arrays."""


def check_alike(split: Any, whole: Any) -> None:
    """Raises `ShardsEscape` unless a step only gathers its shards, then does the same.

    Args:
        split: what devices compute on their rows, traced with shards.
        whole: the same with whole arrays, and modules that gather nothing.
    """
    _check_program(*(_forwards(_on_one_device(program)) for program in (split, whole)))


class NotDivided(Exception):
    """A step works on rows in a way that XLA would not divide by devices."""


def check_divided(together: Any, apart: Any) -> None:
    """Raises `NotDivided` unless XLA divides a step's work on rows by devices.

    It does not in a loop that takes rows in turn, which has as many turns as there are
    rows, nor in a kernel that it can't look into. And where each row has a gradient of
    its own, XLA would move those of all rows to where the shards are.

    Args:
        together: a step, traced with all rows.
        apart: the same, traced with those of one device.
    """
    for equation in equations_in(together):
        name = equation.primitive.name
        sharding = equation.params.get("sharding")
        # What `vmap` makes of a constraint leaves open how its own axis is split.
        is_mapped = PartitionSpec.UNCONSTRAINED in getattr(sharding, "spec", ())
        if name in _KERNELS or name == "sharding_constraint" and is_mapped:
            raise NotDivided(name)
    if _turns(together) != _turns(apart):
        raise NotDivided("a loop over rows")


def _turns(jaxpr: Any) -> list[int]:
    """How often the loops of a program run, but for those of unknown length."""
    loops = (each for each in equations_in(jaxpr) if each.primitive.name == "scan")
    return sorted(each.params["length"] for each in loops)


def _on_one_device(jaxpr: Any) -> Any:
    """What of a program comes first that each device does for itself."""
    names = [equation.primitive.name for equation in jaxpr.eqns]
    return jaxpr.eqns[names.index("shard_map")]


def _forwards(body: Any) -> Any:
    """A program without its backward pass, whose results are split by devices."""
    specs = body.params["out_specs"]
    wanted = [not any(spec) for spec in specs]
    wanted = wanted if any(wanted) else [True] * len(specs)  # predictions
    return dce_jaxpr(opened(body.params["jaxpr"]), wanted, instantiate=True)[0]


def _check_program(split: Any, whole: Any) -> None:
    same = dict(zip(split.invars, whole.invars, strict=True))
    same |= zip(split.constvars, whole.constvars, strict=True)
    expected = iter(whole.eqns)

    for equation in split.eqns:
        name = equation.primitive.name
        if _only_gathers(equation) and _of(equation.invars[0], same) is not None:
            same[equation.outvars[0]] = _of(equation.invars[0], same)
            continue
        other = next(expected, None)
        if other is None or not _is_alike(equation, other, same):
            raise ShardsEscape(f"{name} is not of whole arrays")
        same |= zip(equation.outvars, other.outvars, strict=True)
        for pair in zip(programs_in(equation), programs_in(other), strict=True):
            inside = list(map(opened, pair))
            if name in ("cond", "while") and _gathers(inside[0]):
                # Whether and how often may differ by device, which then wait for ever.
                raise ShardsEscape(f"gathered in a {name}")
            _check_program(*inside)

    outs = [_of(out, same) for out in split.outvars]
    if next(expected, None) is not None or outs != list(map(_plain, whole.outvars)):
        raise ShardsEscape("the results are others")


def _is_alike(equation: Any, other: Any, same: dict[Any, Any]) -> bool:
    """Whether two operations are the same, of the same operands."""
    operands = [_of(variable, same) for variable in equation.invars]
    if equation.primitive is not other.primitive:
        return False
    if operands != list(map(_plain, other.invars)):
        return False
    if programs_in(equation):
        return len(programs_in(equation)) == len(programs_in(other))
    if equation.primitive.name in _CARRIERS:
        return True
    before, after = (
        [variable.aval.shape for variable in (*e.invars, *e.outvars)]
        for e in (equation, other)
    )
    return before == after and _values(equation.params) == _values(other.params)


def _only_gathers(equation: Any) -> bool:
    """Whether an operation only gathers a shard, or the part of one."""
    if equation.primitive.name == "all_gather":
        return True
    inside = [opened(program).eqns for program in programs_in(equation)]
    is_of_one = len(equation.invars) == len(equation.outvars) == 1
    return is_of_one and any(inside) and all(map(_only_gathers, sum(inside, [])))


def _gathers(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name == "all_gather" for equation in equations_in(jaxpr)
    )


def _of(atom: Any, same: dict[Any, Any]) -> Any:
    """What stands for a variable in the other program; a constant for itself."""
    return _plain(atom) if hasattr(atom, "val") else same.get(atom)


def _plain(atom: Any) -> Any:
    return (str(atom.val), str(atom.aval)) if hasattr(atom, "val") else atom


def _values(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an operation that are numbers or names."""
    kinds = int | float | str | tuple | None
    return {k: str(v) for k, v in params.items() if isinstance(v, kinds)}
