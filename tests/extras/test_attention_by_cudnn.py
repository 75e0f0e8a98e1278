"""When attention is left to cuDNN, on devices that are not here."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import losses, tokens
from jax.sharding import AxisType

from jaxdp import fuse_attention
from jaxdp.extras import fuse_attention as module

V100, AMPERE, ADA, HOPPER = (
    SimpleNamespace(platform="gpu", compute_capability=capability)
    for capability in ("7.0", "8.0", "8.9", "9.0")
)
HALF = jnp.bfloat16


def on(monkeypatch, device, count=1):
    """As if such devices were here; returns what cuDNN is called with."""
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


def in_dtype(layer, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, layer)


def fused_in_half(causal=True, width=64, **options):
    key = jax.random.key(0)
    layer = eqx.nn.MultiheadAttention(4, width, key=key, **options)
    return in_dtype(fuse_attention(layer, causal=causal), HALF)


@pytest.mark.parametrize("device", [AMPERE, ADA, HOPPER])
def test_gpus_from_ampere_on_take_cudnn(monkeypatch, device):
    fused, x = fused_in_half(), tokens(128, 64).astype(HALF)
    blocks = fused(x, x, x)
    calls = on(monkeypatch, device)
    np.testing.assert_allclose(
        *(a.astype(jnp.float32) for a in (fused(x, x, x), blocks)), atol=0.02
    )
    assert calls == [(128, 4, 16)]


def refuse(*_, **__):
    raise NotImplementedError("Compute capability 10.3 requires cuDNN >= 9.11.")


def test_auto_takes_blocks_where_cudnn_refuses(monkeypatch, caplog):
    fused, x = fused_in_half(), tokens(128, 64).astype(HALF)
    blocks = fused(x, x, x)
    on(monkeypatch, HOPPER)
    monkeypatch.setattr(jax.nn, "dot_product_attention", refuse)
    with caplog.at_level("INFO", "jaxdp"):
        np.testing.assert_array_equal(fused(x, x, x), blocks)
    assert "takes blocks, not cuDNN: Compute capability 10.3" in caplog.text
    with pytest.raises(NotImplementedError, match=r"10\.3"):
        fuse_attention(fused, causal=True, implementation="cudnn")(x, x, x)


AMD = SimpleNamespace(platform="gpu", compute_capability="gfx942")
BLOCKS = {
    "cpu": (SimpleNamespace(platform="cpu"), {}, {}),
    "v100": (V100, {}, {}),
    "large heads": (AMPERE, {"qk_size": 136, "vo_size": 136}, {}),
    "amd": (AMD, {}, {}),
    "several devices, and no mesh": (HOPPER, {}, {}),
    "float32": (HOPPER, {}, {}),
    "lengths": (HOPPER, {}, {}),
    "mask": (HOPPER, {}, {"mask": np.ones((128, 128), bool)}),
    "segments": (HOPPER, {}, {"segment_ids": np.zeros(128, int)}),
    "dropout": (HOPPER, {"dropout_p": 0.1}, {}),
    "size of heads": (HOPPER, {"qk_size": 12, "vo_size": 12}, {}),
    "sizes of values": (HOPPER, {"vo_size": 8}, {}),
    "told": (HOPPER, {}, {}),
}
"""By the reason: a device, options of the layer, and keywords of its call."""


@pytest.mark.parametrize("why", BLOCKS)
def test_others_take_blocks(monkeypatch, why):
    device, options, keywords = BLOCKS[why]
    calls = on(monkeypatch, device, 8 if why.startswith("several") else 1)
    dtype = jnp.float32 if why == "float32" else HALF
    fused = in_dtype(fused_in_half(**options), dtype)
    if why == "told":
        fused = fuse_attention(fused, implementation="blocks")
    if why == "dropout":
        keywords = {"key": jax.random.key(0)}
    x = tokens(100 if why == "lengths" else 128, 64).astype(dtype)
    assert fused(x, x, x, **keywords).shape == x.shape
    assert not calls


MANUAL, AUTO = AxisType.Manual, AxisType.Auto


@pytest.mark.parametrize("axes, heads, is_taken", [
    ({"data": MANUAL}, 8, True),
    ({"data": MANUAL, "model": AUTO}, 8, True),
    ({"data": MANUAL, "model": AUTO}, 6, False),
    ({"data": MANUAL, "seq": AUTO}, 8, False),
    ({"data": AUTO}, 8, False),
])  # fmt: skip
def test_cudnn_is_not_given_split_tokens(monkeypatch, axes, heads, is_taken):
    on(monkeypatch, HOPPER, 8)
    mesh = SimpleNamespace(
        empty=False,
        abstract_device=SimpleNamespace(platform="gpu"),
        axis_names=tuple(axes),
        axis_types=tuple(axes.values()),
        shape=dict.fromkeys(axes, 4),
    )
    assert module._splits_only_heads(mesh, heads) == is_taken
    assert module._get_compute_capability(mesh) == 9
    mesh.abstract_device.platform = "cpu"
    assert not module._get_compute_capability(mesh)


@pytest.mark.parametrize("strategy", ["sharded", "fsdp", "tensor"])
@pytest.mark.slow_but("tensor")
def test_devices_call_cudnn_for_their_rows_and_heads(monkeypatch, strategy):
    in_blocks = losses(True, strategy, precision="bf16-mixed")
    calls = on(monkeypatch, HOPPER)
    by_cudnn = losses(True, strategy, by="cudnn", precision="bf16-mixed")
    np.testing.assert_allclose(by_cudnn, in_blocks, rtol=2e-3)
    assert calls[-1] == (12, 1 if strategy == "tensor" else 2, 8)
