"""Memory of the compiled step: micro-batches and recomputation need less."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, Stack, Trainer

ROWS, WIDTH, DEPTH = 1024, 64, 16


class Deep(eqx.Module):
    """Equal layers, stacked, and a scan over them."""

    layers: eqx.nn.MLP

    def __init__(self, key):
        def layer(key):
            return eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)

        self.layers = eqx.filter_vmap(layer)(jax.random.split(key, DEPTH))

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def body(x, one):
            return x + 0.1 * eqx.combine(one, static)(x), None

        return jax.lax.scan(body, x, arrays)[0]


def step_of(*, strategy, micro_batches=1, model=Deep, **options):
    """Returns the temporary memory of a step over `ROWS` rows, and the loss."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    parts = np.split(x, micro_batches)
    trainer = Trainer(
        model(jax.random.key(0)), optax.sgd(1e-2), loss="mse", strategy=strategy,
        accumulate_grad_batches=micro_batches, enable_progress_bar=False, **options,
    )  # fmt: skip
    history = trainer.fit([(part, part[:, ::-1].copy()) for part in parts])
    step = trainer.compiled_train_step()
    return step.memory_analysis().temp_size_in_bytes, history["loss"][-1]


@pytest.mark.slow_but("SingleDevice", "FSDP")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap, FSDP])
def test_only_one_micro_batch_has_activations_in_memory(strategy):
    whole, expected = step_of(strategy=strategy())
    parts, loss = step_of(strategy=strategy(), micro_batches=8)
    devices = 1 if strategy is SingleDevice else 8
    activations = ROWS // devices * WIDTH * 4 * DEPTH  # the residual stream alone
    assert parts < whole - activations / 2
    assert loss == pytest.approx(expected, rel=1e-5)


class Residual(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)

    def __call__(self, x):
        return x + 0.1 * self.mlp(x)


class Stacked(eqx.Module):
    blocks: Stack

    def __init__(self, key):
        self.blocks = Stack([Residual(k) for k in jax.random.split(key, DEPTH)])

    def __call__(self, x):
        return self.blocks(x)


# A full Stack as one saves nothing; nor does a policy that saves all products, which
# is most of what there is.
@pytest.mark.parametrize(
    "model, remat, saves",
    [
        (Deep, "layers", True),
        (Stacked, True, True),
        (Stacked, "blocks.stacked", True),
        (Stacked, "blocks.stacked.mlp", True),
        (Stacked, "nothing_saveable", True),
        (Stacked, "everything_saveable", False),
        (Stacked, "blocks", False),
    ],
)
def test_recomputed_layers_are_not_in_memory(model, remat, saves):
    remat = getattr(jax.checkpoint_policies, str(remat), remat)
    whole, expected = step_of(strategy=SingleDevice(), model=model)
    less, loss = step_of(strategy=SingleDevice(), model=model, remat=remat)
    hidden = ROWS * 2 * WIDTH * 4 * DEPTH  # of the MLPs, after the activation
    assert (less < whole - hidden) == saves
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, FSDP])
def test_the_leaves_of_the_state_are_the_arguments_of_the_step(strategy):
    # With small leaves joined into one array, 300 layers compile for minutes.
    model = eqx.nn.MLP(8, "scalar", 16, depth=4, key=jax.random.key(0))
    trainer = Trainer(
        model, loss="mse", strategy=strategy(), enable_progress_bar=False
    )  # fmt: skip
    trainer.fit([(np.ones((16, 8), np.float32), np.ones(16, np.float32))])
    (leaves, _), _ = trainer.compiled_train_step().args_info
    shapes = [leaf.shape for leaf in jax.tree.leaves(trainer.state)]
    assert [leaf.shape for leaf in leaves] == shapes
