"""Fused attention against Equinox's own, and when it is left to cuDNN."""

import functools
import math
import re
from types import SimpleNamespace

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
    Block,
    Model,
    layer_and_inputs,
    losses,
    tokens,
)
from jax.sharding import AxisType
from jax.test_util import check_grads
from toys import assert_close, quiet

from jaxdp import SingleDevice, Stack, fuse_attention
from jaxdp.strategies import tensor_rules


def check_alike(layer, others, inputs, **keywords):
    """Asserts that layers have the same values, and gradients of weights and inputs."""

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
    lower, eye = jnp.tril(jnp.ones((19, 19), bool)), jnp.eye(19, dtype=bool)
    mask = jax.random.bernoulli(jax.random.key(1), 0.6, (19, 19)) | eye

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


def test_dropout_has_the_distribution_of_equinox_and_none_in_inference():
    layer, inputs = layer_and_inputs(dropout_p=0.3)
    fused = fuse_attention(layer, block=5)
    keys = jax.random.split(jax.random.key(3), 2000)

    @jax.jit
    def drawn(keys):
        of_one = lambda key: (fused(*inputs, key=key), layer(*inputs, key=key))  # noqa: E731
        return jax.vmap(of_one)(keys)

    got, wanted = drawn(keys)
    np.testing.assert_allclose(got.mean(axis=0), wanted.mean(axis=0), atol=0.03)
    np.testing.assert_allclose(got.std(axis=0), wanted.std(axis=0), rtol=0.1)
    sums = got.sum(axis=1), wanted.sum(axis=1)  # each query drops weights of its own
    np.testing.assert_allclose(*(sum.std(axis=0) for sum in sums), rtol=0.1)
    with pytest.raises(RuntimeError, match="requires a key"):
        fused(*inputs)
    call = eqx.filter_jit(lambda layer, **keywords: layer(*inputs, **keywords))
    wanted = call(layer, inference=True)
    for got in (call(fused, inference=True), call(eqx.nn.inference_mode(fused))):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


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


def test_gradients_have_gradients():
    layer, _ = layer_and_inputs()

    def steepness(layer):
        gradient = jax.grad(lambda x: (layer(x, x, x) ** 2).sum())
        return jax.jit(jax.grad(lambda x: (gradient(x) ** 2).sum()))(tokens(9))

    np.testing.assert_allclose(
        steepness(fuse_attention(layer, block=4)),
        steepness(layer),
        rtol=1e-3,
        atol=1e-4,
    )


def test_gradients_of_keys_are_summed_over_blocks_in_float32():
    layer, x = layer_and_inputs()[0], tokens(512).astype(jnp.bfloat16)
    layer = jax.tree.map(lambda a: a.astype(x.dtype) if eqx.is_array(a) else a, layer)

    def gradient(block):
        fused = fuse_attention(layer, block=block)
        total = lambda keys: (fused(x, keys, x) ** 2).astype("f4").sum()  # noqa: E731
        return jax.jit(jax.grad(total))(x).astype("f4")

    small, large = gradient(4), gradient(512)
    assert jnp.linalg.norm(small - large) < 0.01 * jnp.linalg.norm(large)


class OfItself(eqx.Module):
    attention: eqx.Module

    def __call__(self, x):
        return self.attention(x, x, x)


def test_products_are_computed_in_the_dtype_of_the_layer():
    fused = fuse_attention(layer_and_inputs()[0], block=8)
    options = {"loss": "mse", "precision": "bf16-mixed", "strategy": SingleDevice()}
    trainer = quiet(OfItself(fused), **options)
    plan = trainer.plan([(np.stack([tokens(32)] * 2), np.zeros((2, 32, 16)))])
    one, attention = 32 * 16 * 16, 32 * 32 * 16  # multiplications
    # Backwards, each product has two, and the scores are computed again. The inputs
    # have no gradients.
    expected = 2 * 2 * ((3 * 2 + 3) * one + (2 + 5) * attention)
    assert plan.products == {"bfloat16": expected}


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
@pytest.mark.slow_but("sharded", "sequence")
def test_dropout_is_the_same_on_any_number_of_devices(strategy):
    alone = losses(True, dropout_p=0.2)
    several = losses(True, strategy, dropout_p=0.2)
    np.testing.assert_allclose(several, alone, rtol=1e-5)
    assert not np.allclose(alone, losses(False), rtol=1e-3)


