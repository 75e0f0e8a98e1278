"""Models and losses written the way Equinox's documentation writes them, unchanged.

An image classifier made of a list of layers and functions, a GRU over a sequence, a
vision transformer that takes one key per row, a score-based diffusion model with a
loss of its own, layers with state, a text classifier on dict batches, frozen layers and
tied embeddings. Each is compared with a hand-written loop.

Compilation is most of the time that this takes, so not everything is tried under every
strategy: what a strategy does to the numbers of a step has tests of its own.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from toys import Recorder

from jaxdp import Pmap, Sharded, SingleDevice, Trainer

every_strategy = pytest.mark.parametrize(
    "strategy", [SingleDevice, Sharded, Pmap], ids=lambda kind: kind.__name__
)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def cut(*arrays, size=8):
    """Batches of `size` rows and a ragged tail."""
    stops = range(size, len(arrays[0]) + size, size)
    return [tuple(array[stop - size : stop] for array in arrays) for stop in stops]


def images(channels, side, count=20, classes=10):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, channels, side, side)).astype(np.float32)
    return x, generator.integers(0, classes, count)


def by_hand(model, optimizer, batches, loss_of, filter_spec=eqx.is_inexact_array):
    """The loop of Equinox's examples: the trained model, and the loss of every step."""
    trained, rest = eqx.partition(model, filter_spec)
    opt_state = optimizer.init(trained)

    @eqx.filter_jit
    def make_step(trained, opt_state, batch):
        @eqx.filter_value_and_grad
        def loss(trained):
            return loss_of(eqx.combine(trained, rest), *batch)

        value, grads = loss(trained)
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        return eqx.apply_updates(trained, updates), opt_state, value

    losses = []
    for batch in batches:
        trained, opt_state, value = make_step(trained, opt_state, batch)
        losses.append(float(value))
    return eqx.combine(trained, rest), losses


def by_trainer(model, optimizer, batches, strategy, **arguments):
    """The trainer after one epoch, and the loss of every step."""
    recorder = Recorder()
    trainer = Trainer(
        model,
        optimizer,
        strategy=strategy(),
        callbacks=[recorder],
        enable_progress_bar=False,
        **arguments,
    )
    trainer.fit(batches)
    return trainer, recorder.losses


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


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        (SingleDevice, {"loss_fn": cnn_loss}),
        (Sharded, {"loss_fn": eqx.filter_jit(cnn_loss)}),
        (Sharded, {"loss": "cross_entropy", "metrics": ["accuracy"]}),
        (Pmap, {"loss_fn": cnn_loss}),
    ],
    ids=["SingleDevice-loss_fn", "Sharded-jitted", "Sharded-loss", "Pmap-loss_fn"],
)
def test_a_cnn_learns_as_by_hand(strategy, arguments):
    data = cut(*images(1, 7))
    model = Cnn(jr.key(0))
    trainer, losses = by_trainer(model, optax.adamw(3e-3), data, strategy, **arguments)
    np.testing.assert_allclose(losses, cnn_by_hand(), rtol=1e-5)
    x = images(1, 7)[0]
    np.testing.assert_allclose(
        trainer.predict(data), jax.vmap(trainer.model)(x), rtol=1e-4, atol=1e-5
    )


class Rnn(eqx.Module):
    """A GRU scanned over the sequence, and the probability of one class."""

    hidden_size: int
    cell: eqx.Module
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, key):
        keys = jr.split(key)
        self.hidden_size = 6
        self.cell = eqx.nn.GRUCell(2, 6, key=keys[0])
        self.linear = eqx.nn.Linear(6, 1, use_bias=False, key=keys[1])
        self.bias = jnp.zeros(1)

    def __call__(self, sequence):
        def body(hidden, x):
            return self.cell(x, hidden), None

        hidden, _ = jax.lax.scan(body, jnp.zeros(self.hidden_size), sequence)
        return jax.nn.sigmoid(self.linear(hidden) + self.bias)


