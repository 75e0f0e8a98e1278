"""The doctor: whether JAX computes right on this machine, and what to do if not."""

import glob
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..basics.environment import get_versions
from ..basics.hardware import describe_mixed_kinds
from ..basics.host_memory import HOST

_LIMIT: Final = 120
"""Seconds that all checks may take."""


class Finding(NamedTuple):
    """What a check finds."""

    state: str
    """"ok", "hint" or "PROBLEM"."""
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n          -> {self.remedy}" if self.remedy else ""
        return f"{self.state:7}  {self.what}{remedy}"


def examine() -> list[str]:
    """Versions, and what a process of its own finds, which may hang or abort."""
    lines = [str(Finding("ok", ", ".join(map(" ".join, get_versions().items()))))]
    try:
        command = [sys.executable, "-c", f"from {__name__} import check; check()"]
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT)
        output, error, code = done.stdout, done.stderr, done.returncode
        why = f"it ended with exit code {code}"
    except subprocess.TimeoutExpired as late:
        output, error, code = late.stdout or b"", b"", 1
        why = f"no answer within {_LIMIT} seconds"

    doing = "jaxdp"
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("# "):
            doing = line[2:]
        else:
            lines.append(line)
    if code:
        errors = error.decode(errors="replace").strip().splitlines() or [why]
        flags = [line for line in errors if "XLA_FLAGS" in line]
        text = f"{doing} failed: {(flags or errors)[-1][:300]}"
        lines.append(str(Finding("PROBLEM", text, "try JAX_PLATFORMS=cpu")))
    return lines


def check() -> None:
    """Prints what the doctor finds, and before it the name of what is tried."""
    for finding in findings(lambda name: print(f"# {name}", flush=True)):
        print(finding, flush=True)


def findings(begins: Callable[[str], Any] = str) -> Iterator[Finding]:
    """What each check finds, in this process; `begins` is told its name before."""
    for name, function in _CHECKS.items():
        begins(name)
        try:
            yield from function()
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}"
            yield Finding("PROBLEM", text[:500])


def _devices() -> Iterator[Finding]:
    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    yield Finding("ok", f"{len(devices)} x {kind} ({platform})")
    version = devices[0].client.platform_version.strip().replace("\n", ", ")
    if platform != "cpu":
        yield Finding("ok", f"driver and libraries: {version}")
        if note := describe_mixed_kinds(devices):
            yield Finding("hint", note)

    # What the system shows, whether or not JAX can use it.
    places = {"NVIDIA GPU": "nvidia[0-9]*", "TPU": "accel*", "AMD GPU": "kfd"}
    seen = [name for name, place in places.items() if glob.glob(f"/dev/{place}")]
    if seen and platform == "cpu":
        remedy = "install JAX for it: see docs/install.md"
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            remedy = "unset JAX_PLATFORMS, which is 'cpu'"
        what = f"there is a {seen[0]}, and JAX does not use it"
        yield Finding("PROBLEM", what, remedy)


def _arithmetic() -> Iterator[Finding]:
    # Of integers so small that no precision rounds them.
    a, b = np.random.default_rng(0).integers(-8, 8, (2, 256, 256)).astype(np.float32)
    yield _same("a product agrees with NumPy's", jax.jit(jnp.matmul)(a, b), a @ b)
    yield _same("ones(4) + 1 is 2", jnp.ones(4) + 1, np.full(4, 2.0))
    drawn = jax.random.normal(jax.random.key(0), (10_000,))
    yield _same("random numbers are finite", jnp.isfinite(drawn).all(), True)


def _donated() -> Iterator[Finding]:
    for swapped in False, True:

        def step(a: Any, b: Any, swapped: bool = swapped) -> Any:
            return (b * 3, a + 1) if swapped else (a + 1, b * 3)

        a, b = jnp.arange(1024.0), jnp.ones(1024)
        expected = step(np.arange(1024.0), np.ones(1024))
        donated = jax.jit(step, donate_argnums=(0, 1))(a, b)
        what = f"donated arrays are overwritten rightly{', swapped' * swapped}"
        yield _same(what, jnp.stack(donated), np.stack(expected))


def _scatter() -> Iterator[Finding]:
    rows = np.random.default_rng(0).integers(0, 399, 40_960)
    add = jax.jit(lambda rows: jnp.zeros((399, 64)).at[rows].add(1.0))
    counts = np.bincount(rows, minlength=399)[:, None] * np.ones(64)
    yield _same("a scatter-add is right", add(rows), counts)
    started = time.perf_counter()
    add(rows).block_until_ready()  # waits for the device
    seconds = time.perf_counter() - started
    yield Finding("ok", f"a scatter-add of 40,960 rows takes {1000 * seconds:.1f} ms")
    if seconds > 0.5:  # it goes row by row
        yield Finding("hint", "embeddings are slow to train", "try another jaxlib")


def _precision() -> Iterator[Finding]:
    value, one = 1 + 2.0**-12, jnp.eye(256)
    for precision in None, "float32":
        with jax.default_matmul_precision(precision):
            product = jax.jit(jnp.matmul)(one * value, one)
        is_exact = float(product[0, 0]) == value  # waits for the device
        how = "computed in float32" if is_exact else "rounded (to TF32, bfloat16)"
        if precision is None:
            yield Finding("ok", f"products of float32 arrays are {how} by default")
        else:
            yield _same('they are in float32 under precision="32-highest"', is_exact, 1)


def _pinned() -> Iterator[Finding]:
    there = jnp.arange(1024.0)
    away = jax.device_put(there, there.sharding.with_memory_kind(HOST))
    back = jax.device_put(away, there.sharding)
    yield _same(f"arrays go to {HOST} memory and back", back, np.arange(1024.0))


def _same(what: str, found: Any, expected: Any) -> Finding:
    if np.array_equal(np.asarray(found), expected):  # waits for the device
        return Finding("ok", what)
    remedy = "wrong numbers: try another version of JAX, or another driver"
    return Finding("PROBLEM", f"not so: {what}", remedy)


_CHECKS: Final[dict[str, Callable[[], Iterator[Finding]]]] = {
    "looking for devices": _devices,
    "arithmetic": _arithmetic,
    "donation": _donated,
    "a scatter-add": _scatter,
    "precision": _precision,
    "pinned memory": _pinned,
}
