"""FSDP units: modules whose parameters stay sharded, and are gathered when called.

A unit, such as a block of a `Stack`, gathers its parameters in its call and again in
its backward pass, which sums gradients directly into shards. There are two ways:

- Each device works on its own rows. It holds `Shard`s, opaque until the call gathers
  them; `jax.grad` turns their `all_gather` into the sum.
- The step gets the full batch. Parameters are global arrays, and sharding constraints
  make XLA gather and sum.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..basics.tree import get_node, leaf_path
from ..step import get_remat_call, override_call, remove_call_override

_RECOMPUTED: Final = {
    "all_gather",
    "row_independent",
    "sharding_constraint",
    "name",
    "convert_element_type",
    "transpose",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
}
"""Primitives whose results are not saved for the backward pass: gathered parameters and
views of arrays."""


class Shard(jax.Array):
    """A device's shard of a parameter, until the module that it belongs to is called.

    Filters such as `eqx.is_inexact_array` treat it as an array, so that a sum over
    parameters can't silently omit it. Every other use is refused.

    Args:
        array: the shard.
        name: path of the parameter.
        owner: path of the module that gathers it.
    """

    def __init__(self, array: Array, name: str, owner: str):
        self.array, self.name, self.owner = array, name, owner

    @property
    def dtype(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.array.dtype

    def astype(self, dtype: Any) -> "Shard":  # pyright: ignore
        return Shard(self.array.astype(dtype), self.name, self.owner)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"`gather`: the loss uses the parameter {self.name} outside of calls of"
            f" {self.owner}, which gathers it when it is called; before that, a device"
            " has only a shard of it. (Passing the model through filter_jit,"
            " filter_checkpoint, stop_gradient or grad is a use.) Pass"
            ' gather="once" to the strategy, which gathers all parameters before the'
            " step; or write the loss for a batch, as a plain `loss_fn`, which may use"
            " any parameter."
        )

    def __repr__(self) -> str:
        return f"Shard({self.name})"


_CONVERSIONS: Final = "__jax_array__ __array__ __len__ __iter__ __bool__ __float__"
_HARMLESS: Final = "__module__ __doc__ __slots__ __weakref__ __hash__ dtype astype"

for _name in {*vars(jax.Array), *_CONVERSIONS.split()} - {*_HARMLESS.split()}:
    _is_method = _name.startswith("__") and _name not in ("__jax_array__", "__array__")
    setattr(Shard, _name, Shard._refuse if _is_method else property(Shard._refuse))


def open_shards(tree: PyTree) -> PyTree:
    """Returns the tree with the array of each `Shard` in its place, for the call of its
    owner.
    """
    is_shard = lambda leaf: isinstance(leaf, Shard)  # noqa: E731
    return jax.tree.map(lambda x: x.array if is_shard(x) else x, tree, is_leaf=is_shard)


class FSDPUnits(NamedTuple):
    """The modules of a model that gather their parameters when they are called."""

    paths: Mapping[str, Any] = MappingProxyType({})
    """Their key paths in the model, by name; none is inside another."""
    stacked: Mapping[str, int] = MappingProxyType({})
    """The number of leading axes that count blocks; a call sees one block."""

    def find_owner(self, name: str) -> str | None:
        """Returns the unit that contains the array of that name, or None."""
        return next((path for path in self.paths if name.startswith(f"{path}.")), None)

    def count_block_axes(self, name: str) -> int:
        """Returns the number of leading axes of an array that count blocks."""
        owner = self.find_owner(name)
        return 0 if owner is None else self.stacked[owner]

    def is_gathered(self, name: str, spec: PartitionSpec) -> bool:
        """Returns True if a unit gathers the array of that name, split like `spec`."""
        num_block_axes = self.count_block_axes(name)
        is_in_block = any(spec[num_block_axes:]) and not any(spec[:num_block_axes])
        return self.find_owner(name) is not None and is_in_block

    def wrap_modules(
        self,
        model: PyTree,
        specs: Mapping[str, PartitionSpec],
        mesh: Mesh | None = None,
    ) -> PyTree:
        """Returns the model with calls of the units that gather.

        Args:
            model: holds the shards of one device or, with a `mesh`, global arrays.
            specs: the splits of the arrays that units gather, by name.
            mesh: given if XLA gathers.
        """
        for name, path in self.paths.items():
            of_parameters = {
                leaf.removeprefix(f"{name}."): PartitionSpec(
                    *spec[self.stacked[name] :]
                )
                for leaf, spec in specs.items()
                if self.find_owner(leaf) == name
            }
            gathered = _GatherCall(
                tuple(of_parameters.items()), self.stacked[name] > 0, mesh
            )

            def arrange(module: Any, name: str = name, call: Any = gathered) -> Any:
                if mesh is None:
                    module = _hide_shards(module, name, dict(call.specs))
                return override_call(module, call)

            model = eqx.tree_at(
                lambda tree, path=path: get_node(tree, path), model, replace_fn=arrange
            )
        return model


def _hide_shards(module: PyTree, owner: str, names: Mapping[str, Any]) -> PyTree:
    """Returns the module with a `Shard` in the place of each array of `names`."""

    def hide(path: Any, leaf: Any) -> Any:
        name = leaf_path(path)
        return Shard(leaf, f"{owner}.{name}", owner) if name in names else leaf

    return jax.tree_util.tree_map_with_path(hide, module)


class _GatherCall(NamedTuple):
    """A call that gathers the module's parameters first; see `override_call`."""

    specs: tuple[tuple[str, PartitionSpec], ...]
    """Pairs of a parameter's name in the module and its split."""
    in_loop: bool
    mesh: Mesh | None = None
    """Given for global arrays. None for the shards of one device."""

    def __call__(self, module: Any, *arguments: Any, **keywords: Any) -> Any:
        recompute = get_remat_call(module)
        module = open_shards(module)

        def call(module: Any, *arguments: Any, **keywords: Any) -> Any:
            whole = self._gather_leaves(module)
            if recompute is not None:
                # One `checkpoint` is enough. In a second, XLA for TPUs would not
                # gather a block while the block before it is computed.
                whole = remove_call_override(whole)
            return whole(*arguments, **keywords)

        recomputed = eqx.filter_checkpoint(
            call,
            policy=_saves_for_backward if recompute is None else recompute.policy,
            # XLA can't merge the two computations within a loop iteration.
            prevent_cse=not self.in_loop,
        )
        return recomputed(module, *arguments, **keywords)

    def _gather_leaves(self, module: PyTree) -> PyTree:
        specs = dict(self.specs)

        def gather(path: Any, leaf: Any) -> Any:
            spec = specs.get(leaf_path(path))
            if spec is None:
                return leaf
            if self.mesh is None:
                return _all_gather(spec, _row_independent.bind(leaf))
            split, whole = (
                NamedSharding(self.mesh, each) for each in (spec, PartitionSpec())
            )
            return _gather_by_constraint(leaf, split, whole)

        with jax.named_scope("parameters"):
            return jax.tree_util.tree_map_with_path(gather, module)


