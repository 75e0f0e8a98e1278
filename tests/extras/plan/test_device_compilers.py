"""The compilers of GPUs and TPUs that are not here, with and without the extra."""

import os
import subprocess
import sys
import types

import jax
import pytest
from jax.experimental import topologies
from planned import installed

from jaxdp.extras.plan import planner
from jaxdp.extras.plan.planner import make_topology_devices

needs_gpu_compiler = pytest.mark.skipif(
    not installed("jax_cuda12_plugin"), reason="no GPU compiler"
)
needs_tpu_compiler = pytest.mark.skipif(
    not installed("libtpu"), reason="no TPU compiler"
)


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


@pytest.mark.parametrize("own", [None, "0"])
def test_a_gpu_compiler_that_refused_is_registered_without_its_check(
    cuda_plugin, monkeypatch, own
):
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    if own is not None:  # a variable of the user stays as it is
        monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", own)
    before = dict(os.environ)
    assert planner.make_gpu_devices("h100x8", "", "1x1x8") == ("1x1x8",)
    assert planner.make_gpu_devices("h100x16", "", "1x2x8") == ("1x2x8",)
    assert cuda_plugin.seen == [own or "1"]
    assert dict(os.environ) == before


def test_a_gpu_compiler_that_jax_has_registered_is_taken_as_it_is(cuda_plugin):
    cuda_plugin.registered = True
    assert planner.make_gpu_devices("h100x8", "", "1x1x8") == ("1x1x8",)
    assert make_topology_devices("h100x12").devices == ("1x3x4",)  # three nodes of 4
    assert cuda_plugin.seen == []


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
    monkeypatch.setattr(xla_client, "pjrt_plugin_initialized", lambda name: False)
    with pytest.raises(ImportError, match="ABORTED: another version. Run pip install"):
        make_topology_devices("v5e-16")
    monkeypatch.setattr(xla_client, "pjrt_plugin_initialized", lambda name: True)
    with pytest.raises(ValueError, match="knows no v5e slice of shape 4x4: ABORTED"):
        make_topology_devices("v5e-16")


USED = """
import os, sys
import jax, jax.numpy as jnp
from jaxdp.extras.plan.planner import make_topology_devices
later = "{later}"
if not later:
    jax.devices()
    print("started", file=sys.stderr, flush=True)
before = dict(os.environ)
for name in {names}:
    sharding = jax.sharding.SingleDeviceSharding(
        make_topology_devices(name).devices[0]
    )
    x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=sharding)
    jax.jit(lambda x: jnp.tanh(x @ jnp.linalg.qr(x)[0])).lower(x).compile()
assert dict(os.environ) == before
assert [device.platform for device in jax.devices()] == ["cpu"], jax.devices()
assert jax.default_backend() == "cpu"
assert jax.jit(lambda x: x @ x)(jnp.ones((4, 4))).sum() == 64
print("done", flush=True)
input()
"""


def start(names, later=False, **environment):
    """A process of a user's own, in which JAX chooses its platform."""
    kept = {key: text for key, text in os.environ.items() if key != "JAX_PLATFORMS"}
    code = USED.format(names=names, later=later or "")
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | environment,
    )


def finish(process):
    """Lets a process end; returns the text that it wrote to stderr since its start."""
    _, err = process.communicate("\n", timeout=300)
    assert process.returncode == 0, err
    return err.partition("started\n")[2]


@needs_gpu_compiler
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("environment", [{}, {"JAX_PLATFORMS": "cpu"}])
def test_gpus_are_compiled_for_and_nothing_else_is_other(later, environment):
    err = finish(start(["h100x8", "a100x16"], later, **environment))
    assert "Traceback" not in err


@needs_tpu_compiler
def test_processes_compile_for_tpus_at_once_and_leave_no_files(tmp_path):
    first, second = (
        start(["v5e-1", "v6e:1x2", "v5p-8"], TMPDIR=str(tmp_path), JAX_PLATFORMS="cpu")
        for _ in range(2)
    )
    assert first.stdout.readline() == second.stdout.readline() == "done\n"
    assert "TPU" not in finish(first) + finish(second)
    assert not list(tmp_path.iterdir())
