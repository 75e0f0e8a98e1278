"""Attention without its matrix of weights: by cuDNN, or for a block of queries."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from ..basics.arguments import check_choice, check_count, checks_arguments
from ..basics.tree import find_matches, leaf_path

Model = TypeVar("Model")

SEQ: Final = "seq"
"""The mesh axis that tokens are split over, as by `SequenceParallel`."""

_MODEL: Final = "model"
"""The mesh axis that heads are split over, as by `tensor_rules`."""


@checks_arguments
def fuse_attention(
    model: Model,
    *,
    causal: bool | str | Sequence[str] = False,
    block: int = 256,
    implementation: str = "auto",
) -> Model:
    """Computes every `eqx.nn.MultiheadAttention` of a model without its weight matrix.

    The attention weights, heads x tokens x tokens, are most of the memory of a model
    with long rows. Here they never exist together. cuDNN's kernel computes attention
    where it can (`jax.nn.dot_product_attention`). Elsewhere a loop computes the weights
    of a block of queries at a time, and once more in the backward pass.
    `docs/long_context.md` lists the cases.

    The new model computes the same values, takes the same arguments, and has the same
    leaves at the same paths, so checkpoints and rules fit both. Layers in a
    `jaxdp.Stack` are replaced, too, but no subclasses of the layer.

    Args:
        model: a model, or any tree with such layers.
        causal: whether each token attends only to itself and earlier ones; or path
            patterns of the layers where it does, such as `"decoder.**"`. Leave out the
            causal mask, which would be a matrix again.
        block: how many queries of a row the loop computes at a time.
        implementation: `"auto"`; `"blocks"`, always the loop; or `"cudnn"`, for which
            JAX raises where cuDNN can't compute a call.

    Returns:
        A new model. Calls of its layers also take `segment_ids`; see
        `FusedAttention.__call__`.

    Raises:
        ValueError: if there is no such layer, or no layer that a pattern names.
    """
    check_count("block", block)
    check_choice("implementation", implementation, ("auto", "cudnn", "blocks"))
    patterns = ["**"] * causal if isinstance(causal, bool) else causal
    patterns = [patterns] if isinstance(patterns, str) else patterns
    is_list = isinstance(patterns, list | tuple) and (patterns or causal is False)
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            "`causal` must be True, False, or path patterns of layers, such as"
            f" 'decoder.**'; got {causal!r}."
        )
    kinds = eqx.nn.MultiheadAttention, FusedAttention
    is_layer = lambda node: type(node) in kinds  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_layer)
    names = [leaf_path(path) for path, node in nodes if is_layer(node)]
    if not names:
        raise ValueError(
            "`model` has no eqx.nn.MultiheadAttention, whose attention could be fused"
            " (subclasses of it are left alone). In a layer of your own, call"
            " jax.nn.dot_product_attention."
        )
    named = find_matches("`causal`", patterns, names, "eqx.nn.MultiheadAttention")

    def fuse_layer(path: Any, node: Any) -> Any:
        if not is_layer(node):
            return node
        return FusedAttention(node, leaf_path(path) in named, block, implementation)

    return jax.tree_util.tree_map_with_path(fuse_layer, model, is_leaf=is_layer)


class FusedAttention(eqx.nn.MultiheadAttention):
    """An `eqx.nn.MultiheadAttention` without a weight matrix."""

    causal: bool = eqx.field(static=True)
    block: int = eqx.field(static=True)
    implementation: str = eqx.field(static=True)

    def __init__(self, layer: Any, causal: bool, block: int, implementation: str):
        for field in dataclasses.fields(eqx.nn.MultiheadAttention):
            setattr(self, field.name, getattr(layer, field.name))
        self.causal, self.block, self.implementation = causal, block, implementation

    @jax.named_scope("FusedAttention")
    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Array | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        process_heads: Callable[..., Any] | None = None,
        segment_ids: Array | None = None,
    ) -> Array:
        """Computes the values of `eqx.nn.MultiheadAttention`; also takes `segment_ids`.

        Args:
            query: `(queries, features)`.
            key_: `(keys, features)`.
            value: `(keys, features)`.
            mask: booleans, `(queries, keys)` or `(heads, queries, keys)`; False hides a
                key. A query whose keys are all hidden gets their mean, as in Equinox.
            key: for dropout of the weights, which draws other numbers than Equinox.
            inference: switches dropout off. Default: the layer's setting.
            process_heads: changes the heads of query, key and value, as rotary
                positions do.
            segment_ids: integers `(tokens,)`, for rows that are packed with several
                texts: a token attends only to tokens of the same number.

        Returns:
            `(queries, features)`.
        """
        for name, array in {"query": query, "key_": key_, "value": value}.items():
            if array.ndim != 2:
                raise ValueError(
                    f"`{name}` must have shape (tokens, features); got {array.shape}."
                    " For several rows, call the layer by jax.vmap."
                )
        queries, keys = len(query), len(key_)
        if (self.causal or segment_ids is not None) and queries != keys:
            raise ValueError(
                "`causal` and `segment_ids` are for queries and keys of the same"
                f" tokens; got {queries} queries and {keys} keys. Pass a `mask` that"
                " says which keys each query may see."
            )
        inputs = (
            (self.query_proj, query),
            (self.key_proj, key_),
            (self.value_proj, value),
        )
        heads: Any = tuple(
            jax.vmap(layer)(x).reshape(len(x), self.num_heads, -1)
            for layer, x in inputs
        )
        if process_heads is not None:
            heads = tuple(process_heads(*heads))
        mask = _parse_mask(mask, self.num_heads, queries, keys)
        segment_ids = _parse_segments(segment_ids, queries)
        rate = self.dropout.p
        inference = self.dropout.inference if inference is None else inference
        dropout = None
        if not inference and not (isinstance(rate, int | float) and rate == 0):
            if key is None:
                raise RuntimeError("Dropout requires a key outside of inference mode.")
            dropout = key, jnp.asarray(rate, jnp.float32)
        is_plain = mask is None and segment_ids is None and dropout is None
        if self.implementation == "cudnn" and not is_plain:
            raise ValueError(
                "`implementation`='cudnn' computes no dropout, no `mask` and no"
                " `segment_ids`. Take 'auto', which computes such calls in blocks."
            )
        is_auto = self.implementation == "auto" and is_plain
        if self.implementation == "cudnn" or is_auto and _suits_cudnn(heads):
            attended: Array = _attend_by_cudnn(heads, self.causal)
        else:
            attended = _attend_with_inputs_kept(
                self.causal, self.block, *heads, (mask, segment_ids, dropout)
            )
        return jax.vmap(self.output_proj)(attended.reshape(queries, -1))


def _parse_mask(mask: Any, heads: int, queries: int, keys: int) -> Array | None:
    if mask is None:
        return None
    shapes = (queries, keys), (heads, queries, keys)
    if mask.shape not in shapes or mask.dtype != bool:
        raise ValueError(
            "`mask` must be of booleans, False where a key is hidden, and of shape"
            f" (queries, keys) = {shapes[0]} or (heads, queries, keys) = {shapes[1]};"
            f" got {mask.dtype}{mask.shape}."
        )
    return jnp.swapaxes(jnp.asarray(mask).reshape(-1, queries, keys), 0, 1)


def _parse_segments(ids: Any, tokens: int) -> Array | None:
    if ids is None:
        return None
    ids = jnp.asarray(ids)
    if ids.shape != (tokens,) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"`segment_ids` must be integers of shape (tokens,) = ({tokens},); got"
            f" {ids.dtype}{ids.shape}."
        )
    return ids


def _attend_by_cudnn(heads: Any, causal: bool) -> Array:
    compute = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
    )
    if _MODEL in _list_auto_axes(jax.typeof(heads[0]).sharding.mesh):
        spec = PartitionSpec(None, _MODEL)
        compute = jax.shard_map(
            compute, in_specs=spec, out_specs=spec, axis_names={_MODEL}, check_vma=False
        )
    return compute(*heads)


def _list_auto_axes(mesh: Any) -> list[str]:
    """Returns the axes over which XLA may split arrays of the program."""
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [n for n, kind in axes if kind != AxisType.Manual and mesh.shape[n] > 1]


def _suits_cudnn(heads: tuple[Array, Array, Array]) -> bool:
    """Returns True if cuDNN computes these heads on the devices of the program.

    JAX can't be asked: its `implementation=None` is never cuDNN, and the call raises
    only when it is traced or compiled.
    """
    query, key, value = heads
    device, mesh = jax.local_devices()[0], jax.typeof(query).sharding.mesh
    platforms = {device.platform}
    if not mesh.empty and mesh.abstract_device is not None:  # of a plan, say
        platforms.add(mesh.abstract_device.platform)
    # Without a mesh it is unknown how several devices split the tokens.
    auto_axes = _list_auto_axes(mesh)
    is_split = jax.device_count() > 1 if mesh.empty else auto_axes not in ([], [_MODEL])
    if is_split or auto_axes and query.shape[1] % mesh.shape[_MODEL]:
        return False
    # Ampere and Ada are 8.x, Hopper is 9.0; AMD's have a text such as "gfx942".
    capability = str(getattr(device, "compute_capability", ""))
    largest = 128 if capability.startswith("8.") else 256
    return (
        platforms <= {"gpu", "cuda"}
        and re.fullmatch(r"([89]|\d\d)\.\d", capability) is not None
        and {x.dtype.name for x in heads} in ({"bfloat16"}, {"float16"})
        and {x.shape[-1] for x in heads} <= {*range(8, largest + 1, 8)}
        and query.shape[-1] == value.shape[-1]
        # Kernels take multiples of 64 with any mask, and refuse some other lengths.
        and len(query) % 64 == len(key) % 64 == 0
    )


def _attend_in_blocks(
    causal: bool, block: int, query: Array, key: Array, value: Array, hidden: Any
) -> Array:
    """Computes attention from queries, keys and values `(tokens, heads, features)`.

    If the tokens are split over devices, as by `SequenceParallel`, each device computes
    its own queries, and gathers all keys and values.

    Args:
        hidden: the mask `(queries, heads or 1, keys)`, the segments `(tokens,)`, and
            the key and rate of dropout; each may be None.
    """
    mask, segment_ids, dropout = hidden
    # The barrier makes positions depend on the queries. Otherwise JAX computes the
    # causal masks of all blocks once, before the loop over a model's layers.
    positions, query = jax.lax.optimization_barrier((jnp.arange(len(query)), query))
    mesh = jax.sharding.get_abstract_mesh()
    parts = mesh.shape[SEQ] if SEQ in _list_auto_axes(mesh) else 1
    parts = 1 if len(query) % parts else parts

    def gather_and_widen(array: Array) -> Array:
        if parts > 1:
            rest = [PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)
            spec = PartitionSpec(None, *rest)
            array = jax.lax.with_sharding_constraint(array, spec)
        return array.astype(jnp.promote_types(array.dtype, jnp.float32))

    queries = query, positions, mask, segment_ids
    # Gradients of keys and values are summed over the blocks in this dtype.
    keys = gather_and_widen(key), gather_and_widen(value), segment_ids
    attend: Any = functools.partial(_loop_over_queries, causal, max(1, block // parts))
    if parts > 1:
        tokens, full = PartitionSpec(SEQ), PartitionSpec()
        attend = jax.shard_map(
            attend,
            in_specs=(tokens, full, full),
            out_specs=tokens,
            axis_names={SEQ},
            check_vma=False,
        )
    return attend(queries, keys, dropout).astype(value.dtype)


def _attend_backward(causal: bool, block: int, inputs: Any, gradient: Array) -> Any:
    *heads, hidden = inputs
    attend = functools.partial(_attend_in_blocks, causal, block, hidden=hidden)
    _, pull_back = jax.vjp(attend, *heads)
    return *pull_back(gradient), None


# Keeps the inputs alone for the backward pass. Within `jax.checkpoint`, policies that
# save products, such as FSDP's, would else save the scores of all blocks: they do not
# see into a function with its own derivative.
_attend_with_inputs_kept = jax.custom_vjp(_attend_in_blocks, nondiff_argnums=(0, 1))
_attend_with_inputs_kept.defvjp(
    lambda *inputs: (_attend_in_blocks(*inputs), inputs[2:]), _attend_backward
)


def _loop_over_queries(
    causal: bool, block: int, queries: Any, keys: Any, dropout: Any
) -> Array:
    """Computes the attended values, `(queries, heads, features)`, `block` at a time."""
    wide_key, wide_value, key_ids = keys
    multiply = functools.partial(jnp.einsum, preferred_element_type=wide_value.dtype)

    @jax.checkpoint
    def attend(inputs: Any) -> Array:
        query, position, mask, query_id = inputs  # query: (heads, features)
        key, value = (x.astype(query.dtype) for x in (wide_key, wide_value))
        scores = multiply("hd,khd->hk", query, key) / math.sqrt(query.shape[-1])
        is_visible = jnp.ones((1, 1), bool) if mask is None else mask
        if causal:
            is_visible &= (jnp.arange(len(key)) <= position)[None]
        if query_id is not None:
            is_visible &= (key_ids == query_id)[None]
        # Equinox's value for hidden keys, which matters where all keys are hidden.
        scores = jnp.where(is_visible, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores)
        if dropout is not None:
            drop_key, rate = dropout
            # Drawn by the position of the query: the same on any number of devices.
            drop_key = jax.random.fold_in(drop_key, position)
            weights = eqx.nn.Dropout(rate)(weights, key=drop_key)
        return multiply("hk,khd->hd", weights.astype(value.dtype), value)

    return jax.lax.map(attend, queries, batch_size=block)
