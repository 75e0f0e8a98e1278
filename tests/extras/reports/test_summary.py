"""The table of a model's layers, before and after it is placed, and `repr`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from toys import Mlp, NormNet, batches, linear, make_small, quiet

from jaxdp import FSDP, DataParallel, Members, Part, Sharded, SingleDevice

KEY = jax.random.key(0)


def layer(summary, path):
    return next(each for each in summary.layers if each.path == path)


def test_it_has_the_arrays_of_each_module_with_what_is_trained_of_them():
    options = {"filter_spec": ["first.weight", "last"], "strategy": SingleDevice()}
    found = quiet(Mlp(KEY), **options).summary()

    kinds = {each.path: each.kind for each in found.layers}
    assert kinds == {"first": "Linear", "last": "Linear", "": "Mlp"}
    first = layer(found, "first")
    assert first.arrays == {"weight": (16, 4), "bias": (16,)}
    assert (first.parameters, first.trained, first.bytes) == (80, 64, 320)
    assert layer(found, "").arrays == {"offsets int32": (3,), "flags bool": (2,)}
    assert (found.parameters, found.trained) == (136, 64 + 51)
    assert found.bytes == found.bytes_per_device == 4 * 134 + 2

    # It is shown as it is printed, flush.
    assert repr(found) == str(found)
    title, header, *rows = str(found).splitlines()
    assert title == "Mlp: 136 parameters, 538 B"
    assert header.split() == "layer class arrays parameters bytes trained".split()
    assert rows[0].split()[-3:] == ["320", "B", "64"]
    assert rows[1].split()[-3:] == ["204", "B", "yes"]
    assert rows[2].split()[-3:] == ["14", "B", "no"]
    assert rows[-1] == "trained: 115 parameters; not trained: 21 parameters"


def test_what_a_device_holds_is_known_before_the_model_is_placed():
    trainer = quiet(Mlp(KEY), loss="cross_entropy", strategy=FSDP(min_size=1))
    before = trainer.summary()
    assert not trainer.run.has_engine
    assert trainer.run.compiled_facts() == ({}, ())

    trainer.fit(batches(16))
    after = trainer.summary()
    assert after == before

    state = trainer.state
    held = [
        shard.data.nbytes
        for leaf in jax.tree.leaves((state.params, state.buffers))
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    ]
    assert after.bytes_per_device == sum(held) < after.bytes
    assert f"each of 8 devices holds {sum(held)} B: FSDP" in str(after)
    assert "per device" in str(after).splitlines()[1]


def test_parts_and_members_and_state_are_told():
    def loss(model, x, y):
        return jnp.zeros(len(x))

    parts = [
        Part("first", loss, optax.sgd(1.0)),
        Part(["last.bias"], loss, optax.sgd(1.0), name="head"),
    ]
    found = quiet(Mlp(KEY), parts).summary()
    assert layer(found, "first").by == "first" and layer(found, "last").by == "head"
    assert "  by first" in str(found) and "  3 by head" in str(found)
    assert found.trained == 83

    models = eqx.filter_vmap(Mlp)(jax.random.split(KEY, 8))
    found = quiet(models, ensemble=8, strategy=Members()).summary()
    assert "of 8 members with 136 each" in str(found)
    assert found.bytes_per_device == found.bytes // 8

    model, state = eqx.nn.make_with_state(NormNet)(KEY)
    found = quiet(model, state=state, precision="bf16-true").summary()
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert found.state == (numbers, 4 * numbers)
    assert layer(found, "first").bytes == 2 * 32  # as it is held, not as it came
    assert "weight bfloat16 (8, 4)" in str(found)


class Own(DataParallel):
    """A strategy that has no mesh."""

    def place(self, state):
        return state


def test_models_and_strategies_of_other_kinds_are_shown():
    def loss_fn(model, x):
        return x.mean()

    layers = eqx.nn.Embedding(10, 4, key=KEY), linear(4, 10)
    tied = eqx.nn.Shared(layers, lambda x: x[1].weight, lambda x: x[0].weight)
    assert quiet(tied, loss_fn=loss_fn).summary().parameters == 40 + 10

    tree = {"a": jnp.ones((3, 4)), "b": [jnp.ones(3)]}
    found = quiet(tree, loss_fn=loss_fn).summary()
    assert [each.path for each in found.layers] == ["", "b"]
    assert found.parameters == 15

    shapes = eqx.filter_eval_shape(Mlp, KEY)
    assert quiet(shapes).summary().bytes == 538
    assert quiet(Mlp(KEY), strategy=Own()).summary().bytes == 538


def test_a_trainer_says_in_a_line_what_it_is():
    trainer = make_small(strategy=Sharded(8))
    assert repr(trainer) == ("Trainer(MLP, 67 parameters, Sharded(8), step 0, epoch 0)")
    trainer.fit(batches(8, 8))
    assert repr(trainer).endswith("step 2, epoch 1)")


@pytest.mark.parametrize("name, value, message", [
    *((name, 2, f"`trainer.{name}` can't be set") for name in (
        "steps_per_execution", "accumulate_grad_batches", "seed", "strategy", "model",
        "history")),
    ("max_epochs", 3, "`trainer.max_epochs` can't be set: pass it to `fit`"),
    ("num_training_batches", 3, "pass `limit_train_batches` to `fit`"),
    ("global_step", 3, "`load` a checkpoint"),
    ("log_every_n_steps", 0, "`log_every_n_steps` must be"),
    ("default_root_dir", "gs://bucket", "`default_root_dir`"),
])  # fmt: skip
def test_what_is_set_is_checked_as_an_argument_is(name, value, message):
    with pytest.raises((AttributeError, ValueError), match=message):
        setattr(make_small(), name, value)


def test_some_attributes_are_set(tmp_path, monkeypatch):
    trainer = make_small()
    trainer.log_every_n_steps, trainer.callbacks = 3, ()
    monkeypatch.chdir(tmp_path)
    trainer.default_root_dir = "runs"
    assert trainer.default_root_dir == str(tmp_path / "runs")
