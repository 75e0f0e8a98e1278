"""Steps of jaxdp beside E, the loop written by hand, and MFU.

All loops of a case live in this process and train in turn; a time is the difference of
fits of two lengths. MFU is the share of the rate, measured here at the model's own
shapes, that the arithmetic of the model reaches.
"""

import collections
import contextlib
import dataclasses
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer
from jaxdp.callbacks import Callback

from .. import models
from ..works import Work
from . import gpt

Run = Callable[[int], float]
"""Trains so many epochs, and returns the seconds that it took."""

Loop = tuple[Run, Callable[[], Any], list[float]]
"""A run, its model at the end, and the seconds of the host for each call."""

REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        title: one line for the table.
        precision: as the Trainer's.
        epochs: how many epochs longer the longer fit is.
        build: makes the model.
        batches: those of an epoch, NumPy.
        loss: of `(model, *batch)`, its mean.
        options: the loss for the Trainer.
        operations: of a step.
        shape: rows, inputs and outputs of the model's main product.
        rate: of learning.
        tolerance: how far the losses at the end may be apart, relatively.
        work: whose loader there is.
    """

    title: str
    precision: str
    epochs: int
    build: Callable[[], Any]
    batches: Callable[[], list[Any]]
    loss: Callable[..., jax.Array]
    options: dict[str, Any]
    operations: float
    shape: tuple[int, int, int]
    rate: float = 1e-3
    tolerance: float = 5e-2
    work: Work | None = None


def of_work(work: Work, precision: str, epochs: int, shape: Any) -> Case:
    """The case of a work."""
    return Case(
        work.title,
        precision,
        epochs,
        lambda: models.build(work),
        work.batches,
        lambda model, x, y: models.mean_loss(model, x, y, work.criterion),
        {"loss": work.criterion},
        operations(work),
        shape,
        work.rate,
        work.tolerance,
        work,
    )


def of_gpt(tokens: int, rows: int, toy: bool) -> Case:
    """A GPT with rows of so many tokens."""
    sizes = (*(gpt.TOY if toy else gpt.FULL)[:4], tokens)
    steps, rows = (2, 2) if toy else (8, rows)
    width = sizes[0]
    return Case(
        f"GPT of {width} x {sizes[1]}, {rows} x {tokens} tokens",
        "bf16-mixed",
        1 if toy else 3,
        lambda: gpt.Gpt(sizes, jax.random.key(0)),
        lambda: gpt.batches(sizes, rows, steps),
        lambda model, tokens: gpt.loss_of_rows(model, tokens).mean(),
        {"loss_fn": gpt.loss_of_rows},
        gpt.operations(sizes, rows),
        (rows * tokens, width, 4 * width),
        1e-4,
    )


def cases(toy: bool) -> dict[str, Case]:
    """By name; at toy size for tests."""
    tiny = Work(
        *("tiny", "MLP 4-32-4, batch 16", "mlp", (4, 32, 4), 16),
        *(8 if toy else 1000, 1, 0, "mse", 1e-2),
    )
    lenet = Work(
        *("lenet", "LeNet, batch 256", "lenet", (), 16 if toy else 256),
        *(2 if toy else 60, 1, 0, "cross_entropy", 5e-2),
    )
    depth, width, rows = (2, 16, 32) if toy else (90, 2056, 6912)
    title = f"MLP of {depth} layers of {width}, batch {rows}"
    big = Work(
        *("big", title, "mlp", (784, *([width] * depth), 10), rows, 2 if toy else 8),
        *(1, 0, "cross_entropy", 5e-2, 1e-5),
    )
    epochs, main = 1 if toy else 3, (rows, width, width)
    return {
        "tiny": of_work(tiny, "32-true", epochs, (16, 4, 32)),
        "lenet": of_work(lenet, "32-true", epochs, (lenet.batch, 800, 128)),
        "big-bf16": of_work(big, "bf16-mixed", epochs, main),
        "big-tf32": of_work(big, "32-true", epochs, main),
        "big-f32": of_work(big, "32-highest", epochs, main),
        "gpt-1024": of_gpt(16 if toy else 1024, 16, toy),
        "gpt-4096": of_gpt(32 if toy else 4096, 4, toy),
    }


def matrix_rate(precision: str, shape: tuple[int, int, int], toy: bool) -> float:
    """Operations per second of a chain of products there and back, the best of five."""
    rows, inputs, outputs = shape
    dtype = jnp.bfloat16 if precision == "bf16-mixed" else jnp.float32
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, inputs), dtype)
    there = jax.random.normal(keys[1], (inputs, outputs), dtype)
    back = jax.random.normal(keys[2], (outputs, inputs), dtype)
    scale = jnp.asarray(1 / np.sqrt(inputs * outputs), dtype)
    times = 2 if toy else 16

    @jax.jit
    def chain(x, there, back):
        return jax.lax.fori_loop(0, times, lambda _, x: (x @ there @ back) * scale, x)

    with _products(precision):
        chain(x, there, back).block_until_ready()
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            chain(x, there, back).block_until_ready()
            best = min(best, time.perf_counter() - begin)
    return 4 * rows * inputs * outputs * times / best


def _products(precision: str) -> Any:
    if precision == "32-highest":
        return jax.default_matmul_precision("float32")
    return contextlib.nullcontext()


def operations(work: Work) -> float:
    """Of the matrix products of a step: forward, and twice that backward.

    Nobody needs the gradient of the first layer's input, so that is left out.
    """
    sides = iter([26, 9])  # of what LeNet's convolutions give
    forward = []
    for shape in work.shapes():
        if len(shape) > 1:
            places = next(sides) ** 2 if len(shape) == 4 else 1
            forward.append(2 * work.batch * places * float(np.prod(shape)))
    return 3 * sum(forward) - forward[0]


def expert(case: Case) -> Loop:
    """E: jit over partitioned arrays, donated state, the next batch on its way."""
    optimizer = optax.adam(case.rate)
    params, static = eqx.partition(case.build(), eqx.is_inexact_array)
    state = params, optimizer.init(params)
    del params
    batches = case.batches()

    def in_half(tree):
        return jax.tree.map(
            lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, tree
        )

    def step(state, *batch):
        params, opt_state = state

        def loss_of(params):
            rows = batch
            if case.precision == "bf16-mixed":
                params, rows = in_half((params, rows))
            return case.loss(eqx.combine(params, static), *rows).astype(jnp.float32)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state), loss

    step, calls = jax.jit(step, donate_argnums=0), []

    def run(epochs: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        waiting = collections.deque()
        following = jax.device_put(batches[0])
        for number in range(epochs * len(batches)):
            batch = following
            following = jax.device_put(batches[(number + 1) % len(batches)])
            called = time.perf_counter()
            with _products(case.precision):
                state, loss = step(state, *batch)
            calls.append(time.perf_counter() - called)
            waiting.append(loss)
            if len(waiting) > 8:
                waiting.popleft().block_until_ready()
        float(waiting[-1])
        jax.block_until_ready(state)
        return time.perf_counter() - begin

    return run, lambda: eqx.combine(state[0], static), calls


class Calls(Callback):
    """How long the host takes from before a step to behind it."""

    def __init__(self):
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_train_batch_start(self, trainer, batch, batch_idx):
        self._begun = time.perf_counter()

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.seconds.append(time.perf_counter() - self._begun)


def ours(case: Case, *, ready: bool = False, **options: Any) -> Loop:
    """jaxdp as users start it: from a plain `DataLoader`, or from ready arrays."""
    calls = Calls()
    trainer = Trainer(
        case.build(),
        optax.adam(case.rate),
        strategy=SingleDevice(),
        precision=case.precision,
        default_root_dir=tempfile.gettempdir(),
        callbacks=[] if options else [calls],  # which sees steps one by one
        **case.options,
        **options,
    )
    if not ready and case.work is not None and importlib.util.find_spec("torch"):
        loader = case.work.loader()
    else:
        loader = case.batches()

    def run(epochs: int) -> float:
        begin = time.perf_counter()
        trainer.fit(loader, max_epochs=trainer.current_epoch + epochs)
        return time.perf_counter() - begin

    return run, lambda: trainer.model, calls.seconds


LOOPS: dict[str, Callable[[Case], Loop]] = {
    "expert": expert,
    "jaxdp": ours,
    "jaxdp32": lambda case: ours(case, steps_per_execution=32),
    "jaxdp_ready": lambda case: ours(case, ready=True),
}

TOY_LOOPS = {name: LOOPS[name] for name in ("expert", "jaxdp")}
"""What compiles little."""


def measure_case(case: Case, repeats: int, toy: bool) -> dict[str, Any]:
    """Seconds per step of each loop, the ratios, and what could not be run."""
    found: dict[str, Any] = {"title": case.title, "precision": case.precision}
    names = "seconds_per_step", "of_expert", "loss", "host_seconds_per_call", "not_run"
    found |= {name: {} for name in names} | {"too_short": []}
    loops: dict[str, Loop] = {}
    some = TOY_LOOPS if toy and case.title != cases(True)["tiny"].title else LOOPS
    for name, make in some.items():
        try:
            loops[name] = make(case)
            loops[name][0](1)  # compiles
            loops[name][0](1)
        except Exception as error:  # out of memory, or not available: say so, go on
            loops.pop(name, None)
            found["not_run"][name] = f"{type(error).__name__}: {error}"[:300]
    batches = case.batches()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(repeats):
        for name in loops if turn % 2 == 0 else reversed(loops):
            run = loops[name][0]
            short, long = run(1), run(1 + case.epochs)
            times[name].append((long - short) / (case.epochs * len(batches)))
            if is_too_short(short, long) and name not in found["too_short"]:
                found["too_short"].append(name)

    final = eqx.filter_jit(case.loss)
    for name, (_, model, calls) in loops.items():
        found["loss"][name] = float(final(model(), *batches[0]))
        found["seconds_per_step"][name] = statistics.median(times[name])
        if calls:
            found["host_seconds_per_call"][name] = statistics.median(calls)
        pairs = zip(times[name], times.get("expert", ()), strict=False)
        if values := [ours / theirs for ours, theirs in pairs]:
            found["of_expert"][name] = statistics.median(values)
    for name, loss in found["loss"].items():
        wanted = found["loss"].get("expert", loss)
        if abs(loss - wanted) > case.tolerance * abs(wanted):
            found["not_run"][name] = f"ended at the loss {loss:g}, E at {wanted:g}"
    found["matrix_rate"] = matrix_rate(case.precision, case.shape, toy)
    found["mfu"] = {
        name: case.operations / (value * found["matrix_rate"])
        for name, value in found["seconds_per_step"].items()
    }
    return found


def is_too_short(short: float, long: float) -> bool:
    """Returns whether the difference of two fits is lost in what each varies by."""
    return long - short < 0.2 * long


def measure(toy: bool) -> dict[str, Any]:
    """All cases."""
    found = {}
    for name, case in cases(toy).items():
        found[name] = measure_case(case, 1 if toy else REPEATS, toy)
        jax.clear_caches()
    return found


def rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each case and loop."""
    for case in found.values():
        title = f"{case['title']}, {case['precision']}"
        yield title, f"ceiling {case['matrix_rate'] / 1e12:.4g} TFLOP/s"
        for name, value in case["seconds_per_step"].items():
            if name in case["too_short"]:
                yield f"{title}: {name}", "too short to time"
                continue
            mfu = case["mfu"][name]
            text = f"{1e3 * value:.4g} ms a step, MFU {mfu:.1%}"
            if mfu > 1:  # the ceiling is of too small products
                text = f"{1e3 * value:.4g} ms a step, MFU not known"
            if name in case["of_expert"] and "expert" not in case["too_short"]:
                text += f", {case['of_expert'][name]:.3f} of E"
            if name in case["host_seconds_per_call"]:
                host = 1e6 * case["host_seconds_per_call"][name]
                text += f", host {host:.0f} us a call"
            yield f"{title}: {name}", text
        for name, reason in case["not_run"].items():
            yield f"{title}: {name}", reason
