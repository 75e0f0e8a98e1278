"""A small GPT that learns to write like Shakespeare, letter by letter.

    python examples/gpt.py                            # the data split over 8 devices
    python examples/gpt.py --strategy fsdp --remat    # and the memory, block by block
    python examples/gpt.py --strategy tensor --precision bf16-mixed

Each option is one argument of the Trainer; what is learned stays the same. GPT-2's
largest has --context 1024 --width 1600 --depth 48 --heads 25. Takes tinyshakespeare.txt
from the folder in JAXDP_DATA_DIR, or any text from --text.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.utils.data import DataLoader, TensorDataset

from jaxdp import FSDP, Sharded, SingleDevice, Stack, TensorParallel, Trainer, ZeRO
from jaxdp.strategies import DataParallel, tensor_rules

SHORT = "To be, or not to be, that is the question:\n" * 200


class Block(eqx.Module):
    """Attention to earlier letters, then an MLP for each letter."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: jax.Array):
        keys = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        own = self.attention  # its projections, which tensor_rules knows
        h, by_head = jax.vmap(self.norm1)(x), (len(x), own.num_heads, -1)
        projections = own.query_proj, own.key_proj, own.value_proj
        q, k, v = (jax.vmap(each)(h).reshape(by_head) for each in projections)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + jax.vmap(own.output_proj)(h)
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
        x = jax.vmap(self.letters)(letters) + self.places[: len(letters)]
        return jax.vmap(self.head)(jax.vmap(self.norm)(self.blocks(x)))


def sample(model: GPT, start: list[int], length: int, key: jax.Array) -> list[int]:
    """`length` letters that follow `start`, drawn one by one."""
    context = len(model.places)
    logits_at = eqx.filter_jit(lambda model, window, last: model(window)[last])
    letters = list(start)
    for draw in jax.random.split(key, length):
        seen = letters[-context:]
        window = jnp.array(seen + [0] * (context - len(seen)))
        logits = logits_at(model, window, jnp.int32(len(seen) - 1))
        letters.append(int(jax.random.categorical(draw, logits / 0.8)))
    return letters


def windows(letters: np.ndarray, context: int) -> TensorDataset:
    """Every stretch of text, and the same one letter later."""
    count = (len(letters) - 1) // context
    x, y = (letters[i : i + count * context].reshape(count, context) for i in (0, 1))
    return TensorDataset(torch.tensor(x), torch.tensor(y))


def choose(args: argparse.Namespace, model: GPT) -> DataParallel:
    if args.strategy == "tensor":
        return TensorParallel({"data": 4, "model": 2}, tensor_rules(model))
    if args.strategy == "fsdp":
        return FSDP(gather=args.gather, groups=args.groups)
    kinds = {"single": SingleDevice, "sharded": Sharded, "zero": ZeRO}
    return kinds[args.strategy]()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    kinds = ["single", "sharded", "zero", "fsdp", "tensor"]
    parser.add_argument("--strategy", default="sharded", choices=kinds)
    parser.add_argument("--gather", default="blocks", help="of fsdp, or once")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--remat", action="store_true")
    text = Path(os.environ.get("JAXDP_DATA_DIR", "."), "tinyshakespeare.txt")
    parser.add_argument("--text", type=Path, default=text)
    sizes = {"context": 64, "width": 128, "depth": 4, "heads": 4}
    counts = {"steps": 600, "batch": 64, "accumulate": 1, "groups": 1, "sampled": 300}
    for name, default in (sizes | counts).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)

    jax.config.update("jax_num_cpu_devices", 8)
    text = args.text.read_text() if args.text.is_file() else SHORT
    vocab = sorted(set(text))
    letters = np.array([vocab.index(letter) for letter in text], np.int32)
    cut = int(0.95 * len(letters))
    train, val = (windows(x, args.context) for x in (letters[:cut], letters[cut:]))
    size = args.batch // args.accumulate
    model = GPT(len(vocab), [getattr(args, s) for s in sizes], jax.random.key(0))
    trainer = Trainer(
        model,
        optax.adamw(optax.cosine_decay_schedule(3e-3, args.steps)),
        loss="cross_entropy",
        strategy=choose(args, model),
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        remat="blocks.stacked" if args.remat else False,
        gradient_clip_val=1.0,
    )
    history = trainer.fit(DataLoader(train, size, shuffle=True), max_steps=args.steps)
    tested = trainer.validate(DataLoader(val, size))
    print(f"{trainer.strategy}, {args.precision}: val_loss {tested['val_loss']:.3f}")
    sampled = sample(trainer.model, [letters[0]], args.sampled, jax.random.key(1))
    print(written := "".join(vocab[letter] for letter in sampled))
    return {"trainer": trainer, "history": history, **tested, "text": written}


if __name__ == "__main__":
    main()
