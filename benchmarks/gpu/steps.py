"""Steps of jaxdp beside the expert's, a loop by hand: time, MFU, the first loss.

All loops of a case train in turn in one process, and a step's time is the difference of
fits of two lengths. MFU is the share of the rate of matrix products, measured here at
the shapes of the model's main product, that the model's arithmetic reaches. The seconds
to the first loss are measured in fresh processes.
"""

import collections
import dataclasses
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import SingleDevice, Trainer
from jaxdp.callbacks import Callback

from .. import models
from ..works import Work
from . import measure_in_process
from .gpt import make_gpt

REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to train, and its data.

    Args:
        title: one line for the table.
        precision: of the Trainer.
        epochs: how many epochs longer the longer fit is.
        make_model: makes the model.
        make_batches: makes the batches of an epoch, in NumPy.
        compute_loss: the mean loss, of `(model, *batch)`.
        loss: the Trainer's arguments for it.
        operations: in the matrix products of a step.
        product: rows, inputs and outputs of the model's main product.
        rate: the learning rate.
        tolerance: the largest relative difference of the losses at the end.
        work: the work whose loader is used, if there is one.
    """

    title: str
    precision: str
    epochs: int
    make_model: Callable[[], Any]
    make_batches: Callable[[], list[Any]]
    compute_loss: Callable[..., jax.Array]
    loss: dict[str, Any]
    operations: float
    product: tuple[int, int, int]
    rate: float = 1e-3
    tolerance: float = 5e-2
    work: Work | None = None


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that trains a case.

    Args:
        train_first_batch: trains one step, and waits for its loss.
        train: trains so many epochs, and returns their seconds.
        get_model: returns the model as it is now.
        host_seconds: the time of the host for each step so far, if that is measured.
    """

    train_first_batch: Callable[[], None]
    train: Callable[[int], float]
    get_model: Callable[[], Any]
    host_seconds: list[float]


def make_cases(toy: bool) -> dict[str, Case]:
    """Returns the cases by name, at toy size for tests."""
    tiny = Work(
        *("tiny", "MLP 4-32-4, batch 16", "mlp", (4, 32, 4), 16),
        *(8 if toy else 1000, 1, 0, "mse", 1e-2),
    )
    lenet = Work(
        *("lenet", "LeNet, batch 256", "lenet", (), 16 if toy else 256),
        *(2 if toy else 60, 1, 0, "cross_entropy", 5e-2),
    )
    epochs = 1 if toy else 3
    return {
        "tiny": _make_case_of_work(tiny, "32-true", epochs, (16, 4, 32)),
        "lenet": _make_case_of_work(lenet, "32-true", epochs, (lenet.batch, 800, 128)),
        "gpt2": make_gpt_case("bf16-mixed", toy=toy),
    }


def _make_case_of_work(work: Work, precision: str, epochs: int, product: Any) -> Case:
    return Case(
        work.title,
        precision,
        epochs,
        lambda: models.build(work),
        work.batches,
        lambda model, x, y: models.mean_loss(model, x, y, work.criterion),
        {"loss": work.criterion},
        count_operations(work),
        product,
        work.rate,
        work.tolerance,
        work,
    )


def make_gpt_case(precision: str, *, toy: bool, rows: int = 16, steps: int = 8) -> Case:
    """Returns GPT-2's small model, 124M parameters and an output layer of its own.

    Its attention is computed by cuDNN where that can.
    """
    words, tokens, width, depth, heads = 50304, 1024, 768, 12, 12
    if toy:
        words, tokens, width, depth, heads, rows, steps = 64, 16, 32, 2, 2, 2, 2

    def make_batches() -> list[Any]:
        shape = steps, rows, tokens + 1
        text = np.random.default_rng(0).integers(0, words, shape, dtype=np.int32)
        return [(batch[:, :-1], batch[:, 1:]) for batch in text]

    def compute_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.vmap(model)(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    products = depth * 12 * width**2 + words * width
    attention = depth * 2 * width * tokens / 2  # half of the tokens are earlier ones
    return Case(
        f"GPT-2 small, {depth} blocks of {width}, {rows} x {tokens} tokens",
        precision,
        1 if toy else 3,
        lambda: make_gpt(words, tokens, width, depth, heads),
        make_batches,
        compute_loss,
        {"loss_fn": compute_loss},
        3 * 2 * rows * tokens * (products + attention),  # forward, and twice backward
        (rows * tokens, width, 4 * width),
        1e-4,
    )


def count_operations(work: Work) -> float:
    """Returns the operations of a step's matrix products: forward, and twice backward.

    The gradient of the first layer's input is not computed.
    """
    sides = iter([26, 9])  # of the outputs of LeNet's convolutions
    forward = []
    for shape in work.shapes():
        if len(shape) > 1:
            places = next(sides) ** 2 if len(shape) == 4 else 1
            forward.append(2 * work.batch * places * float(np.prod(shape)))
    return 3 * sum(forward) - forward[0]


def measure_product_rate(case: Case, toy: bool) -> float:
    """Returns the operations per second of a chain of products, the best of five."""
    rows, inputs, outputs = case.product
    dtype = jnp.bfloat16 if case.precision == "bf16-mixed" else jnp.float32
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, inputs), dtype)
    there = jax.random.normal(keys[1], (inputs, outputs), dtype)
    back = jax.random.normal(keys[2], (outputs, inputs), dtype)
    scale = jnp.asarray(1 / np.sqrt(inputs * outputs), dtype)
    times = 2 if toy else 16

    @jax.jit
    def multiply(x, there, back):
        return jax.lax.fori_loop(0, times, lambda _, x: (x @ there @ back) * scale, x)

    multiply(x, there, back).block_until_ready()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        multiply(x, there, back).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 4 * rows * inputs * outputs * times / best


