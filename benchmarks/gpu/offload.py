"""A billion parameters: their optimizer state on the host, and what a save stalls."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer


def measure(toy: bool) -> dict[str, Any]:
    """With and without `offload`: milliseconds of a step, bytes, seconds of saving."""
    width, depth, rows, steps = (64, 2, 8, 3) if toy else (8192, 15, 512, 5)
    x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    data = [(x, np.zeros(rows, np.int32))] * steps
    found = {}
    for offload in (None, "optimizer"):
        try:
            found[offload or "on the device"] = _one(offload, width, depth, data)
        except Exception as error:  # too large, or no such memory
            text = f"{type(error).__name__}: {error}"[:500]
            found[offload or "on the device"] = {"failed": text}
        jax.clear_caches()
    return found


def _one(offload: str | None, width: int, depth: int, data: list[Any]) -> Any:
    model = eqx.nn.MLP(width, 10, width, depth, key=jax.random.key(0))
    parameters = sum(
        leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))
    )
    trainer = Trainer(
        model,
        optax.adam(1e-5),
        loss="cross_entropy",
        strategy=SingleDevice(),
        offload=offload,
        enable_progress_bar=False,
    )
    trainer.fit(data)
    begin = time.perf_counter()
    trainer.fit(data, max_epochs=2)
    jax.block_until_ready(trainer.state)
    seconds = (time.perf_counter() - begin) / len(data)
    stats = jax.devices()[0].memory_stats() or {}

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        path = trainer.save(Path(folder) / "saved")
        saved = time.perf_counter() - begin
        begin = time.perf_counter()
        trainer.load(path)
        jax.block_until_ready(trainer.state)
        loaded = time.perf_counter() - begin
    return {
        "parameters": parameters,
        "milliseconds": 1e3 * seconds,
        "bytes_in_use": stats.get("bytes_in_use"),
        "seconds of saving": saved,
        "seconds of loading": loaded,
    }


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each."""
    for name, one in found.items():
        if "failed" in one:
            yield name, f"FAILED: {one['failed'][:200]}"
            continue
        used = one["bytes_in_use"]
        yield (
            f"{name}, {one['parameters'] / 1e9:.3g} billion parameters",
            f"{one['milliseconds']:.4g} ms a step, "
            + (f"{used / 1e9:.3g} GB in use, " if used else "")
            + f"{one['seconds of saving']:.2f} s to save,"
            f" {one['seconds of loading']:.2f} s to load",
        )
