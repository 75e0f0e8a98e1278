"""Norms by layer, update ratios, and leaves that do not learn."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import batches, cross_entropy, on_one_device, read_table

from jaxdp import Pmap, Sharded, SingleDevice
from jaxdp.callbacks import CSVLogger, GradientMonitor
from jaxdp.callbacks.gradient_monitor import group_by_layer


def make_trainer(*callbacks, **options):
    model = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    options = {"model": model, "optimizer": optax.sgd(0.5)} | options
    return on_one_device(*callbacks, **{"log_every_n_steps": 1, **options})


def norm(tree):
    return np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(tree)))


@pytest.mark.slow_but("Sharded(8)")
@pytest.mark.parametrize("strategy", [SingleDevice(), Sharded(8), Pmap(4)], ids=repr)
def test_norms_are_those_of_plain_jax(tmp_path, strategy):
    data = batches(*[8] * 3)
    trainer = make_trainer(GradientMonitor(), CSVLogger(tmp_path), strategy=strategy)
    model = trainer.model
    trainer.fit(data)
    for row, (x, y) in zip(read_table(tmp_path), data, strict=False):
        grads = eqx.filter_grad(cross_entropy)(model, x, y)
        updates = jax.tree.map(lambda g: -0.5 * g, grads)
        weights = eqx.filter(model, eqx.is_inexact_array)
        model = eqx.apply_updates(model, updates)
        assert float(row["grad_norm"]) == pytest.approx(norm(grads), rel=1e-4)
        ratio = norm(updates) / norm(weights)
        assert float(row["update_ratio"]) == pytest.approx(ratio, rel=1e-4)
        for i in range(3):
            layer, weight = grads.layers[i], weights.layers[i]
            found = float(row[f"grad_norm/layers[{i}]"])
            assert found == pytest.approx(norm(layer), rel=1e-4)
            found = float(row[f"update_ratio/layers[{i}]"])
            assert found == pytest.approx(0.5 * norm(layer) / norm(weight), rel=1e-4)


def test_values_are_logged_when_others_are(tmp_path):
    callbacks = CSVLogger(tmp_path), GradientMonitor(max_layers=0)
    make_trainer(*callbacks, log_every_n_steps=3).fit(batches(*[8] * 7))
    logged = [row for row in read_table(tmp_path) if row["loss"]]
    assert [row["step"] for row in logged] == ["3", "6"]
    names = [name for name in logged[0] if "/" in name or "_" in name]
    assert names == ["grad_norm", "update_ratio", "epoch_loss"]
    assert all(float(row["grad_norm"]) > 0 for row in logged)


def test_layers_are_as_deep_as_their_number_allows():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    blocks = [{"attention": linear, "mlp": [linear, linear]} for _ in range(3)]
    model = eqx.filter({"blocks": blocks, "scale": jnp.ones(())}, eqx.is_inexact_array)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model)]

    finest = group_by_layer(paths, 100)
    block = ["blocks[0]['attention']", "blocks[0]['mlp'][0]", "blocks[0]['mlp'][1]"]
    assert list(finest)[:3] == block
    assert len(finest) == 10 and finest["scale"] == [18]
    halves = ["blocks[0]['attention']", "blocks[0]['mlp']"]
    assert list(group_by_layer(paths, 7))[:2] == halves
    blocks = group_by_layer(paths, 6)
    assert list(blocks) == ["blocks[0]", "blocks[1]", "blocks[2]", "scale"]
    assert sorted(sum(blocks.values(), [])) == list(range(19))
    assert list(group_by_layer(paths, 2)) == ["blocks", "scale"]
    assert group_by_layer(paths, 1) == {} and group_by_layer([], 5) == {}


class Partly(eqx.Module):
    used: eqx.nn.Linear
    unused: eqx.nn.Linear
    fixed: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.used = eqx.nn.Linear(4, 8, key=keys[0])
        self.unused = eqx.nn.Linear(8, 8, key=keys[1])
        self.fixed = eqx.nn.Linear(8, 3, key=keys[2])

    def __call__(self, x):
        x = jax.nn.relu(self.used(x))
        return self.fixed(x + 0 * jax.lax.stop_gradient(self.unused(x)))


def test_leaves_that_do_not_learn_are_named_once():
    def label(path, _):
        return "no" if path[0].name == "fixed" else "yes"

    optimizer = optax.partition(
        {"yes": optax.adam(0.1), "no": optax.set_to_zero()},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )
    monitor = GradientMonitor(check_steps=5)
    model = Partly(jax.random.key(0))
    trainer = make_trainer(monitor, model=model, optimizer=optimizer)
    with pytest.warns(UserWarning) as caught:
        trainer.fit(batches(*[8] * 4), max_epochs=3)
    dead, never_updated = [str(w.message) for w in caught]
    assert re.search("first 5 steps, .* zero gradients .*: unused.weight, un", dead)
    assert re.search("gradient and no update .*: fixed.weight, fixed", never_updated)
    assert monitor.dead == ["unused.weight", "unused.bias"]
    assert monitor.never_updated == ["fixed.weight", "fixed.bias"]


def test_a_leaf_that_learns_late_is_not_named(recwarn):
    def late_rate(step):
        return jnp.where(step < 3, 0.0, 0.1)

    monitor = GradientMonitor(check_steps=6)
    trainer = make_trainer(monitor, optimizer=optax.sgd(late_rate))
    trainer.fit(batches(*[8] * 20))
    assert monitor.never_updated == monitor.dead == [] and not recwarn.list


def test_a_monitor_may_see_another_model_before_its_check():
    monitor = GradientMonitor(check_steps=10)
    for depth in (1, 2):
        model = eqx.nn.MLP(4, 3, 8, depth, key=jax.random.key(0))
        make_trainer(monitor, model=model).fit(batches(*[8] * 4))
    assert monitor.dead == []


def test_the_check_goes_on_over_the_fits_of_a_run_and_anew_in_another():
    model, monitor = {"used": jnp.ones(3), "idle": jnp.ones(3)}, GradientMonitor()
    loss_fn = lambda model, x, y: x[:, :3] @ model["used"]  # noqa: E731
    for _ in range(2):
        trainer = make_trainer(monitor, model=model, loss=None, loss_fn=loss_fn)
        trainer.fit(batches(*[8] * 6))
        assert monitor.dead == []
        with pytest.warns(UserWarning, match="zero gradients .*: idle"):
            trainer.fit(batches(*[8] * 6), max_epochs=2)
        assert monitor.dead == ["idle"]