def make_expert(case: Case) -> Loop:
    """Makes the loop by hand.

    A jitted step with a donated state; the next batch is put before the step is called.
    """
    optimizer = optax.adam(case.rate)
    params, static = eqx.partition(case.make_model(), eqx.is_inexact_array)
    state = params, optimizer.init(params)
    del params
    batches, host_seconds = case.make_batches(), []

    def cast(tree):
        return jax.tree.map(
            lambda a: a.astype(jnp.bfloat16) if eqx.is_inexact_array(a) else a, tree
        )

    def step(state, *batch):
        params, opt_state = state

        def compute_loss(params):
            rows = batch
            if case.precision == "bf16-mixed":
                params, rows = cast((params, rows))
            loss = case.compute_loss(eqx.combine(params, static), *rows)
            return loss.astype(jnp.float32)

        loss, grads = jax.value_and_grad(compute_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state), loss

    step = jax.jit(step, donate_argnums=0)

    def train_first_batch() -> None:
        nonlocal state
        state, loss = step(state, *batches[0])
        float(loss)

    def train(epochs: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        in_flight = collections.deque()
        following = jax.device_put(batches[0])
        for number in range(epochs * len(batches)):
            batch = following
            following = jax.device_put(batches[(number + 1) % len(batches)])
            called = time.perf_counter()
            state, loss = step(state, *batch)
            host_seconds.append(time.perf_counter() - called)
            in_flight.append(loss)
            if len(in_flight) > 8:
                in_flight.popleft().block_until_ready()
        float(in_flight[-1])
        jax.block_until_ready(state)
        return time.perf_counter() - begin

    return Loop(
        train_first_batch, train, lambda: eqx.combine(state[0], static), host_seconds
    )


class HostTimer(Callback):
    """Times the host from before each step to after it."""

    def __init__(self):
        self.seconds: list[float] = []
        self._begin = 0.0

    def on_train_batch_start(self, trainer, batch, batch_idx):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.seconds.append(time.perf_counter() - self._begin)


def make_fit(case: Case, *, ready: bool = False, **options: Any) -> Loop:
    """Makes a fit of a Trainer, over a plain `DataLoader` or over ready batches."""
    timer = HostTimer()
    trainer = Trainer(
        case.make_model(),
        optax.adam(case.rate),
        strategy=SingleDevice(),
        precision=case.precision,
        default_root_dir=tempfile.gettempdir(),
        callbacks=[] if options else [timer],
        enable_progress_bar=not options,
        **case.loss,
        **options,
    )
    batches = case.make_batches()
    has_loader = case.work is not None and importlib.util.find_spec("torch")
    loader = case.work.loader() if has_loader and not ready else batches

    def train_first_batch() -> None:
        trainer.fit(batches[:1], max_epochs=trainer.current_epoch + 1)

    def train(epochs: int) -> float:
        begin = time.perf_counter()
        trainer.fit(loader, max_epochs=trainer.current_epoch + epochs)
        return time.perf_counter() - begin

    return Loop(train_first_batch, train, lambda: trainer.model, timer.seconds)


LOOPS: Final[dict[str, Callable[[Case], Loop]]] = {
    "expert": make_expert,
    "jaxdp": make_fit,
    "jaxdp, ready batches": lambda case: make_fit(case, ready=True),
    "jaxdp, 32 steps per dispatch": lambda case: make_fit(case, steps_per_execution=32),
    "jaxdp, O1": lambda case: make_fit(case, ready=True, compiler_options="O1"),
    "jaxdp, no command buffers": lambda case: make_fit(
        case,
        ready=True,
        compiler_options={"xla_gpu_enable_command_buffer": ""},
    ),
}

_TOY_LOOPS: Final = "expert", "jaxdp"
"""Few, since each one compiles."""


def measure_case(case: Case, repeats: int, toy: bool) -> dict[str, Any]:
    """Returns seconds per step of each loop, the ratios, and reasons for no result."""
    found: dict[str, Any] = {"title": case.title, "precision": case.precision}
    names = "seconds_per_step", "of_expert", "loss", "host_seconds_per_call", "not_run"
    found |= {name: {} for name in names} | {"too_short": []}
    loops: dict[str, Loop] = {}
    for name in _TOY_LOOPS if toy else LOOPS:
        try:
            loops[name] = LOOPS[name](case)
            loops[name].train(1)  # compiles
            loops[name].train(1)
        except Exception as error:  # too little memory, or an unknown option
            loops.pop(name, None)
            found["not_run"][name] = f"{type(error).__name__}: {error}"[:300]
    num_batches = len(case.make_batches())
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(repeats):
        for name in loops if turn % 2 == 0 else reversed(loops):
            short, long = loops[name].train(1), loops[name].train(1 + case.epochs)
            times[name].append((long - short) / (case.epochs * num_batches))
            if is_too_short(short, long) and name not in found["too_short"]:
                found["too_short"].append(name)

    compute_loss, batch = eqx.filter_jit(case.compute_loss), case.make_batches()[0]
    for name, loop in loops.items():
        found["loss"][name] = float(compute_loss(loop.get_model(), *batch))
        found["seconds_per_step"][name] = statistics.median(times[name])
        if loop.host_seconds:
            found["host_seconds_per_call"][name] = statistics.median(loop.host_seconds)
        pairs = zip(times[name], times.get("expert", ()), strict=False)
        if ratios := [ours / theirs for ours, theirs in pairs]:
            found["of_expert"][name] = statistics.median(ratios)
    for name, loss in found["loss"].items():
        expected = found["loss"].get("expert", loss)
        if abs(loss - expected) > case.tolerance * abs(expected):
            text = f"ended at the loss {loss:g}, the expert at {expected:g}"
            found["not_run"][name] = text
    found["product_rate"] = measure_product_rate(case, toy)
    found["mfu"] = {
        name: case.operations / (seconds * found["product_rate"])
        for name, seconds in found["seconds_per_step"].items()
    }
    return found


def is_too_short(short: float, long: float) -> bool:
    """Returns whether noise hides the difference of two fits."""
    return long - short < 0.2 * long


def measure_one(name: str, loop: str, toy: bool) -> dict[str, Any]:
    """Returns the seconds from a loop's start to its first loss."""
    jnp.ones(4).block_until_ready()  # the device is ready
    begin = time.perf_counter()
    LOOPS[loop](make_cases(toy)[name]).train_first_batch()
    return {"seconds": time.perf_counter() - begin}


def measure(toy: bool) -> Iterator[tuple[str, Any]]:
    """Yields the results of each case, and the seconds to the first loss."""
    for name in ("tiny", "gpt2"):
        loops = "expert", "jaxdp"
        yield (
            f"first loss: {name}",
            {loop: measure_in_process(__name__, name, loop, toy) for loop in loops},
        )
    for name, case in make_cases(toy).items():
        yield name, measure_case(case, 1 if toy else REPEATS, toy)
        jax.clear_caches()


def format_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a row for each case and loop."""
    for name, case in found.items():
        if name.startswith("first loss"):
            for loop, result in case.items():
                text = result.get("failed") or f"{result['seconds']:.2f} s"
                yield f"{name}: {loop}", text
        else:
            yield from _format_case(case)


def _format_case(case: dict[str, Any]) -> Iterator[tuple[str, str]]:
    title = f"{case['title']}, {case['precision']}"
    yield title, f"products run at {case['product_rate'] / 1e12:.4g} TFLOP/s"
    for name, seconds in case["seconds_per_step"].items():
        if name in case["too_short"]:
            yield f"{title}: {name}", "too short to time"
            continue
        mfu = case["mfu"][name]
        text = f"{1e3 * seconds:.4g} ms a step, MFU {mfu:.1%}"
        if mfu > 1:  # the products at these shapes were too small to time
            text = f"{1e3 * seconds:.4g} ms a step, MFU not known"
        if name in case["of_expert"] and "expert" not in case["too_short"]:
            text += f", {case['of_expert'][name]:.3f} of the expert's"
        if name in case["host_seconds_per_call"]:
            host = 1e6 * case["host_seconds_per_call"][name]
            text += f", host {host:.0f} us a call"
        yield f"{title}: {name}", text
    for name, reason in case["not_run"].items():
        yield f"{title}: {name}", reason
