"""Fused attention against Equinox's own."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import (
    HEADS,
    KEYS,
    ODD,
    PLAIN,
    QUERIES,
    Model,
    layer_and_inputs,
    losses,
    tokens,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.test_util import check_grads
from toys import assert_close

from jaxdp import Stack, fuse_attention
from jaxdp.strategies import tensor_rules


def check_alike(layer, others, inputs, **keywords):
    """Whether layers have the same values, and gradients of all they are given."""

    def total(both):
        result = both[0](*both[1], **keywords)
        weights = jnp.cos(jnp.arange(result.size)).reshape(result.shape)
        return (result * weights).sum()

    gradient = eqx.filter_jit(eqx.filter_value_and_grad(total))
    wanted = gradient((layer, inputs))
    for other in others:
        assert_close(gradient((other, inputs)), wanted, 1e-5, 1e-5)


def masks(heads):
    shape = (*[HEADS] * heads, QUERIES, KEYS)
    mask = jax.random.bernoulli(jax.random.key(7), 0.6, shape)
    return mask.at[..., 3, :].set(False)  # one that sees nothing


@pytest.mark.parametrize(
    ("sizes", "mask", "blocks"),
    [
        (PLAIN, None, (5,)),
        (PLAIN, masks(0), (1, 100)),
        (ODD, None, (5,)),
        (ODD, masks(1), (5,)),
    ],
    ids=["plain", "mask", "sizes", "mask of heads"],
)
@pytest.mark.slow_cases("plain", "sizes")
def test_values_and_gradients_are_those_of_equinox(sizes, mask, blocks):
    layer, inputs = layer_and_inputs(sizes)
    fused = [fuse_attention(layer, block=block) for block in blocks]
    check_alike(layer, fused, inputs, mask=mask)


def test_causal_needs_no_mask():
    layer, _ = layer_and_inputs()
    fused = fuse_attention(layer, causal=True, block=4)
    lower = jnp.tril(jnp.ones((19, 19), bool))
    mask = jax.random.bernoulli(jax.random.key(1), 0.6, (19, 19)) | jnp.eye(
        19, dtype=bool
    )

    @jax.jit
    def pairs(x):
        alone = fused(x, x, x), layer(x, x, x, lower)
        return alone, (fused(x, x, x, mask), layer(x, x, x, lower & mask))

    for pair in pairs(tokens(19)):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)


def test_heads_are_processed_as_before():
    layer, _ = layer_and_inputs()
    rotary = eqx.nn.RotaryPositionalEmbedding(4)

    def turned(query, key, value):
        turn = jax.vmap(rotary, in_axes=1, out_axes=1)
        return turn(query), turn(key), value

    fused = [fuse_attention(layer)]
    check_alike(layer, fused, [tokens(9)] * 3, process_heads=turned)


def test_dropout_has_the_distribution_of_equinox():
    layer, inputs = layer_and_inputs(dropout_p=0.3)
    fused = fuse_attention(layer, block=5)
    keys = jax.random.split(jax.random.key(3), 2000)

    @jax.jit
    def drawn(keys):
        of_one = jax.vmap(
            lambda key: (fused(*inputs, key=key), layer(*inputs, key=key))
        )
        return of_one(keys)

    got, wanted = drawn(keys)
    np.testing.assert_allclose(got.mean(axis=0), wanted.mean(axis=0), atol=0.03)
    np.testing.assert_allclose(got.std(axis=0), wanted.std(axis=0), rtol=0.1)
    with pytest.raises(RuntimeError, match="requires a key"):
        fused(*inputs)


def test_inference_has_no_dropout():
    layer, inputs = layer_and_inputs(dropout_p=0.3)
    fused = fuse_attention(layer)
    call = eqx.filter_jit(lambda layer, **keywords: layer(*inputs, **keywords))
    wanted = call(layer, inference=True)
    for got in (call(fused, inference=True), call(eqx.nn.inference_mode(fused))):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    with pytest.warns(UserWarning, match="deterministic"):
        got = call(fused, deterministic=True)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradients_see_the_dropout_of_the_values():
    layer, inputs = layer_and_inputs(dropout_p=0.3)
    fused = fuse_attention(layer, block=5)

    @jax.jit
    def total(query):
        return (fused(query, *inputs[1:], key=jax.random.key(3)) ** 2).sum()

    check_grads(total, inputs[:1], order=1, modes=["rev"], rtol=0.02)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.slow_but("True")
def test_packed_rows_are_as_if_alone(causal):
    layer, _ = layer_and_inputs()
    fused = fuse_attention(layer, causal=causal, block=4)
    ids = jnp.repeat(jnp.array([3, 1, 2]), 7)

    @jax.jit
    def both(x):
        parts = x.reshape(3, 7, -1)
        alone = jax.vmap(fused)(parts, parts, parts).reshape(x.shape)
        return fused(x, x, x, segment_ids=ids), alone

    np.testing.assert_allclose(*both(tokens(21)), rtol=1e-5, atol=1e-6)


def test_no_gradient_leaves_its_segment():
    layer, _ = layer_and_inputs()
    fused = fuse_attention(layer, block=4)
    x, ids = tokens(19), jnp.array([3] * 8 + [1] * 6 + [2] * 5)
    jacobian = jax.jit(jax.jacrev(lambda x: fused(x, x, x, segment_ids=ids)))
    reached = np.abs(jacobian(x)).max(axis=(1, 3)) > 0  # (output token, input token)
    np.testing.assert_array_equal(reached, ids[:, None] == ids[None])


def test_queries_and_keys_may_have_segments_of_their_own():
    layer, inputs = layer_and_inputs()
    fused = fuse_attention(layer, block=4)
    ids = jnp.arange(QUERIES) % 3, jnp.arange(KEYS) % 2  # no key is in 2
    mask = ids[0][:, None] == ids[1][None]
    got = eqx.filter_jit(fused)(*inputs, segment_ids=ids)
    wanted = jnp.where(ids[0][:, None] == 2, 0, eqx.filter_jit(layer)(*inputs, mask))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_layers_keep_their_leaves_and_paths():
    model = Model()
    fused = fuse_attention(model)
    one, other = (jax.tree_util.tree_leaves_with_path(m) for m in (model, fused))
    assert [path for path, _ in one] == [path for path, _ in other]
    assert all(a is b for (_, a), (_, b) in zip(one, other, strict=True))
    layer = fused.blocks.stacked.attention
    assert isinstance(layer, eqx.nn.MultiheadAttention)
    assert tensor_rules(fused) == tensor_rules(model)
    again = fuse_attention(fused, causal=["blocks.*"]).blocks.stacked.attention
    assert (layer.causal, again.causal) == (False, True)


@pytest.mark.parametrize("remat", [False, "blocks.stacked"])
@pytest.mark.parametrize("strategy", ["single", "sharded", "fsdp", "tensor"])
@pytest.mark.slow_but("single-False", "fsdp-blocks.stacked")
def test_losses_are_those_of_the_plain_model(strategy, remat):
    got = losses(True, strategy, remat=remat)
    np.testing.assert_allclose(got, losses(False), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["sharded", "fsdp", "tensor", "sequence"])
@pytest.mark.slow_but("sharded")
def test_dropout_is_the_same_on_any_number_of_devices(strategy):
    alone = losses(True, dropout_p=0.2)
    several = losses(True, strategy, dropout_p=0.2)
    np.testing.assert_allclose(several, alone, rtol=1e-5)
    assert not np.allclose(alone, losses(False), rtol=1e-3)


def temporary(layer, wrapped=lambda call: call, count=4096, **shardings):
    """Bytes of a gradient beside its arguments, compiled for one row."""

    def total(layer, x):
        return (wrapped(lambda x: layer(x, x, x))(x) ** 2).sum()

    arrays, rest = eqx.partition(layer, eqx.is_array)
    gradient = jax.jit(
        jax.grad(lambda arrays, x: total(eqx.combine(arrays, rest), x), (0, 1)),
        **shardings,
    )
    x = jax.ShapeDtypeStruct((count, layer.query_size), jnp.float32)
    compiled = gradient.lower(arrays, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()


@pytest.mark.parametrize("policy", [None, "dots_saveable"])
@pytest.mark.slow_but("dots_saveable")
def test_memory_of_long_rows(policy):
    layer = eqx.nn.MultiheadAttention(4, 256, key=jax.random.key(0))
    wrapped = lambda call: call  # noqa: E731
    if policy:
        wrapped = functools.partial(
            jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy)
        )
    fused = fuse_attention(layer, causal=True)
    assert temporary(fused, wrapped)[0] < 0.2 * temporary(layer, wrapped)[0]


class Layer(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __call__(self, x):
        return self.attention(x, x, x)


def test_a_loop_over_layers_keeps_no_causal_masks():
    """JAX would compute those of all blocks before it: tokens x tokens x heads."""
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [Layer(eqx.nn.MultiheadAttention(4, 32, key=key)) for key in keys]
    arrays, rest = eqx.partition(
        fuse_attention(Stack(layers), causal=True, block=64), eqx.is_array
    )

    def total(arrays, x):
        return (jax.vmap(eqx.combine(arrays, rest))(x) ** 2).sum()

    x = jax.ShapeDtypeStruct((1, 1024, 32), jnp.float32)
    text = jax.jit(jax.grad(total)).lower(arrays, x).as_text()
    assert "1024x64xi1" in text and "16x1x4x1024x64xi1" not in text


def test_split_tokens_are_gathered_a_block_at_a_time():
    fused = fuse_attention(
        eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0)), causal=True
    )
    mesh = Mesh(jax.devices()[:8], ("seq",), axis_types=(AxisType.Auto,))
    of_tokens = NamedSharding(mesh, PartitionSpec("seq"))
    whole = NamedSharding(mesh, PartitionSpec())
    bytes_split, text = temporary(
        fused, in_shardings=(whole, of_tokens), out_shardings=(whole, of_tokens)
    )
    assert bytes_split < 0.25 * temporary(fused)[0]
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    assert gathered and all("[256," in line for line in gathered)


# Errors. -------------------------------------------------------------------------