def spirals(count):
    """Clockwise and other spirals of 8 points, as JAX arrays."""
    angle = jnp.linspace(0, 6, 8)[None] + jr.uniform(jr.key(1), (count, 1)) * 6
    sign = jnp.where(jnp.arange(count) % 2, 1.0, -1.0)[:, None]
    x = jnp.stack([sign * jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return x, (sign + 1) / 2


def binary_cross_entropy(p, y):
    return -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))


def rnn_loss(model, x, y):
    return binary_cross_entropy(jax.vmap(model)(x), y).mean()


@functools.cache
def rnn_by_hand():
    data = cut(*spirals(20))
    return by_hand(Rnn(jr.key(0)), optax.adam(1e-2), data + data[:2], rnn_loss)[1]


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        (SingleDevice, {"loss_fn": rnn_loss}),
        (Sharded, {"loss_fn": rnn_loss}),
        (Pmap, {"loss": binary_cross_entropy}),
    ],
    ids=["SingleDevice-loss_fn", "Sharded-loss_fn", "Pmap-loss"],
)
def test_an_rnn_learns_as_by_hand_from_an_endless_generator(strategy, arguments):
    def endless():
        while True:
            yield from cut(*spirals(20))

    recorder = Recorder()
    trainer = Trainer(
        Rnn(jr.key(0)),
        optax.adam(1e-2),
        strategy=strategy(),
        callbacks=[recorder],
        enable_progress_bar=False,
        **arguments,
    )
    trainer.fit(endless(), max_steps=5)
    np.testing.assert_allclose(recorder.losses, rnn_by_hand(), rtol=1e-5)


def test_a_loss_that_takes_its_own_gradient_is_refused():
    wrapped = eqx.filter_value_and_grad(rnn_loss)
    with pytest.raises(TypeError, match="filter_value_and_grad"):
        by_trainer(
            Rnn(jr.key(0)), optax.sgd(0.1), cut(*spirals(8)), Sharded, loss_fn=wrapped
        )


class Block(eqx.Module):
    norms: list
    attention: eqx.nn.MultiheadAttention
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, rate, key):
        keys = jr.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(2, width, key=keys[0])
        self.linear = eqx.nn.Linear(width, width, key=keys[1])
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x, enable_dropout, key):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        y = jax.nn.gelu(jax.vmap(self.linear)(jax.vmap(self.norms[1])(x)))
        return x + self.dropout(y, inference=not enable_dropout, key=key)


class VisionTransformer(eqx.Module):
    """Called as `model(image, enable_dropout, key)`."""

    embedding: eqx.nn.Linear
    positions: jax.Array
    class_token: jax.Array
    blocks: list[Block]
    head: eqx.nn.Sequential
    num_layers: int

    def __init__(self, rate, key, width=8):
        keys = jr.split(key, 5)
        self.embedding = eqx.nn.Linear(2 * 4 * 4, width, key=keys[0])
        self.positions = jr.normal(keys[1], (5, width))
        self.class_token = jr.normal(keys[2], (1, width))
        self.num_layers = 1
        self.blocks = [Block(width, rate, keys[3])]
        self.head = eqx.nn.Sequential(
            [eqx.nn.LayerNorm(width), eqx.nn.Linear(width, 10, key=keys[4])]
        )

    def __call__(self, x, enable_dropout, key):
        patches = x.reshape(2, 2, 4, 2, 4).transpose(1, 3, 0, 2, 4).reshape(4, -1)
        x = jnp.concatenate((self.class_token, jax.vmap(self.embedding)(patches)))
        x += self.positions[: x.shape[0]]
        keys = jr.split(key, self.num_layers)
        for block, block_key in zip(self.blocks, keys, strict=True):
            x = block(x, enable_dropout, key=block_key)
        return self.head(x[0])


def vit_loss(model, images, labels, keys):
    logits = jax.vmap(model, in_axes=(0, None, 0))(images, True, keys)
    return cross_entropy(logits, labels)


