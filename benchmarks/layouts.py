"""Shows the memory and communication of each layout of a GPT, from its compiled step.

    python benchmarks/layouts.py                # eight devices faked on the CPU
    python benchmarks/layouts.py --width 512 --depth 8

Prints a Markdown table. Memory is that of one device: between steps, and the additional
memory within a step. Bytes are those that one device sends in a step, divided by the
bytes of the gradient. A ring of n devices needs at least 2(n-1)/n for an all-reduce.
Each row has the same model and batch, and changes one or two arguments of the Trainer.
The losses are checked to be the same.
"""

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
import optax

from jaxdp import Pipeline, Sharded, SingleDevice, TensorParallel, Trainer
from jaxdp.extras.plan import hlo
from jaxdp.strategies import FSDP, ZeRO, tensor_rules

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT  # noqa: E402

MIB = 2**20


def rows(model):
    """Returns names, and the arguments that differ."""
    pairs = {"data": jax.device_count() // 2, "model": 2}
    yield "`SingleDevice()`", {"strategy": SingleDevice()}
    yield "`Sharded()`", {"strategy": Sharded()}
    yield "`ZeRO()`", {"strategy": ZeRO()}
    yield '`FSDP(gather="once")`', {"strategy": FSDP(gather="once")}
    yield "`FSDP()`", {"strategy": FSDP()}
    yield "`FSDP(groups=2)`", {"strategy": FSDP(groups=2)}
    tensor = TensorParallel(pairs, tensor_rules(model))
    yield f"`TensorParallel({pairs}, ...)`", {"strategy": tensor}
    yield "`Pipeline(4, 8)`", {"strategy": Pipeline(4, 8)}
    yield (
        "`FSDP()`, `accumulate_grad_batches=4`",
        {"strategy": FSDP(), "accumulate_grad_batches": 4},
    )
    remat = {"remat": True}
    yield (
        '`FSDP(gather="once")`, `remat=True`',
        {"strategy": FSDP(gather="once"), **remat},
    )
    yield "`FSDP()`, `remat=True`", {"strategy": FSDP(), **remat}
    yield (
        '`FSDP()`, `precision="bf16-mixed"`',
        {"strategy": FSDP(), "precision": "bf16-mixed"},
    )


def measure(model, x, y, options):
    micro_batches = options.get("accumulate_grad_batches", 1)
    trainer = Trainer(
        model, optax.adamw(1e-3), loss="cross_entropy", enable_progress_bar=False,
        **options,
    )  # fmt: skip
    parts = zip(np.split(x, micro_batches), np.split(y, micro_batches), strict=True)
    history = trainer.fit(list(parts))
    step = trainer.compiled_train_step()
    first = jax.devices()[0]

    def held(tree):
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == first
        )

    state = trainer.state
    program = hlo.read(step.as_text())
    sent = sum(each.wire_bytes * (each.times or 1) for each in program.collectives)
    return {
        "parameters": held((state.params, state.buffers)),
        "optimizer": held(state.opt_state),
        "step": step.memory_analysis().temp_size_in_bytes,
        "sent": sent,
        "loss": history["loss"][-1],
    }


def main():
    parser = argparse.ArgumentParser()
    sizes = {"width": 256, "depth": 4, "context": 128, "batch": 64}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)

    vocab = 64
    shape = [args.context, args.width, args.depth, args.width // 32]
    model = GPT(vocab, shape, jax.random.key(0))
    shape = args.batch, args.context
    x, y = np.random.default_rng(0).integers(0, vocab, (2, *shape), np.int32)
    size = sum(a.nbytes for a in jax.tree.leaves(model) if hasattr(a, "nbytes"))
    devices = jax.device_count()
    print(
        f"GPT of {size / 4e6:.1f} million parameters, {size / MIB:.1f} MiB; a batch of"
        f" {args.batch} x {args.context} tokens, AdamW, {devices} devices."
        f" A ring's least for one all-reduce: {2 * (devices - 1) / devices:.2f}.\n"
    )
    print("| | parameters, MiB | optimizer, MiB | a step, MiB | sent / gradient |")
    print("|---|---|---|---|---|")
    expected = None
    for name, options in rows(model):
        found = measure(model, x, y, options)
        expected = expected or found["loss"]
        rtol = 1e-2 if "precision" in options else 1e-5
        np.testing.assert_allclose(found["loss"], expected, rtol=rtol)
        cells = [f"{found[k] / MIB:.1f}" for k in ("parameters", "optimizer", "step")]
        print(
            f"| {name} | {' | '.join(cells)} | {found['sent'] / size:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
