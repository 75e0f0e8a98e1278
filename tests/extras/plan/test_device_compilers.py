"""The compilers of devices that are not here, with and without the extra."""

import math
import os
import subprocess
import sys
import types

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.experimental import topologies
from planned import PARAMS, installed, plan

from jaxdp import FSDP, Sharded, ZeRO
from jaxdp.extras.plan import planner
from jaxdp.extras.plan.planner import (
    find_slice_shape,
    make_topology_devices,
)

COMPILERS = {"tpu": ["libtpu"], "gpu": ["jax_cuda12_plugin", "nvidia"]}


def needs_compiler(names, *others):
    """A case that is skipped without the compiler for a topology, or for several."""
    first = names if isinstance(names, str) else names[0]
    modules = COMPILERS["tpu" if first.startswith("v") else "gpu"]
    skip = pytest.mark.skipif(not installed(*modules), reason="no compiler for it")
    return pytest.param(names, *others, marks=skip)


def test_slices_have_the_shapes_that_are_offered():
    for kind, shapes in {
        "v5p": "1x1x1 2x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 8x8x16",
        "v5e": "1x1 1x2 2x2 2x4 16x16",
    }.items():
        for text in shapes.split():
            shape = tuple(map(int, text.split("x")))
            assert find_slice_shape(kind, math.prod(shape), "") == shape


@pytest.mark.parametrize("name, match", [
    ("v5e-8", r"TPU support not installed.*pip install --upgrade 'jax\["),
    ("h100x8", r"jax_plugins.*'jax\[cuda12-local"),
])  # fmt: skip
def test_a_missing_compiler_is_named_with_what_to_install(name, match):
    if installed(COMPILERS["tpu" if name == "v5e-8" else "gpu"][0]):
        pytest.skip("the compiler is installed")
    with pytest.raises(ImportError, match=match):
        plan(topology=name)


