"""Models of many kinds of layers, their training, and what it moves and holds."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
from kinds_of_models import Gpt, Gru
from toys import Recorder, quiet

from jaxdp import SingleDevice
from jaxdp.extras.plan import hlo


def transformer(key):
    return Gpt(key, width=32, words=40, length=8, depth=1, in_stack=False)


def make(name):
    """A model, and three batches of 32, 32 and 13 rows."""
    key, random = jax.random.key(0), np.random.default_rng(0)
    sizes = (32, 32, 13)
    labels = [random.integers(0, 10, size).astype(np.int32) for size in sizes]
    if name == "mlp":
        x = [random.normal(size=(size, 64)) for size in sizes]
        model = eqx.nn.MLP(64, 10, 128, 3, key=key)
    elif name == "gru":
        x = [random.normal(size=(size, 6, 8)) for size in sizes]
        model = Gru(key, 64)
    else:
        x = [random.integers(0, 40, (size, 8)) for size in sizes]
        labels = x
        model = transformer(key)
    return model, list(zip(x, labels, strict=True))


def train(model, data, strategy, optimizer=None, epochs=2, **arguments):
    recorder = Recorder()
    if "loss_fn" not in arguments:
        arguments.setdefault("loss", "cross_entropy")
    callbacks = [recorder, *arguments.pop("callbacks", ())]
    arguments |= {"strategy": strategy, "callbacks": callbacks}
    trainer = quiet(model, optimizer or optax.adamw(1e-2), **arguments)
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
