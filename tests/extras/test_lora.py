"""Adapters on linear layers: trained alone, saved alone, merged at the end."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import Deep, batches, on_one_device

import jaxdp
from jaxdp import FSDP
from jaxdp.callbacks import ModelCheckpoint
from jaxdp.extras import cli

KEY = jax.random.key(1)
PATTERNS = ["blocks.stacked.linear", "last"]


def read_weights(path, file):
    """The arrays that the command writes of a checkpoint."""
    assert cli.main(["export", str(path), str(file)]) == 0
    return np.load(file)


def adapted(**options):
    return jaxdp.lora(Deep(4), PATTERNS, 2, key=KEY, **options)


def outputs(model):
    x = jnp.asarray(batches(8, 8)[0][0])
    model = eqx.nn.inference_mode(model)
    return np.asarray(jax.vmap(model)(x))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_adapters_alone_are_trained_and_merged_they_give_the_same(precision):
    base, model = Deep(4), adapted(alpha=4)
    np.testing.assert_array_equal(outputs(model), outputs(base))
    trainer = on_one_device(model=model, strategy=FSDP(), precision=precision)
    trainer.fit(batches(16, 16), max_epochs=2)
    trained = trainer.model
    for find in (
        lambda m: m.first, lambda m: m.last, lambda m: m.blocks.stacked.linear
    ):  # fmt: skip
        np.testing.assert_array_equal(find(base).weight, find(trained).weight)
    assert np.abs(trained.blocks.stacked.linear.up).min() > 0
    leaves = jax.tree_util.tree_leaves_with_path(trainer.state.params)
    assert {jax.tree_util.keystr(path[-1:]) for path, _ in leaves} == {".down", ".up"}

    merged = jaxdp.merge_lora(trained)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    assert np.abs(outputs(trained) - outputs(base)).max() > 1e-2
    np.testing.assert_allclose(outputs(merged), outputs(trained), atol=1e-6)


def test_checkpoints_have_the_adapters_alone(tmp_path, caplog):
    def trained(epochs, ckpt_path=None, model=None, folder="run"):
        saver = ModelCheckpoint(tmp_path / folder)
        trainer = on_one_device(saver, model=model or adapted())
        trainer.fit(batches(16, 16), max_epochs=epochs, ckpt_path=ckpt_path)
        return trainer

    trained(1)
    resumed, whole = trained(2, "last"), trained(2, folder="other")
    assert eqx.tree_equal(resumed.model, whole.model)
    path = tmp_path / "run" / "4"
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(resumed.state.params))
    stored = read_weights(path, tmp_path / "weights.npz")
    assert {name.rpartition(".")[2] for name in stored} == {"down", "up"}
    assert "has 4 arrays of adapters, and not what is beside them" in caplog.text
    assert sum(leaf.nbytes for leaf in stored.values()) == size

    # The model comes back on the weights that it was made with, and on no others.
    loaded = jaxdp.load_model(path, like=adapted())
    assert eqx.tree_equal(loaded, resumed.model)
    assert resumed.validate(batches(8, 8), ckpt_path="last")
    shapes = eqx.filter_eval_shape(adapted)
    with pytest.raises(ValueError, match="has adapters alone; pass the model"):
        jaxdp.load_model(path, like=shapes)
    other = eqx.tree_at(lambda m: m.first.weight, adapted(), replace_fn=lambda w: w + 1)
    with pytest.raises(ValueError, match="first.weight of the model that they were tr"):
        on_one_device(model=other).load(path)


def test_what_changes_frozen_weights_has_them_saved(tmp_path):
    def shrink(model):
        return eqx.tree_at(lambda m: m.first.weight, model, replace_fn=lambda w: w / 2)

    trainer = on_one_device(model=adapted(), after_update=shrink)
    trainer.fit(batches(16, 16))
    path = trainer.save(tmp_path / "saved")
    assert "first.weight" in read_weights(path, tmp_path / "weights.npz")
    loaded = jaxdp.load_model(path, like=eqx.filter_eval_shape(adapted))
    assert eqx.tree_equal(loaded, trainer.model)


def test_patterns_train_more_than_the_adapters():
    model = adapted()
    trainer = on_one_device(model=model, filter_spec=["**.down", "**.up", "first"])
    trainer.fit(batches(16, 16))
    assert trainer.state.params.first.weight is not None
    assert trainer.state.params.last.weight is None
    with pytest.raises(ValueError, match="`filter_spec`: 'frist' matches no submodule"):
        on_one_device(model=model, filter_spec=["frist"])