@pytest.fixture
def cuda_plugin(monkeypatch):
    """A plugin that registers only where its check is skipped, as JAX's does."""
    jax.devices()  # has looked for plugins before there is this one
    plugin = types.SimpleNamespace(registered=False, seen=[])

    def initialize():
        plugin.seen.append(os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"))
        plugin.registered = True

    def get_topology_desc(*, platform, topology, target_config):
        if not plugin.registered:
            raise NotImplementedError(f"topology not implemented for {platform}")
        return types.SimpleNamespace(devices=[topology])

    plugin.initialize = initialize
    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setitem(sys.modules, "jax_plugins", types.ModuleType("jax_plugins"))
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda12", plugin)
    return plugin


@pytest.mark.parametrize("registered, own, seen", [
    (False, None, ["1"]),
    (False, "0", ["0"]),  # a variable of the user stays as it is
    (True, None, []),
])  # fmt: skip
def test_a_gpu_compiler_that_refused_is_registered_without_its_check(
    cuda_plugin, monkeypatch, registered, own, seen
):
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    if own is not None:
        monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", own)
    cuda_plugin.registered, before = registered, dict(os.environ)
    make_topology_devices.cache_clear()
    for name, shape in {"h100x8": "1x1x8", "h100x16": "1x2x8"}.items():
        assert make_topology_devices(name).devices == (shape,)
    assert make_topology_devices("h100x12").devices == ("1x3x4",)  # three nodes of 4
    make_topology_devices.cache_clear()
    assert cuda_plugin.seen == seen and dict(os.environ) == before


def test_a_gpu_compiler_that_does_not_start_says_why(cuda_plugin):
    def initialize():
        raise RuntimeError("a library is broken.\nThe rest of it")

    cuda_plugin.initialize = initialize
    message = (
        r"a library is broken\. Run pip install --upgrade 'jax\[cuda12-local,tpu\]"
    )
    with pytest.raises(ImportError, match=message):
        planner.make_gpu_devices("h100x8", "", "1x1x8")


def test_a_tpu_compiler_that_does_not_start_is_told_from_a_wrong_slice(monkeypatch):
    def get_topology_desc(*_, **__):
        raise RuntimeError("ABORTED: another version")

    from jaxlib import xla_client

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setattr(xla_client, "pjrt_plugin_loaded", lambda name: True)
    for starts, error, words in (
        (False, ImportError, "ABORTED: another version. Run pip install"),
        (True, ValueError, "knows no v5e slice of shape 4x4: ABORTED"),
    ):
        has_started = lambda name, starts=starts: starts  # noqa: E731
        monkeypatch.setattr(xla_client, "pjrt_plugin_initialized", has_started)
        with pytest.raises(error, match=words):
            make_topology_devices("v5e-16")


@pytest.mark.parametrize("name, devices", [
    needs_compiler("v5e-8", 8),
    needs_compiler("v5p-2048", 1024),
    needs_compiler("v6e:2x4", 8),
    needs_compiler("h100x8", 8),
    needs_compiler("h100x1024", 1024),
    needs_compiler("a100x4", 4),
])  # fmt: skip
def test_devices_that_are_not_here(name, devices):
    found = plan(topology=name)
    is_tpu = name.startswith("v")
    assert found.platform == ("tpu" if is_tpu else "gpu")
    assert name.startswith(found.estimate.hardware)
    assert found.num_devices == len(make_topology_devices(name).devices) == devices
    assert found.wire_bytes == 2 * (devices - 1) / devices * (PARAMS + 4)
    memory = found.memory
    assert memory.parameters == PARAMS
    held = memory.parameters + memory.optimizer + memory.other + memory.batch
    assert memory.arguments == held or is_tpu  # which pads arrays to tiles
    assert memory.arguments >= 3 * PARAMS
    assert [row.devices for row in found.scaling([1, 2]).rows] == [1, 2]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("strategy", [Sharded, ZeRO, FSDP])
@pytest.mark.parametrize("name", [needs_compiler("h100x8"), needs_compiler("v5e-8")])
def test_layouts_send_the_least_by_the_compilers_for_other_hardware(
    name, strategy, accumulate
):
    # Of tiny arrays the TPU compiler makes all-reduces.
    model = eqx.nn.MLP(256, 128, 1024, 2, key=jax.random.key(0))
    data = np.zeros((512, 256), np.float32), np.zeros(512, np.int32)
    options = {"model": model, "accumulate_grad_batches": accumulate}
    found = plan(strategy(), [data], topology=name, **options)
    assert found.bounds[0].ratio < 1.05
    if found.platform == "gpu":  # a TPU pads arrays
        assert [each.ratio for each in found.bounds[1:]] == [1, 1]


USED = """
import os, sys
import jax, jax.numpy as jnp
from jaxdp.extras.plan.planner import make_topology_devices
if "{first}":
    jax.devices()
    print("started", file=sys.stderr, flush=True)
before = dict(os.environ)
for name in {names}:
    sharding = jax.sharding.SingleDeviceSharding(make_topology_devices(name).devices[0])
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)
    jax.jit(lambda x: jnp.tanh(x @ jnp.linalg.qr(x)[0])).lower(x).compile()
assert dict(os.environ) == before
assert [device.platform for device in jax.devices()] == ["cpu"], jax.devices()
assert jax.jit(lambda x: x @ x)(jnp.ones((4, 4))).sum() == 64
print("done", flush=True)
input()
"""
TPUS = ["v5e-1", "v6e:1x2", "v5p-8"]


@pytest.mark.parametrize("names, first, environment", [
    needs_compiler(["h100x8"], "devices", {}),
    needs_compiler(["a100x16"], "", {}),
    needs_compiler(["h100x8"], "", {"JAX_PLATFORMS": "cpu"}),
    needs_compiler(TPUS, "devices", {"JAX_PLATFORMS": "cpu"}),
])  # fmt: skip
def test_processes_compile_at_once_and_nothing_else_is_other(
    names, first, environment, tmp_path
):
    # In processes of a user's own, JAX chooses its platform.
    kept = {key: text for key, text in os.environ.items() if key != "JAX_PLATFORMS"}
    code = USED.format(names=names, first=first)
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=kept | environment | {"TMPDIR": str(tmp_path)},
        )
        for _ in range(2)
    ]
    said = [process.stdout.readline() for process in both]
    for process in both:
        _, err = process.communicate("\n", timeout=300)
        assert process.returncode == 0, err
        err = err.partition("started\n")[2]
        assert "Traceback" not in err and "TPU" not in err
    assert said == ["done\n"] * 2
    assert names != TPUS or not list(tmp_path.iterdir())
