"""`Bitwise`: hashes on 1, 2, 4 and 8 devices."""

import hashlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, Recorder, arrays, batches, make_small, quiet

from jaxdp import Bitwise, Pmap, Sharded, SingleDevice, Stack

pytestmark = pytest.mark.bits

EVERYWHERE = [lambda: SingleDevice(), lambda: Sharded(2), lambda: Pmap(4), Sharded]


def conv_net():
    keys = jax.random.split(jax.random.key(0), 3)
    gelu, silu, flat = map(eqx.nn.Lambda, (jax.nn.gelu, jax.nn.silu, jnp.ravel))
    first = eqx.nn.Conv2d(1, 8, 3, padding=1, key=keys[0]), gelu
    second = eqx.nn.Conv2d(8, 16, 3, padding=1, key=keys[1]), silu
    pool, dropout = eqx.nn.MaxPool2d(2, 2), eqx.nn.Dropout(0.2)
    last = flat, dropout, eqx.nn.Linear(16 * 4, 10, key=keys[2])
    return eqx.nn.Sequential([*first, pool, *second, pool, *last])


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(64), eqx.nn.LayerNorm(64)]
        self.attention = eqx.nn.MultiheadAttention(4, 64, dropout_p=0.1, key=keys[0])
        self.mlp = eqx.nn.MLP(64, 64, 128, 1, key=keys[1])

    def __call__(self, x, *, key=None):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, key=key)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """One block, or two in a stack."""

    embedding: eqx.nn.Embedding
    blocks: Block | Stack
    last: eqx.nn.Linear

    def __init__(self, in_stack=False):
        keys = jax.random.split(jax.random.key(0), 4)
        self.embedding = eqx.nn.Embedding(32, 64, key=keys[0])
        blocks = [Block(key) for key in keys[1:3]]
        self.blocks = Stack(blocks) if in_stack else blocks[0]
        self.last = eqx.nn.Linear(64, 10, key=keys[3])

    def __call__(self, tokens, *, key=None):
        x = self.blocks(jax.vmap(self.embedding)(tokens), key=key)
        return self.last(x.mean(axis=0))


class Scaled(eqx.Module):
    """Two arrays divided by the same number, in a loop and outside of one."""

    scale: jax.Array
    shift: jax.Array
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __call__(self, x):
        def divided(h, _=None):
            by = lambda: jnp.where(self.scale > 0, self.scale, self.shift)  # noqa: E731
            return jnp.tanh(h) / by() + jnp.sin(h) / by(), None

        h, _ = divided(self.first(x))
        return self.last(jax.lax.scan(divided, h, length=3)[0])


def scaled():
    keys = jax.random.split(jax.random.key(0))
    first, last = (
        eqx.nn.Linear(*sizes, key=key)
        for sizes, key in zip([(4, 16), (16, 3)], keys, strict=True)
    )
    return Scaled(jnp.array(1.37), jnp.array(-0.3), first, last)


def labelled(draw, *sizes):
    generator = np.random.default_rng(0)
    return [(draw(generator, size), generator.integers(0, 10, size)) for size in sizes]


def images(*sizes):
    def draw(generator, size):
        return generator.normal(size=(size, 1, 8, 8)).astype(np.float32)

    return labelled(draw, *sizes)


def words(*sizes):
    return labelled(lambda generator, n: generator.integers(0, 32, (n, 12)), *sizes)


def digest(tree):
    """A hash of all bits of a tree's arrays."""
    return hashlib.sha256(b"".join(map(np.ndarray.tobytes, arrays(tree)))).hexdigest()


def make(model, strategy, **options):
    recorder = Recorder()
    if "loss_fn" not in options:
        options.setdefault("loss", "cross_entropy")
    optimizer = options.pop("optimizer", optax.adam(1e-2))
    bitwise = {"strategy": Bitwise(strategy), "callbacks": [recorder]}
    return quiet(model, optimizer, **bitwise, **options), recorder


def train(model, strategy, data, *, epochs=1, **options):
    """Hashes of what a training leaves, and of all that it says on the way."""
    trainer, recorder = make(model, strategy, **options)
    history = trainer.fit(data, data[-2:], max_epochs=epochs)
    return {
        "state": digest(trainer.state),
        "losses": recorder.losses,
        "history": dict(history),
        "predictions": digest(jnp.asarray(trainer.predict(data))),
    }


