"""Which arrays decay, and how long a schedule lasts."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import quiet

from jaxdp import Arrays, Stack, decay_mask, steps_of


class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        self.linear, self.norm = eqx.nn.Linear(4, 4, key=key), eqx.nn.LayerNorm(4)

    def __call__(self, x):
        return self.norm(self.linear(x))


def model_of_all_kinds():
    keys = jax.random.split(jax.random.key(0), 6)
    return {
        "embedding": eqx.nn.Embedding(8, 4, key=keys[0]),
        "convolution": eqx.nn.Conv1d(4, 4, 3, key=keys[1]),
        "block": Block(keys[2]),
        "stack": Stack([Block(key) for key in keys[3:5]]),
        "image_norm": eqx.nn.LayerNorm((4, 4)),
        "head": eqx.nn.Linear(4, 2, key=keys[5]),
    }


WEIGHTS = {
    "embedding.weight",
    "convolution.weight",
    "block.linear.weight",
    "stack.stacked.linear.weight",
    "head.weight",
}


@pytest.mark.parametrize("exclude, decayed", [
    ((), WEIGHTS),
    (("embedding.*", "head.weight"), WEIGHTS - {"embedding.weight", "head.weight"}),
    (("*.linear.*",), {"embedding.weight", "convolution.weight", "head.weight"}),
])  # fmt: skip
def test_matrices_decay_and_neither_biases_nor_norms(exclude, decayed):
    params = eqx.filter(model_of_all_kinds(), eqx.is_inexact_array)
    mask = decay_mask(*exclude)(params)
    leaves = jax.tree.leaves_with_path(mask)
    write = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    assert {write(path) for path, decays in leaves if decays} == decayed


def mlp():
    return eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))


def loader_of(rows):
    return Arrays(np.ones((rows, 4), "f4"), np.ones((rows, 2), "f4"), batch_size=8)


def test_a_trainer_decays_only_what_the_mask_says():
    # A rate at which Adam itself moves nothing, and the decay a tenth of each weight.
    optimizer = optax.adamw(1e-8, weight_decay=1e7, mask=decay_mask())
    trainer = quiet(mlp(), optimizer, loss="mse")
    trainer.fit(loader_of(8))
    for old, new in zip(mlp().layers, trainer.model.layers, strict=True):
        np.testing.assert_allclose(new.weight, 0.9 * old.weight, atol=1e-6)
        np.testing.assert_allclose(new.bias, old.bias, atol=1e-6)


@pytest.mark.parametrize("rows, every", [(40, 1), (44, 3)])
def test_steps_are_those_that_a_fit_takes(rows, every):
    loader, options = loader_of(rows), {"accumulate_grad_batches": every}
    trainer = quiet(mlp(), loss="mse", **options)
    trainer.fit(loader, max_epochs=3)
    assert trainer.global_step == steps_of(loader, 3, **options)