GATHERED_IN_BRANCH: Final = (
    "`gather`: a module that gathers its parameters when it is called, such as a block"
    " of a Stack, is called in a branch of jax.lax.cond, in a while loop or under a"
    ' vmap over models, where devices differ in when they gather. Pass gather="once"'
    " to the strategy, which gathers all parameters before the step; or write the loss"
    " for a batch, as a plain `loss_fn`."
)


def _refuse_rows(*_: Any) -> Any:
    """Raises where `vmap` would batch a shard, as in a `lax.cond` whose predicate
    depends on the row: devices would add gradients of different rows.
    """
    raise ValueError(GATHERED_IN_BRANCH)


_row_independent: Final = Primitive("row_independent")
"""The identity of a shard; raises under a `vmap` in which it would differ by row."""

_row_independent.def_impl(lambda shard: shard)
_row_independent.def_abstract_eval(lambda shard: shard)
ad.deflinear2(_row_independent, lambda gradient, _: [gradient])
batching.primitive_batchers[_row_independent] = _refuse_rows
mlir.register_lowering(_row_independent, lambda _, shard: [shard])


def _all_gather(spec: PartitionSpec, leaf: Array) -> Array:
    """Gathers an array from its shards, split like `spec`."""
    for axis, names in enumerate(spec):
        if names is not None:
            leaf = jax.lax.all_gather(leaf, names, axis=axis, tiled=True)
    return leaf


def _constrain_split_then_full(
    leaf: Array, split: NamedSharding, whole: NamedSharding
) -> Array:
    """Constrains a global array to be split, and then full."""
    leaf = jax.lax.with_sharding_constraint(leaf, split)
    return jax.lax.with_sharding_constraint(leaf, whole)


_gather_by_constraint = jax.custom_jvp(
    _constrain_split_then_full, nondiff_argnums=(1, 2)
)


@_gather_by_constraint.defjvp
def _(
    split: NamedSharding, whole: NamedSharding, leaves: Any, tangents: Any
) -> tuple[Array, Array]:
    # The tangent is only constrained to be split. The backward pass transposes that
    # into the same constraint on the gradient. So gradients are summed directly into
    # shards, and no full gradient is made.
    (leaf,), (tangent,) = leaves, tangents
    tangent = jax.lax.with_sharding_constraint(tangent, split)
    return _constrain_split_then_full(leaf, split, whole), tangent


def _saves_for_backward(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _RECOMPUTED