@functools.cache
def vit_losses(rate, strategy):
    return by_trainer(
        VisionTransformer(rate, jr.key(0)),
        optax.adamw(1e-3),
        cut(*images(2, 8)),
        strategy,
        loss_fn=vit_loss,
    )[1]


def test_a_vision_transformer_learns_as_by_hand():
    def loss_of(model, x, y):
        return vit_loss(model, x, y, jr.split(jr.key(0), len(x))).mean()

    model, data = VisionTransformer(0.0, jr.key(0)), cut(*images(2, 8))
    _, expected = by_hand(model, optax.adamw(1e-3), data, loss_of)
    np.testing.assert_allclose(vit_losses(0.0, Sharded), expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", [Sharded, Pmap], ids=["Sharded", "Pmap"])
def test_a_vision_transformer_drops_the_same_units_everywhere(strategy):
    one = vit_losses(0.3, SingleDevice)
    np.testing.assert_allclose(vit_losses(0.3, strategy), one, rtol=1e-5)
    assert not np.allclose(one, vit_losses(0.0, Sharded), rtol=1e-3)


class Mixer(eqx.Module):
    """A mixer over patches and channels, called as `model(t, image)`."""

    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    patches: eqx.nn.MLP
    channels: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    t1: float

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.conv_in = eqx.nn.Conv2d(2, 6, 2, stride=2, key=keys[0])
        self.conv_out = eqx.nn.ConvTranspose2d(6, 1, 2, stride=2, key=keys[1])
        self.patches = eqx.nn.MLP(4, 4, 8, depth=1, key=keys[2])
        self.channels = eqx.nn.MLP(6, 6, 8, depth=1, key=keys[3])
        self.norm = eqx.nn.LayerNorm((6, 4))
        self.t1 = 10.0

    def __call__(self, t, y):
        t = jnp.broadcast_to(jnp.array(t / self.t1), (1, *y.shape[1:]))
        y = self.conv_in(jnp.concatenate([y, t])).reshape(6, 4)
        y = y + jax.vmap(self.patches)(self.norm(y))
        y = y + jax.vmap(self.channels)(y.T).T
        return self.conv_out(y.reshape(6, 2, 2))


def denoising_loss(model, weight, int_beta, data, t, key):
    """The loss of one image at one time."""
    mean = data * jnp.exp(-0.5 * int_beta(t))
    std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-int_beta(t)), 1e-5))
    noise = jr.normal(key, data.shape)
    prediction = model(t, mean + std * noise)
    return weight(t) * jnp.mean((prediction + noise / std) ** 2)


def batch_loss_fn(model, weight, int_beta, data, t1, key):
    """The mean over a batch, with one key and low-discrepancy times."""
    rows = data.shape[0]
    time_key, noise_key = jr.split(key)
    t = jr.uniform(time_key, (rows,), maxval=t1 / rows) + t1 / rows * jnp.arange(rows)
    one = functools.partial(denoising_loss, model, weight, int_beta)
    return jnp.mean(jax.vmap(one)(data, t, jr.split(noise_key, rows)))


def int_beta(t):
    return t


def weight(t):
    return 1 - jnp.exp(-int_beta(t))


@functools.cache
def diffusion_losses(strategy, form):
    def with_key(model, data, key):
        return batch_loss_fn(model, weight, int_beta, data, 10.0, key)

    def with_keys(model, data, keys):
        times = jax.vmap(jr.uniform)(keys) * 10
        one = functools.partial(denoising_loss, model, weight, int_beta)
        return jax.vmap(one)(data, times, keys)

    loss_fn = {
        "key": with_key,
        "keys": with_keys,
        "partial": functools.partial(
            batch_loss_fn, weight=weight, int_beta=int_beta, t1=10.0
        ),
    }[form]
    data = [x for (x,) in cut(images(1, 4, count=24)[0])]
    optimizer = optax.adabelief(3e-4)
    return by_trainer(Mixer(jr.key(0)), optimizer, data, strategy, loss_fn=loss_fn)[1]


