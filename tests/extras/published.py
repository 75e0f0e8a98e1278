"""Tensors as the files of well-known models have them, and models for them."""

import equinox as eqx
import jax
import numpy as np

from jaxdp import Stack

WIDTH, LAYERS = 16, 3


def numbers(*shape, dtype=np.float32):
    """Numbers that are all different, which bfloat16 may round."""
    seed = sum(shape)
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def layer(i, array):
    """The tensor of layer `i`, exactly in bfloat16, too."""
    return array * np.asarray(i + 1, array.dtype)


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear

    def __init__(self, bias, *, key):
        keys = jax.random.split(key, 4)
        self.query, self.key, self.value, self.output = (
            eqx.nn.Linear(WIDTH, WIDTH, use_bias=bias, key=key) for key in keys
        )


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attn: Attention

    def __init__(self, bias=True, *, key):
        self.norm = eqx.nn.LayerNorm(WIDTH, use_bias=bias)
        self.attn = Attention(bias, key=key)

    def __call__(self, x):
        x = jax.vmap(self.norm)(x)
        q, k, v = (
            jax.vmap(f)(x) for f in (self.attn.query, self.attn.key, self.attn.value)
        )
        weights = jax.nn.softmax(q @ k.T / 4)
        return x + jax.vmap(self.attn.output)(weights @ v)


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Stack
    head: eqx.nn.Linear

    def __init__(self, bias=True, *, key=None):
        keys = jax.random.split(jax.random.key(0) if key is None else key, LAYERS + 2)
        self.embed = eqx.nn.Embedding(32, WIDTH, key=keys[0])
        self.blocks = Stack([Block(bias, key=key) for key in keys[2:]])
        self.head = eqx.nn.Linear(WIDTH, 32, use_bias=False, key=keys[1])

    def __call__(self, tokens):
        return jax.vmap(self.head)(self.blocks(jax.vmap(self.embed)(tokens)))


LLAMA_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "blocks.*.norm.weight": "model.layers.*.input_layernorm.weight",
    "blocks.*.attn.query.weight": "model.layers.*.self_attn.q_proj.weight",
    "blocks.*.attn.key.weight": "model.layers.*.self_attn.k_proj.weight",
    "blocks.*.attn.value.weight": "model.layers.*.self_attn.v_proj.weight",
    "blocks.*.attn.output.weight": "model.layers.*.self_attn.o_proj.weight",
    "head.weight": "lm_head.weight",
}


def llama(dtype=np.float32):
    square = numbers(WIDTH, WIDTH, dtype=dtype)
    tensors = {
        "model.embed_tokens.weight": numbers(32, WIDTH, dtype=dtype),
        "lm_head.weight": numbers(32, WIDTH, dtype=dtype) / dtype(2),
    }
    for i in range(LAYERS):
        prefix = f"model.layers.{i}"
        tensors[f"{prefix}.input_layernorm.weight"] = layer(
            i, numbers(WIDTH, dtype=dtype)
        )
        for j, name in enumerate("qkvo"):
            array = layer(i, square) * dtype(2**j)
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = array
    return tensors


class Basic(eqx.Module):
    """A residual block of a ResNet."""

    conv1: eqx.nn.Conv2d
    bn1: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d
    bn2: eqx.nn.BatchNorm

    def __init__(self, key):
        self.conv1, self.conv2 = (
            eqx.nn.Conv2d(4, 4, 3, padding=1, use_bias=False, key=key)
            for key in jax.random.split(key)
        )
        self.bn1, self.bn2 = (
            eqx.nn.BatchNorm(4, "batch", mode=mode) for mode in ("batch", "ema")
        )

    def __call__(self, x, state):
        y, state = self.bn1(self.conv1(x), state)
        y, state = self.bn2(self.conv2(jax.nn.relu(y)), state)
        return jax.nn.relu(x + y), state


class Resnet(eqx.Module):
    """Two residual blocks, with BatchNorm of both modes."""

    stem: eqx.nn.Conv2d
    layers: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.stem = eqx.nn.Conv2d(3, 4, 3, padding=1, key=keys[0])
        self.layers = [Basic(key) for key in keys[1:3]]
        self.head = eqx.nn.Linear(4, 5, key=keys[3])

    def __call__(self, x, state):
        x = self.stem(x)
        for layer in self.layers:
            x, state = layer(x, state)
        return self.head(x.mean((1, 2))), state


GPT2_NAMES = {
    "embed.weight": "wte.weight",
    "blocks.*.norm.*": "h.*.ln_1.*",
    **{
        f"blocks.*.attn.{name}.weight": ("h.*.attn.c_attn.weight", "T", ("split", 3, i))
        for i, name in enumerate(("query", "key", "value"))
    },
    **{
        f"blocks.*.attn.{name}.bias": ("h.*.attn.c_attn.bias", ("split", 3, i))
        for i, name in enumerate(("query", "key", "value"))
    },
    "blocks.*.attn.output.weight": ("h.*.attn.c_proj.weight", "T"),
    "blocks.*.attn.output.bias": "h.*.attn.c_proj.bias",
    "head.weight": None,
}


def gpt2():
    tensors = {"wte.weight": numbers(32, WIDTH)}
    for i in range(LAYERS):
        tensors |= {
            f"h.{i}.ln_1.weight": layer(i, numbers(WIDTH)),
            f"h.{i}.ln_1.bias": layer(i, numbers(WIDTH)) / 2,
            f"h.{i}.attn.bias": np.ones((1, 1, 8, 8), np.float32),
            f"h.{i}.attn.c_attn.weight": layer(i, numbers(WIDTH, 3 * WIDTH)),
            f"h.{i}.attn.c_attn.bias": layer(i, numbers(3 * WIDTH)),
            f"h.{i}.attn.c_proj.weight": layer(i, numbers(WIDTH, WIDTH)),
            f"h.{i}.attn.c_proj.bias": layer(i, numbers(WIDTH)),
        }
    return tensors
