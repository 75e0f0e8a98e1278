"""Optimizer states split over devices: any optimizer gives one device's numbers."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from layered_models import make, resident, size, train
from optax import contrib
from toys import assert_close, batches

from jaxdp import FSDP, SingleDevice, ZeRO


def by_rank(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


OPTIMIZERS = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-3),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-3),
    "muon": lambda: contrib.muon(1e-3),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-3), "vector": optax.sgd(1e-2, 0.9)}, by_rank
    ),
    "masked": lambda: optax.masked(
        optax.adam(1e-3), lambda p: jax.tree.map(lambda leaf: leaf.ndim == 2, p)
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(1e-2, 0, 10)
    ),
    "flatten": lambda: optax.flatten(optax.adam(1e-3)),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(1e-3), 2
    ).gradient_transformation(),
}


@pytest.mark.slow_but("adafactor")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_gives_the_numbers_of_one_device(name):
    """Norms over all parameters, and over rows and columns, are those of the whole."""
    # Adafactor keeps rows and columns only of what is as wide as this.
    width = 128 if name == "adafactor" else 32
    model = eqx.nn.MLP(width, 16, width, 1, key=jax.random.key(0))
    data = [(np.tile(x, 2)[:, :width], y) for x, y in make("mlp")[1]]
    optimizer = OPTIMIZERS[name]()
    one, expected = train(model, data, SingleDevice(), optimizer)
    for strategy in (ZeRO(), FSDP()):
        trainer, losses = train(model, data, strategy, optimizer)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_close(trainer.model, one.model, rtol=1e-4, atol=2e-6)
        opt_state = trainer.state.opt_state
        if name != "flatten":  # one vector, of a length that 8 does not divide
            assert resident(opt_state) <= 1.05 * size(opt_state) / 8 + 100


def test_a_stack_of_gradients_is_split_as_its_parameter():
    """L-BFGS's memory, `(8, *shape)`; eight devices could divide its first axis."""
    model = eqx.nn.MLP(4, 3, 64, 1, key=jax.random.key(0))
    optimizer = optax.chain(optax.scale_by_lbfgs(8), optax.scale(-0.01))
    trainer, losses = train(model, batches(16, 5), FSDP(), optimizer)
    memory = trainer.state.opt_state[0].diff_params_memory
    assert memory.layers[0].weight.sharding.spec == PartitionSpec(None, "data")
    expected = train(model, batches(16, 5), SingleDevice(), optimizer)[1]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
