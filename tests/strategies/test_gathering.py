"""FSDP whose blocks, or other submodules, gather their parameters when called."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from toys import Recorder, equations, quiet, tracing

from jaxdp import FSDP, SingleDevice, Stack, per_example
from jaxdp.strategies import find_layouts

WIDTH, BLOCKS = 64, 16
softmax = optax.softmax_cross_entropy_with_integer_labels


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key, bias=True):
        up, down = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH, use_weight=bias, use_bias=bias)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, use_bias=bias, key=up)
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, use_bias=bias, key=down)

    def __call__(self, x, key=None):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Deep(eqx.Module):
    first: eqx.nn.Linear
    blocks: Stack | list[Block]
    last: eqx.nn.Linear

    def __init__(self, blocks=BLOCKS, bias=True, in_stack=True):
        first, last, *keys = jax.random.split(jax.random.key(0), blocks + 2)
        self.first = eqx.nn.Linear(8, WIDTH, key=first)
        made = [Block(key, bias) for key in keys]
        self.blocks = Stack(made) if in_stack else made
        self.last = eqx.nn.Linear(WIDTH, 3, key=last)

    def __call__(self, x):
        x = self.first(x)
        for block in [self.blocks] if isinstance(self.blocks, Stack) else self.blocks:
            x = block(x)
        return self.last(x)


def data(rows=24, count=9):
    """Batches of which the last is ragged."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows * count - 5, 8)).astype(np.float32)
    y = draw.integers(0, 3, len(x)).astype(np.int32)
    return [(x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows)]


def losses(strategy, model=None, epochs=1, **options):
    recorder = Recorder()
    options = {"optimizer": optax.adam(1e-3), "callbacks": [recorder]} | options
    options |= {"loss": None if "loss_fn" in options else "cross_entropy"}
    trainer = quiet(Deep(2) if model is None else model, strategy=strategy, **options)
    trainer.fit(data(), max_epochs=epochs)
    return np.array(recorder.losses), trainer


def assert_as_on_one_device(strategy, **options):
    """Trains on one device and by a strategy; returns that one's trainer."""
    expected, _ = losses(SingleDevice(), **options)
    found, trainer = losses(strategy, **options)
    np.testing.assert_allclose(found[:50], expected[:50], rtol=1e-5)
    return trainer


FROZEN = jax.tree.map(eqx.is_inexact_array, Deep(2))
FROZEN = eqx.tree_at(lambda m: m.blocks.stacked.up.weight, FROZEN, False)

KINDS = {
    "two groups": (FSDP(groups=2), {"model": Deep(4)}),
    "four groups of two": (FSDP(groups=4), {"model": Deep(3)}),
    "submodules of blocks": (FSDP(gather=["blocks.stacked.up"]), {}),
    "a whole stack": (FSDP(gather=["blocks", "last"]), {}),
    "no stack": (FSDP(gather=["blocks[*]"]), {"model": Deep(3, in_stack=False)}),
    "accumulated, clipped, several steps a dispatch": (FSDP(), {
        "accumulate_grad_batches": 2, "gradient_clip_val": 0.1,
        "steps_per_execution": 3,
    }),
    "recomputed": (FSDP(), {"remat": "blocks.stacked"}),
    "frozen": (FSDP(), {"filter_spec": FROZEN}),
    "adafactor": (FSDP(), {"optimizer": optax.adafactor(1e-3)}),
}  # fmt: skip


@pytest.mark.slow_but("recomputed")
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_losses_are_those_of_one_device(kind):
    strategy, options = KINDS[kind]
    trainer = assert_as_on_one_device(strategy, epochs=6, **options)
    forward = [each for each in traffic(trainer) if "forward" in each.part]
    assert any(each.kind == "all-gather" for each in forward), traffic(trainer)


def traffic(trainer):
    return trainer.running_plan().traffic


