"""Attention without its matrix of weights: by cuDNN, or for a block of queries."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

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
    patterns = [causal] if isinstance(causal, str) else causal
    are_texts = (
        isinstance(patterns, list | tuple)
        and len(patterns) > 0
        and all(isinstance(pattern, str) for pattern in patterns)
    )
    if not (isinstance(patterns, bool) or are_texts):
        raise TypeError(
            "`causal` must be True, False, or path patterns of layers, such as"
            f" 'decoder.**'; got {causal!r}."
        )
    patterns = [] if isinstance(patterns, bool) else patterns
    is_layer = lambda node: type(node) in _REPLACED  # noqa: E731
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
        is_causal = causal is True or leaf_path(path) in named
        return FusedAttention(node, is_causal, block, implementation)

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
        layers = self.query_proj, self.key_proj, self.value_proj
        heads: Any = tuple(
            jax.vmap(layer)(x).reshape(len(x), self.num_heads, -1)
            for layer, x in zip(layers, (query, key_, value), strict=True)
        )
        if process_heads is not None:
            heads = tuple(process_heads(*heads))
        mask = _parse_mask(mask, self.num_heads, queries, keys)
        segment_ids = _parse_segments(segment_ids, queries)
        hidden = _MaskAndDropout(mask, segment_ids, *self._get_dropout(key, inference))
        hides = any(part is not None for part in hidden)
        if self.implementation == "cudnn" and hides:
            raise ValueError(
                "`implementation`='cudnn' computes no dropout, no `mask` and no"
                " `segment_ids`. Take 'auto', which computes such calls in blocks."
            )
        is_auto = self.implementation == "auto" and not hides
        if self.implementation == "cudnn" or is_auto and _suits_cudnn(heads):
            attended: Array = _attend_by_cudnn(heads, self.causal)
        else:
            facts = _Facts(self.causal, self.block)
            attended = _attend_in_blocks(facts, *heads, hidden)
        return jax.vmap(self.output_proj)(attended.reshape(queries, -1))

    def _get_dropout(
        self, key: PRNGKeyArray | None, inference: bool | None
    ) -> tuple[PRNGKeyArray | None, Array | None]:
        """Returns the key and the rate of dropout, or two times None."""
        rate = self.dropout.p
        inference = self.dropout.inference if inference is None else inference
        if inference or (isinstance(rate, int | float) and rate == 0):
            return None, None
        if key is None:
            raise RuntimeError(
                "Dropout requires a key when running in non-deterministic mode."
            )
        return key, jax.lax.stop_gradient(jnp.asarray(rate, jnp.float32))


_REPLACED: Final = eqx.nn.MultiheadAttention, FusedAttention


class _MaskAndDropout(NamedTuple):
    """The weights that are left out beside those of `causal`: arrays, or None."""

    mask: Any
    """Booleans `(queries, heads or 1, keys)`; False hides."""
    segment_ids: Any
    """Integers `(tokens,)`."""
    key: Any
    """The PRNG key of dropout."""
    rate: Any
    """The rate of dropout, from 0 to 1."""


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


class _Facts(NamedTuple):
    """The static facts of a call of the loop."""

    causal: bool
    block: int


# The weights of a block are computed once more in the backward pass: JAX's derivative
# of the loop would keep them. As this function has its own derivative, policies of
# `jax.checkpoint`, such as FSDP's, see no product in it, which they would keep, too.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_blocks(
    facts: _Facts, query: Array, key: Array, value: Array, hidden: _MaskAndDropout
) -> Array:
    """Computes attention from queries, keys and values `(tokens, heads, features)`."""
    return _split_queries(_loop_forward, facts, (query,), (key, value), hidden)


def _attend_backward(facts: _Facts, inputs: Any, gradient: Array) -> Any:
    query, key, value, hidden = inputs
    d_query, d_key, d_value = _split_queries(
        _loop_backward, facts, (query, gradient), (key, value), hidden
    )
    d_key, d_value = d_key.sum(axis=0), d_value.sum(axis=0)  # over devices
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attend_in_blocks.defvjp(
    lambda facts, *inputs: (_attend_in_blocks(facts, *inputs), inputs),
    _attend_backward,
)


def _split_queries(
    loop: Callable[..., Any],
    facts: _Facts,
    queries: Any,
    keys: Any,
    hidden: _MaskAndDropout,
) -> Any:
    """Runs a loop over the queries, whose first one is at position `first`.

    If the tokens are split over devices, as by `SequenceParallel`, each device has its
    own queries, and gathers all keys and values.
    """
    queries = *queries, hidden.mask, hidden.segment_ids
    keys = *keys, hidden.segment_ids
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    parts = mesh.shape[SEQ] if kinds.get(SEQ) == AxisType.Auto else 1
    if parts == 1 or any(len(x) % parts for x in jax.tree.leaves((queries, keys))):
        return loop(facts, 0, queries, keys, hidden)
    facts = facts._replace(block=max(1, facts.block // parts))

    def loop_on_device(queries: Any, keys: Any, hidden: _MaskAndDropout) -> Any:
        first = jax.lax.axis_index(SEQ) * len(queries[0])
        return loop(facts, first, queries, keys, hidden)

    def gather(array: Array) -> Array:
        rest = [PartitionSpec.UNCONSTRAINED] * (array.ndim - 1)
        return jax.lax.with_sharding_constraint(array, PartitionSpec(None, *rest))

    tokens, full = PartitionSpec(SEQ), PartitionSpec()
    mapped = jax.shard_map(
        loop_on_device,
        in_specs=(tokens, full, full),
        out_specs=tokens,
        axis_names={SEQ},
        check_vma=False,
    )
    hidden = hidden._replace(mask=None, segment_ids=None)
    return mapped(queries, jax.tree.map(gather, keys), hidden)


def _loop_forward(
    facts: _Facts, first: Any, queries: Any, keys: Any, hidden: _MaskAndDropout
):
    """Returns the attended values, `(queries, heads, features)`."""
    key, value, key_ids = keys

    def attend(block: Any) -> Array:
        position, query, mask, ids = block
        weights = _weigh(
            _compute_scores(query, key), facts, hidden, position, mask, ids, key_ids
        )
        return _multiply("qhk,khd->qhd", weights, value).astype(value.dtype)

    attended = jax.lax.map(attend, _split_into_blocks(facts, first, queries))
    return _join_blocks(attended, len(queries[0]))


def _loop_backward(
    facts: _Facts, first: Any, queries: Any, keys: Any, hidden: _MaskAndDropout
):
    """Returns the gradients of the queries, and `(1, ...)` those of keys and values."""
    key, value, key_ids = keys

    def add_block(sums: tuple[Array, Array], block: Any) -> Any:
        position, query, gradient, mask, ids = block
        weights, pull_back = jax.vjp(
            lambda scores: _weigh(scores, facts, hidden, position, mask, ids, key_ids),
            _compute_scores(query, key),
        )
        (d_scores,) = pull_back(_multiply("qhd,khd->qhk", gradient, value))
        d_scores = d_scores / math.sqrt(query.shape[-1])
        d_query = _multiply("qhk,khd->qhd", d_scores, key).astype(query.dtype)
        d_key = sums[0] + _multiply("qhk,qhd->khd", d_scores, query)
        d_value = sums[1] + _multiply("qhk,qhd->khd", weights, gradient)
        return (d_key, d_value), d_query

    start: Any = tuple(jnp.zeros(x.shape, _get_sum_dtype(x)) for x in (key, value))
    blocks = _split_into_blocks(facts, first, queries)
    (d_key, d_value), d_query = jax.lax.scan(add_block, start, blocks)
    return _join_blocks(d_query, len(queries[0])), d_key[None], d_value[None]


def _split_into_blocks(facts: _Facts, first: Any, queries: Any) -> Any:
    """Returns positions, and arrays of the queries, as `(blocks, queries, ...)`."""
    # The barrier makes positions depend on the queries. Otherwise JAX computes the
    # causal masks of all blocks once, before the loop over a model's layers.
    query, *others = queries
    positions, query = jax.lax.optimization_barrier(
        (first + jnp.arange(len(query)), query)
    )
    count = -(-len(query) // facts.block)

    def split(array: Array) -> Array:
        padding = [(0, -len(array) % count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding).reshape(count, -1, *array.shape[1:])

    return jax.tree.map(split, [positions, query, *others])


def _join_blocks(blocks: Array, count: int) -> Array:
    return blocks.reshape(-1, *blocks.shape[2:])[:count]


def _compute_scores(query: Array, key: Array) -> Array:
    return _multiply("qhd,khd->qhk", query, key) / math.sqrt(query.shape[-1])


def _weigh(
    scores: Array,
    facts: _Facts,
    hidden: _MaskAndDropout,
    positions: Array,
    mask: Array | None,
    query_ids: Array | None,
    key_ids: Array | None,
) -> Array:
    """Returns the weights of a block of queries, `(queries, heads, keys)`."""
    is_visible = jnp.ones((1, 1, 1), bool) if mask is None else mask
    if facts.causal:
        keys = jnp.arange(scores.shape[-1])
        is_visible &= (positions[:, None] >= keys[None])[:, None]
    if query_ids is not None and key_ids is not None:
        is_visible &= (query_ids[:, None] == key_ids[None])[:, None]
    # Equinox's value for hidden keys, which matters where all keys are hidden.
    weights = jax.nn.softmax(jnp.where(is_visible, scores, jnp.finfo(scores.dtype).min))
    if hidden.rate is None:
        return weights
    # Drawn by the position of the query: the same on any number of devices.
    keep_rate = (1 - hidden.rate).astype(weights.dtype)
    keys = jax.vmap(functools.partial(jax.random.fold_in, hidden.key))(positions)
    draw = functools.partial(jax.random.bernoulli, p=keep_rate, shape=weights.shape[1:])
    return jnp.where(jax.vmap(draw)(keys), weights / keep_rate, 0)


def _multiply(equation: str, one: Array, other: Array) -> Array:
    """Multiplies in the narrower dtype of the two; sums in float32 or wider."""
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    one, other = one.astype(narrow), other.astype(narrow)
    dtype = _get_sum_dtype(one)
    return jnp.einsum(equation, one, other, preferred_element_type=dtype)


def _get_sum_dtype(array: Array) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)
