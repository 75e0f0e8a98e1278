"""Layers split by rules: one device's numbers, and what theory says is moved."""

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layered_models import (
    bytes_moved,
    make,
    on_one_device,
    resident,
    size,
    train,
    transformer,
)
from toys import linear

from jaxdp import TensorParallel
from jaxdp.extras.plan import hlo
from jaxdp.strategies import tensor_rules

ON_BOTH = [
    ("layers[3].bias", P()),
    ("layers[3].weight", P(None, ("data", "model"))),
    ("layers[2].weight", P(None, ("model", "data"))),
    ("**.weight", P("model", "data")),
    ("layers[?].bias", P(("model", "data"))),
]
"""Rules that hold an MLP in eighths between steps, but for its last bias."""
CASES = {
    "4x2": ({"data": 4, "model": 2}, None, 1),
    "1x8": ({"data": 1, "model": 8}, None, 1),
    "held in shards": ({"data": 4, "model": 2}, ON_BOTH, 1),
    "held in shards, accumulated": ({"data": 4, "model": 2}, ON_BOTH, 3),
}


@pytest.mark.slow_but("4x2", "held in shards")
@pytest.mark.parametrize("case", CASES)
def test_tensor_parallel_gives_the_numbers_of_one_device(case):
    model, data = make("mlp")
    mesh_shape, rules, accumulate = CASES[case]
    strategy = TensorParallel(mesh_shape, rules or tensor_rules(model))
    trainer, losses = train(model, data, strategy, accumulate_grad_batches=accumulate)
    np.testing.assert_allclose(losses, on_one_device("mlp", accumulate), rtol=1e-5)
    both = trainer.state.params, trainer.state.opt_state
    assert resident(both) <= 1.1 * size(both) / (8 if rules else mesh_shape["model"])
    _, by_kind = bytes_moved(trainer)
    assert ("reduce-scatter" in by_kind) == bool(rules)


def test_tensor_parallel_moves_what_theory_says():
    """Per pair of layers one sum of activations forwards and one backwards; and the
    gradients of what a device holds, over the data axis."""
    model, data = make("transformer")
    strategy = TensorParallel({"data": 4, "model": 2}, tensor_rules(model))
    trainer, losses = train(model, data, strategy)
    np.testing.assert_allclose(losses, on_one_device("transformer", 1), rtol=1e-5)
    program = hlo.read(trainer.compiled_train_step().as_text())
    assert {each.kind for each in program.collectives} == {"all-reduce"}
    shape = dict(strategy.mesh.shape)
    over = {"model": 0.0, "data": 0.0}
    for each in program.collectives:
        axes = each.axes(shape)
        if each.operand_bytes > 100:
            assert axes is not None and len(axes) == 1
            over[axes[0]] += each.wire_bytes
    activations = 32 // 4 * 8 * 32 * 4  # rows, places, width, bytes
    # Forwards one for attention and one for the MLP; backwards the MLP's, and those of
    # attention's three inputs, which XLA sums one by one.
    assert over["model"] == (2 + 1 + 3) * (2 * 1 / 2) * activations
    held = sum(
        leaf.addressable_data(0).nbytes
        for leaf in jax.tree.leaves(trainer.state.params)
    )
    assert held <= over["data"] / (2 * 3 / 4) <= held + 100


def test_rules_of_words_split_embedding_and_head_with_the_numbers_of_one_device():
    model, data = make("transformer")
    words = P("model")
    rules = [*tensor_rules(model), ("embedding.weight", words), ("last.*", words)]
    strategy = TensorParallel({"data": 4, "model": 2}, rules)
    trainer, losses = train(model, data, strategy)
    np.testing.assert_allclose(losses, on_one_device("transformer", 1), rtol=1e-5)
    both = trainer.state.params, trainer.state.opt_state
    assert resident(both) <= 0.52 * size(both)  # without these rules 0.6


def test_tensor_rules_are_for_pairs_of_layers():
    model = transformer(jax.random.key(0))
    rules = dict(tensor_rules(model.blocks[0], "m"))
    assert rules == {
        "attention.query_proj.weight": P("m", None),
        "attention.key_proj.weight": P("m", None),
        "attention.value_proj.weight": P("m", None),
        "attention.output_proj.weight": P(None, "m"),
        "mlp.layers[0].weight": P("m", None),
        "mlp.layers[0].bias": P("m"),
        "mlp.layers[1].weight": P(None, "m"),
    }
    odd = [
        path for path, _ in tensor_rules(eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0)))
    ]
    assert odd == ["layers[0].weight", "layers[0].bias", "layers[1].weight"]
    with pytest.raises(ValueError, match="has no eqx.nn.MLP of two or more layers"):
        tensor_rules(linear())
