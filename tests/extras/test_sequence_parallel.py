"""Rows whose tokens are split over devices: one device's numbers, in less memory."""

import functools
import re

import attending
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from toys import Recorder, linear, quiet

from jaxdp import Arrays, SequenceParallel, SingleDevice, Stack, fuse_attention, muon
from jaxdp.losses import token_cross_entropy

slow = pytest.mark.slow
TOKENS, VOCABULARY = 16, 16


class Block(eqx.Module):
    """Causal attention with rotary positions and dropout, and a perceptron."""

    norm: eqx.nn.LayerNorm
    rotary: eqx.nn.RotaryPositionalEmbedding
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key, width):
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.rotary = eqx.nn.RotaryPositionalEmbedding(width // 2)
        self.attention = eqx.nn.MultiheadAttention(2, width, dropout_p=0.1, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x, *, key=None):
        def rotated(q, k, v):
            turn = jax.vmap(self.rotary, in_axes=1, out_axes=1)
            return turn(q), turn(k), v

        h = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(h, h, h, mask, process_heads=rotated, key=key)
        return x + jax.vmap(self.mlp)(x)


class Model(eqx.Module):
    """Tokens to the logits of what comes after each."""

    embed: eqx.nn.Embedding
    blocks: Stack
    head: eqx.nn.Linear

    def __init__(self, width=16):
        keys = jax.random.split(jax.random.key(0), 4)
        self.embed = eqx.nn.Embedding(VOCABULARY, width, key=keys[0])
        self.head = eqx.nn.Linear(width, VOCABULARY, key=keys[1])
        self.blocks = Stack([Block(key, width) for key in keys[2:]])

    def __call__(self, tokens, *, key=None):
        return jax.vmap(self.head)(self.hidden(tokens, key))

    def hidden(self, tokens, key=None):
        return self.blocks(jax.vmap(self.embed)(tokens), key=key)


def data(*sizes, tokens=TOKENS):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCABULARY, (sum(sizes), tokens)).astype(np.int32)
    stops = np.cumsum(sizes)
    x = [rows[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
    return [(part, (part + 1) % 5) for part in x]


RAGGED = data(4, 4, 4, 3)


def per_token(model, x, y, keys):
    """Tokens that are 0 are not asked for, nor are most of the last ones."""
    hidden = jax.vmap(model.hidden)(x, keys)
    asked = (x > 0) & (jnp.arange(TOKENS)[None] < 3 + 4 * (x[:, :1] % 4))
    return token_cross_entropy(model.head, hidden, y, 16, weights=asked.astype(float))


def shifted(model, tokens, keys):
    """A row has the target of its last token, too."""
    logits = jax.vmap(model)(tokens[:, :-1], key=keys)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return values.mean(axis=1)


def mean_of_tokens(prediction, target):
    """A scalar: rows interact."""
    values = optax.softmax_cross_entropy_with_integer_labels(prediction, target)
    return (values**2).mean() ** 0.5


def arrays():
    x, y = (np.concatenate(parts) for parts in zip(*RAGGED, strict=True))
    return Arrays(*jax.device_put((x, y)), batch_size=4)


CASES = {
    "without dropout": {},
    "with dropout": {},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed"},
    "per token": {"loss": None, "loss_fn": per_token},
    "rows interact": {"loss": mean_of_tokens},
    "shifted": {"loss": None, "loss_fn": shifted, "data": [x for x, _ in RAGGED]},
    "12 tokens": {
        **{"loss": None, "loss_fn": shifted},
        "data": [x for x, _ in data(4, 3, tokens=12)],
    },
    "arrays": {"data": arrays},
    "muon": {"optimizer": muon(0.02)},
    "fused": {},
    "recomputed": {"remat": "blocks.stacked", "steps_per_execution": 3},
}
SPLITS = {
    f"{shape['data']}x{shape['seq']}{' fsdp' * fsdp}": functools.partial(
        SequenceParallel, shape, fsdp=fsdp
    )
    for fsdp in (False, True)
    for shape in ({"data": 1, "seq": 8}, {"data": 2, "seq": 4})
}


@functools.cache
def trained(case, strategy=SingleDevice):
    """Losses of six steps, then of a validation, and predictions."""
    options = {"loss": "cross_entropy", "optimizer": optax.adam(1e-2)} | CASES[case]
    loader = options.pop("data", RAGGED)
    loader = loader() if callable(loader) else loader
    model = Model()
    model = eqx.nn.inference_mode(model) if case == "without dropout" else model
    if case == "fused":
        model = fuse_attention(model, causal=True, block=4)
    trainer = quiet(
        model, strategy=strategy(), callbacks=[recorder := Recorder()], **options
    )
    trainer.fit(loader, max_epochs=2)
    held = jax.tree.map(lambda leaf: leaf.sharding.spec, trainer.state.params)
    tested = [*trainer.validate(loader).values()]
    return np.array(recorder.losses + tested), trainer.predict(RAGGED), held


QUICK = [("without dropout", "2x4 fsdp"), ("shifted", "2x4")]


@pytest.mark.parametrize("case, split", [
    pytest.param(case, split, marks=[] if (case, split) in QUICK else slow)
    for case in CASES
    for split in SPLITS
    if case != "12 tokens" or "2x4" in split
])  # fmt: skip
def test_numbers_are_those_of_one_device(case, split):
    losses, predictions, held = trained(case, SPLITS[split])
    expected, predicted, _ = trained(case)
    rtol = 1e-2 if case == "bf16" else 1e-5
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    np.testing.assert_allclose(predictions, predicted, rtol=100 * rtol, atol=10 * rtol)
    is_split = held.blocks.stacked.mlp.layers[0].weight == P(None, ("data", "seq"))
    assert is_split == ("fsdp" in split)


def test_leaves_of_the_longest_length_are_split_and_others_by_rows_only():
    shapes = {(2, 8): (1, 2), (2, 8, 3): (1, 2, 3), (2, 4): (1, 4), (2,): (1,)}

    def loss_fn(model, *leaves):
        means = [leaf.reshape(2, -1).mean(axis=1) for leaf in leaves]
        return sum(means) * model.bias.sum()

    strategy = SequenceParallel({"data": 2, "seq": 4})
    trainer = quiet(linear(), loss_fn=loss_fn, strategy=strategy)
    plan = trainer.plan([tuple(np.zeros(shape, np.float32) for shape in shapes)])
    leaves = [leaf for leaf in plan.leaves if leaf.group == "batch"]
    held = {leaf.shape[1:]: leaf.shard[1:] for leaf in leaves}
    assert shapes.items() <= held.items()


def test_it_is_planned_for_more_devices_by_more_rows():
    strategy = SequenceParallel({"data": 2, "seq": 2}, devices=4)
    grown = strategy.on(jax.devices())
    assert grown.mesh.shape == {"data": 4, "seq": 2} and grown.row_axes == ("data",)
    assert SequenceParallel(devices=4).mesh.shape == {"data": 1, "seq": 4}
    with pytest.raises(ValueError, match="3 are not divisible by 2"):
        strategy.on(jax.devices()[:3])


def test_memory_is_split_and_a_plan_says_so():
    model = eqx.filter_eval_shape(lambda: Model(width=64))
    model = eqx.nn.inference_mode(model)  # compiles sooner
    x = np.zeros((1, 1024), np.int32)

    def plan_under(strategy):
        options = {"loss": "cross_entropy", "remat": "blocks.stacked"}
        trainer = quiet(model, optax.adam(1e-3), strategy=strategy, **options)
        return trainer.plan([(x, x)])

    plan = plan_under(SequenceParallel({"data": 1, "seq": 8}))
    whole = plan_under(SingleDevice()).memory.temporary
    assert plan.memory.temporary < 0.25 * whole
    text = str(plan)
    assert "SequenceParallel({'data': 1, 'seq': 8}), 1 rows per step" in text
    assert "batch[0] (1, 1024) (each device has (1, 128))" in text
    assert re.search(r"all-gather +seq \(8\) .* forward: ", text)
    (sent, *_) = plan.bounds
    assert "over the devices that share the batch" in sent.what
    assert sent.least == 2 * 7 / 8 * plan.memory.parameters


@slow
def test_fused_attention_gathers_keys_and_values_and_sums_nothing_forwards():
    """XLA by itself would gather queries, and sum what they attend to, by blocks."""
    keys = jax.random.split(jax.random.key(0))
    layers = [attending.Block(16, key) for key in keys]
    model = fuse_attention(Stack(layers), causal=True, block=32)
    trainer = quiet(model, loss="mse", strategy=SPLITS["2x4"](), remat="stacked")
    x = np.zeros((2, 256, 16), np.float32)
    forward = [
        traffic
        for traffic in trainer.plan([(x, x)]).traffic
        if re.match("forward: .*FusedAttention", traffic.part)
    ]
    assert {traffic.kind for traffic in forward} == {"all-gather"}
    one_of_two_layers = 256 * 16 * 4  # bytes of keys, or of values, of a row
    sent = sum(traffic.wire_bytes for traffic in forward)
    assert sent == 2 * 2 * one_of_two_layers * 3 / 4
