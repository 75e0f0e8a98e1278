"""The same bits in fresh processes, after a resume, with several steps per dispatch."""

import hashlib
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

from . import measure_in_process


class TextNet(eqx.Module):
    """Embeddings and a max-pool, whose gradients GPUs add in an order that varies."""

    words: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    pool: eqx.nn.MaxPool1d
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.words = eqx.nn.Embedding(399, 64, key=keys[0])
        self.conv = eqx.nn.Conv1d(64, 64, 3, padding=1, key=keys[1])
        self.pool = eqx.nn.MaxPool1d(3, 2)
        self.last = eqx.nn.Linear(64 * 31, 10, key=keys[2])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.conv(jax.vmap(self.words)(tokens).T)
        return self.last(self.pool(jax.nn.relu(x)).ravel())


def measure_one(reproducible: str | None, toy: bool) -> dict[str, Any]:
    """Returns hashes of three runs that must end alike, and seconds per step."""
    rows, steps = (8, 8) if toy else (512, 64)
    draw = np.random.default_rng(0)
    x = draw.integers(0, 399, (steps, rows, 64), dtype=np.int32)
    data = [*zip(x, draw.integers(0, 10, (steps, rows)), strict=True)]

    def trainer(**options: Any) -> Trainer:
        return Trainer(
            TextNet(jax.random.key(0)),
            optax.adam(1e-3),
            loss="cross_entropy",
            strategy=SingleDevice(),
            reproducible=reproducible,
            enable_progress_bar=False,
            **options,
        )

    def digest(trained: Trainer) -> str:
        leaves = jax.tree.leaves((trained.state.params, trained.state.opt_state))
        text = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
        return hashlib.sha256(text).hexdigest()[:16]

    whole = trainer()
    whole.fit(data)
    begin = time.perf_counter()
    whole.fit(data, max_epochs=2)
    jax.block_until_ready(whole.state)
    found: dict[str, Any] = {"seconds_per_step": (time.perf_counter() - begin) / steps}
    found["one run"] = digest(whole)

    half = trainer()
    half.fit(data, max_steps=steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        path = half.save(Path(folder) / "half")
        resumed = trainer()
        resumed.fit(data, max_epochs=2, ckpt_path=path)
    found["resumed"] = digest(resumed)

    # On CPUs, convolutions in several steps are refused.
    is_cpu = jax.default_backend() == "cpu"
    several = trainer(steps_per_execution=1 if is_cpu else 8)
    several.fit(data, max_epochs=2)
    found["8 steps a dispatch"] = digest(several)
    return found


def measure(toy: bool) -> Iterator[tuple[str, Any]]:
    """Yields the results of two fresh processes for each setting."""
    for reproducible in (None, "run"):
        yield (
            reproducible or "default",
            [measure_in_process(__name__, reproducible, toy) for _ in range(2)],
        )


def format_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields rows for each setting, and one for the price."""
    seconds = {}
    for setting, runs in found.items():
        failed = [one["failed"] for one in runs if "failed" in one]
        if failed:
            yield setting, f"FAILED: {failed[0][-200:]}"
            continue
        for name in ("one run", "resumed", "8 steps a dispatch"):
            hashes = {one[name] for one in runs}
            same = "the same" if hashes == {runs[0]["one run"]} else "NOT the same"
            text = f"{same} bits as one run, {len(runs)} processes: {sorted(hashes)}"
            yield f"{setting}: {name}", text
        seconds[setting] = min(one["seconds_per_step"] for one in runs)
        yield f"{setting}: time", f"{1e3 * seconds[setting]:.3g} ms a step"
    if {"default", "run"} <= seconds.keys():
        ratio = seconds["run"] / seconds["default"]
        yield 'the price of reproducible="run"', f"{ratio:.2f} x the time"
