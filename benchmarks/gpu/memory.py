"""Memory: plans beside the peak in use, offload and checkpoints, too large batches.

Each is measured in a process of its own, since a peak never falls.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import equinox as eqx
import jax
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer

from . import measure_in_process
from .steps import make_gpt_case

PLANS: Final = {
    "MLP": {},
    "MLP, 4 micro-batches": {"accumulate_grad_batches": 4},
    "GPT-2 small, bf16-mixed": {"precision": "bf16-mixed"},
}
"""The Trainer's arguments of the plans that are compared with a fit."""


def measure(toy: bool) -> Iterator[tuple[str, Any]]:
    """Yields the results of each measurement."""
    for name in PLANS:
        yield f"plan: {name}", measure_in_process(__name__, "plan", name, toy)
    yield "too large", measure_in_process(__name__, "too large", None, toy)
    for offload in (None, "optimizer"):
        title = "offload: " + (offload or "none")
        yield title, measure_in_process(__name__, "offload", offload, toy)


def measure_one(kind: str, argument: Any, toy: bool) -> dict[str, Any]:
    """Returns the results of a measurement, in this process."""
    if kind == "plan":
        return _measure_plan(argument, toy)
    if kind == "offload":
        return _measure_offload(argument, toy)
    return _train_too_large_batches(toy)


def _make_mlp_trainer(width: int, depth: int, **options: Any) -> Trainer:
    return Trainer(
        eqx.nn.MLP(width, 10, width, depth, key=jax.random.key(0)),
        optax.adam(1e-5),
        loss="cross_entropy",
        strategy=SingleDevice(),
        enable_progress_bar=False,
        **options,
    )


def _make_batch(rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    return x, np.zeros(rows, np.int32)


def _count_bytes(model: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


def _measure_plan(name: str, toy: bool) -> dict[str, Any]:
    """Returns the peak that a plan says, and the device's peak after a fit."""
    if name.startswith("GPT"):
        case = make_gpt_case("bf16-mixed", toy=toy, rows=8, steps=4)
        model, data = case.make_model(), case.make_batches()
        trainer = Trainer(
            model,
            optax.adam(1e-4),
            strategy=SingleDevice(),
            enable_progress_bar=False,
            **case.loss,
            **PLANS[name],
        )
    else:
        width, rows = (32, 16) if toy else (8192, 8192)
        data = [_make_batch(rows, width)] * 4
        trainer = _make_mlp_trainer(width, 4, **PLANS[name])
        model = trainer.model
    plan = trainer.plan(data)
    trainer.fit(data, max_epochs=2)
    jax.block_until_ready(trainer.state)
    return {
        "planned": plan.memory.peak,
        "model of the caller": _count_bytes(model),
        "used": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def _measure_offload(offload: str | None, toy: bool) -> dict[str, Any]:
    """Returns times and bytes of a model of a billion parameters, and of its saves."""
    width, depth, rows, steps = (64, 2, 8, 3) if toy else (8192, 15, 512, 5)
    data = [_make_batch(rows, width)] * steps
    trainer = _make_mlp_trainer(width, depth, offload=offload)
    trainer.fit(data)
    begin = time.perf_counter()
    trainer.fit(data, max_epochs=2)
    jax.block_until_ready(trainer.state)
    seconds = (time.perf_counter() - begin) / steps
    stats = jax.devices()[0].memory_stats() or {}

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        path = trainer.save(Path(folder) / "saved")
        save_seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        trainer.load(path)
        jax.block_until_ready(trainer.state)
        load_seconds = time.perf_counter() - begin
    return {
        "parameters": _count_bytes(trainer.model) // 4,
        "milliseconds": 1e3 * seconds,
        "bytes_in_use": stats.get("bytes_in_use"),
        "save_seconds": save_seconds,
        "load_seconds": load_seconds,
    }


def _train_too_large_batches(toy: bool) -> dict[str, Any]:
    """Returns a plan's largest batch, and the result of it, of more, and of few rows.

    All are trained in this process, which should continue after an error.
    """
    width = 64 if toy else 4096
    plan = _make_mlp_trainer(width, 8).plan([_make_batch(64, width)])
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    largest = plan.largest_batch(None if limit else 4e6)
    found: dict[str, Any] = {"largest batch": largest, "bytes_limit": limit}
    for name, rows in {
        "that batch": largest,
        "1.1 times that batch": int(1.1 * largest),
        "64 rows, after that": 64,
    }.items():
        batch = np.zeros((rows, width), np.float32), np.zeros(rows, np.int32)
        try:
            _make_mlp_trainer(width, 8).fit([batch] * 2)
            found[name] = "trained"
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            found[name] = f"{type(error).__name__}: {error} {notes}"[:1500]
    return found


def format_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a row for each measurement."""
    for name, result in found.items():
        if "failed" in result:
            yield name, f"FAILED: {result['failed'][-200:]}"
        elif name.startswith("plan"):
            yield name, _format_plan(result)
        elif name.startswith("offload"):
            yield name, _format_offload(result)
        else:
            yield "the largest batch by the plan", f"{result['largest batch']} rows"
            for text in ("that batch", "1.1 times that batch", "64 rows, after that"):
                yield text, result[text][:300]


def _format_plan(result: dict[str, Any]) -> str:
    planned = result["planned"] + result["model of the caller"]
    text = f"{planned / 1e6:.4g} MB planned, with the caller's model"
    if not (used := result["used"]):
        return f"{text}; this device does not report its use"
    return f"{text}; {used / 1e6:.4g} MB used, {used / planned:.3f} x"


def _format_offload(result: dict[str, Any]) -> str:
    used = result["bytes_in_use"]
    return (
        f"{result['parameters'] / 1e9:.3g} billion parameters,"
        f" {result['milliseconds']:.4g} ms a step,"
        + (f" {used / 1e9:.3g} GB in use," if used else "")
        + f" {result['save_seconds']:.2f} s to save,"
        f" {result['load_seconds']:.2f} s to load"
    )
