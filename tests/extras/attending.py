"""Layers and models that attend, what they are called with, and their losses."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
from toys import quiet

from jaxdp import (
    FSDP,
    SequenceParallel,
    Sharded,
    SingleDevice,
    Stack,
    TensorParallel,
    fuse_attention,
)
from jaxdp.strategies import tensor_rules

HEADS, QUERIES, KEYS = 4, 13, 17
PLAIN = {"num_heads": HEADS, "query_size": 16}
ODD = {
    "num_heads": HEADS,
    "query_size": 24,
    "key_size": 20,
    "value_size": 18,
    "output_size": 10,
    "qk_size": 6,
    "vo_size": 5,
    "use_query_bias": True,
    "use_key_bias": True,
    "use_value_bias": True,
    "use_output_bias": True,
}


def layer_and_inputs(sizes=PLAIN, queries=QUERIES, keys=KEYS, **options):
    key = jax.random.split(jax.random.key(0), 4)
    layer = eqx.nn.MultiheadAttention(**sizes, **options, key=key[0])
    shapes = [
        (queries, layer.query_size),
        (keys, layer.key_size),
        (keys, layer.value_size),
    ]
    return layer, [
        jax.random.normal(k, s) for k, s in zip(key[1:], shapes, strict=True)
    ]


def tokens(count, width=16, seed=5):
    return jax.random.normal(jax.random.key(seed), (count, width))


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __init__(self, width, key, dropout_p=0.0):
        self.attention = eqx.nn.MultiheadAttention(
            2, width, dropout_p=dropout_p, key=key
        )

    def __call__(self, x, key=None):
        return x + self.attention(x, x, x, key=key)


class Model(eqx.Module):
    blocks: Stack
    head: eqx.nn.Linear

    def __init__(self, width=16, dropout_p=0.0):
        keys = jax.random.split(jax.random.key(0), 3)
        self.blocks = Stack([Block(width, key, dropout_p) for key in keys[:2]])
        self.head = eqx.nn.Linear(width, 8, key=keys[2])

    def __call__(self, x, key=None):
        return self.head(self.blocks(x, key=key).mean(axis=0))


def batches(length=12):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, length, 16)).astype(np.float32)
    y = rng.normal(size=(24, 8)).astype(np.float32)
    return [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]


@functools.cache
def losses(fused, strategy="single", dropout_p=0.0, by="blocks", **arguments):
    model = Model(dropout_p=dropout_p)
    strategies = {
        "single": SingleDevice,
        "sharded": Sharded,
        "fsdp": functools.partial(FSDP, min_size=1),
        "sequence": lambda: SequenceParallel({"data": 2, "seq": 4}, fsdp=True),
        "tensor": lambda: TensorParallel({"data": 4, "model": 2}, tensor_rules(model)),
    }
    fuse = functools.partial(fuse_attention, block=5, implementation=by)
    model = fuse(model) if fused else model
    arguments |= {"loss": "mse", "strategy": strategies[strategy]()}
    trainer = quiet(model, optax.adam(1e-2), **arguments)
    return trainer.fit(batches(), max_epochs=3)["loss"]