@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_memory_of_long_rows(policy):
    layer = eqx.nn.MultiheadAttention(4, 256, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((4096, layer.query_size), jnp.float32)
    keeps = policy and getattr(jax.checkpoint_policies, policy)
    wrap = functools.partial(jax.checkpoint, policy=keeps) if policy else jax.jit

    def temporary(layer):
        arrays, rest = eqx.partition(layer, eqx.is_array)

        def total(arrays, x):
            layer = eqx.combine(arrays, rest)
            return (wrap(lambda x: layer(x, x, x))(x) ** 2).sum()

        compiled = jax.jit(jax.grad(total, (0, 1))).lower(arrays, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(fuse_attention(layer, causal=True)) < 0.2 * temporary(layer)


def test_a_loop_over_layers_keeps_no_causal_masks():
    """With recomputed blocks, JAX would compute those of all blocks before it."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = Stack([Block(32, key) for key in keys])
    fused = fuse_attention(model, causal=True, block=64)
    arrays, rest = eqx.partition(fused, eqx.is_array)

    def total(arrays, x):
        return (jax.checkpoint(jax.vmap(eqx.combine(arrays, rest)))(x) ** 2).sum()

    x = jax.ShapeDtypeStruct((1, 1024, 32), jnp.float32)
    text = jax.jit(jax.grad(total)).lower(arrays, x).as_text()
    shapes = re.findall(r"tensor<([\dx]+)xi1>", text)
    sizes = [math.prod(map(int, shape.split("x"))) for shape in shapes]
    assert 64 * 1024 in sizes and max(sizes) <= 4 * 64 * 1024  # of one block


# cuDNN, on devices that are not here. --------------------------------------------

V100, AMPERE, HOPPER, AMD = (
    SimpleNamespace(platform="gpu", compute_capability=capability)
    for capability in ("7.0", "8.9", "9.0", "gfx942")
)
HALF = jnp.bfloat16


def on(monkeypatch, device, count=1):
    """Pretends to have such devices; returns the shapes that cuDNN is called with."""
    calls = []

    def attention(query, key, value, *, is_causal, implementation):
        assert implementation == "cudnn"
        calls.append(query.shape)
        return xla(query, key, value, is_causal=is_causal)

    xla = jax.nn.dot_product_attention
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device])
    monkeypatch.setattr(jax, "device_count", lambda: count)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    return calls


# By the reason: a device, and what differs from a call that cuDNN computes.
BLOCKS = {
    "cpu": (SimpleNamespace(platform="cpu"), {}),
    "v100": (V100, {}),
    "amd": (AMD, {}),
    "large heads": (AMPERE, {"layer": {"qk_size": 136, "vo_size": 136}}),
    "several devices, and no mesh": (HOPPER, {"count": 8}),
    "float32": (HOPPER, {"dtype": jnp.float32}),
    "lengths": (HOPPER, {"tokens": 100}),
    "mask": (HOPPER, {"call": {"mask": np.ones((128, 128), bool)}}),
    "segments": (HOPPER, {"call": {"segment_ids": np.zeros(128, int)}}),
    "dropout": (
        HOPPER,
        {"call": {"key": jax.random.key(0)}, "layer": {"dropout_p": 0.1}},
    ),
    "size of heads": (HOPPER, {"layer": {"qk_size": 12, "vo_size": 12}}),
    "sizes of values": (HOPPER, {"layer": {"vo_size": 8}}),
    "told": (HOPPER, {"implementation": "blocks"}),
}
CUDNN = {"ampere": (AMPERE, {}), "hopper": (HOPPER, {})}


@pytest.mark.parametrize("case", BLOCKS | CUDNN)
def test_calls_that_cudnn_computes_are_left_to_it(monkeypatch, case):
    device, other = (BLOCKS | CUDNN)[case]
    dtype, x = other.get("dtype", HALF), tokens(other.get("tokens", 128), 64)
    x, keywords, key = x.astype(dtype), other.get("call", {}), jax.random.key(0)
    layer = eqx.nn.MultiheadAttention(4, 64, **other.get("layer", {}), key=key)
    layer = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, layer)
    by = other.get("implementation", "auto")
    fused = fuse_attention(layer, causal=True, implementation=by)
    in_blocks = fused(x, x, x, **keywords)
    calls = on(monkeypatch, device, other.get("count", 1))
    got = fused(x, x, x, **keywords)
    assert calls == ([(128, 4, 16)] if case in CUDNN else [])
    np.testing.assert_allclose(*(a.astype("f4") for a in (got, in_blocks)), atol=0.02)


MANUAL, AUTO = AxisType.Manual, AxisType.Auto


@pytest.mark.parametrize("axes, heads, platform, is_taken", [
    ({"data": MANUAL}, 8, "gpu", True),
    ({"data": MANUAL}, 8, "cpu", False),
    ({"data": MANUAL, "model": AUTO}, 8, "gpu", True),
    ({"data": MANUAL, "model": AUTO}, 6, "gpu", False),
    ({"data": MANUAL, "seq": AUTO}, 8, "gpu", False),
    ({"data": AUTO}, 8, "gpu", False),
])  # fmt: skip
def test_cudnn_is_not_given_split_tokens(monkeypatch, axes, heads, platform, is_taken):
    calls, key = on(monkeypatch, HOPPER, 8), jax.random.key(0)
    sizes = {"qk_size": 8, "vo_size": 8, "dtype": HALF, "key": key}
    fused = fuse_attention(eqx.nn.MultiheadAttention(heads, 64, **sizes))
    x = tokens(64, 64).astype(HALF)
    mesh = SimpleNamespace(
        empty=False,
        abstract_device=SimpleNamespace(platform=platform),
        axis_names=tuple(axes),
        axis_types=tuple(axes.values()),
        shape=dict.fromkeys(axes, 4),
    )
    of_mesh = SimpleNamespace(sharding=SimpleNamespace(mesh=mesh))
    monkeypatch.setattr(jax, "typeof", lambda _: of_mesh)
    monkeypatch.setattr(jax, "shard_map", lambda function, **_: function)
    assert fused(x, x, x).shape == (64, 64)
    assert calls == ([(64, heads, 8)] if is_taken else [])


@pytest.mark.parametrize("strategy", ["sharded", "fsdp", "tensor"])
@pytest.mark.slow_but("tensor")
def test_devices_call_cudnn_for_their_rows_and_heads(monkeypatch, strategy):
    in_blocks = losses(True, strategy, precision="bf16-mixed")
    calls = on(monkeypatch, HOPPER)
    by_cudnn = losses(True, strategy, by="cudnn", precision="bf16-mixed")
    np.testing.assert_allclose(by_cudnn, in_blocks, rtol=2e-3)
    assert calls[-1] == (12, 1 if strategy == "tensor" else 2, 8)
