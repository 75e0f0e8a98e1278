"""Models of many kinds of layers, their training, and what it moves and holds."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from toys import Recorder

from jaxdp import SingleDevice, Trainer
from jaxdp.extras.plan import hlo


class Cnn(eqx.Module):
    """(1, 8, 8) -> 10."""

    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(16, 32, 3, padding=1, key=keys[1]),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(512, 10, key=keys[2]),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key=None):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.dropout(self.attention(y, y, y), key=key)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """(8,) tokens -> (8, 40) logits."""

    embedding: eqx.nn.Embedding
    places: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key, width=32):
        keys = jax.random.split(key, 5)
        self.embedding = eqx.nn.Embedding(40, width, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (8, width))
        self.blocks = [Block(width, keys[2])]
        self.head = eqx.nn.Linear(width, 40, key=keys[4])

    def __call__(self, tokens, key=None):
        x = jax.vmap(self.embedding)(tokens) + self.places
        for index, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, index))
        return jax.vmap(self.head)(x)


class Gru(eqx.Module):
    """(6, 8) -> (10,) logits, by a loop."""

    cell: eqx.nn.GRUCell
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, 64, key=keys[0])
        self.last = eqx.nn.Linear(64, 10, key=keys[1])

    def __call__(self, x):
        def turn(hidden, row):
            return self.cell(row, hidden), None

        return self.last(jax.lax.scan(turn, jnp.zeros(64), x)[0])


class UNet(eqx.Module):
    """Noise in (1, 8, 8) images, at a time, by two resolutions and a skip between."""

    time: eqx.nn.MLP
    down: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]
    middle: eqx.nn.MultiheadAttention
    up: eqx.nn.ConvTranspose2d
    last: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.time = eqx.nn.MLP("scalar", 16, 16, 1, key=keys[0])
        self.down = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[1]),
            eqx.nn.Conv2d(16, 16, 3, stride=2, padding=1, key=keys[2]),
        ]
        self.norms = [eqx.nn.GroupNorm(4, 16), eqx.nn.GroupNorm(4, 16)]
        self.middle = eqx.nn.MultiheadAttention(2, 16, key=keys[3])
        self.up = eqx.nn.ConvTranspose2d(16, 16, 4, 2, padding=1, key=keys[4])
        self.last = eqx.nn.Conv2d(32, 1, 3, padding=1, key=keys[5])

    def __call__(self, x, t):
        h = self.norms[0](self.down[0](x) + self.time(t)[:, None, None])
        skipped = jax.nn.silu(h)
        h = jax.nn.silu(self.norms[1](self.down[1](skipped)))
        places = h.reshape(16, -1).T
        h = h + self.middle(places, places, places).T.reshape(h.shape)
        return self.last(jnp.concatenate([self.up(h), skipped]))


def diffusion(model, x, keys):
    """For each row: a time and noise of its own, and how well the noise is found."""

    def of_row(x, key):
        for_time, for_noise = jax.random.split(key)
        t = jax.random.uniform(for_time)
        noise = jax.random.normal(for_noise, x.shape)
        return (
            (model(jnp.sqrt(1 - t) * x + jnp.sqrt(t) * noise, t) - noise) ** 2
        ).mean()

    return jax.vmap(of_row)(x, keys)


class VisionTransformer(eqx.Module):
    """(3, 8, 8) -> 10, by patches of 2 x 2, a token for the class, and two blocks."""

    patches: eqx.nn.Conv2d
    token: jax.Array
    places: jax.Array
    blocks: list[Block]
    head: eqx.nn.Sequential

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.patches = eqx.nn.Conv2d(3, 32, 2, stride=2, key=keys[0])
        self.token = jax.random.normal(keys[1], (1, 32))
        self.places = jax.random.normal(keys[2], (17, 32))
        self.blocks = [Block(32, key) for key in keys[3:5]]
        linear = eqx.nn.Linear(32, 10, key=keys[5])
        self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(32), linear])

    def __call__(self, x, key=None):
        x = self.patches(x).reshape(32, -1).T
        x = jnp.concatenate([self.token, x]) + self.places
        for index, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, index))
        return self.head(x[0])


def make(name):
    """A model, and three batches of 32, 32 and 13 rows."""
    key, random = jax.random.key(0), np.random.default_rng(0)
    sizes = (32, 32, 13)
    labels = [random.integers(0, 10, size).astype(np.int32) for size in sizes]
    if name == "mlp":
        x = [random.normal(size=(size, 64)) for size in sizes]
        model = eqx.nn.MLP(64, 10, 128, 3, key=key)
    elif name == "cnn":
        x = [random.normal(size=(size, 1, 8, 8)) for size in sizes]
        model = Cnn(key)
    elif name == "gru":
        x = [random.normal(size=(size, 6, 8)) for size in sizes]
        model = Gru(key)
    else:
        x = [random.integers(0, 40, (size, 8)) for size in sizes]
        labels = x
        model = Transformer(key)
    return model, list(zip(x, labels, strict=True))


def train(model, data, strategy, optimizer=None, epochs=2, **arguments):
    recorder = Recorder()
    if "loss_fn" not in arguments:
        arguments.setdefault("loss", "cross_entropy")
    trainer = Trainer(
        model, optimizer or optax.adamw(1e-2), strategy=strategy,
        callbacks=[recorder, *arguments.pop("callbacks", ())],
        enable_progress_bar=False, **arguments,
    )  # fmt: skip
    trainer.fit(data, max_epochs=epochs)
    return trainer, recorder.losses


@functools.cache
def on_one_device(name, accumulate):
    model, data = make(name)
    return train(model, data, SingleDevice(), accumulate_grad_batches=accumulate)[1]


def bytes_moved(trainer):
    """Bytes that a device sends in one train step, and those by kind."""
    program = hlo.read(trainer.compiled_train_step().as_text())
    assert all(each.times is not None for each in program.collectives)
    by_kind = {}
    for each in program.collectives:
        moved = each.times * each.wire_bytes
        by_kind[each.kind] = by_kind.get(each.kind, 0) + moved
    return sum(by_kind.values()), by_kind


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def resident(tree):
    """Bytes of the fullest device."""
    leaves = jax.tree.leaves(tree)
    devices = leaves[0].sharding.device_set
    return max(
        sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        for device in devices
    )


@functools.cache
def large(name):
    """A model, batches for it, how it is trained, and what one device makes of it."""
    random = np.random.default_rng(0)
    if name == "unet":
        data = [random.normal(size=(size, 1, 8, 8)) for size in (16, 16, 5)]
        model, arguments = UNet(jax.random.key(0)), {"loss_fn": diffusion}
    else:
        data = [
            (random.normal(size=(size, 3, 8, 8)), random.integers(0, 10, size))
            for size in (16, 16, 5)
        ]
        model, arguments = VisionTransformer(jax.random.key(0)), {}
    arguments["optimizer"] = optax.adamw(1e-3)
    return model, data, arguments, train(model, data, SingleDevice(), **arguments)[1]
