"""Does JAX compute right here? Tries it, and says what to do about what is wrong."""

import glob
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..basics.environment import versions
from ..basics.hardware import note_on_kinds
from ..basics.host_memory import HOST

_LIMIT: Final = 120  # seconds that all checks may take
_CHECK: Final = "from jaxdp.cli.doctor import check; check()"


class Finding(NamedTuple):
    """One line of the examination."""

    state: Literal["ok", "hint", "problem"]
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "PROBLEM" if self.state == "problem" else self.state.ljust(7)
        remedy = f"\n          -> {self.remedy}" if self.remedy else ""
        return f"{mark}  {self.what}{remedy}"


def examine() -> list[Finding]:
    """Versions, and findings of a process of its own, which may hang or abort."""
    findings = [Finding("ok", ", ".join(" ".join(pair) for pair in versions().items()))]
    try:
        command = [sys.executable, "-c", _CHECK]
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT)
        output, error, code = done.stdout, done.stderr, done.returncode
        why = f"it ended with exit code {code}"
    except subprocess.TimeoutExpired as late:
        output, error, code = late.stdout or b"", b"", 1
        why = f"no answer within {_LIMIT} seconds"

    # A line of JSON for each finding, and before it the name of what is tried.
    doing = "jaxdp"
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("{"):
            findings.append(Finding(**json.loads(line)))
        elif line.startswith("# "):
            doing = line[2:]
    if code:
        lines = error.decode(errors="replace").strip().splitlines() or [why]
        flags = [line for line in lines if "XLA_FLAGS" in line]
        text = f"{doing} failed: {(flags or lines)[-1][:300]}"
        findings.append(Finding("problem", text, "try JAX_PLATFORMS=cpu"))
    return findings


def check() -> None:
    """Prints what `examine` reads; runs in a process of its own."""
    for name, finding in findings():
        line = f"# {name}" if finding is None else json.dumps(finding._asdict())
        print(line, flush=True)


def findings() -> Iterator[tuple[str, Finding | None]]:
    """What each check finds, in this process; None as one begins, by its name."""
    for name, function in _CHECKS.items():
        yield name, None
        try:
            yield from [(name, finding) for finding in function()]
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}"
            yield name, Finding("problem", text[:500])


def _devices() -> Iterator[Finding]:
    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    yield Finding("ok", f"{len(devices)} x {kind} ({platform})")
    version = devices[0].client.platform_version.strip().replace("\n", ", ")
    if platform != "cpu":
        yield Finding("ok", f"driver and libraries: {version}{_libraries()}")
        if note := note_on_kinds(devices):
            yield Finding("hint", note)

    # What the system shows, whether or not JAX can use it.
    places = {"NVIDIA GPU": "nvidia[0-9]*", "TPU": "accel*", "AMD GPU": "kfd"}
    seen = [name for name, place in places.items() if glob.glob(f"/dev/{place}")]
    if seen and platform == "cpu":
        remedy = "install JAX for it: see docs/install.md"
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            remedy = "unset JAX_PLATFORMS, which is 'cpu'"
        yield Finding(
            "problem", f"there is a {seen[0]}, and JAX does not use it", remedy
        )


def _libraries() -> str:
    """The versions of CUDA's libraries that JAX has loaded, where it tells them."""
    try:
        import jax._src.lib

        told: Any = jax._src.lib.cuda_versions
        driver, cudnn = told.cuda_driver_get_version(), told.cudnn_get_version()
    except Exception:  # not with this version, or not NVIDIA's
        return ""
    return f", driver for CUDA {driver // 1000}.{driver % 1000 // 10}, cuDNN {cudnn}"


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
    return Finding("problem", f"not so: {what}", remedy)


_CHECKS: Final[dict[str, Callable[[], Iterator[Finding]]]] = {
    "looking for devices": _devices,
    "arithmetic": _arithmetic,
    "donation": _donated,
    "a scatter-add": _scatter,
    "precision": _precision,
    "pinned memory": _pinned,
}