def test_a_diffusion_loss_with_one_key_per_batch_may_be_a_partial():
    one = diffusion_losses(SingleDevice, "key")
    assert len(set(one)) == 3 and np.isfinite(one).all()
    np.testing.assert_allclose(diffusion_losses(Sharded, "partial"), one, rtol=1e-5)


@pytest.mark.parametrize("strategy", [Sharded, Pmap], ids=["Sharded", "Pmap"])
def test_a_diffusion_loss_with_keys_per_row_is_the_same_everywhere(strategy):
    np.testing.assert_allclose(
        diffusion_losses(strategy, "keys"),
        diffusion_losses(SingleDevice, "keys"),
        rtol=1e-5,
    )


class Stateful(eqx.Module):
    """Batch statistics and a spectral norm in one model."""

    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm
    last: eqx.nn.Linear

    def __init__(self, key, axis_name="batch"):
        keys = jr.split(key, 3)
        self.norm = eqx.nn.BatchNorm(3, axis_name=axis_name, mode="ema")
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


@functools.cache
def stateful_by_hand():
    """Losses of every step, and predictions of the model in inference mode."""
    model, state = eqx.nn.make_with_state(Stateful)(jr.key(0))
    optimizer = optax.sgd(0.1)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, state, opt_state, xs, ys):
        loss = eqx.filter_value_and_grad(stateful_loss, has_aux=True)
        (value, state), grads = loss(model, state, xs, ys)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, value

    losses = []
    for xs, ys in sines():
        model, state, opt_state, value = make_step(model, state, opt_state, xs, ys)
        losses.append(float(value))
    model = eqx.Partial(eqx.nn.inference_mode(model), state=state)
    predictions, _ = jax.vmap(model)(jnp.concatenate([x for x, _ in sines()]))
    return losses, predictions


def sines():
    x = jr.normal(jr.key(2), (21, 3))
    return cut(x, jnp.sin(x) + 1)


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [(SingleDevice, {"loss": "mse"}), (Sharded, {"loss_fn": stateful_loss})],
    ids=["SingleDevice-loss", "Sharded-loss_fn"],
)
def test_layers_with_state_learn_as_by_hand(strategy, arguments):
    model, state = eqx.nn.make_with_state(Stateful)(jr.key(0))
    trainer, losses = by_trainer(
        model, optax.sgd(0.1), sines(), strategy, state=state, **arguments
    )
    expected, predictions = stateful_by_hand()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(
        trainer.predict(sines()), predictions, rtol=1e-4, atol=1e-5
    )


def test_layers_with_state_learn_as_by_hand_under_pmap_over_all_devices():
    axes = ("batch", "data")
    model, state = eqx.nn.make_with_state(Stateful)(jr.key(0), axis_name=axes)
    _, losses = by_trainer(
        model, optax.sgd(0.1), sines(), Pmap, state=state, loss="mse"
    )
    np.testing.assert_allclose(losses, stateful_by_hand()[0], rtol=1e-5)


class TextClassifier(eqx.Module):
    """Called on a dict, as `model(inputs, enable_dropout, key)`."""

    embedding: eqx.nn.Embedding
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key)
        self.embedding = eqx.nn.Embedding(20, 6, key=keys[0])
        self.dropout = eqx.nn.Dropout(0.2)
        self.head = eqx.nn.Linear(6, 2, key=keys[1])

    def __call__(self, inputs, enable_dropout=True, key=None):
        real = (inputs["token_ids"] != 0)[:, None]
        words = jax.vmap(self.embedding)(inputs["token_ids"])
        x = jnp.sum(words * real, axis=0) / jnp.maximum(real.sum(), 1)
        return self.head(self.dropout(x, inference=not enable_dropout, key=key))


def tokens():
    generator = np.random.default_rng(0)
    return generator.integers(0, 20, (20, 7)), generator.integers(0, 2, 20)