def test_a_stacks_parameters_cross_one_and_a_half_times():
    # Biases are not needed once more, and XLA does not gather them once more.
    _, trainer = losses(FSDP(), Deep(BLOCKS, bias=False))
    assert is_by_block(trainer)
    in_blocks = [each for each in traffic(trainer) if each.times == BLOCKS]
    assert {each.kind for each in in_blocks} == {"all-gather", "reduce-scatter"}
    crossed = sum(each.wire_bytes for each in in_blocks)
    # An all-reduce of F bytes is a reduce-scatter and an all-gather.
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state.params.blocks))
    assert crossed == 1.5 * 2 * held * 7 / 8


def test_a_recomputed_block_is_recomputed_by_one_checkpoint():
    """In two, one in the other, XLA for TPUs gathers no block ahead of its turn."""

    def checkpoints(remat):
        strategy, programs = tracing(FSDP, gather=["blocks[*]"])
        losses(strategy, Deep(1, in_stack=False), remat=remat)
        names = [each.primitive.name for each in equations(programs[0])]
        return sum(name in ("checkpoint", "remat2") for name in names)

    assert checkpoints("blocks[0]") == checkpoints(False) > 0


@pytest.mark.parametrize("gather", ["once", ["blocks[*]"]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_named_loss_casts_parameters_before_they_are_gathered(gather, dtype):
    """A `loss_fn` may read them outside of calls, where they keep their dtype."""
    strategy, programs = tracing(FSDP, gather=gather)
    options = {"model": Deep(2, in_stack=False), "precision": "bf16-mixed"}
    if dtype == "float32":
        options["loss_fn"] = each_loss
    _, trainer = losses(strategy, **options)
    trainer.validate(data()[:1])
    # Split when they are cast: or else XLA gathers before it casts.
    for program in programs[0], programs[-1]:
        gathered = {
            (str(x.outvars[0].aval.dtype), x.params["sharding"].is_fully_replicated)
            for x in equations(program)
            if x.primitive.name == "sharding_constraint"
            and x.outvars[0].aval.shape == (WIDTH, 8)
        }
        assert gathered >= {(dtype, False), (dtype, True)}


def test_memory_within_a_step_is_that_of_few_blocks():
    def temporary(gather):
        """The temporary memory divided by that of all blocks."""
        options = {"model": Deep(BLOCKS), "remat": "blocks.stacked"}
        _, trainer = losses(FSDP(gather=gather), **options)
        analysis = trainer.compiled_train_step().memory_analysis()
        held = jax.tree.leaves(trainer.state.params.blocks)
        return analysis.temp_size_in_bytes / sum(leaf.nbytes for leaf in held)

    # A step by hand needs 0.21 of it, and one that gathers all blocks twice of it.
    assert temporary("auto") <= 0.25
    assert temporary("once") > 1  # or else this test says nothing


def each_loss(model, x, y):
    return softmax(jax.vmap(model)(x), y)


def weights_of(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


def penalty(model):
    return sum(jnp.sum(weight**2) for weight in weights_of(model))


def penalized(model, x, y):
    return each_loss(model, x, y) + 0.01 * penalty(model)


def by_row(model, x, y):
    """Passes rows through the blocks if they begin above 0, which differs by device."""

    def logits(x):
        hidden = model.first(x)
        hidden = jax.lax.cond(x[0] > 0, lambda h: model.blocks(h), lambda h: h, hidden)
        return model.last(hidden)

    return softmax(jax.lax.map(jax.checkpoint(logits), x), y)


def standardised(model, x, y):
    logits = jax.vmap(model)(x)
    return softmax(logits - logits.mean(axis=0, keepdims=True), y).mean()


@pytest.mark.slow_but("penalized", "standardised")
@pytest.mark.parametrize("loss_fn", [penalized, by_row, standardised])
def test_a_loss_of_a_batch_may_use_any_weights(loss_fn):
    """XLA gathers them where they are used, and blocks when they are called."""
    trainer = assert_as_on_one_device(FSDP(), loss_fn=loss_fn)
    gathered = [each for each in traffic(trainer) if each.kind == "all-gather"]
    assert any("forward" in each.part for each in gathered)
    assert is_by_block(trainer)


def of_one(use):
    """A loss of one example that uses the model's weights in some way, too."""

    def loss(model, x, y):
        return softmax(model(x), y) + 0.01 * use(model)

    return per_example(loss)


def up(model):
    return model.blocks.stacked.up.weight


USES = {
    "a penalty on all": penalty,
    "optax's norm": lambda m: optax.tree.norm(weights_of(m)),
    "a shape": lambda m: up(m).shape[1],
    "a method": lambda m: up(m).sum(),
    "a slice": lambda m: up(m)[0, 0, 0],
    "a comparison": lambda m: jnp.sum(up(m) == 0),
    "an operator": lambda m: jnp.sum(1 / up(m)),
    "a length": lambda m: len(up(m)),
    "a transformation": lambda m: jax.vmap(jnp.sum)(up(m)).sum(),
    "a copy of the module": lambda m: eqx.filter_vmap(
        lambda block: block.up.weight.sum()
    )(m.blocks.stacked).sum(),
}


@pytest.mark.parametrize("use", USES)
def test_shards_are_refused_outside_of_the_calls_that_gather_them(use):
    message = r'`gather`: the loss uses.* outside of calls of .*gather="once"'
    with pytest.raises(ValueError, match=message):
        losses(FSDP(), loss_fn=of_one(USES[use]))


# Calls of blocks, and their refusals. Devices would gather at other times, or sum
# gradients of other rows.


def calls(blocks, x):
    return blocks(x)


def in_a_branch(blocks, x):
    return jax.lax.cond(x[0] > 0, lambda x: blocks(x), lambda x: x, x)


def in_a_branch_of_a_loop(blocks, x):
    return jax.lax.map(lambda x: in_a_branch(blocks, x), x[None])[0]


def until_it_is_small(blocks, x):
    is_large = lambda x: jnp.abs(x).max() > 0.5  # noqa: E731
    return jax.lax.while_loop(is_large, lambda x: 0.5 * blocks(x), x)


class Branching(eqx.Module):
    """Calls two blocks in some way."""

    blocks: Stack
    call: object = eqx.field(static=True)

    def __init__(self, call, key=None):
        keys = jax.random.split(jax.random.key(0) if key is None else key)
        self.blocks = Stack([eqx.nn.Linear(8, 8, key=key) for key in keys])
        self.call = call

    def __call__(self, x):
        return self.call(self.blocks, x)


X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
WAVES = [(X, np.sin(X))]


def branching(call, strategy, **options):
    model = options.pop("model", None) or Branching(call)
    return quiet(model, optax.sgd(1.0), loss="mse", strategy=strategy, **options)


FOUR = eqx.filter_vmap(lambda key: Branching(calls, key))(
    jax.random.split(jax.random.key(0), 4)
)
BRANCHES = {
    "a branch": (in_a_branch, {}, "in a branch of"),
    "a branch of a loop": (in_a_branch_of_a_loop, {}, "in a branch of"),
    "an ensemble": (calls, {"model": FOUR, "ensemble": 4}, "vmap over models"),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_blocks_that_rows_call_apart_are_refused_or_gathered_before(case):
    call, options, words = BRANCHES[case]
    with pytest.raises(ValueError, match=f'{words}.*gather="once"'):
        branching(call, FSDP(), **options).fit(WAVES)
    found = []
    for strategy in FSDP(gather="once"), SingleDevice():
        trainer = branching(call, strategy, **options)
        loss = trainer.fit(WAVES)["loss"]
        found.append((np.asarray(trainer.model.blocks.stacked.weight), loss))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_blocks_in_a_while_loop_are_refused():
    trainer = branching(until_it_is_small, FSDP())
    for method in trainer.validate, trainer.predict:
        with pytest.raises(ValueError, match='a while loop.*gather="once"'):
            method(WAVES)


def test_what_is_gathered_at_once_may_be_used_anywhere():
    assert_as_on_one_device(FSDP(gather="once"), loss_fn=of_one(penalty))


def is_by_block(trainer):
    layouts = find_layouts(trainer.strategy, trainer.state)
    return layouts["params: blocks.stacked.up.weight"] == P(None, "data")
