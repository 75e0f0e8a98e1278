"""A batch of 1.1 times the largest: what is said, and whether the process goes on."""

import time
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer


def measure(toy: bool) -> dict[str, Any]:
    """The largest batch by the plan, what happens beyond it, and after that."""
    width = 64 if toy else 4096

    def trainer() -> Trainer:
        return Trainer(
            eqx.nn.MLP(width, 10, width, 8, key=jax.random.key(0)),
            optax.adam(1e-5),
            loss="cross_entropy",
            strategy=SingleDevice(),
            enable_progress_bar=False,
        )

    def batch(rows: int) -> Any:
        return np.zeros((rows, width), np.float32), np.zeros(rows, np.int32)

    plan = trainer().plan([batch(64)])
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    largest = plan.largest_batch(None if limit else 4e6)
    found: dict[str, Any] = {"largest batch": largest, "bytes_limit": limit}
    for name, rows in {"1": largest, "1.1": int(1.1 * largest), "a few": 64}.items():
        begin = time.perf_counter()
        try:
            trainer().fit([batch(rows)] * 2)
            found[name] = "trained"
        except Exception as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            found[name] = f"{type(error).__name__}: {error} {notes}"[:1500]
        found[f"{name}: seconds"] = time.perf_counter() - begin
    return found


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each batch."""
    yield "the largest batch by the plan", f"{found['largest batch']} rows"
    for name, title in {
        "1": "that batch",
        "1.1": "1.1 times that batch",
        "a few": "64 rows, after that, in the same process",
    }.items():
        yield title, found[name][:300]
