"""Attention by a loop over blocks of keys, with the weights of one block at a time."""

import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

# Softmax needs a maximum and a sum over all keys, which are kept as far as the loop has
# come (arXiv:1805.02867). The derivative is written by hand (arXiv:2205.14135): JAX's
# own would keep what each turn begins with.


MODEL: Final = "model"
"""The axis of a mesh that heads are split over, as by `tensor_rules`."""

SEQ: Final = "seq"
"""The axis that tokens are split over, as by `SequenceParallel`."""


class Hidden(NamedTuple):
    """Which weights are left out; each is an array, or None."""

    mask: Any
    """Booleans `(queries, keys)`, or `(heads, queries, keys)`; False hides."""
    query_ids: Any
    """The segments of queries, integers."""
    key_ids: Any
    """Those of keys."""
    key: Any
    """Of dropout."""
    rate: Any
    """Of dropout, from 0 to 1."""


class _Blocks(NamedTuple):
    """What is known of a call while it is traced."""

    causal: bool
    count: int
    keys: int


def in_blocks(
    heads: tuple[Array, Array, Array], hidden: Hidden, causal: bool, block: int
) -> Array:
    """Attention of `heads` of queries, keys and values, `(tokens, heads, features)`.

    Args:
        heads: queries, keys and values.
        hidden: which weights are left out.
        causal: whether those of later keys are, too.
        block: how many keys are taken at a time, about.

    Returns:
        `(queries, heads, features)`, in the dtype of the values.
    """
    query, key, value = heads
    blocks = _Blocks(causal, _count(len(key), block), len(key))
    return _attention(blocks, query, key, value, hidden)


def _count(keys: int, block: int) -> int:
    """How many blocks: as many as divide the keys, if that is not many more."""
    least = max(1, math.ceil(keys / block))
    near = range(least, min(keys, 2 * least) + 1)
    return next((number for number in near if keys % number == 0), least)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    blocks: _Blocks, query: Array, key: Array, value: Array, hidden: Hidden
) -> Array:
    return _forward(blocks, query, key, value, hidden)[0]


def _forward(
    blocks: _Blocks, query: Array, key: Array, value: Array, hidden: Hidden
) -> tuple[Array, Any]:
    loop = functools.partial(_loop, blocks)
    looped: Any = _as_one(loop, query, key, value, hidden)
    return looped[0], (query, key, value, hidden, *looped)


