"""Does training work here? Tries it, and says what to do about what does not."""

import glob
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final, Literal, NamedTuple

from ..basics.environment import versions
from ..plan.device_compilers import installed as compilers_installed

_LIMIT: Final = 120
"""Seconds that a trial may take."""

_LEAST: Final = {"jax": (0, 10), "equinox": (0, 13), "optax": (0, 2), "numpy": (2, 0)}


class Finding(NamedTuple):
    """One line of the examination."""

    state: Literal["ok", "hint", "problem"]
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok     ", "hint": "hint   ", "problem": "PROBLEM"}[self.state]
        remedy = f"\n          -> {self.remedy}" if self.remedy else ""
        return f"{mark}  {self.what}{remedy}"


def examine(*, quick: bool = False) -> Iterator[Finding]:
    """Findings one by one, as they come.

    Args:
        quick: whether to leave out what takes seconds.
    """
    yield from _packages()
    yield from _devices()
    yield _cache_folder()
    yield from _disk()
    if not quick:
        yield _workers()
        yield _processes()
        yield _checkpoints()
    yield from _compilers(quick)
    yield _extras()


def _packages() -> Iterator[Finding]:
    found = versions()
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    yield Finding("ok", listed)
    for name, least in _LEAST.items():
        wanted = ".".join(map(str, least))
        if name not in found:
            remedy = f"pip install '{name}>={wanted}'"
            yield Finding("problem", f"{name} is not installed", remedy)
        elif _numbers(found[name]) < least:
            remedy = f"pip install -U '{name}>={wanted}'"
            yield Finding("problem", f"{name} {found[name]} is too old", remedy)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _devices() -> Iterator[Finding]:
    """In a process of its own, where a driver that hangs can be given up."""
    answer, error = _try(_COMPUTE)
    platform = ""
    if error:
        remedy = (
            "try JAX_PLATFORMS=cpu; see https://docs.jax.dev/en/latest/installation"
        )
        yield Finding("problem", f"JAX can't compute: {error}", f"{remedy}.html")
    else:
        count, platform, kind = answer.split("|")
        yield Finding("ok", f"JAX computes on {count} x {kind} ({platform})")

    seen = _accelerators()
    if seen and platform == "cpu":
        package = {"NVIDIA GPU": "jax[cuda12]", "TPU": "jax[tpu]"}.get(seen, "")
        remedy = f'pip install -U "{package}"' if package else "install its JAX plugin"
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            remedy = "unset JAX_PLATFORMS, which is 'cpu'"
        yield Finding("problem", f"there is a {seen}, and JAX does not use it", remedy)
    elif not seen and platform == "cpu":
        yield Finding("ok", f"no accelerator is visible; {os.cpu_count()} CPUs are")


def _accelerators() -> str:
    """What the system shows, whether or not JAX can use it."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return "NVIDIA GPU"
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return "TPU"
    return "AMD GPU" if os.path.exists("/dev/kfd") else ""


def _cache_folder() -> Finding:
    """Where compiled programs are kept from one run to the next."""
    import jax

    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore
    if not folder:
        return Finding(
            "hint",
            "compiled programs are not kept between runs",
            "unset JAX_ENABLE_COMPILATION_CACHE, or set JAX_COMPILATION_CACHE_DIR to a"
            " folder that can be written to, and the second run starts sooner",
        )
    folder, size = os.path.expanduser(folder), ""
    if "://" not in folder:
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            return Finding(
                "problem",
                f"the cache of compiled programs, {folder}, can't be written to:"
                f" {error}",
                "set JAX_COMPILATION_CACHE_DIR to a folder that can be",
            )
        files = [entry for entry in os.scandir(folder) if entry.is_file()]
        size = f" ({sum(file.stat().st_size for file in files) / 1e6:.0f} MB)"
    return Finding("ok", f"compiled programs are kept in {folder}{size}")


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
    if os.path.isdir(shared) and shutil.disk_usage(shared).total < 500e6:
        size = shutil.disk_usage(shared).total / 1e6
        yield Finding(
            "hint",
            f"{shared} has {size:.0f} MB, which data workers share batches through",
            "in Docker: docker run --shm-size=8g (or num_workers=0)",
        )


def _workers() -> Finding:
    if find_spec("torch") is None:
        return Finding(
            "hint",
            "torch is not installed; any iterable of batches trains, too",
            "pip install torch, for its DataLoader",
        )
    answer, error = _try(_WORKERS)
    if error:
        remedy = "use num_workers=0; in Docker, --shm-size=8g may help"
        return Finding("problem", f"torch's data workers fail: {error}", remedy)
    return Finding("ok", f"torch's data workers work ({answer})")


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


def _checkpoints() -> Finding:
    answer, error = _try(_CHECKPOINT)
    if error:
        remedy = "pip install -U orbax-checkpoint"
        return Finding("problem", f"Orbax can't save and restore: {error}", remedy)
    return Finding("ok", f"checkpoints are saved and restored ({answer})")


def _compilers(quick: bool) -> Iterator[Finding]:
    """Those of devices that are not here, which `Trainer.plan` takes."""
    there = compilers_installed()
    missing = [f"{what}s" for what in ("GPU", "TPU") if what not in there]
    if missing:
        yield Finding(
            "ok",
            f"no plans for {' and '.join(missing)} that are not here; for them: pip"
            " install 'jaxdp[plan]', into an environment of its own",
        )
    for what, package in there.items():
        compiler = f"the {what} compiler, {package},"
        name = {"GPU": "h100x8", "TPU": "v5e-4"}[what]
        _, error = ("", "") if quick else _try(_COMPILE.format(name=name))
        if error:
            remedy = "pip install -U 'jaxdp[plan]'"
            yield Finding("problem", f"{compiler} fails: {error}", remedy)
        else:
            works = "is installed" if quick else "works"
            yield Finding("ok", f'{compiler} {works}: topology="{name}"')
    if "GPU" in there and not _accelerators() and not os.environ.get("JAX_PLATFORMS"):
        yield Finding(
            "hint",
            "JAX's CUDA plugin is installed and there is no GPU: it says so at every"
            " start of JAX",
            "set JAX_PLATFORMS=cpu, or keep jaxdp[plan] in an environment of its own",
        )


def _extras() -> Finding:
    names = ("matplotlib", "tensorboard", "wandb", "mlflow", "safetensors", "tqdm")
    there = [name for name in names if find_spec(name)]
    missing = [name for name in names if name not in there]
    text = f"optional packages: {', '.join(there) or 'none'}"
    return Finding(
        "ok", text + (f"; not here: {', '.join(missing)}" if missing else "")
    )


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
        lines = [line for line in err.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        return "", last[:300] or f"it ended with exit code {process.returncode}"
    lines = out.strip().splitlines()
    return (lines[-1] if lines else ""), ""


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
import importlib.metadata
print("Orbax", importlib.metadata.version("orbax-checkpoint"))
"""
