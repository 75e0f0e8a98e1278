"""Measures the time to the first loss, with a cold and a warm compilation cache.

python -m benchmarks.start [--only W1,W2] [--depths 60,300] [--repeats 3]

Each measurement is a process of its own, in turns; the caches of compiled programs are
in a folder that is empty before a cold start. A deep model of many small arrays is
compared with a loop by hand, both with a cold cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from .processes import ROOT
from .works import WORKS

IMPORT = (
    "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
)
ALONE, WITH = "jax, equinox, optax", "jax, equinox, optax, jaxdp"

FIRST_LOSS = """
import time; begin = time.perf_counter()
import dataclasses, optax
from benchmarks.models import build
from benchmarks.works import WORKS
from jaxdp import Trainer
from jaxdp.callbacks import Callback
class First(Callback):
    def on_train_batch_end(self, trainer, metrics, batch_idx):
        float(metrics["loss"])
        end = time.perf_counter()
        print(end - begin, end - fitting)
work = WORKS[{!r}]
work = dataclasses.replace(work, steps=1)
model, loader = build(work), work.loader()
fitting = time.perf_counter()
Trainer(
    model, optax.adam(1e-3), loss=work.criterion, callbacks=[First()]
).fit(loader, max_steps=1)
"""

DEEP = """
import time
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
from jaxdp import Trainer
model = eqx.nn.MLP(8, "scalar", 16, depth={}, key=jax.random.key(0))
x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
batch, optimizer = (x, x.sum(1)), optax.adam(1e-3)
begin = time.perf_counter()
{}
print(time.perf_counter() - begin)
"""

BY_HAND = """
params, static = eqx.partition(jax.tree.map(
    lambda leaf: jnp.array(leaf) if eqx.is_array(leaf) else leaf, model
), eqx.is_inexact_array)
def loss(params, x, y):
    return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)
def step(state, x, y):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (eqx.apply_updates(params, updates), opt_state), value
state = params, jax.jit(optimizer.init)(params)
float(jax.jit(step, donate_argnums=0)(state, *batch)[1])
"""

BY_JAXDP = """
trainer = Trainer(model, optimizer, loss="mse", enable_progress_bar=False)
float(next(trainer.steps([batch]))["loss"])
"""


def seconds(code: str, folder: str) -> list[float]:
    """Returns the last output of `code`, in a new process with its caches in
    `folder`.
    """
    # The process has compiled modules, as an installed package has after its first
    # import.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment = inherited | {
        "JAX_PLATFORMS": "cpu",
        "HOME": folder,
        "XDG_CACHE_HOME": folder,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [float(number) for number in done.stdout.splitlines()[-1].split()]


def main(argv: list[str] | None = None) -> dict[str, tuple[float, float]]:
    """Measures and prints; returns the two times of each row."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--only", default="W1,W2", help="works for the first loss")
    parser.add_argument("--depths", default="60,300", help="of an MLP of width 16")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    for name in filter(None, args.only.split(",")):
        if name not in WORKS:
            parser.error(f"`--only` has {name!r}; there are {', '.join(WORKS)}.")

    with tempfile.TemporaryDirectory() as folder:
        seconds(IMPORT.format(WITH), folder)  # compiles the modules
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            [alone], [beside] = (
                seconds(IMPORT.format(names), folder) for names in (ALONE, WITH)
            )
        times.setdefault(f"import {ALONE}; with jaxdp", []).append((alone, beside))
        for name in filter(None, args.only.split(",")):
            code = FIRST_LOSS.format(name)
            with tempfile.TemporaryDirectory() as folder:
                cold, warm = seconds(code, folder), seconds(code, folder)
            for since, first, second in zip(("import", "fit"), cold, warm, strict=True):
                row = f"{name}, {since} to first loss: cold; warm cache"
                times.setdefault(row, []).append((first, second))
        for depth in filter(None, args.depths.split(",")):
            pair: list[float] = []
            for loop in (BY_HAND, BY_JAXDP):
                with tempfile.TemporaryDirectory() as folder:
                    pair += seconds(DEEP.format(depth, loop), folder)
            row = f"MLP of depth {depth}, first loss: by hand; with jaxdp"
            times.setdefault(row, []).append((pair[0], pair[1]))

    print("| | s | s | ratio |\n|---|---|---|---|")
    found = {}
    for row, pairs in times.items():
        before, after = (statistics.median(part) for part in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"| {row} | {before:.2f} | {after:.2f} | {ratio:.2f} |")
        found[row] = before, after
    return found


if __name__ == "__main__":
    main()