def _loop(
    blocks: _Blocks, query: Array, key: Array, value: Array, hidden: Hidden
) -> tuple[Array, Array, Array]:
    """Attention; and for each head and query the greatest score, and the sum of all
    exponentials after it was subtracted."""
    dtype = _accumulated(query)

    def turn(carry: Any, own: Any) -> tuple[Any, None]:
        most, total, attended = carry
        number, key, value = own[0], *_whole(*own[1:])
        scores = _scores(blocks, number, query, key, hidden)[0]
        higher = jnp.maximum(most, scores.max(axis=-1))
        base = jnp.where(higher == -jnp.inf, 0, higher)
        weights = jnp.exp(scores - base[..., None])
        fading = jnp.exp(most - base)
        total = total * fading + weights.sum(axis=-1)
        added = _product("hqk,khd->hqd", _kept(number, weights, hidden), value)
        attended = _over_tokens(attended * fading[..., None] + added, 1)
        return (higher, total, attended), None

    queries, heads, _ = query.shape
    nothing = jnp.zeros((heads, queries), dtype)
    attended = jnp.zeros((heads, queries, value.shape[-1]), dtype)
    # Numbers that come with the keys: of others JAX would compute the causal masks of
    # all blocks once, before the loop over a model's layers, and keep them.
    numbers, key = jax.lax.optimization_barrier((jnp.arange(blocks.count), key))
    cut = numbers, _cut(blocks, key), _cut(blocks, value)
    start = nothing - jnp.inf, nothing, _over_tokens(attended, 1)
    (most, total, attended), _ = jax.lax.scan(turn, start, cut)

    # Two, not the logarithm of their product: where all is masked, the greatest score
    # is the least number there is, and nothing can be added to it.
    base = jnp.where(most == -jnp.inf, 0, most)
    total = jnp.where(total == 0, 1, total)
    attended = jnp.swapaxes(attended / total[..., None], 0, 1).astype(value.dtype)
    return attended, base, total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _as_one(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, in which policies of `jax.checkpoint` see no products
    to keep, as FSDP's would."""
    return function(*arguments)


_as_one.defvjp(
    lambda function, *arguments: jax.vjp(function, *arguments),
    lambda _, pullback, gradients: pullback(gradients),
)


def _backward(blocks: _Blocks, kept: Any, gradient: Array) -> tuple[Any, ...]:
    query, key, value, hidden, attended, base, total = kept
    dtype = _accumulated(query)
    scale = 1 / math.sqrt(query.shape[-1])
    mean = (gradient.astype(dtype) * attended.astype(dtype)).sum(axis=-1).T

    def turn(of_query: Array, own: Any) -> tuple[Array, tuple[Array, Array]]:
        number, key, value = own[0], *_whole(*own[1:])
        scores, visible = _scores(blocks, number, query, key, hidden)
        weights = jnp.exp(scores - base[..., None]) / total[..., None]
        of_value = _product("hqk,qhd->khd", _kept(number, weights, hidden), gradient)
        of_weights = _kept(number, _product("qhd,khd->hqk", gradient, value), hidden)
        of_scores = weights * (of_weights - mean[..., None]) * scale
        of_scores = jnp.where(visible, of_scores, 0)
        of_key = _product("hqk,qhd->khd", of_scores, query)
        of_query = of_query + _product("hqk,khd->qhd", of_scores, key)
        return of_query, (of_key.astype(key.dtype), of_value.astype(value.dtype))

    cut = jnp.arange(blocks.count), _cut(blocks, key), _cut(blocks, value)
    start = _over_tokens(jnp.zeros(query.shape, dtype), 0)
    of_query, others = jax.lax.scan(turn, start, cut)
    of_key, of_value = (_joined(blocks, leaf) for leaf in others)
    return of_query.astype(query.dtype), of_key, of_value, None


_attention.defvjp(_forward, _backward)


def _scores(
    blocks: _Blocks, number: Array, query: Array, key: Array, hidden: Hidden
) -> tuple[Array, Array]:
    """Products `(heads, queries, block)`, and which are visible, broadcastable."""
    scores = _product("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    scores = _over_tokens(scores, 1)
    positions = jnp.arange(len(key)) * blocks.count + number
    there = (positions < blocks.keys)[None]
    if blocks.causal:
        there = there & (jnp.arange(len(query))[:, None] >= positions[None])
    if hidden.query_ids is not None:
        ids = _turn_of(blocks, number, hidden.key_ids)
        there = there & (hidden.query_ids[:, None] == ids[None])
    visible = there = there[None]
    if hidden.mask is not None:
        of_heads = hidden.mask if hidden.mask.ndim == 3 else hidden.mask[None]
        allowed = _turn_of(blocks, number, of_heads)
        # As Equinox hides it, which matters where nothing else is left.
        scores = jnp.where(allowed, scores, jnp.finfo(scores.dtype).min)
        visible = there & allowed
    return jnp.where(there, scores, -jnp.inf), visible


def _kept(number: Array, weights: Array, hidden: Hidden) -> Array:
    """Weights of a block after dropout, which draws the same whenever it is asked."""
    if hidden.rate is None:
        return weights
    share = (1 - hidden.rate).astype(weights.dtype)
    key = jax.random.fold_in(hidden.key, number)
    is_kept = jax.random.bernoulli(key, share, weights.shape)
    return jnp.where(is_kept, weights / share, 0)


def _product(what: str, one: Array, other: Array) -> Array:
    """A product in the narrower dtype of the two, summed in float32 at least."""
    dtype = _accumulated(one)
    if one.dtype != other.dtype:
        narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        one, other = one.astype(narrow), other.astype(narrow)
    return jnp.einsum(what, one, other, preferred_element_type=dtype)


def _accumulated(heads: Array) -> Any:
    return jnp.float64 if heads.dtype == jnp.float64 else jnp.float32


# A block is every so-many-th key. So the axis may stay split over devices, each has
# its part of each block, and no more than a block is gathered at a time.


def _cut(blocks: _Blocks, array: Array) -> Array:
    """`(keys, ...)` as `(count, block, ...)`."""
    missing = -len(array) % blocks.count
    if missing:
        array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return jnp.swapaxes(array.reshape(-1, blocks.count, *array.shape[1:]), 0, 1)


def _whole(*blocks: Array) -> tuple[Array, ...]:
    """Keys and values of a block, `(block, ...)`, on all devices that share tokens."""
    return tuple(_over_tokens(block, 0, None) for block in blocks)


def _over_tokens(array: Array, axis: int, over: str | None = SEQ) -> Array:
    """The same split over the devices that share tokens, or whole on each of them.

    If the ambient mesh has such, as under `SequenceParallel`: left to itself, XLA may
    gather queries in place of keys, and sum what they attend to, for each block.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(SEQ) != AxisType.Auto or array.shape[axis] % mesh.shape[SEQ]:
        return array
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
    spec[axis] = over
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*spec))


def _joined(blocks: _Blocks, cut: Array) -> Array:
    """What `_cut` has cut."""
    return jnp.swapaxes(cut, 0, 1).reshape(-1, *cut.shape[2:])[: blocks.keys]


def _turn_of(blocks: _Blocks, number: Array, array: Array) -> Array:
    """The keys of one block, `(..., block)`, from all, `(..., keys)`."""
    missing = -array.shape[-1] % blocks.count
    if missing:
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
    apart = array.reshape(*array.shape[:-1], -1, blocks.count)
    return jax.lax.dynamic_index_in_dim(apart, number, axis=-1, keepdims=False)
