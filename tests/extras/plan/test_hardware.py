"""Stand-ins for devices, and the compilers for them."""

import math

import equinox as eqx
import jax
import numpy as np
import pytest
from planned import PARAMS, batch, installed, trainer

from jaxdp import FSDP, Sharded, ZeRO
from jaxdp.extras.plan.hardware import HARDWARE
from jaxdp.extras.plan.planner import (
    find_slice_shape,
    make_fake_devices,
    make_topology_devices,
)


def test_stand_ins_are_apart_from_the_devices_here():
    before = jax.devices()
    assert len(make_fake_devices(300).devices) == 300
    assert jax.devices() == before
    assert not set(make_fake_devices(300).devices) & set(before)


def test_slices_have_the_shapes_that_are_offered():
    for kind, shapes in {
        "v5p": "1x1x1 2x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 8x8x16",
        "v5e": "1x1 1x2 2x2 2x4 16x16",
    }.items():
        for text in shapes.split():
            shape = tuple(map(int, text.split("x")))
            assert find_slice_shape(kind, math.prod(shape), "") == shape


COMPILERS = {"tpu": ["libtpu"], "gpu": ["jax_cuda12_plugin", "nvidia"]}


@pytest.mark.parametrize("name, platform, match", [
    ("v5e-8", "tpu", r"TPU support not installed.*pip install --upgrade 'jax\["),
    ("h100x8", "gpu", r"jax_plugins.*'jax\[cuda12-local"),
])  # fmt: skip
def test_a_missing_compiler_is_named_with_what_to_install(name, platform, match):
    if installed(COMPILERS[platform][0]):
        pytest.skip("the compiler is installed")
    with pytest.raises(ImportError, match=match):
        trainer().plan([batch()], topology=name)


@pytest.mark.parametrize("name, platform, devices, hardware", [
    ("v5e-8", "tpu", 8, "v5e"),
    ("v5p-2048", "tpu", 1024, "v5p"),
    ("v6e:2x4", "tpu", 8, "v6e"),
    ("h100x8", "gpu", 8, "h100"),
    ("h100x1024", "gpu", 1024, "h100"),
    ("a100x4", "gpu", 4, "a100"),
])  # fmt: skip
def test_devices_that_are_not_here(name, platform, devices, hardware):
    if not installed(*COMPILERS[platform]):
        pytest.skip("no compiler for it")
    plan = trainer().plan([batch(64)], topology=name)
    assert (plan.platform, plan.estimate.hardware) == (platform, hardware)
    assert plan.num_devices == len(make_topology_devices(name).devices) == devices
    assert plan.wire_bytes == 2 * (devices - 1) / devices * (PARAMS + 4)
    memory = plan.memory
    assert memory.parameters == PARAMS
    held = memory.parameters + memory.optimizer + memory.other + memory.batch
    # Arrays are padded to tiles on a TPU.
    assert memory.arguments == held or platform == "tpu"
    assert memory.arguments >= 3 * PARAMS
    assert [row.devices for row in plan.scaling([1, 2]).rows] == [1, 2]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("strategy", [Sharded, ZeRO, FSDP])
@pytest.mark.parametrize("name", ["h100x8", "v5e-8"])
def test_layouts_send_the_least_by_the_compilers_for_other_hardware(
    name, strategy, accumulate
):
    if not installed(*COMPILERS["tpu" if name == "v5e-8" else "gpu"]):
        pytest.skip("no compiler for it")
    # Of tiny arrays the TPU compiler makes all-reduces.
    model = eqx.nn.MLP(256, 128, 1024, 2, key=jax.random.key(0))
    planned = trainer(strategy(), model, accumulate_grad_batches=accumulate)
    data = np.zeros((512, 256), np.float32), np.zeros(512, np.int32)
    plan = planned.plan([data], topology=name)
    assert plan.bounds[0].ratio < 1.05
    if plan.platform == "gpu":  # a TPU pads arrays
        assert [each.ratio for each in plan.bounds[1:]] == [1, 1]


def test_profiles_are_in_order():
    for name, each in HARDWARE.items():
        assert each.name == name
        assert each.flops >= each.flops_float32 >= each.flops_highest > 5e12
        assert each.far_bandwidth <= each.link_bandwidth < each.memory_bandwidth
        assert 10e9 <= each.memory < 1e12
