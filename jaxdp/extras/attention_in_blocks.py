"""Attention by a loop over blocks of keys, with the weights of one block at a time."""

import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

# Softmax needs a maximum and a sum over all keys. The loop carries both over the keys
# read so far (arXiv:1805.02867). The derivative is written by hand (arXiv:2205.14135):
# JAX's own would keep the carry of every iteration. A loop over blocks of queries needs
# no such derivative, but it would gather all keys where devices share the tokens.

MODEL: Final = "model"
"""The mesh axis that heads are split over, as by `tensor_rules`."""

SEQ: Final = "seq"
"""The mesh axis that tokens are split over, as by `SequenceParallel`."""


class MaskAndDropout(NamedTuple):
    """Which attention weights are left out; each field is an array, or None."""

    mask: Any
    """Booleans `(queries, keys)`, or `(heads, queries, keys)`; False hides."""
    query_ids: Any
    """The segments of queries, integers."""
    key_ids: Any
    """The segments of keys, integers."""
    key: Any
    """The PRNG key of dropout."""
    rate: Any
    """The rate of dropout, from 0 to 1."""


class _Blocks(NamedTuple):
    """The static facts of a call."""

    causal: bool
    count: int
    """The number of blocks."""
    keys: int
    """The number of keys."""


def attend_in_blocks(
    heads: tuple[Array, Array, Array], hidden: MaskAndDropout, causal: bool, block: int
) -> Array:
    """Computes attention from queries, keys and values `(tokens, heads, features)`.

    Args:
        heads: queries, keys and values.
        hidden: which weights are left out.
        causal: whether the weights of later keys are left out, too.
        block: about how many keys a block has.

    Returns:
        `(queries, heads, features)`, in the dtype of the values.
    """
    query, key, value = heads
    # The number of blocks divides the keys, if that takes at most twice as many.
    fewest = max(1, math.ceil(len(key) / block))
    counts = range(fewest, min(len(key), 2 * fewest) + 1)
    count = next((count for count in counts if len(key) % count == 0), fewest)
    blocks = _Blocks(causal, count, len(key))
    return _attend(blocks, query, key, value, hidden)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    blocks: _Blocks, query: Array, key: Array, value: Array, hidden: MaskAndDropout
) -> Array:
    return _attend_forward(blocks, query, key, value, hidden)[0]


def _attend_forward(
    blocks: _Blocks, query: Array, key: Array, value: Array, hidden: MaskAndDropout
) -> tuple[Array, Any]:
    loop = functools.partial(_loop_over_blocks, blocks)
    outputs: Any = _hide_products(loop, query, key, value, hidden)
    return outputs[0], (query, key, value, hidden, *outputs)


