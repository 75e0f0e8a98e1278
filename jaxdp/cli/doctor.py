"""Does training work here? Tries it, and says what to do about what does not."""

import glob
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final, Literal, NamedTuple

import jax
from jaxlib import xla_client

from ..basics.environment import versions
from ..basics.process import keep_programs
from ..plan.device_compilers import installed as compilers_installed
from ..plan.hardware import gpu_share

_LIMIT: Final = 120
"""Seconds that a trial may take."""

_EXTRAS: Final = {
    "matplotlib": ("plots", "history.plot, curves in reports"),
    "tensorboard": ("loggers", "TensorBoardLogger"),
    "wandb": ("wandb", "WandbLogger"),
    "mlflow": ("mlflow", "MLFlowLogger"),
    "safetensors": ("safetensors", "weights in its format"),
    "torch": ("torch", "its DataLoader"),
}
"""Packages that may be missing: the extra that brings each, and what needs it."""

_BAD_FLAGS: Final = (
    r"(Unknown flags? in XLA_FLAGS|Couldn't interpret value|Could not open file).*"
)
"""What XLA says last, but for a page of flags, before it aborts."""


class Finding(NamedTuple):
    """One line of the examination."""

    state: Literal["ok", "hint", "problem"]
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "PROBLEM" if self.state == "problem" else self.state.ljust(7)
        remedy = f"\n          -> {self.remedy}" if self.remedy else ""
        return f"{mark}  {self.what}{remedy}"


def examine(*, quick: bool = False) -> Iterator[Finding]:
    """Findings one by one, as they come.

    Args:
        quick: whether to leave out what takes seconds.
    """
    yield Finding("ok", ", ".join(" ".join(each) for each in versions().items()))
    if wrong := _wrong_flags():
        yield wrong
        return  # whatever uses JAX would be aborted
    yield from _devices()
    yield from _settings()
    yield _cache_folder()
    yield from _disk()
    if not quick:
        if find_spec("torch"):
            yield _workers()
        yield _processes()
        yield _tried(
            _CHECKPOINT,
            "checkpoints are saved and restored",
            "Orbax can't save and restore",
            "pip install -U orbax-checkpoint",
        )
    yield from _compilers(quick)
    if missing := [name for name in _EXTRAS if not find_spec(name)]:
        extras = ",".join(_EXTRAS[name][0] for name in missing)
        needs = ", ".join(f"{name} (for {_EXTRAS[name][1]})" for name in missing)
        remedy = f"where you need them: pip install 'jaxdp[{extras}]'"
        yield Finding("ok", f"not installed: {needs}", remedy)


def _wrong_flags() -> Finding | None:
    """What makes XLA abort every process that uses JAX."""
    if "XLA_FLAGS" not in os.environ:
        return None
    _, error = _try(_FIRST_USE)
    if not re.match(_BAD_FLAGS, error):
        return None
    return Finding(
        "problem",
        f"XLA aborts every process that uses JAX, because of XLA_FLAGS: {error}",
        "correct it; or pass the option as Trainer(compiler_options=...), where an"
        " unknown name is an error that lists similar ones",
    )


def _devices() -> Iterator[Finding]:
    """In a process of its own, where a driver that hangs can be given up."""
    answer, error = _try(_COMPUTE)
    if error:
        page = "https://docs.jax.dev/en/latest/installation.html"
        remedy = f"try JAX_PLATFORMS=cpu; see {page}"
        yield Finding("problem", f"JAX can't compute: {error}", remedy)
        return
    count, platform, kind = answer.split("|")
    yield Finding("ok", f"JAX computes on {count} x {kind} ({platform})")

    seen = _accelerators()
    if seen and platform == "cpu":
        package = {"NVIDIA GPU": "jax[cuda12]", "TPU": "jax[tpu]"}.get(seen, "")
        remedy = f'pip install -U "{package}"' if package else "install its JAX plugin"
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            remedy = "unset JAX_PLATFORMS, which is 'cpu'"
        yield Finding("problem", f"there is a {seen}, and JAX does not use it", remedy)


def _settings() -> Iterator[Finding]:
    """What is set or installed that JAX would suffer from on a GPU."""
    name = "XLA_CLIENT_MEM_FRACTION"
    remedy = (
        f"set {name}, which replaces XLA_PYTHON_CLIENT_MEM_FRACTION, to a number above"
        " 0 and at most 1, or unset both"
    )
    try:
        xla_client.generate_pjrt_gpu_plugin_options()
        if not 0 < gpu_share() <= 1:
            raise ValueError(f"{gpu_share():g} is no share of its memory")
    except ValueError as error:
        yield Finding("problem", f"JAX can't start on a GPU: {error}", remedy)
    else:
        if _accelerators() == "NVIDIA GPU":
            what = f"JAX reserves {gpu_share():.0%} of a GPU's memory ({name})"
            yield Finding("ok", what)

    plugin = find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")
    if plugin and find_spec("torch") and not version("torch").endswith("+cpu"):
        yield Finding(
            "hint",
            f"torch {version('torch')} brings CUDA libraries beside JAX's own: of the"
            " two cuDNNs only one is loaded, and JAX may refuse it",
            "install torch's CPU build, which is enough for its loaders; see"
            " docs/install.md",
        )