@every_strategy
def test_a_dict_batch_is_passed_whole_and_as_torch_would_collate_it(strategy):
    def compute_loss(classifier, inputs):
        rows = inputs["token_ids"].shape[0]
        keys = jr.split(jr.key(0), rows)
        logits = jax.vmap(classifier, in_axes=(0, None, 0))(inputs, False, keys)
        return jnp.mean(cross_entropy(logits, inputs["label"]))

    data = [{"token_ids": x, "label": y} for x, y in cut(*tokens())]
    model, optimizer = TextClassifier(jr.key(0)), optax.adam(1e-2)
    _, expected = by_hand(model, optimizer, [(batch,) for batch in data], compute_loss)
    _, losses = by_trainer(model, optimizer, data, strategy, loss_fn=compute_loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", [Sharded, Pmap], ids=["Sharded", "Pmap"])
def test_a_nested_input_is_given_to_the_model_row_by_row(strategy):
    data = [({"token_ids": x}, y) for x, y in cut(*tokens())]
    model, optimizer = TextClassifier(jr.key(0)), optax.adam(1e-2)
    _, one = by_trainer(model, optimizer, data, SingleDevice, loss="cross_entropy")
    trainer, losses = by_trainer(
        model, optimizer, data, strategy, loss="cross_entropy", metrics=["accuracy"]
    )
    np.testing.assert_allclose(losses, one, rtol=1e-5)
    assert trainer.predict(data).shape == (20, 2)


@every_strategy
def test_only_the_last_layer_is_trained(strategy):
    def mean_squared_error(model, x, y):
        return jnp.mean((y - jax.vmap(model)(x)) ** 2)

    x = np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)
    data = cut(x, 5 * x - 2)
    model = eqx.nn.MLP(in_size=1, out_size=1, width_size=8, depth=1, key=jr.key(0))
    filter_spec = jax.tree.map(lambda _: False, model)
    filter_spec = eqx.tree_at(
        lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias),
        filter_spec,
        replace=(True, True),
    )
    optimizer = optax.sgd(3e-3, momentum=0.9)
    expected, by_hand_losses = by_hand(
        model, optimizer, data, mean_squared_error, filter_spec
    )
    trainer, losses = by_trainer(
        model,
        optimizer,
        data,
        strategy,
        loss_fn=mean_squared_error,
        filter_spec=filter_spec,
    )
    np.testing.assert_allclose(losses, by_hand_losses, rtol=1e-5)
    first, last = trainer.model.layers
    np.testing.assert_array_equal(first.weight, model.layers[0].weight)
    np.testing.assert_allclose(last.weight, expected.layers[1].weight, rtol=1e-5)
    # Momentum of two leaves, and none of the frozen ones.
    assert len(jax.tree.leaves(trainer.state.opt_state)) == 2


class LanguageModel(eqx.Module):
    """An embedding whose weight is the last layer's too."""

    shared: eqx.nn.Shared

    def __init__(self, key):
        embedding = eqx.nn.Embedding(20, 6, key=key)
        linear = eqx.nn.Linear(6, 20, key=key)
        self.shared = eqx.nn.Shared(
            (embedding, linear),
            where=lambda pair: pair[1].weight,
            get=lambda pair: pair[0].weight,
        )

    def __call__(self, tokens):
        embedding, linear = self.shared()
        return jax.vmap(linear)(jax.vmap(embedding)(tokens))


@every_strategy
def test_tied_weights_learn_as_by_hand_and_stay_tied(strategy):
    def loss_of(model, x, y):
        return cross_entropy(jax.vmap(model)(x), y).mean()

    text, _ = tokens()
    data = cut(text[:, :-1], text[:, 1:])
    model, optimizer = LanguageModel(jr.key(0)), optax.adam(1e-2)
    _, expected = by_hand(model, optimizer, data, loss_of)
    trainer, losses = by_trainer(
        model, optimizer, data, strategy, loss="cross_entropy", metrics=["accuracy"]
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    embedding, linear = trainer.model.shared()
    np.testing.assert_array_equal(embedding.weight, linear.weight)