def _loop_over_blocks(
    blocks: _Blocks, query: Array, key: Array, value: Array, hidden: MaskAndDropout
) -> tuple[Array, Array, Array]:
    """Returns attention, and two arrays `(heads, queries)` for the backward pass.

    They are the maximum of the scores, and the sum of `exp(score - maximum)`.
    """
    dtype = _get_sum_dtype(query)

    def add_block(carry: Any, block: Any) -> tuple[Any, None]:
        maximum, total, attended = carry
        number, key, value = block[0], *_gather_block(*block[1:])
        scores = _compute_scores(blocks, number, query, key, hidden)[0]
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
        base = jnp.where(new_maximum == -jnp.inf, 0, new_maximum)
        weights = jnp.exp(scores - base[..., None])
        decay = jnp.exp(maximum - base)
        total = total * decay + weights.sum(axis=-1)
        added = _multiply("hqk,khd->hqd", _drop(number, weights, hidden), value)
        attended = _constrain_tokens(attended * decay[..., None] + added, 1)
        return (new_maximum, total, attended), None

    queries, heads, _ = query.shape
    zeros = jnp.zeros((heads, queries), dtype)
    attended = jnp.zeros((heads, queries, value.shape[-1]), dtype)
    # The barrier makes block numbers depend on the keys. Otherwise JAX computes the
    # causal masks of all blocks once, before the loop over a model's layers.
    numbers, key = jax.lax.optimization_barrier((jnp.arange(blocks.count), key))
    inputs = numbers, _split_keys(blocks, key), _split_keys(blocks, value)
    start = zeros - jnp.inf, zeros, _constrain_tokens(attended, 1)
    (maximum, total, attended), _ = jax.lax.scan(add_block, start, inputs)

    # Not the logarithm of their product: where all is masked, the maximum is the
    # smallest number of its dtype, and adding to it changes nothing.
    base = jnp.where(maximum == -jnp.inf, 0, maximum)
    total = jnp.where(total == 0, 1, total)
    attended = jnp.swapaxes(attended / total[..., None], 0, 1).astype(value.dtype)
    return attended, base, total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _hide_products(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function so that policies of `jax.checkpoint` see no products in it.

    Policies such as FSDP's would keep the products, which are the attention weights.
    """
    return function(*arguments)


_hide_products.defvjp(
    lambda function, *arguments: jax.vjp(function, *arguments),
    lambda _, pullback, gradients: pullback(gradients),
)


def _attend_backward(blocks: _Blocks, residuals: Any, gradient: Array) -> Any:
    query, key, value, hidden, attended, base, total = residuals
    dtype = _get_sum_dtype(query)
    scale = 1 / math.sqrt(query.shape[-1])
    mean = (gradient.astype(dtype) * attended.astype(dtype)).sum(axis=-1).T

    def add_block(d_query: Array, block: Any) -> tuple[Array, tuple[Array, Array]]:
        number, key, value = block[0], *_gather_block(*block[1:])
        scores, visible = _compute_scores(blocks, number, query, key, hidden)
        weights = jnp.exp(scores - base[..., None]) / total[..., None]
        d_value = _multiply("hqk,qhd->khd", _drop(number, weights, hidden), gradient)
        d_weights = _drop(number, _multiply("qhd,khd->hqk", gradient, value), hidden)
        d_scores = weights * (d_weights - mean[..., None]) * scale
        d_scores = jnp.where(visible, d_scores, 0)
        d_key = _multiply("hqk,qhd->khd", d_scores, query)
        d_query = d_query + _multiply("hqk,khd->qhd", d_scores, key)
        return d_query, (d_key.astype(key.dtype), d_value.astype(value.dtype))

    numbers = jnp.arange(blocks.count)
    inputs = numbers, _split_keys(blocks, key), _split_keys(blocks, value)
    start = _constrain_tokens(jnp.zeros(query.shape, dtype), 0)
    d_query, (d_key, d_value) = jax.lax.scan(add_block, start, inputs)
    d_key, d_value = (
        jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])[: blocks.keys]
        for x in (d_key, d_value)
    )
    return d_query.astype(query.dtype), d_key, d_value, None


_attend.defvjp(_attend_forward, _attend_backward)


def _compute_scores(
    blocks: _Blocks, number: Array, query: Array, key: Array, hidden: MaskAndDropout
) -> tuple[Array, Array]:
    """Returns scores `(heads, queries, block)`, and which of them are visible."""
    scores = _multiply("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    scores = _constrain_tokens(scores, 1)
    positions = jnp.arange(len(key)) * blocks.count + number
    in_reach = (positions < blocks.keys)[None]  # False for padding
    if blocks.causal:
        in_reach = in_reach & (jnp.arange(len(query))[:, None] >= positions[None])
    if hidden.query_ids is not None:
        ids = _select_block(blocks, number, hidden.key_ids)
        in_reach = in_reach & (hidden.query_ids[:, None] == ids[None])
    visible = in_reach = in_reach[None]
    if hidden.mask is not None:
        mask = hidden.mask if hidden.mask.ndim == 3 else hidden.mask[None]
        is_allowed = _select_block(blocks, number, mask)
        # Equinox's value for hidden keys, which matters where all keys are hidden.
        scores = jnp.where(is_allowed, scores, jnp.finfo(scores.dtype).min)
        visible = in_reach & is_allowed
    return jnp.where(in_reach, scores, -jnp.inf), visible


def _drop(number: Array, weights: Array, hidden: MaskAndDropout) -> Array:
    """Applies dropout to the weights of a block; draws the same for the same number."""
    if hidden.rate is None:
        return weights
    keep_rate = (1 - hidden.rate).astype(weights.dtype)
    key = jax.random.fold_in(hidden.key, number)
    is_kept = jax.random.bernoulli(key, keep_rate, weights.shape)
    return jnp.where(is_kept, weights / keep_rate, 0)


def _multiply(equation: str, one: Array, other: Array) -> Array:
    """Multiplies in the narrower dtype of the two; sums in float32 or wider."""
    dtype = _get_sum_dtype(one)
    if one.dtype != other.dtype:
        narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        one, other = one.astype(narrow), other.astype(narrow)
    return jnp.einsum(equation, one, other, preferred_element_type=dtype)


def _get_sum_dtype(heads: Array) -> Any:
    return jnp.float64 if heads.dtype == jnp.float64 else jnp.float32


# Block i has the keys i, i + count, i + 2 * count, and so on. If the keys are split
# over devices, each device has a part of each block, and one block is gathered at a
# time.


def _split_keys(blocks: _Blocks, array: Array) -> Array:
    """Turns `(keys, ...)` into `(count, block, ...)`."""
    padding = -len(array) % blocks.count
    if padding:
        array = jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))
    return jnp.swapaxes(array.reshape(-1, blocks.count, *array.shape[1:]), 0, 1)


def _select_block(blocks: _Blocks, number: Array, array: Array) -> Array:
    """Returns the keys of one block, `(..., block)`, from `(..., keys)`."""
    padding = -array.shape[-1] % blocks.count
    if padding:
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padding)])
    array = array.reshape(*array.shape[:-1], -1, blocks.count)
    return jax.lax.dynamic_index_in_dim(array, number, axis=-1, keepdims=False)


def _gather_block(*blocks: Array) -> tuple[Array, ...]:
    """Gathers the keys and values of a block on all devices that split the tokens."""
    return tuple(_constrain_tokens(block, 0, None) for block in blocks)


def _constrain_tokens(array: Array, axis: int, over: str | None = SEQ) -> Array:
    """Splits an axis of tokens over the mesh axis `seq`, or with None replicates it.

    Does nothing without such a mesh, which `SequenceParallel` sets. XLA by itself may
    gather queries instead of keys, and reduce the attended values once per block.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(SEQ) != AxisType.Auto or array.shape[axis] % mesh.shape[SEQ]:
        return array
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
    spec[axis] = over
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*spec))
