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
from toys import assert_close, hand_written, run

from jaxdp import FSDP, Pmap, Sharded, SingleDevice


def cut(*arrays):
    """Batches of 8 rows, and a ragged one."""
    starts = range(0, len(arrays[0]), 8)
    return [tuple(array[start : start + 8] for array in arrays) for start in starts]


class Cnn(eqx.Module):
    """Layers and plain functions in one list, called in turn."""

    layers: list

    def __init__(self, key):
        keys = jr.split(key)
        convolution = eqx.nn.Conv2d(1, 3, kernel_size=3, key=keys[0])
        linear = eqx.nn.Linear(48, 10, key=keys[1])
        pool = eqx.nn.MaxPool2d(kernel_size=2)
        between = pool, jax.nn.relu, jnp.ravel
        self.layers = [convolution, *between, linear, jax.nn.log_softmax]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cnn_loss(model, x, y):
    log_probabilities = jax.vmap(model)(x)
    return -jnp.take_along_axis(log_probabilities, y[:, None], axis=1).mean()


def images():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, 1, 7, 7)).astype(np.float32)
    return cut(x, generator.integers(0, 10, 20))


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


def text_loss(model, inputs, targets):
    logits = jax.vmap(model)(inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def text_of_dict(model, batch):
    return text_loss(model, batch["inputs"], batch["next"])


def texts():
    text = np.random.default_rng(0).integers(0, 20, (20, 7))
    return [({"tokens": x}, y) for x, y in cut(text[:, :-1], text[:, 1:])]


def dicts():
    return [{"inputs": x, "next": y} for x, y in texts()]


@functools.cache
def by_hand(kind):
    """The model and the loss of every step, in the loop of the examples."""
    loss_of, data = (cnn_loss, images) if kind is Cnn else (text_loss, texts)
    return hand_written(kind(jr.key(0)), optax.adam(1e-2), data(), 1, loss_of)


NAMED = {"loss": "cross_entropy", "metrics": ["accuracy"]}


@pytest.mark.slow_but(
    "Cnn-Pmap-images-arguments2", "LanguageModel-FSDP-dicts-arguments4"
)
@pytest.mark.parametrize("kind, strategy, data, arguments", [
    (Cnn, Sharded, images, {"loss_fn": eqx.filter_jit(cnn_loss)}),
    (Cnn, Sharded, images, NAMED),
    (Cnn, Pmap, images, {"loss_fn": cnn_loss}),
    (LanguageModel, SingleDevice, dicts, {"loss_fn": text_of_dict}),
    (LanguageModel, FSDP, dicts, {"loss_fn": text_of_dict}),
    (LanguageModel, Pmap, texts, NAMED),
])  # fmt: skip
def test_models_learn_as_by_hand(kind, strategy, data, arguments):
    losses, trainer = run(strategy(), kind(jr.key(0)), 1, data(), **arguments)
    model, expected = by_hand(kind)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    pairs = images() if kind is Cnn else texts()
    wanted = [jax.vmap(model)(x) for x, _ in pairs]
    assert_close(trainer.predict(pairs), np.concatenate(wanted), 1e-4, 1e-5)
    if kind is LanguageModel:
        embedding, linear = trainer.model.shared()
        np.testing.assert_array_equal(embedding.weight, linear.weight)


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
    options = {"state": state, "optimizer": optax.sgd(0.1), **arguments}
    losses, trainer = run(strategy(), model, 1, cut(*sines()), **options)
    expected, predictions = stateful_by_hand()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(trainer.predict(cut(*sines())), predictions, 1e-4, 1e-5)


@pytest.mark.parametrize("strategy", [SingleDevice, Pmap])
def test_only_the_last_layer_is_trained(strategy):
    def loss_fn(model, x, y):
        return jnp.mean((y - jax.vmap(model)(x)) ** 2)

    data, optimizer = cut(*sines()), optax.sgd(3e-3, momentum=0.9)
    model = eqx.nn.MLP(3, 3, width_size=8, depth=1, key=jr.key(0))
    spec = eqx.tree_at(
        lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias),
        jax.tree.map(lambda _: False, model),
        replace=(True, True),
    )
    _, expected = hand_written(model, optimizer, data, 1, loss_fn, filter_spec=spec)
    options = {"filter_spec": spec, "loss_fn": loss_fn, "optimizer": optimizer}
    losses, trainer = run(strategy(), model, 1, data, **options)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(
        trainer.model.layers[0].weight, model.layers[0].weight
    )
    # Momentum of two leaves, and none of the frozen ones.
    assert len(jax.tree.leaves(trainer.state.opt_state)) == 2
