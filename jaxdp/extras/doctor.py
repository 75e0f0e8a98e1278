"""The doctor: checks whether JAX computes right on this machine, and names remedies."""

import glob
import os
import time
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..basics.environment import get_versions
from ..basics.hardware import describe_mixed_kinds
from ..basics.host_memory import HOST


def examine() -> bool:
    """Prints the name of each check, and its lines; returns True if all are well.

    A check that hangs, or that ends the process, is the last one named.
    """
    print(_format("ok", ", ".join(map(" ".join, get_versions().items()))))
    lines = []
    for name in CHECKS:
        print(f"{name}:", flush=True)
        for line in run_check(name):
            print(line, flush=True)
            lines.append(line)
    return not any(line.startswith("PROBLEM") for line in lines)


def run_check(name: str) -> Iterator[str]:
    """Yields the lines of one of `CHECKS`; an exception becomes a line.

    They begin with "ok", "hint" or "PROBLEM".
    """
    try:
        yield from CHECKS[name]()
    except Exception as error:
        text = f"{name}: {type(error).__name__}: {error}"
        yield _format("PROBLEM", text[:500])


def _format(state: str, text: str, remedy: str = "") -> str:
    return f"{state:7}  {text}" + (f"\n          -> {remedy}" if remedy else "")


def _format_comparison(text: str, result: Any, expected: Any) -> str:
    """Returns a line that says whether a result is the expected one."""
    if np.array_equal(np.asarray(result), expected):  # waits for the device
        return _format("ok", text)
    remedy = "wrong numbers: try another version of JAX, or another driver"
    return _format("PROBLEM", f"not so: {text}", remedy)


def _check_devices() -> Iterator[str]:
    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    yield _format("ok", f"{len(devices)} x {kind} ({platform})")
    if platform != "cpu":
        version = devices[0].client.platform_version.strip().replace("\n", ", ")
        yield _format("ok", f"driver and libraries: {version}")
        if mixed := describe_mixed_kinds(devices):
            yield _format("hint", mixed)
        return

    # Devices that the system has, and that JAX does not use.
    files = {"NVIDIA GPU": "nvidia[0-9]*", "TPU": "accel*", "AMD GPU": "kfd"}
    is_asked_for = os.environ.get("JAX_PLATFORMS") == "cpu"
    remedy = "unset JAX_PLATFORMS, which is 'cpu'"
    remedy = remedy if is_asked_for else "install JAX for it: see docs/install.md"
    for name, file in files.items():
        if glob.glob(f"/dev/{file}"):
            text = f"there is a {name}, and JAX does not use it"
            yield _format("PROBLEM", text, remedy)


def _check_arithmetic() -> Iterator[str]:
    # Integers so small that no precision rounds them.
    a, b = np.random.default_rng(0).integers(-8, 8, (2, 256, 256)).astype(np.float32)
    yield _format_comparison(
        "a product agrees with NumPy's", jax.jit(jnp.matmul)(a, b), a @ b
    )
    yield _format_comparison("ones(4) + 1 is 2", jnp.ones(4) + 1, np.full(4, 2.0))
    numbers = jax.random.normal(jax.random.key(0), (10_000,))
    yield _format_comparison(
        "random numbers are finite", jnp.isfinite(numbers).all(), True
    )


def _check_donation() -> Iterator[str]:
    for swapped in False, True:

        def step(a: Any, b: Any, swapped: bool = swapped) -> Any:
            return (b * 3, a + 1) if swapped else (a + 1, b * 3)

        arrays = np.arange(1024.0, dtype=np.float32), np.ones(1024, np.float32)
        donated = jax.jit(step, donate_argnums=(0, 1))(*map(jnp.array, arrays))
        text = f"donated arrays are overwritten rightly{', swapped' * swapped}"
        yield _format_comparison(text, jnp.stack(donated), np.stack(step(*arrays)))


def _check_scatter() -> Iterator[str]:
    rows = np.random.default_rng(0).integers(0, 399, 40_960)
    add = jax.jit(lambda rows: jnp.zeros((399, 64)).at[rows].add(1.0))
    counts = np.bincount(rows, minlength=399)[:, None] * np.ones(64)
    yield _format_comparison("a scatter-add is right", add(rows), counts)
    started = time.perf_counter()
    add(rows).block_until_ready()  # waits for the device
    seconds = time.perf_counter() - started
    yield _format("ok", f"a scatter-add of 40,960 rows takes {1000 * seconds:.1f} ms")
    if seconds > 0.5:  # some versions of XLA add row by row
        yield _format("hint", "embeddings are slow to train", "try another jaxlib")


def _check_precision() -> Iterator[str]:
    value, one = 1 + 2.0**-12, jnp.eye(256)
    for precision in None, "float32":
        with jax.default_matmul_precision(precision):
            product = jax.jit(jnp.matmul)(one * value, one)
        is_exact = float(product[0, 0]) == value  # waits for the device
        how = "computed in float32" if is_exact else "rounded (to TF32, bfloat16)"
        if precision is None:
            yield _format("ok", f"products of float32 arrays are {how} by default")
        else:
            text = 'they are in float32 under precision="32-highest"'
            yield _format_comparison(text, is_exact, True)


def _check_host_memory() -> Iterator[str]:
    array = jnp.arange(1024.0)
    on_host = jax.device_put(array, array.sharding.with_memory_kind(HOST))
    back = jax.device_put(on_host, array.sharding)
    yield _format_comparison(
        f"arrays go to {HOST} memory and back", back, np.arange(1024.0)
    )


CHECKS: Final = {
    "looking for devices": _check_devices,
    "arithmetic": _check_arithmetic,
    "donation": _check_donation,
    "a scatter-add": _check_scatter,
    "precision": _check_precision,
    "pinned memory": _check_host_memory,
}
