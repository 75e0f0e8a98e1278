"""Norms by layer, update ratios, and leaves that do not learn."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import On, batches, cross_entropy, on_one_device, read_table

from jaxdp import Pmap, Sharded, SingleDevice
from jaxdp.callbacks import CSVLogger, GradientMonitor, ThroughputMonitor

DATA, KEY = batches(*[8] * 6), jax.random.key(0)


def make_trainer(*callbacks, **options):
    model = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    options = {"model": model, "optimizer": optax.sgd(0.5)} | options
    return on_one_device(*callbacks, **{"log_every_n_steps": 1, **options})


def norm(tree):
    return np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(tree)))


@pytest.mark.slow_but("Sharded(8)")
@pytest.mark.parametrize("strategy", [SingleDevice(), Sharded(8), Pmap(4)], ids=repr)
def test_norms_are_those_of_plain_jax(tmp_path, strategy):
    trainer = make_trainer(GradientMonitor(), CSVLogger(tmp_path), strategy=strategy)
    model = trainer.model
    trainer.fit(DATA[:3])
    for row, (x, y) in zip(read_table(tmp_path), DATA[:3], strict=False):
        grads = eqx.filter_grad(cross_entropy)(model, x, y)
        updates = jax.tree.map(lambda g: -0.5 * g, grads)
        weights = eqx.filter(model, eqx.is_inexact_array)
        model = eqx.apply_updates(model, updates)
        layers = {"": (grads, weights)} | {
            f"/layers[{i}]": (grads.layers[i], weights.layers[i]) for i in range(3)
        }
        for name, (gradient, weight) in layers.items():
            found = float(row[f"grad_norm{name}"]), float(row[f"update_ratio{name}"])
            ratio = 0.5 * norm(gradient) / norm(weight)
            assert found == pytest.approx((norm(gradient), ratio), rel=1e-4)


def test_values_are_logged_when_others_are(tmp_path):
    callbacks = CSVLogger(tmp_path), GradientMonitor(max_layers=0)
    make_trainer(*callbacks, log_every_n_steps=3).fit(batches(*[8] * 7))
    logged = [row for row in read_table(tmp_path) if row["loss"]]
    assert [row["step"] for row in logged] == ["3", "6"]
    names = [name for name in logged[0] if "/" in name or "_" in name]
    assert names == ["grad_norm", "update_ratio", "epoch_loss"]
    assert all(float(row["grad_norm"]) > 0 for row in logged)


def test_a_value_of_the_same_name_is_refused():
    other = On(inside_step=lambda *_: {"grad_norm": jnp.float32(0)})
    trainer = make_trainer(GradientMonitor(max_layers=0), other)
    with pytest.raises(ValueError, match="'grad_norm' is that of a metric") as raised:
        trainer.fit(DATA)
    assert "GradientMonitor" in "".join(raised.value.__notes__)


def test_a_refused_name_does_not_refuse_the_next_fit():
    def log(trainer, *_):
        if trainer.global_step == 0:
            trainer.log("norm", 1.0)

    inside = On(inside_step=lambda *_: {"norm": jnp.float32(0)})
    trainer = make_trainer(On(on_train_batch_start=log), inside)
    with pytest.raises(ValueError, match="'norm' is that of a metric"):
        trainer.fit(DATA)
    trainer.fit(DATA)


def test_the_last_values_are_among_all_that_is_logged():
    monitor = GradientMonitor(max_layers=0)
    trainer = make_trainer(monitor, ThroughputMonitor(), log_every_n_steps=4)
    trainer.fit(DATA)  # 6 steps
    last = trainer.callback_metrics
    assert {"loss", "grad_norm", "update_ratio"} <= last.keys()
    assert "throughput/examples_per_s" in last

    again = make_trainer(GradientMonitor(max_layers=0), log_every_n_steps=1)
    again.fit(DATA[:4])
    assert last["grad_norm"] == again.callback_metrics["grad_norm"]


def test_layers_are_as_deep_as_their_number_allows():
    each = [eqx.nn.Linear(4, 4, key=key) for key in jax.random.split(KEY, 9)]
    blocks = [{"attention": each[i], "mlp": each[i + 1 : i + 3]} for i in (0, 3, 6)]
    model = {"blocks": blocks, "scale": jnp.ones(())}

    def loss_fn(model, x, y):
        layers = jax.tree.leaves(model["blocks"], is_leaf=callable)
        return sum(jax.vmap(one)(x).mean(1) for one in layers) * model["scale"]

    def layers(max_layers):
        """The norms of the gradients, by layer in order."""
        monitor = GradientMonitor(max_layers=max_layers)
        trainer = make_trainer(monitor, model=model, loss=None, loss_fn=loss_fn)
        trainer.fit(DATA[:1])
        found = {k: v for k, v in trainer.callback_metrics.items() if "grad_norm" in k}
        total = found.pop("grad_norm")
        parts = {name.removeprefix("grad_norm/"): v for name, v in found.items()}
        if parts:
            assert total == pytest.approx(math.hypot(*parts.values()), rel=1e-5)
        return [*parts]

    parts = "['attention']", "['mlp'][0]", "['mlp'][1]"
    finest = [f"blocks[{i}]{part}" for i in range(3) for part in parts]
    assert layers(100) == layers(10) == [*finest, "scale"]
    halves = [f"blocks[{i}]['{part}']" for i in range(3) for part in blocks[i]]
    assert layers(9) == layers(7) == [*halves, "scale"]
    assert layers(6) == ["blocks[0]", "blocks[1]", "blocks[2]", "scale"]
    assert layers(1) == []


def test_leaves_that_do_not_learn_are_named_once_in_a_run():
    model = {"used": jnp.ones(3), "idle": jnp.ones(3), "fixed": jnp.ones(3)}
    loss_fn = lambda model, x, y: x[:, :3] @ (model["used"] * model["fixed"])  # noqa: E731
    kinds = {"yes": optax.adamw(0.1), "no": optax.set_to_zero()}
    labels = {"used": "yes", "idle": "yes", "fixed": "no"}
    options = {"model": model, "loss": None, "loss_fn": loss_fn}
    monitor = GradientMonitor()
    for _ in range(2):  # the steps of all fits of a run count, and of no other
        optimizer = optax.partition(kinds, labels)
        trainer = make_trainer(monitor, optimizer=optimizer, **options)
        trainer.fit(DATA)
        assert monitor.dead == monitor.never_updated == []
        with pytest.warns(UserWarning) as caught:
            trainer.fit(DATA, max_epochs=3)
        dead, never_updated = [str(w.message) for w in caught]
        assert re.search(r"first 10 steps, .* zero gradients .*: idle\.", dead)
        assert re.search(r"gradient and no update .*: fixed\.", never_updated)
        assert (monitor.dead, monitor.never_updated) == (["idle"], ["fixed"])


def test_a_leaf_that_learns_late_is_not_named(recwarn):
    rate = optax.join_schedules([lambda step: 0.0, lambda step: 0.1], [3])
    monitor = GradientMonitor(check_steps=6)
    make_trainer(monitor, optimizer=optax.sgd(rate)).fit(batches(*[8] * 20))
    assert monitor.never_updated == monitor.dead == [] and not recwarn.list


def test_a_monitor_may_see_another_model_before_its_check():
    monitor = GradientMonitor(check_steps=10)
    for depth in (1, 2):
        model = eqx.nn.MLP(4, 3, 8, depth, key=jax.random.key(0))
        make_trainer(monitor, model=model).fit(DATA[:4])
    assert monitor.dead == []
