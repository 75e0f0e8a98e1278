"""A small GPT that learns to write like Shakespeare, letter by letter.

    python examples/gpt.py                            # the data split over 8 devices
    python examples/gpt.py --strategy FSDP --remat    # and the memory, block by block
    python examples/gpt.py --strategy TensorParallel --precision bf16-mixed
    python examples/gpt.py --strategy SequenceParallel --fused --chunked --muon

Options are arguments of the Trainer; what is learned stays the same. GPT-2's largest
has --context 1024 --width 1600 --depth 48 --heads 25. --text takes any file.
"""

import argparse
import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.utils.data import DataLoader, TensorDataset

import jaxdp
from jaxdp import FSDP, SequenceParallel, Stack, TensorParallel, Trainer, losses
from jaxdp.strategies import tensor_rules

MESH = {"data": 4, "model": 2}
SHORT = "To be, or not to be, that is the question:\n" * 200


class Block(eqx.Module):
    """Attention to earlier letters, then an MLP for each letter."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: jax.Array):
        keys = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        own, h = self.attention, jax.vmap(self.norm1)(x)
        if type(own) is not eqx.nn.MultiheadAttention:  # it is fused
            x = x + own(h, h, h)
        else:  # by its projections, which tensor_rules knows
            layers = own.query_proj, own.key_proj, own.value_proj
            q, k, v = (
                jax.vmap(f)(h).reshape(len(h), own.num_heads, -1) for f in layers
            )
            h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + jax.vmap(own.output_proj)(h.reshape(x.shape))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class GPT(eqx.Module):
    """Letters `(context,)` to the logits of the letter after each."""

    letters: eqx.nn.Embedding
    places: jax.Array
    blocks: Stack
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, vocab: int, sizes: list[int], key: Any):
        context, width, depth, heads = sizes
        keys = jax.random.split(key, depth + 3)
        self.letters = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (context, width))
        self.blocks = Stack([Block(width, heads, key) for key in keys[3:]])
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocab, use_bias=False, key=keys[2])

    def __call__(self, letters: jax.Array) -> jax.Array:
        return jax.vmap(self.head)(self.hidden(letters))

    def hidden(self, letters: jax.Array) -> jax.Array:
        x = jax.vmap(self.letters)(letters) + self.places[: len(letters)]
        return jax.vmap(self.norm)(self.blocks(x))

    def loss(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return losses.token_cross_entropy(self.head, self.hidden(x), y, chunk=16)


def sample(model: GPT, start: list[int], length: int, key: jax.Array) -> list[int]:
    """`length` letters that follow `start`, drawn one by one."""
    logits_at = eqx.filter_jit(lambda model, window, last: model(window)[last])
    letters = list(start)
    for draw in jax.random.split(key, length):
        window = np.resize(seen := letters[-len(model.places) :], len(model.places))
        logits = logits_at(model, window, jnp.int32(len(seen) - 1))
        letters.append(int(jax.random.categorical(draw, logits / 0.8)))
    return letters


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("remat", "fused", "chunked", "muon"):
        parser.add_argument(f"--{name}", action="store_true")
    sizes = {"context": 64, "width": 128, "depth": 4, "heads": 4}
    counts = {"steps": 600, "batch": 64, "accumulate": 1, "groups": 1, "sampled": 300}
    text = os.path.join(os.environ.get("JAXDP_DATA_DIR", "."), "tinyshakespeare.txt")
    words = {"strategy": "Sharded", "precision": "32-true", "text": text}
    for name, default in (sizes | counts | words).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    text = open(args.text).read() if os.path.isfile(args.text) else SHORT
    vocab, letters = np.unique([*text], return_inverse=True)

    def windows(letters: np.ndarray) -> TensorDataset:  # and one letter later
        count = (len(letters) - 1) // args.context * args.context
        x, y = (letters[i : i + count].reshape(-1, args.context) for i in (0, 1))
        return TensorDataset(torch.tensor(x), torch.tensor(y))

    train, val = map(windows, np.split(letters, [int(0.95 * len(letters))]))
    model = GPT(len(vocab), [getattr(args, s) for s in sizes], jax.random.key(0))
    model = jaxdp.fuse_attention(model, causal=True) if args.fused else model
    strategies = {
        "FSDP": lambda: FSDP(groups=args.groups),
        "TensorParallel": lambda: TensorParallel(MESH, tensor_rules(model)),
        "SequenceParallel": lambda: SequenceParallel({"data": 2, "seq": 4}, fsdp=True),
    }
    rate = optax.cosine_decay_schedule(3e-3, args.steps)
    trainer = Trainer(
        model,
        jaxdp.muon(rate, consistent_rms=0.2) if args.muon else optax.adamw(rate),
        loss=None if args.chunked else "cross_entropy",
        loss_fn=jaxdp.per_example(GPT.loss) if args.chunked else None,
        strategy=strategies.get(args.strategy, getattr(jaxdp, args.strategy))(),
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        remat=args.remat,
        gradient_clip_val=1.0,
    )
    size = args.batch // args.accumulate
    history = trainer.fit(DataLoader(train, size, shuffle=True), max_steps=args.steps)
    tested = trainer.validate(DataLoader(val, size))
    print(f"{trainer.strategy}, {args.precision}: val_loss {tested['val_loss']:.3f}")
    drawn = sample(trainer.model, [letters[0]], args.sampled, jax.random.key(1))
    print(text := "".join(vocab[drawn]))
    return {"trainer": trainer, "history": history, **tested, "text": text}


if __name__ == "__main__":
    main()
