"""Plans beside `peak_bytes_in_use`: six cases, each in a process of its own."""

from collections.abc import Iterator
from typing import Any, Final

import equinox as eqx
import jax
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer

from . import fresh, gpt

CASES: Final = {
    "MLP, SGD": ("mlp", "sgd", {}),
    "MLP, Adam": ("mlp", "adam", {}),
    "MLP, Adam, 4 micro-batches": ("mlp", "adam", {"accumulate_grad_batches": 4}),
    "MLP, Adam, bf16-mixed": ("mlp", "adam", {"precision": "bf16-mixed"}),
    "GPT, Adam, bf16-mixed": ("gpt", "adam", {"precision": "bf16-mixed"}),
    "GPT, Adam, 32-true": ("gpt", "adam", {}),
}


def one(name: str, toy: bool) -> dict[str, Any]:
    """What a plan says, and what the device has had at most."""
    kind, optimizer, options = CASES[name]
    if kind == "gpt":
        sizes = gpt.TOY if toy else gpt.FULL
        model = gpt.Gpt(sizes, jax.random.key(0))
        data: list[Any] = gpt.batches(sizes, 2 if toy else 8, 4)
        options = {"loss_fn": gpt.loss_of_rows, **options}
    else:
        width, rows = (32, 16) if toy else (8192, 8192)
        model = eqx.nn.MLP(width, 10, width, 4, key=jax.random.key(0))
        x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
        data = [(x, np.zeros(rows, np.int32))] * 4
        options = {"loss": "cross_entropy", **options}
    trainer = Trainer(
        model,
        {"sgd": optax.sgd, "adam": optax.adam}[optimizer](1e-4),
        strategy=SingleDevice(),
        enable_progress_bar=False,
        **options,
    )
    plan = trainer.plan(data)
    trainer.fit(data, max_epochs=2)
    jax.block_until_ready(trainer.state)
    stats = jax.devices()[0].memory_stats() or {}
    given = sum(
        leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))
    )
    return {
        "planned": plan.memory.peak,
        "model that was given": given,
        "used": stats.get("peak_bytes_in_use"),
        "limit": stats.get("bytes_limit"),
    }


def measure(toy: bool) -> dict[str, Any]:
    """By case; at toy size all in this process."""
    if toy:
        return {name: one(name, toy) for name in CASES}
    return {name: fresh.one(__name__, name, toy) for name in CASES}


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each case."""
    for name, one in found.items():
        if "failed" in one:
            yield name, f"FAILED: {one['failed'][-200:]}"
            continue
        planned = one["planned"] + one["model that was given"]
        text = f"{planned / 1e6:.4g} MB planned, with the model that was given"
        if one["used"]:
            text += f"; {one['used'] / 1e6:.4g} MB used, {one['used'] / planned:.3f} x"
        yield name, text if one["used"] else f"{text}; this device tells of no use"
