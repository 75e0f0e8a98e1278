"""Does training work here? Tries it, and says what to do about what does not."""

import glob
import os
import re
import shutil
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
    "GPU compiler": (
        "plan",
        "plans for GPUs, in an environment of its own",
    ),
    "TPU compiler": (
        "plan",
        "plans for TPUs, in an environment of its own",
    ),
}
"""What may be missing: the extra that brings each, and what needs it."""

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
    yield from _settings()
    first, *others = _devices()
    yield from (first, *others)
    if first.state == "problem":
        return  # nothing else that uses JAX would work

    yield _cache_folder()
    yield from _shared_memory()
    if not quick:
        if find_spec("torch"):
            yield _tried(*_WORKERS)
        yield _tried(*_CHECKPOINT)
    for what, package in compilers_installed().items():
        yield Finding("ok", f"the {what} compiler, {package}, is installed")
    yield from _missing()


def _devices() -> Iterator[Finding]:
    """In a process of its own, where a driver that hangs can be given up."""
    answer, error = _try(_COMPUTE)
    if re.match(_BAD_FLAGS, error):
        yield Finding(
            "problem",
            f"XLA aborts every process that uses JAX, because of XLA_FLAGS: {error}",
            "correct it; or pass the option as Trainer(compiler_options=...), where an"
            " unknown name is an error that lists similar ones",
        )
        return
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
    folder = os.path.expanduser(config.jax_compilation_cache_dir or "")
    why = ""
    if folder and "://" not in folder:
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            folder, why = "", f" ({error})"
    if folder and config.jax_enable_compilation_cache:
        return Finding("ok", f"compiled programs are kept in {folder}")
    return Finding(
        "hint",
        f"compiled programs are not kept{why}: every run compiles its steps again",
        "set JAX_COMPILATION_CACHE_DIR to a folder that can be written to, and unset"
        " JAX_ENABLE_COMPILATION_CACHE",
    )


def _shared_memory() -> Iterator[Finding]:
    shared = "/dev/shm"
    if os.path.isdir(shared) and (size := shutil.disk_usage(shared).total) < 500e6:
        what = f"{shared}, through which data workers share batches, has {size:,} bytes"
        remedy = "in Docker: docker run --shm-size=8g (or num_workers=0)"
        yield Finding("hint", what, remedy)


def _missing() -> Iterator[Finding]:
    """What an extra would bring."""
    compilers = [f"{what} compiler" for what in compilers_installed()]
    missing = [
        name for name in _EXTRAS if name not in compilers and not find_spec(name)
    ]
    if missing:
        extras = ",".join(dict.fromkeys(_EXTRAS[name][0] for name in missing))
        needs = ", ".join(f"{name} (for {_EXTRAS[name][1]})" for name in missing)
        remedy = f"where you need them: pip install 'jaxdp[{extras}]'"
        yield Finding("ok", f"not installed: {needs}", remedy)


def _tried(works: str, fails: str, remedy: str, code: str) -> Finding:
    """What is found where a program works, and where it fails."""
    answer, error = _try(code)
    if error:
        return Finding("problem", f"{fails}: {error}", remedy)
    return Finding("ok", f"{works} ({answer})" if answer else works)


def _try(code: str) -> tuple[str, str]:
    """The last line that a program prints, and what went wrong if anything did."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_LIMIT} seconds"
    if done.returncode:
        bad_flags = re.search(_BAD_FLAGS, done.stderr)
        last = bad_flags[0] if bad_flags else done.stderr.strip().rpartition("\n")[2]
        return "", last[:300] or f"it ended with exit code {done.returncode}"
    return done.stdout.strip().rpartition("\n")[2], ""


_COMPUTE: Final = """
import jax, jax.numpy as jnp
devices = jax.devices()
x = jax.jit(lambda a: (a @ a).sum())(jnp.ones((256, 256)))
assert x == 256**3, x
print(len(devices), devices[0].platform, devices[0].device_kind, sep="|")
"""

_WORKERS: Final = (
    "torch's data workers work",
    "torch's data workers fail",
    "use num_workers=0; in Docker, --shm-size=8g may help",
    """
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
""",
)

_CHECKPOINT: Final = (
    "checkpoints are saved and restored",
    "Orbax can't save and restore",
    "pip install -U orbax-checkpoint",
    """
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
""",
)
