"""FSDP whose blocks, or other submodules, gather their parameters when called."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from toys import Recorder, quiet

from jaxdp import FSDP, SingleDevice, Stack, per_example
from jaxdp.step import equations_in, override_call
from jaxdp.step.remat import RematSpec
from jaxdp.strategies import find_layouts
from jaxdp.strategies.fsdp_units import _GatherCall

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


def losses(model, strategy, epochs=6, **arguments):
    recorder = Recorder()
    arguments.setdefault("optimizer", optax.adam(1e-3))
    if "loss_fn" not in arguments:
        arguments["loss"] = "cross_entropy"
    trainer = quiet(model, strategy=strategy, callbacks=[recorder], **arguments)
    trainer.fit(data(), max_epochs=epochs)
    return np.array(recorder.losses), trainer


FROZEN = jax.tree.map(eqx.is_inexact_array, Deep(2))
FROZEN = eqx.tree_at(lambda m: m.blocks.stacked.up.weight, FROZEN, False)

KINDS = {
    "two groups": (Deep(4), FSDP(groups=2), {}),
    "four groups of two": (Deep(3), FSDP(groups=4), {}),
    "submodules of blocks": (Deep(2), FSDP(gather=["blocks.stacked.up"]), {}),
    "a whole stack": (Deep(2), FSDP(gather=["blocks", "last"]), {}),
    "no stack": (Deep(3, in_stack=False), FSDP(gather=["blocks[*]"]), {}),
    "accumulated, clipped, several steps a dispatch": (
        Deep(2),
        FSDP(),
        dict(accumulate_grad_batches=2, gradient_clip_val=0.1, steps_per_execution=3),
    ),
    "recomputed": (Deep(2), FSDP(), {"remat": "blocks.stacked"}),
    "frozen": (Deep(2), FSDP(), {"filter_spec": FROZEN}),
    "adafactor": (Deep(2), FSDP(), {"optimizer": optax.adafactor(1e-3)}),
}


@pytest.mark.slow_but("recomputed")
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_losses_are_those_of_one_device(kind):
    model, strategy, arguments = KINDS[kind]
    expected, _ = losses(model, SingleDevice(), **arguments)
    found, trainer = losses(model, strategy, **arguments)
    np.testing.assert_allclose(found[:50], expected[:50], rtol=1e-5)
    gathered = [plan for plan in traffic(trainer) if "forward" in plan.part]
    assert any(each.kind == "all-gather" for each in gathered), traffic(trainer)


def traffic(trainer):
    return trainer.running_plan().traffic


def test_a_stacks_parameters_cross_one_and_a_half_times():
    # Biases are not needed once more, and XLA does not gather them once more.
    _, trainer = losses(Deep(bias=False), FSDP(), epochs=1)
    blocks = trainer.state.params.blocks
    layouts = find_layouts(trainer.strategy, trainer.state)
    assert layouts["params: blocks.stacked.up.weight"] == P(None, "data")

    in_blocks = [each for each in traffic(trainer) if each.times == BLOCKS]
    assert {each.kind for each in in_blocks} == {"all-gather", "reduce-scatter"}
    crossed = sum(each.wire_bytes for each in in_blocks)
    # An all-reduce of F bytes is a reduce-scatter and an all-gather.
    all_reduce = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(blocks)) * 7 / 8
    assert crossed == 1.5 * all_reduce


def test_a_recomputed_block_is_recomputed_by_one_checkpoint():
    """In two, one in the other, XLA for TPUs gathers no block ahead of its turn."""
    block = RematSpec(("blocks[0]",)).apply(Deep(1, in_stack=False)).blocks[0]
    call = override_call(block, _GatherCall((), in_loop=True))
    program = jax.make_jaxpr(call)(jnp.zeros(WIDTH))
    names = [each.primitive.name for each in equations_in(program.jaxpr)]
    assert sum(name in ("checkpoint", "remat2") for name in names) == 1


@pytest.mark.parametrize("gather", ["once", ["blocks[*]"]])
@pytest.mark.parametrize("named", [True, False])
def test_a_named_loss_casts_parameters_before_they_are_gathered(gather, named):
    """A `loss_fn` may read them outside of calls, where they keep their dtype."""
    programs = []

    class Traced(FSDP):
        def compile(self, step, arguments, *others, **options):
            jitted = super().compile(step, arguments, *others, **options)
            programs.append(jitted.trace(*arguments).jaxpr)
            return jitted

    how = {"loss": "cross_entropy"} if named else {"loss_fn": each_loss}
    how |= {"strategy": Traced(gather=gather), "precision": "bf16-mixed"}
    _, trainer = losses(Deep(2, in_stack=False), epochs=1, **how)
    trainer.validate(data()[:1])
    # Split when they are cast: or else XLA gathers before it casts.
    dtype = "bfloat16" if named else "float32"
    for program in programs[0], programs[-1]:
        gathered = {
            (str(x.outvars[0].aval.dtype), x.params["sharding"].is_fully_replicated)
            for x in equations_in(program)
            if x.primitive.name == "sharding_constraint"
            and x.outvars[0].aval.shape == (WIDTH, 8)
        }
        assert gathered >= {(dtype, False), (dtype, True)}


def test_memory_within_a_step_is_that_of_few_blocks():
    def temporary(gather):
        strategy = FSDP(gather=gather)
        _, trainer = losses(Deep(), strategy, epochs=1, remat="blocks.stacked")
        analysis = trainer.compiled_train_step().memory_analysis()
        return trainer.state.params.blocks, analysis.temp_size_in_bytes

    blocks, by_block = temporary("auto")
    # A step by hand needs 0.21 of it, and one that gathers all blocks twice of it.
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(blocks))
    assert by_block <= 0.25 * whole
    assert temporary("once")[1] > whole  # or else this test says nothing


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
@pytest.mark.parametrize(
    "loss_fn",
    [penalized, by_row, standardised],
)
def test_a_loss_of_a_batch_may_use_any_weights(loss_fn):
    """XLA gathers them where they are used, and blocks when they are called."""
    expected, _ = losses(Deep(2), SingleDevice(), epochs=1, loss_fn=loss_fn)
    found, trainer = losses(Deep(2), FSDP(), epochs=1, loss_fn=loss_fn)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
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
    "a size": lambda m: sum(w.size for w in weights_of(m)),
    "a method": lambda m: up(m).sum(),
    "a slice": lambda m: up(m)[0, 0, 0],
    "a comparison": lambda m: jnp.sum(up(m) == 0),
    "an operator": lambda m: jnp.sum(1 / up(m)),
    "a length": lambda m: len(up(m)),
    "a cast": lambda m: up(m).astype(jnp.float32).mean(),
    "a transformation": lambda m: jax.vmap(jnp.sum)(up(m)).sum(),
    "a copy of the module": lambda m: eqx.filter_vmap(
        lambda block: block.up.weight.sum()
    )(m.blocks.stacked).sum(),
}


@pytest.mark.parametrize("use", USES)
def test_shards_are_refused_outside_of_the_calls_that_gather_them(use):
    message = r'`gather`: the loss uses.* outside of calls of .*gather="once"'
    with pytest.raises(ValueError, match=message):
        losses(Deep(2), FSDP(), epochs=1, loss_fn=of_one(USES[use]))


def in_a_branch(blocks, x):
    return jax.lax.cond(x[0] > 0, lambda x: blocks(x), lambda x: x, x)


def in_a_branch_of_a_loop(blocks, x):
    return jax.lax.map(lambda x: in_a_branch(blocks, x), x[None])[0]


def until_it_is_small(blocks, x):
    def is_large(carry):
        return (jnp.abs(carry[0]).max() > 0.5) & (carry[1] < 5)

    return jax.lax.while_loop(
        is_large, lambda c: (0.5 * blocks(c[0]), c[1] + 1), (x, 0)
    )


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


@pytest.mark.parametrize("call", [in_a_branch, in_a_branch_of_a_loop])
def test_blocks_in_branches_of_rows_are_refused_or_gathered_before(call):
    """Devices would gather at other times, or sum gradients of other rows."""
    options = {"optimizer": optax.sgd(1.0), "loss": "mse"}
    with pytest.raises(ValueError, match='in a branch of.*gather="once"'):
        quiet(Branching(call), strategy=FSDP(), **options).fit(WAVES)
    found = []
    for strategy in FSDP(gather="once"), SingleDevice():
        trainer = quiet(Branching(call), strategy=strategy, **options)
        trainer.fit(WAVES)
        found.append(np.asarray(trainer.model.blocks.stacked.weight))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_an_ensemble_of_stacks_is_gathered_once_or_refused():
    keys = jax.random.split(jax.random.key(0), 4)
    models = eqx.filter_vmap(lambda key: Branching(lambda blocks, x: blocks(x), key))
    options = {"model": models(keys), "loss": "mse", "ensemble": 4}
    with pytest.raises(ValueError, match='vmap over models.*gather="once"'):
        quiet(strategy=FSDP(), **options).fit(WAVES)
    np.testing.assert_allclose(*(
        quiet(strategy=strategy, **options).fit(WAVES, max_epochs=2)["loss"]
        for strategy in (FSDP(gather="once"), SingleDevice())
    ), rtol=1e-5)  # fmt: skip


def test_blocks_in_a_while_loop_are_refused():
    model = Branching(lambda blocks, x: until_it_is_small(blocks, x)[0])
    trainer = quiet(model, strategy=FSDP(), loss="mse")
    for method in trainer.validate, trainer.predict:
        with pytest.raises(ValueError, match='a while loop.*gather="once"'):
            method(WAVES)


def test_what_is_gathered_at_once_may_be_used_anywhere():
    loss_fn = of_one(USES["a penalty on all"])
    expected, _ = losses(Deep(2), SingleDevice(), epochs=1, loss_fn=loss_fn)
    found, _ = losses(Deep(2), FSDP(gather="once"), epochs=1, loss_fn=loss_fn)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def is_by_block(trainer):
    layouts = find_layouts(trainer.strategy, trainer.state)
    return layouts["params: blocks.stacked.up.weight"] == P(None, "data")
