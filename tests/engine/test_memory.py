"""Memory of the compiled step: micro-batches and recomputation need less."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import quiet

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, Stack

ROWS, WIDTH, DEPTH = 1024, 64, 16


class Residual(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key)

    def __call__(self, x):
        return x + 0.1 * self.mlp(x)


def deep():
    keys = jax.random.split(jax.random.key(0), DEPTH)
    return eqx.nn.Sequential([Stack([Residual(key) for key in keys])])


def step_of(strategy=SingleDevice, micro_batches=1, **options):
    """Returns the temporary memory of a step over `ROWS` rows, and the loss."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
    parts = np.split(x, micro_batches)
    options |= {"accumulate_grad_batches": micro_batches, "strategy": strategy()}
    trainer = quiet(deep(), optax.sgd(1e-2), loss="mse", **options)
    history = trainer.fit([(part, part[:, ::-1].copy()) for part in parts])
    step = trainer.compiled_train_step()
    return step.memory_analysis().temp_size_in_bytes, history["loss"][-1]


@pytest.mark.slow_but("SingleDevice", "FSDP")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap, FSDP])
def test_only_one_micro_batch_has_activations_in_memory(strategy):
    whole, expected = step_of(strategy)
    parts, loss = step_of(strategy, micro_batches=8)
    devices = 1 if strategy is SingleDevice else 8
    activations = ROWS // devices * WIDTH * 4 * DEPTH  # the residual stream alone
    assert parts < whole - activations / 2
    assert loss == pytest.approx(expected, rel=1e-5)


# A policy that saves all products saves most of what there is.
@pytest.mark.parametrize("remat, saves", [
    (True, True),
    ("layers[0].stacked.mlp", True),
    ("nothing_saveable", True),
    ("everything_saveable", False),
    ("layers[*]", True),
])  # fmt: skip
def test_recomputed_layers_are_not_in_memory(remat, saves):
    whole, expected = step_of()
    policy = getattr(jax.checkpoint_policies, str(remat), remat)
    less, loss = step_of(remat=policy)
    hidden = ROWS * 2 * WIDTH * 4 * DEPTH  # of the MLPs, after the activation
    assert (less < whole - hidden) == saves
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, FSDP])
def test_the_leaves_of_the_state_are_the_arguments_of_the_step(strategy):
    # With small leaves joined into one array, 300 layers compile for minutes.
    model = eqx.nn.MLP(8, "scalar", 16, depth=4, key=jax.random.key(0))
    trainer = quiet(model, loss="mse", strategy=strategy())
    trainer.fit([(np.ones((16, 8), np.float32), np.ones(16, np.float32))])
    (leaves, _), _ = trainer.compiled_train_step().args_info
    shapes = [leaf.shape for leaf in jax.tree.leaves(trainer.state)]
    assert [leaf.shape for leaf in leaves] == shapes
