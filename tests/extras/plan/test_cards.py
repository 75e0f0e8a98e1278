"""Devices by their names: rates, memory, and what they compute float32 in."""

import types

import pytest
from planned import plan

from jaxdp.basics.hardware import describe_mixed_kinds, get_product_precision
from jaxdp.extras.plan.hardware import (
    HARDWARE,
    find_profile,
    get_usable_memory,
    hardware_of,
)

# As CUDA and libtpu name them, which is what `device.device_kind` is.
KINDS = {
    "NVIDIA A100-SXM4-80GB": ("a100", 80),
    "NVIDIA A100-SXM4-40GB": ("a100 40gb", 40),
    "NVIDIA A100-PCIE-40GB": ("a100 pcie 40gb", 40),
    "NVIDIA H100 80GB HBM3": ("h100", 80),
    "NVIDIA H100 PCIe": ("h100 pcie", 80),
    "NVIDIA H200 NVL": ("h200 nvl", 141),
    "NVIDIA GH200 480GB": ("gh200", 96),
    "NVIDIA H20": ("h20", 96),
    "NVIDIA B300 SXM6 AC": ("b300", 270),
    "NVIDIA A10G": ("a10g", 24),
    "NVIDIA L40S": ("l40s", 48),
    "Tesla V100-SXM2-32GB": ("v100", 32),
    "NVIDIA RTX 6000 Ada Generation": ("rtx 6000 ada", 48),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ("rtx pro 6000 blackwell", 96),
    "NVIDIA GeForce RTX 3090 Ti": ("rtx 3090 ti", 24),
    "TPU v4": ("v4", 32 * 2**30 / 1e9),
    "TPU v5 lite": ("v5e", 16),
    "TPU v5": ("v5p", 95),
    "TPU v6 lite": ("v6e", 32),
    # These only look alike.
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4080 SUPER": None,
    "NVIDIA RTX A1000": None,
    "NVIDIA A10-8Q": None,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
    "Quadro RTX 6000": None,
    "AMD Instinct MI300X": None,
    "cpu": None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_cards_are_known_by_the_words_of_their_names(kind):
    profile = find_profile(kind)
    found = profile and (profile.name, pytest.approx(profile.memory / 1e9))
    assert found == KINDS[kind]


def device(kind, platform="gpu", limit=None, **attributes):
    stats = None if limit is None else {"bytes_limit": limit}
    attributes = {"device_kind": kind, "platform": platform, **attributes}
    return types.SimpleNamespace(
        memory_stats=lambda: stats, **{"process_index": 0, **attributes}
    )


def test_memory_is_that_of_the_device(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    profile = hardware_of(device("NVIDIA GH200 480GB", limit=48 * 10**9))
    assert profile.memory == 96 * 10**9
    assert get_usable_memory(profile) == 48 * 10**9
    assert hardware_of(device("TPU v5 lite", "tpu", 15 * 10**9)).memory == 15 * 10**9
    assert hardware_of(device("NVIDIA H200")).memory == HARDWARE["h200"].memory
    elsewhere = device("NVIDIA H200", limit=1, process_index=1)
    assert hardware_of(elsewhere).memory == HARDWARE["h200"].memory


@pytest.mark.parametrize("variable", [None, "XLA_CLIENT_", "XLA_PYTHON_CLIENT_"])
def test_jax_takes_a_share_of_a_gpu_and_all_of_a_tpu(variable, monkeypatch):
    for name in ("XLA_CLIENT_", "XLA_PYTHON_CLIENT_"):
        monkeypatch.delenv(f"{name}MEM_FRACTION", raising=False)
    if variable:
        monkeypatch.setenv(f"{variable}MEM_FRACTION", ".5")
    share = 0.5 if variable else 0.75
    gpu, tpu = (plan(hardware=name) for name in ("h100", "v5e"))
    assert gpu.planner.limit(None) == int(0.9 * share * 80e9)
    assert tpu.planner.limit(None) == int(0.9 * 16e9)
    assert f"{share * 80:.4g} GB of its 80 GB" in str(gpu)
    assert "the share that JAX takes" not in str(tpu)

    almost = gpu.memory.peak / share  # its share is just what the step needs
    for memory, fits in ((almost + 2, True), (almost - 2, False)):
        card = HARDWARE["h100"]._replace(memory=int(memory))
        assert plan(hardware=card).estimate.fits == fits


@pytest.mark.parametrize("kind, platform, capability, expected", [
    ("NVIDIA H100 80GB HBM3", "gpu", "9.0", "TF32"),
    ("NVIDIA A100-SXM4-80GB", "gpu", None, "TF32"),
    ("NVIDIA B200", "cuda", "10.0", "TF32"),
    ("NVIDIA GeForce RTX 2080 Ti", "gpu", "7.5", "float32"),
    ("AMD Instinct MI300X", "gpu", "gfx942", "float32"),
    ("TPU v5 lite", "tpu", None, "bfloat16"),
    ("cpu", "cpu", None, "float32"),
])  # fmt: skip
def test_what_float32_is_computed_in(kind, platform, capability, expected):
    attributes = {} if capability is None else {"compute_capability": capability}
    assert get_product_precision(device(kind, platform, **attributes)) == expected


def test_rates_belong_to_what_is_computed_in():
    h100, tpu = HARDWARE["h100"], HARDWARE["v5e"]
    names = "bfloat16", "float16", "float32 by default", "float32"
    assert [h100.rate(name) for name in names] == [989e12, 989e12, 494e12, 67e12]
    assert [tpu.rate(name) for name in names] == [197e12] * 3 + [197e12 / 6]
    for name, each in HARDWARE.items():
        assert each.name == name
        assert each.flops >= each.flops_float32 >= each.flops_highest > 5e12
        assert each.far_bandwidth <= each.link_bandwidth < each.memory_bandwidth
        assert 10e9 <= each.memory < 1e12


def test_a_mix_of_kinds_is_told_with_its_remedy():
    few, many = device("NVIDIA GeForce RTX 2080"), device("NVIDIA GeForce RTX 3090")
    note = describe_mixed_kinds([many, few, many])
    assert "1 x NVIDIA GeForce RTX 2080, 2 x NVIDIA GeForce RTX 3090" in note
    assert "CUDA_VISIBLE_DEVICES" in note
    assert describe_mixed_kinds([many, many]) is None
