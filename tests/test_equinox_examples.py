"""Models and losses written the way Equinox's documentation writes them, unchanged.

Each is compared with a hand-written loop. Compilation is most of the time that this
takes, so not everything is tried under every strategy: what a strategy does to the
numbers of a step has tests of its own.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from toys import Recorder, hand_written, quiet

from jaxdp import FSDP, Pmap, Sharded, SingleDevice

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def cut(*arrays):
    """Batches of 8 rows and a ragged tail; arrays of their own if there is one only."""
    starts = range(0, len(arrays[0]), 8)
    batches = [tuple(array[start : start + 8] for array in arrays) for start in starts]
    return [x for (x,) in batches] if len(arrays) == 1 else batches


def images(channels, side):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, channels, side, side)).astype(np.float32)
    return x, generator.integers(0, 10, 20)


def by_hand(model, optimizer, batches, loss_of, **options):
    """The trained model, and the loss of every step, in the loop of the examples."""
    return hand_written(model, optimizer, batches, 1, loss_of, **options)


def by_trainer(model, optimizer, batches, strategy, **arguments):
    """The trainer, and the loss of every step."""
    recorder = Recorder()
    arguments |= {"strategy": strategy(), "callbacks": [recorder]}
    trainer = quiet(model, optimizer, **arguments)
    trainer.fit(batches)
    return trainer, recorder.losses


def assert_same(found, expected, rtol=1e-5, atol=0.0):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


class Cnn(eqx.Module):
    """Layers and plain functions in one list, called in turn."""

    layers: list

    def __init__(self, key):
        keys = jr.split(key)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=3, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(48, 10, key=keys[1]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cnn_loss(model, x, y):
    log_probabilities = jax.vmap(model)(x)
    return -jnp.take_along_axis(log_probabilities, y[:, None], axis=1).mean()


@functools.cache
def cnn_by_hand():
    return by_hand(Cnn(jr.key(0)), optax.adamw(3e-3), cut(*images(1, 7)), cnn_loss)[1]


@pytest.mark.slow_but("Pmap-arguments2")
@pytest.mark.parametrize("strategy, arguments", [
    (Sharded, {"loss_fn": eqx.filter_jit(cnn_loss)}),
    (Sharded, {"loss": "cross_entropy", "metrics": ["accuracy"]}),
    (Pmap, {"loss_fn": cnn_loss}),
])  # fmt: skip
def test_a_cnn_learns_as_by_hand(strategy, arguments):
    x, y = images(1, 7)
    model, data = Cnn(jr.key(0)), cut(x, y)
    trainer, losses = by_trainer(model, optax.adamw(3e-3), data, strategy, **arguments)
    assert_same(losses, cnn_by_hand())
    assert_same(trainer.predict(data), jax.vmap(trainer.model)(x), rtol=1e-4, atol=1e-5)


class Stateful(eqx.Module):
    """Batch statistics and a spectral norm in one model."""

    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
        inner = eqx.nn.Linear(3, 8, key=keys[0])
        self.spectral = eqx.nn.SpectralNorm(inner, "weight", key=keys[1])
        self.last = eqx.nn.Linear(8, 3, key=keys[2])

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        x, state = self.spectral(x, state)
        return self.last(jax.nn.relu(x)), state


def stateful_loss(model, state, xs, ys):
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    predictions, state = batched(xs, state)
    return jnp.mean((predictions - ys) ** 2), state


def sines():
    x = jr.normal(jr.key(2), (21, 3))
    return x, jnp.sin(x) + 1


@functools.cache
def stateful_by_hand():
    """Losses of every step, and predictions of the model in inference mode."""
    model, state = eqx.nn.make_with_state(Stateful)(jr.key(0))

    @eqx.filter_jit
    def make_step(model, state, xs, ys):
        loss = eqx.filter_value_and_grad(stateful_loss, has_aux=True)
        (value, state), grads = loss(model, state, xs, ys)
        updates = jax.tree.map(lambda g: -0.1 * g, grads)
        return eqx.apply_updates(model, updates), state, value

    losses = []
    for xs, ys in cut(*sines()):
        model, state, value = make_step(model, state, xs, ys)
        losses.append(float(value))
    model = eqx.Partial(eqx.nn.inference_mode(model), state=state)
    return losses, jax.vmap(model)(sines()[0])[0]


@pytest.mark.slow_cases("Sharded-arguments1")
@pytest.mark.parametrize("strategy, arguments", [
    (SingleDevice, {"loss": "mse"}),
    (Sharded, {"loss_fn": stateful_loss}),
    (Pmap, {"loss": "mse"}),
])  # fmt: skip
def test_layers_with_state_learn_as_by_hand(strategy, arguments):
    model, state = eqx.nn.make_with_state(Stateful)(jr.key(0))
    data, arguments = cut(*sines()), {"state": state, **arguments}
    trainer, losses = by_trainer(model, optax.sgd(0.1), data, strategy, **arguments)
    expected, predictions = stateful_by_hand()
    assert_same(losses, expected)
    assert_same(trainer.predict(data), predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", [SingleDevice, Pmap])
def test_only_the_last_layer_is_trained(strategy):
    def loss_fn(model, x, y):
        return jnp.mean((y - jax.vmap(model)(x)) ** 2)

    x = np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)
    data, optimizer = cut(x, 5 * x - 2), optax.sgd(3e-3, momentum=0.9)
    model = eqx.nn.MLP(1, 1, width_size=8, depth=1, key=jr.key(0))
    spec = eqx.tree_at(
        lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias),
        jax.tree.map(lambda _: False, model),
        replace=(True, True),
    )
    options = {"filter_spec": spec}
    expected, by_hand_losses = by_hand(model, optimizer, data, loss_fn, **options)
    options["loss_fn"] = loss_fn
    trainer, losses = by_trainer(model, optimizer, data, strategy, **options)
    assert_same(losses, by_hand_losses)
    first, last = trainer.model.layers
    np.testing.assert_array_equal(first.weight, model.layers[0].weight)
    assert_same(last.weight, expected.layers[1].weight)
    # Momentum of two leaves, and none of the frozen ones.
    assert len(jax.tree.leaves(trainer.state.opt_state)) == 2


class LanguageModel(eqx.Module):
    """An embedding whose weight is the last layer's too; called on a dict."""

    shared: eqx.nn.Shared

    def __init__(self, key):
        layers = eqx.nn.Embedding(20, 6, key=key), eqx.nn.Linear(6, 20, key=key)
        self.shared = eqx.nn.Shared(
            layers, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
        )

    def __call__(self, inputs):
        embedding, linear = self.shared()
        return jax.vmap(linear)(jax.vmap(embedding)(inputs["tokens"]))