def _accelerators() -> str:
    """What the system shows, whether or not JAX can use it."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return "NVIDIA GPU"
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return "TPU"
    return "AMD GPU" if os.path.exists("/dev/kfd") else ""


def _cache_folder() -> Finding:
    """Where compiled programs are kept from one run to the next."""
    keep_programs()  # as the first `Trainer` does
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or not config.jax_enable_compilation_cache:
        what = "compiled programs are not kept: every run compiles its steps again"
        remedy = "set JAX_COMPILATION_CACHE_DIR to a folder that can be written to"
        if not config.jax_enable_compilation_cache:
            remedy = "unset JAX_ENABLE_COMPILATION_CACHE"
        return Finding("hint", what, remedy)
    if "://" not in folder:
        folder = os.path.expanduser(folder)
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            what = f"compiled programs can't be kept in {folder}: {error}"
            remedy = "set JAX_COMPILATION_CACHE_DIR to a folder that can be written to"
            return Finding("problem", what, remedy)
    return Finding("ok", f"compiled programs are kept in {folder}")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free / 1e9
    if not os.access(".", os.W_OK):
        what = f"the folder {os.getcwd()} can't be written to"
        yield Finding("problem", what, "pass `default_root_dir` to the Trainer")
    elif free < 2:
        what = f"{free:.1f} GB are free on the disk of {os.getcwd()}"
        remedy = "checkpoints need room for `save_top_k` + 1 of them"
        yield Finding("hint", what, remedy)

    shared = "/dev/shm"
    if os.path.isdir(shared) and (size := shutil.disk_usage(shared).total) < 500e6:
        what = f"{shared}, through which data workers share batches, has {size:,} bytes"
        remedy = "in Docker: docker run --shm-size=8g (or num_workers=0)"
        yield Finding("hint", what, remedy)


def _workers() -> Finding:
    return _tried(
        _WORKERS,
        "torch's data workers work",
        "torch's data workers fail",
        "use num_workers=0; in Docker, --shm-size=8g may help",
    )


def _processes() -> Finding:
    """Two processes on this machine that sum over each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [_start(_PROCESS.format(port=port, rank=rank)) for rank in range(2)]
    results = [_finish(process) for process in started]
    if results == [("3", "")] * 2:
        return Finding("ok", "several processes can work together (gloo, loopback)")
    failed = next((error for _, error in results if error), results)
    return Finding(
        "problem",
        f"two processes can't work together: {failed}",
        "look for a firewall on the loopback interface; one process works without",
    )


def _compilers(quick: bool) -> Iterator[Finding]:
    """Those of devices that are not here, which `Trainer.plan` takes."""
    there = compilers_installed()
    missing = [f"{what}s" for what in ("GPU", "TPU") if what not in there]
    if missing:
        what = (
            f"Trainer.plan can't compile for {' and '.join(missing)} that are not here"
        )
        remedy = (
            "where you need it: pip install 'jaxdp[plan]' in a separate environment"
        )
        yield Finding("ok", what, remedy)
    for what, package in there.items():
        name = {"GPU": "h100x8", "TPU": "v5e-4"}[what]
        compiler = f"the {what} compiler, {package}"
        if quick:
            yield Finding("ok", f"{compiler}, is installed")
        else:
            code, remedy = _COMPILE.format(name=name), "pip install -U 'jaxdp[plan]'"
            yield _tried(code, f"{compiler}, works", f"{compiler}, fails", remedy)
    if "GPU" in there and not _accelerators() and not os.environ.get("JAX_PLATFORMS"):
        yield Finding(
            "hint",
            "JAX's CUDA plugin is installed and there is no GPU: it says so at every"
            " start of JAX",
            "set JAX_PLATFORMS=cpu, or keep jaxdp[plan] in an environment of its own",
        )


def _tried(code: str, works: str, fails: str, remedy: str) -> Finding:
    """What is found where a program of a trial works, and where it fails."""
    answer, error = _try(code)
    if error:
        return Finding("problem", f"{fails}: {error}", remedy)
    return Finding("ok", f"{works} ({answer})" if answer else works)


def _try(code: str) -> tuple[str, str]:
    """The last line that a program prints, and what went wrong if anything did."""
    return _finish(_start(code))


def _start(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "", f"no answer within {_LIMIT} seconds"
    if process.returncode:
        bad_flags = re.search(_BAD_FLAGS, err)
        last = bad_flags[0] if bad_flags else err.strip().rpartition("\n")[2][:300]
        return "", last or f"it ended with exit code {process.returncode}"
    return out.strip().rpartition("\n")[2], ""


_FIRST_USE: Final = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
jax.devices()
"""

_COMPUTE: Final = """
import jax, jax.numpy as jnp
devices = jax.devices()
x = jax.jit(lambda a: (a @ a).sum())(jnp.ones((256, 256)))
assert x == 256**3, x
print(len(devices), devices[0].platform, devices[0].device_kind, sep="|")
"""

_WORKERS: Final = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from jaxdp.data.torch_workers import safe_workers
if __name__ == "__main__":
    data = TensorDataset(torch.arange(64.).reshape(16, 4))
    loader = DataLoader(data, 4, num_workers=2)
    with safe_workers(loader):  # as a fit starts them
        total = sum(x.sum().item() for (x,) in loader)
        context = loader.multiprocessing_context or torch.multiprocessing
        method = context.get_start_method()
    assert total == 2016, total
    print(f"started by {method!r}")
"""

_PROCESS: Final = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize("127.0.0.1:{port}", 2, {rank}, initialization_timeout=60)
import numpy as np
from jax.experimental import multihost_utils
print(multihost_utils.process_allgather(np.array([{rank} + 1])).sum())
"""

_COMPILE: Final = """
import jax, jax.numpy as jnp
from jaxdp.plan.hardware import topology
sharding = jax.sharding.SingleDeviceSharding(topology("{name}").devices[0])
x = jax.ShapeDtypeStruct((256, 256), "float32", sharding=sharding)
jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
"""

_CHECKPOINT: Final = """
import os, tempfile
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp, orbax.checkpoint as ocp
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "a")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"a": jnp.arange(3.)})
        checkpointer.wait_until_finished()
        assert checkpointer.restore(path)["a"].sum() == 3
print("Orbax", ocp.__version__)
"""
