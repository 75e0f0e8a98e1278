"""`Stack` and `Pipeline`: layers in stages, and the numbers of one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from toys import Deep, DeepBlock, batches, quiet, run

from jaxdp import FSDP, Pipeline, SingleDevice, Stack, Trainer
from jaxdp.extras.plan import hlo
from jaxdp.strategies import tensor_rules

# Rows that neither pipelines nor micro-batches divide.
DATA = batches(24, 24, 13)


def train(strategy, *, data=DATA, epochs=3, **options):
    losses, trainer = run(strategy, Deep(), epochs, data, **options)
    return trainer, losses


def of_batch(model, x, y, keys):
    """Rows interact outside of the stack."""
    logits = jax.vmap(lambda row, key: model(row, key=key))(x, keys)
    logits = logits - logits.mean(axis=0, keepdims=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# bf16 has 8 bits, and XLA leaves out other roundings in other programs.
@pytest.mark.slow_cases("bf16")
@pytest.mark.parametrize("options, rtol", [
    ({"accumulate_grad_batches": 2, "remat": "blocks.stacked"}, 1e-5),
    ({"precision": "bf16-mixed", "gradient_clip_val": 0.1}, 2e-2),
    ({"loss_fn": of_batch, "data": DATA[:1]}, 1e-5),
], ids=["accumulation", "bf16", "of a batch"])  # fmt: skip
def test_numbers_are_those_of_one_device(options, rtol):
    losses = [train(kind, **options)[1] for kind in (SingleDevice(), Pipeline(4, 2))]
    np.testing.assert_allclose(*losses, rtol=rtol)


def test_a_stage_has_its_own_blocks_only_and_sends_what_they_give():
    trainer, _ = train(Pipeline(4, 6), epochs=1)
    params, (adam, *_) = trainer.state.params, trainer.state.opt_state
    for tree in (params, adam.mu, adam.nu):
        weight = tree.blocks.stacked.linear.weight
        assert {shard.data.shape for shard in weight.addressable_shards} == {(2, 8, 8)}
        assert tree.first.weight.sharding.is_fully_replicated
    program = hlo.read(trainer.compiled_train_step().as_text())
    by_kind = {}
    for each in program.collectives:
        by_kind.setdefault(each.kind, []).append(each)
    assert set(by_kind) == {"collective-permute", "all-reduce"}
    # Forwards and backwards, 2 rows of 8 numbers in each of 6 + 3 turns.
    sent = [(each.times, each.operand_bytes) for each in by_kind["collective-permute"]]
    assert sent == [(9, 2 * 8 * 4)] * 2
    # Three times the 12 rows of a pipeline among its stages; and between pipelines,
    # once, the gradients of what a device holds, and two sums.
    own = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(params))
    rows, between = [], []
    for each in by_kind["all-reduce"]:
        (rows if each.groups[0] == (0, 1, 2, 3) else between).append(each.operand_bytes)
    assert rows == [12 * 8 * 4] * 3
    assert own <= sum(between) <= own + 8


def test_the_plan_tells_the_bubble():
    model = eqx.filter_eval_shape(Deep)
    trainer = Trainer(model, loss="cross_entropy", strategy=Pipeline(4, 5))
    plan = trainer.plan(DATA)
    assert plan.bubble == plan.to_dict()["bubble"] == 3 / 8
    assert "Stages wait for 37.5% of the blocks' time." in str(plan)
    trainer = Trainer(model, loss="cross_entropy", strategy=FSDP())
    assert trainer.plan(DATA).bubble == 0


def test_a_stack_is_its_blocks_in_turn():
    keys = jax.random.split(jax.random.key(0), 3)
    blocks = [DeepBlock(8, key) for key in keys]
    stack, x = Stack(blocks), jnp.arange(8.0)
    assert len(stack) == 3
    expected = x
    for block, key in zip(blocks, jax.random.split(keys[0], 3), strict=True):
        expected = block(expected, key=key)
    np.testing.assert_allclose(stack(x, key=keys[0]), expected, rtol=1e-6)
    calm = eqx.nn.inference_mode(stack)
    assert np.isfinite(calm(x)).all()


def test_ready_made_tensor_rules_split_each_block():
    keys = jax.random.split(jax.random.key(0), 8)
    stack = Stack([eqx.nn.MLP(4, 4, 8, 1, key=key) for key in keys])
    assert tensor_rules(stack) == [
        ("stacked.layers[0].weight", PartitionSpec(None, "model", None)),
        ("stacked.layers[0].bias", PartitionSpec(None, "model")),
        ("stacked.layers[1].weight", PartitionSpec(None, None, "model")),
    ]


class Plain(eqx.Module):
    """Adds 1, and takes no key."""

    weight: jax.Array

    def __call__(self, x):
        return x + self.weight


class Trains(eqx.Module):
    """Adds 1 in training, else 0."""

    weight: jax.Array

    def __call__(self, x, key=None, training=True):
        assert isinstance(training, bool)
        return x + 0 * self.weight + training


class OfTrains(eqx.Module):
    blocks: Stack

    def __call__(self, x, key, training):
        return self.blocks(x, key=key, training=training)


class ReadsStack(eqx.Module):
    """Has a stack or a list of blocks, and asks which."""

    blocks: Stack | list[Plain]

    def __call__(self, x):
        assert len(self.blocks) == 4
        for block in [self.blocks] if isinstance(self.blocks, Stack) else self.blocks:
            x = block(x)
        return x


MODELS = {
    "plain": lambda: (Stack([Plain(jnp.ones(8))] * 4), {"remat": "stacked"}),
    "trains": lambda: (OfTrains(Stack([Trains(jnp.ones(8))] * 4)), {}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "strategy", [SingleDevice(), Pipeline(4, 2), FSDP(min_size=1)], ids=repr
)
def test_blocks_are_told_whether_they_train_where_they_name_it(strategy, name):
    model, options = MODELS[name]()
    options |= {"loss": lambda p, y: p.mean(-1), "strategy": strategy}
    trainer = quiet(model, **options)
    data = [(np.zeros((16, 8), np.float32), np.zeros(16))]
    assert trainer.fit(data)["loss"] == [4.0]
    if name == "trains":
        assert trainer.validate(data)["val_loss"] == 0


@pytest.mark.parametrize(
    "strategy", [SingleDevice(), Pipeline(4, 2), FSDP(min_size=1)], ids=repr
)
def test_a_model_may_ask_for_the_class_and_length_of_its_stack(strategy):
    model = ReadsStack(Stack([Plain(jnp.ones(8))] * 4))
    trainer = quiet(model, loss=lambda p, y: p.mean(-1), strategy=strategy)
    data = [(np.zeros((16, 8), np.float32), np.zeros(16))]
    assert trainer.fit(data)["loss"] == [4.0]
    assert trainer.validate(data).keys() == {"val_loss"}
