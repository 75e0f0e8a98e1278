"""FSDP whose blocks XLA gathers: a `loss_fn` of a batch may use any weights.

Numbers are those of one device; what it takes on GPUs is in `plan/test_overlap.py`.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Recorder

from jaxdp import FSDP, SingleDevice, Stack, Trainer

WIDTH = 16

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    order: jax.Array

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=up)
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=down)
        self.dropout = eqx.nn.Dropout(0.2)
        self.order = jnp.arange(WIDTH)[::-1]  # of integers, and split, too

    def __call__(self, x, key=None):
        hidden = jax.nn.gelu(self.up(self.norm(x[self.order])))
        return x + self.down(self.dropout(hidden, key=key))


class Model(eqx.Module):
    first: eqx.nn.Linear
    blocks: Stack
    last: eqx.nn.Linear

    def __init__(self):
        first, last, *keys = jax.random.split(jax.random.key(0), 5)
        self.first = eqx.nn.Linear(8, WIDTH, key=first)
        self.blocks = Stack([Block(key) for key in keys])
        self.last = eqx.nn.Linear(WIDTH, 3, key=last)

    def __call__(self, x, *, key):
        return self.last(self.blocks(self.first(x), key=key))


def logits_of(model, x, keys):
    return jax.vmap(lambda x, key: model(x, key=key))(x, keys)


def scalar(model, x, y, keys):
    return cross_entropy(logits_of(model, x, keys), y).mean()


def contrasted(model, x, y, keys):
    logits = logits_of(model, x, keys)
    return cross_entropy(logits - logits.mean(axis=0, keepdims=True), y).mean()


def of_one_key(model, x, y, key):
    """Each row beside another one of the batch."""
    order, *keys = jax.random.split(key, len(x) + 1)
    other = x[jax.random.permutation(order, len(x))]
    return cross_entropy(logits_of(model, (x + other) / 2, jnp.stack(keys)), y)


def penalized(model, x, y, keys):
    weights = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    penalty = sum(jnp.sum(weight.astype(jnp.float32) ** 2) for weight in weights)
    return cross_entropy(logits_of(model, x, keys), y) + 0.01 * penalty


def with_slopes(model, x, y, keys):
    """Forward-mode derivatives by weights of blocks, inside the loss."""

    def logits(up):
        where = lambda model: model.blocks.stacked.up.weight  # noqa: E731
        return logits_of(eqx.tree_at(where, model, up), x, keys)

    up = model.blocks.stacked.up.weight
    values, slopes = jax.jvp(logits, (up,), (jnp.ones_like(up),))
    return (cross_entropy(values, y) + 0.1 * (slopes**2).sum(axis=1)).mean()


def keeping_gradients():
    """SGD whose state is the gradient of the last step."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _, params=None: (jax.tree.map(lambda g: -0.1 * g, grads), grads),
    )


def batches():
    """Of which the last is ragged."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(61, 8)).astype(np.float32)
    y = draw.integers(0, 3, len(x)).astype(np.int32)
    return [(x[i : i + 16], y[i : i + 16]) for i in range(0, len(x), 16)]


def trained(loss_fn, strategy, epochs=1, ckpt_path=None, **arguments):
    """The losses of steps, the last gradient, and the trainer."""
    recorder = Recorder()
    trainer = Trainer(
        Model(), keeping_gradients(), loss_fn=loss_fn, strategy=strategy,
        callbacks=[recorder], enable_progress_bar=False, **arguments,
    )  # fmt: skip
    trainer.fit(batches(), max_epochs=epochs, ckpt_path=ckpt_path)
    gradient = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state.opt_state)]
    return np.array(recorder.losses), gradient, trainer


@functools.cache
def on_one_device(loss_fn, epochs=1, **arguments):
    return trained(loss_fn, SingleDevice(), epochs, **arguments)[:2]


def assert_alike(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance)
    norm = np.sqrt(sum((leaf**2).sum() for leaf in expected[1]))
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * norm)


CASES = {
    "scalar": (scalar, {}),
    "contrasted": (contrasted, {}),
    "one key": (of_one_key, {}),
    "penalized": (penalized, {}),
    "slopes": (with_slopes, {}),
    "scalar, accumulated": (scalar, {"accumulate_grad_batches": 2}),
    "penalized, accumulated": (penalized, {"accumulate_grad_batches": 2}),
    "scalar, recomputed": (scalar, {"remat": "blocks.stacked"}),
    "penalized, recomputed": (penalized, {"remat": True}),
}


@pytest.mark.slow_but("contrasted", "penalized")
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_device(name):
    loss_fn, arguments = CASES[name]
    *found, _ = trained(loss_fn, FSDP(), **arguments)
    assert_alike(found, on_one_device(loss_fn, **arguments))


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [contrasted, penalized])
def test_bf16_rounds_as_much_as_on_one_device(loss_fn):
    exact = on_one_device(loss_fn)
    single = on_one_device(loss_fn, precision="bf16-mixed")
    *found, _ = trained(loss_fn, FSDP(), precision="bf16-mixed")

    def distances(run):
        losses, gradient = run
        apart = [(a - b).ravel() for a, b in zip(gradient, exact[1], strict=True)]
        return abs(losses - exact[0]).max(), np.linalg.norm(np.concatenate(apart))

    for ours, theirs in zip(distances(found), distances(single), strict=True):
        assert ours < 1.5 * theirs


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [contrasted, penalized])
def test_a_run_goes_on_with_the_same_bits(loss_fn, tmp_path):
    straight = trained(loss_fn, FSDP(), 2)
    half = trained(loss_fn, FSDP())[2].save(tmp_path / "half")
    *rest, _ = trained(loss_fn, FSDP(), 2, half)
    expected = straight[0][-len(rest[0]) :], straight[1]
    assert_alike(rest, expected, tolerance=0)
    assert_alike(trained(loss_fn, SingleDevice(), 2, half), expected)
    assert_alike(straight, on_one_device(loss_fn, 2))


@pytest.mark.slow
def test_validation_is_by_xla_too():
    losses = [
        trained(contrasted, strategy)[2].validate(batches())["val_loss"]
        for strategy in (FSDP(), SingleDevice())
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
