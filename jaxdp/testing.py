"""Checks for strategies of your own."""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import PyTree

from .callbacks.base import Callback
from .strategies import DataParallel, SingleDevice
from .trainer import Trainer

TOLERANCE = 1e-5
"""Largest relative difference of a loss from that of one device, in float32."""


def fake_devices(count: int) -> None:
    """Makes the CPU look like `count` devices. Call it before any use of JAX.

    Raises:
        RuntimeError: if JAX has started its devices already.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def check_strategy(
    strategy: DataParallel,
    model: PyTree | None = None,
    batches: Sequence[tuple[Any, Any]] | None = None,
    **arguments: Any,
) -> None:
    """Checks that `strategy` keeps the promises that every strategy makes.

    50 steps with dropout, ragged batches and accumulation give the losses of one
    device, and so do two steps with a loss that is written for a batch; validation and
    prediction count every row once; the user's model stays whole; the step is traced
    once; checkpoints interchange with `SingleDevice`, unless the strategy adds a state.

    Args:
        strategy: an instance.
        model: what to train; by default a small MLP with dropout, 4 -> 32 -> 3.
        batches: `(x, y)` batches for it, integer labels; one should be ragged. Ten
            epochs are trained.
        arguments: of `Trainer`, such as `ensemble=8`, if the strategy needs them.

    Raises:
        AssertionError: naming the promise that is broken, with the numbers.
    """
    model = _DropoutModel(jax.random.key(0)) if model is None else model
    batches = _toy_batches() if batches is None else batches
    both = strategy, SingleDevice()
    train = functools.partial(_train, model, arguments)
    expected, tested = train(SingleDevice(), batches), train(strategy, batches)

    for leaf in jax.tree.leaves(model):
        assert not (isinstance(leaf, jax.Array) and leaf.is_deleted()), (
            "your model is yours: `place` handed out the user's own buffer, and a step"
            " overwrote it. Copy in `place`, for example with jnp.copy inside jax.jit."
        )

    # The same numbers, by one program.
    _assert_close("the loss of step", tested.losses, expected.losses)
    assert tested.traces == expected.traces, (
        f"one compile: the step was traced {tested.traces} times, and"
        f" {expected.traces} on one device"
    )

    # Several micro-batches, and a loss that is written for a batch.
    losses = (train(one, batches, accumulate_grad_batches=2).losses for one in both)
    _assert_close("with two micro-batches a step, the loss of step", *losses)
    two = [f(batches, key=lambda batch: len(batch[1])) for f in (max, min)]
    losses = (train(one, two, loss=_scale_by_mean, epochs=1).losses for one in both)
    _assert_close(
        "where a loss is written for a batch (`compile` must give the step the whole"
        " batch unless `rows` is 'apart'), the loss of step",
        *losses,
    )

    # Validation and prediction.
    metrics = [run.trainer.validate(batches) for run in (tested, expected)]
    for name in metrics[1]:
        _assert_close(f"every row once: {name}", [metrics[0][name]], [metrics[1][name]])
    predictions = [run.trainer.predict(batches) for run in (tested, expected)]
    assert predictions[0].shape == predictions[1].shape, (
        f"every row once: `predict` gave {predictions[0].shape} for"
        f" {predictions[1].shape[0]} rows"
    )
    np.testing.assert_allclose(*predictions, rtol=1e-3, atol=1e-4)

    # Checkpoints.
    trained = eqx.filter(tested.trainer.model, eqx.is_array)
    adds_state = tested.trainer.run.config.adds_state
    with tempfile.TemporaryDirectory() as folder:
        path = tested.trainer.save(f"{folder}/saved")
        for one in both[: 1 if adds_state else 2]:
            fresh = train(one, batches, epochs=0).trainer
            fresh.load(path)
            restored = eqx.filter(fresh.model, eqx.is_array)
            assert eqx.tree_equal(trained, restored), (
                f"checkpoints interchange: saved under {strategy}, the model is another"
                f" one when loaded under {one}"
            )


class _TraceCounter(Callback):
    """A short training, its losses, and how often its step was traced."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.traces = 0
        self.trainer: Any = None

    def inside_step(self, grads: Any, updates: Any, state: Any) -> dict[str, Any]:
        self.traces += 1
        return {}

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Any, batch_idx: int
    ) -> None:
        self.losses.append(np.asarray(metrics["loss"]))  # waits for the device


def _train(
    model: PyTree,
    arguments: Mapping[str, Any],
    strategy: DataParallel,
    batches: Sequence[tuple[Any, Any]],
    loss: Any = "cross_entropy",
    epochs: int = 10,
    **more: Any,
) -> _TraceCounter:
    run = _TraceCounter()
    options = {"optimizer": optax.adam(1e-2), "metrics": ["accuracy"], "loss": loss}
    options |= {"callbacks": [run], "enable_progress_bar": False, "strategy": strategy}
    run.trainer = Trainer(model, **{**options, **more, **arguments})
    if epochs:
        run.trainer.fit(batches, max_epochs=epochs)
    return run


def _scale_by_mean(prediction: Any, target: Any) -> Any:
    """A loss that is written for a batch."""
    values = optax.softmax_cross_entropy_with_integer_labels(prediction, target)
    return values * values.mean()


def _assert_close(what: str, losses: Sequence[Any], expected: Sequence[Any]) -> None:
    counts = len(losses), len(expected)
    assert counts[0] == counts[1], f"{what}: {counts[0]} values, {counts[1]}"
    for step, (loss, reference) in enumerate(zip(losses, expected, strict=True)):
        assert np.all(np.abs(loss - reference) <= TOLERANCE * np.abs(reference)), (
            f"same numbers anywhere: {what} number {step} is {loss}, and on one"
            f" device {reference}; {TOLERANCE} relative is allowed"
        )


class _DropoutModel(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any):
        self.mlp = eqx.nn.MLP(4, 3, 32, 1, key=key)
        self.dropout = eqx.nn.Dropout(0.3)

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        return self.mlp(self.dropout(x, key=key))


def _toy_batches() -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(0)
    sizes = (16, 16, 16, 16, 5)
    x = [generator.normal(size=(size, 4)).astype(np.float32) for size in sizes]
    return [(part, (part.sum(axis=1) > 0).astype(np.int32) + 1) for part in x]