def text_loss(model, batch):
    return cross_entropy(jax.vmap(model)(batch["inputs"]), batch["next"]).mean()


@pytest.mark.slow_but("SingleDevice-arguments0", "FSDP-arguments2")
@pytest.mark.parametrize("strategy, arguments", [
    (SingleDevice, {"loss_fn": text_loss}),
    (Pmap, {"loss": "cross_entropy", "metrics": ["accuracy"]}),
    (FSDP, {"loss_fn": text_loss}),
    (FSDP, {"loss": "cross_entropy", "metrics": ["accuracy"]}),
])  # fmt: skip
def test_tied_weights_learn_as_by_hand_from_dicts_and_stay_tied(strategy, arguments):
    text = np.random.default_rng(0).integers(0, 20, (20, 7))
    pairs = [({"tokens": x}, y) for x, y in cut(text[:, :-1], text[:, 1:])]
    dicts = [{"inputs": x, "next": y} for x, y in pairs]
    model, optimizer = LanguageModel(jr.key(0)), optax.adam(1e-2)
    _, expected = by_hand(model, optimizer, [(batch,) for batch in dicts], text_loss)
    data = dicts if "loss_fn" in arguments else pairs
    trainer, losses = by_trainer(model, optimizer, data, strategy, **arguments)
    assert_same(losses, expected)
    assert trainer.predict(pairs).shape == (20, 6, 20)
    embedding, linear = trainer.model.shared()
    np.testing.assert_array_equal(embedding.weight, linear.weight)
