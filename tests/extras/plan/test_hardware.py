"""Stand-ins for devices, and the compilers for them."""

import equinox as eqx
import jax
import numpy as np
import pytest
from planned import PARAMS, batch, installed, trainer

from jaxdp import (
    FSDP,
    Sharded,
    ZeRO,
)
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
    assert [
        find_slice_shape("v5p", n, "") for n in (1, 2, 4, 8, 16, 32, 64, 128, 1024)
    ] == [
        (1, 1, 1),
        (2, 1, 1),
        (2, 2, 1),
        (2, 2, 2),
        (2, 2, 4),
        (2, 4, 4),
        (4, 4, 4),
        (4, 4, 8),
        (8, 8, 16),
    ]
    assert [find_slice_shape("v5e", n, "") for n in (1, 2, 4, 8, 256)] == [
        (1, 1),
        (1, 2),
        (2, 2),
        (2, 4),
        (16, 16),
    ]


@pytest.mark.skipif(installed("libtpu"), reason="the TPU compiler is installed")
def test_a_missing_tpu_compiler_names_the_extra():
    with pytest.raises(
        ImportError,
        match=r"JAX TPU support not installed.*pip install --upgrade 'jax\[",
    ):
        trainer().plan([batch()], topology="v5e-8")


@pytest.mark.skipif(
    installed("jax_cuda12_plugin"), reason="the GPU compiler is installed"
)
def test_a_missing_gpu_compiler_names_the_extra():
    with pytest.raises(ImportError, match=r"jax_plugins.*'jax\[cuda12-local"):
        trainer().plan([batch()], topology="h100x8")


@pytest.mark.skipif(not installed("libtpu"), reason="no TPU compiler")
@pytest.mark.parametrize(
    ("name", "devices"), [("v5e-8", 8), ("v5p-2048", 1024), ("v6e:2x4", 8)]
)
def test_tpus_that_are_not_here(name, devices):
    plan = trainer().plan([batch(64)], topology=name)
    assert plan.platform == "tpu"
    assert plan.num_devices == len(make_topology_devices(name).devices) == devices
    assert plan.estimate.hardware == name[:3]
    assert plan.wire_bytes == 2 * (devices - 1) / devices * (PARAMS + 4)
    assert plan.memory.parameters == PARAMS
    # Arrays are padded to tiles on a TPU.
    assert plan.memory.arguments >= 3 * PARAMS
    assert [row.devices for row in plan.scaling([1, 2]).rows] == [1, 2]


@pytest.mark.skipif(
    not installed("jax_cuda12_plugin", "nvidia"), reason="no GPU compiler"
)
@pytest.mark.parametrize(
    ("name", "devices"), [("h100x8", 8), ("h100x1024", 1024), ("a100x4", 4)]
)
def test_gpus_that_are_not_here(name, devices):
    plan = trainer().plan([batch(64)], topology=name)
    assert plan.platform == "gpu"
    assert plan.num_devices == devices
    assert plan.estimate.hardware == name.split("x")[0]
    assert plan.wire_bytes == 2 * (devices - 1) / devices * (PARAMS + 4)
    assert plan.memory.arguments == (
        plan.memory.parameters
        + plan.memory.optimizer
        + plan.memory.other
        + plan.memory.batch
    )
    assert [row.devices for row in plan.scaling([1, 2]).rows] == [1, 2]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("strategy", [Sharded, ZeRO, FSDP])
@pytest.mark.parametrize("name", ["h100x8", "v5e-8"])
def test_layouts_send_the_least_by_the_compilers_for_other_hardware(
    name, strategy, accumulate
):
    needed = ["libtpu"] if name == "v5e-8" else ["jax_cuda12_plugin", "nvidia"]
    if not installed(*needed):
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
