"""Several networks in a tuple, a list or a dict, as one model."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from toys import arrays, assert_close, assert_equal_leaves, batches, quiet, rows

import jaxdp
from jaxdp import FSDP, Part, SingleDevice, TensorParallel
from jaxdp.callbacks import ModelCheckpoint

KEYS = jax.random.split(jax.random.key(0))
ENCODER = eqx.nn.MLP(4, 8, 16, 1, key=KEYS[0])
HEAD = eqx.nn.Linear(8, 3, key=KEYS[1])
Named = collections.namedtuple("Named", "encoder head")

KINDS = {
    "tuple": ((ENCODER, HEAD), "[0]", "[1]"),
    "list": ([ENCODER, HEAD], "[0]", "[1]"),
    "dict": ({"encoder": ENCODER, "head": HEAD}, "encoder", "head"),
    "named tuple": (Named(ENCODER, HEAD), "encoder", "head"),
}


class Both(eqx.Module):
    encoder: eqx.nn.MLP
    head: eqx.nn.Linear


def loss_fn(model, x, y):
    model = vars(model) if isinstance(model, Both) else model
    encoder, head = model.values() if isinstance(model, dict) else model
    logits = jax.vmap(lambda x: head(encoder(x)))(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def make(kind, strategy=None, optimizer=None, **options):
    options = {"loss_fn": loss_fn, "strategy": strategy or SingleDevice()} | options
    return quiet(KINDS[kind][0], optimizer or optax.adam(1e-2), **options)


@pytest.fixture(scope="module")
def expected():
    """The trained arrays of a module that holds the two models."""
    both = quiet(
        Both(ENCODER, HEAD), optax.adam(1e-2), loss_fn=loss_fn, strategy=SingleDevice()
    )
    both.fit(batches(16, 16, 5), max_epochs=2)
    return arrays(both.model)


def by_rule(first):
    """The weight of a layer split by its path."""
    rules = [(f"{first}.layers[0].weight", PartitionSpec("model"))]
    return TensorParallel({"data": 4, "model": 2}, rules)


@pytest.mark.slow_but(
    "<lambda>0-tuple", "<lambda>1-list", "by_rule-dict", "<lambda>0-named tuple"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [
    lambda first: SingleDevice(), lambda first: FSDP(min_size=1), by_rule,
])  # fmt: skip
def test_several_models_train_as_a_module_of_them(kind, strategy, expected):
    trainer = make(kind, strategy(KINDS[kind][1]))
    trainer.fit(batches(16, 16, 5), max_epochs=2)
    assert type(trainer.model) is type(KINDS[kind][0])
    assert jax.tree.structure(trainer.model) == jax.tree.structure(KINDS[kind][0])
    assert_close(trainer.model, expected, rtol=1e-4)


@pytest.mark.slow_but("tuple", "dict")
@pytest.mark.parametrize("kind", KINDS)
def test_their_paths_are_written_as_users_write_them(kind, tmp_path):
    model, first, second = KINDS[kind]
    parts = [
        Part(first, loss_fn, optax.adam(1e-2), name="one"),
        Part([f"{second}.bias"], loss_fn, optax.sgd(0.1), name="two"),
    ]
    trainer = make(kind, optimizer=parts, loss_fn=None)
    trainer.fit(batches(16, 16))
    np.testing.assert_array_equal(arrays(trainer.model)[-2], arrays(model)[-2])
    text = str(trainer.summary())
    assert f"{first}.layers[0]" in text and f"{second}" in text and "['" not in text

    # Checkpoints and files of weights.
    path = trainer.save(tmp_path / "saved")
    again = make(kind, optimizer=parts, loss_fn=None)
    again.load(path)
    again.fit(batches(16, 16), max_epochs=2)
    found = jaxdp.load_model(path, like=model)
    assert_equal_leaves(arrays(found), arrays(trainer.model))
    wider = eqx.tree_at(lambda m: jax.tree.leaves(m)[-1], model, jnp.zeros(4))
    again = quiet(wider, parts)
    for load in (lambda: jaxdp.load_model(path, like=wider), lambda: again.load(path)):
        with pytest.raises(ValueError) as caught:
            load()
        assert f"{second}.bias" in str(caught.value) and ": ['" not in str(caught.value)


def test_files_of_weights_keep_the_paths(tmp_path):
    model = KINDS["dict"][0]
    safetensors = pytest.importorskip("safetensors.numpy")
    path = jaxdp.save_model(tmp_path / "model.safetensors", model)
    names = safetensors.load_file(path).keys()
    assert "encoder.layers[0].weight" in names and "head.bias" in names
    found = jaxdp.load_model(path, like=model)
    assert eqx.tree_equal(found, model)

    # As files were written before.
    old = {
        f"['{n.partition('.')[0]}'].{n.partition('.')[2]}": v
        for n, v in safetensors.load_file(path).items()
    }
    safetensors.save_file(old, path)
    assert eqx.tree_equal(jaxdp.load_model(path, like=model), model)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_filtered_and_passed_over(kind, tmp_path):
    model, _, second = KINDS[kind]
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(
        lambda m: m[second] if kind == "dict" else m[1], spec, replace=True
    )
    saver = ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = make(kind, filter_spec=spec, callbacks=[saver])
    trainer.fit(batches(16), batches(8), max_epochs=2)
    before, after = arrays(model), arrays(trainer.model)
    same = [np.array_equal(*each) for each in zip(before, after, strict=True)]
    assert same == [True] * 4 + [False] * 2
    assert trainer.test(batches(8), "best")["test_loss"] == saver.best_model_score
    assert "MLP" in repr(trainer) and "Linear" in repr(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_loss_that_calls_them_they_are_refused(kind):
    model = KINDS[kind][0]
    with pytest.raises(TypeError, match=r"a list of models.*`loss_fn\(model.*Part"):
        quiet(model)
    with pytest.raises(TypeError, match="calls the model on one example"):
        make(kind).predict([rows(4)[0]])