MIXED = {"precision": "bf16-mixed"}
# Ragged batches: the last is padded to the size of the others.
CASES = {
    "dropout": (lambda: Mlp(jax.random.key(0)), batches(32, 32, 13), {}),
    "division": (scaled, batches(16, 5), {}),
    "adafactor": (
        lambda: eqx.nn.MLP(4, 3, 256, 2, key=jax.random.key(0)),
        batches(32, 5),
        {"optimizer": optax.adafactor(1e-2)},
    ),
    "conv": (conv_net, images(32, 13), {}),
    "transformer": (
        Transformer,
        words(32, 13),
        {"gradient_clip_val": 0.5, "optimizer": optax.adamw(1e-2)},
    ),
    "bf16": (Transformer, words(32, 13), MIXED),
    "blocks": (lambda: Transformer(True), words(32, 13), {"remat": True, **MIXED}),
    "accumulation": (
        conv_net,
        images(16, 16, 5, 16, 7),
        {"accumulate_grad_batches": 2, "optimizer": optax.sgd(1e-2, momentum=0.9)},
    ),
}


SLOW = "bf16", "blocks", "transformer", "adafactor"


@pytest.mark.slow_cases("accumulation", "division", "conv")
@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else [])
    for case in CASES
])  # fmt: skip
def test_every_device_count_gives_the_same_bits(case):
    make_model, data, options = CASES[case]
    expected = train(make_model(), EVERYWHERE[0](), data, **options)
    assert np.isfinite(expected["losses"]).all()
    counts = EVERYWHERE[1:] if case == "dropout" else EVERYWHERE[1::2]
    for strategy in counts:
        found = train(make_model(), strategy(), data, **options)
        assert found == expected, strategy()


@pytest.mark.slow
def test_a_resumed_run_on_another_count_gives_the_same_bits(tmp_path):
    """Stopped after three batches of an epoch of four; dropout is drawn on."""
    data = batches(16, 16, 16, 5)
    whole, _ = make(Mlp(jax.random.key(0)), Sharded(8))
    whole.fit(data, max_steps=7)
    expected = digest(whole.state)
    stopped, _ = make(Mlp(jax.random.key(0)), Sharded(4))
    stopped.fit(data, max_steps=3)
    # What comes next is the short batch, padded as it would have been.
    resumed, _ = make(Mlp(jax.random.key(1)), Pmap(2))
    resumed.load(stopped.save(tmp_path / "stopped"))
    resumed.fit(data, max_steps=7)
    assert digest(resumed.state) == expected


# The mode "ema" notes in the model's state that the first batch has been.
@pytest.mark.slow_cases("batch")
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_what_is_written_for_a_batch_is_computed_by_every_device(mode, caplog):
    caplog.set_level("INFO", logger="jaxdp")
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0), mode=mode)
    kinds = EVERYWHERE if mode == "batch" else EVERYWHERE[:2]
    norms = [train(model, kind(), batches(16, 5), state=state) for kind in kinds]
    assert np.isfinite(norms[0]["losses"]).all()
    assert all(found == norms[0] for found in norms)
    assert "so every device computes the whole batch" in caplog.text


def test_gradients_are_summed_by_shares_of_them():
    """No more bytes than an all-reduce on eight devices, and no more arrays held."""
    from jaxdp.extras.plan import hlo

    model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
    x = np.ones((16, 64), np.float32)

    def program_under(strategy):
        trainer = quiet(model, optax.sgd(1e-2), loss="mse", strategy=strategy)
        trainer.fit([(x, x)])
        return trainer.compiled_train_step()

    program, other = map(program_under, (Bitwise(Sharded()), Sharded()))
    size = sum(leaf.nbytes for leaf in arrays(model))
    names = {c.kind for c in hlo.read(program.as_text()).collectives}
    assert names == {"all-gather", "all-to-all"}
    held, others = (p.memory_analysis().temp_size_in_bytes for p in (program, other))
    assert held < others + 5 * size


def test_the_losses_that_are_reported_have_the_same_bits_for_any_number_of_rows():
    """XLA may turn a division by 5 into a product with 1/5, in some programs only."""

    def losses(strategy):
        trainer, recorder = make(Mlp(jax.random.key(0)), strategy, metrics=["accuracy"])
        trainer.fit(batches(16, 5, 7, 3, 11, 13, 9, 15, 6, 10, 12, 14))
        return recorder.losses

    assert losses(SingleDevice()) == losses(Sharded(2))


def test_a_run_that_is_to_repeat_itself_is_compiled_so():
    trainer = make_small(
        reproducible="run", compiler_options={"xla_gpu_autotune_level": 0}
    )
    trainer.fit(batches(8))
    assert trainer.run.config.compiler_options == {
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_autotune_level": 0,
    }
