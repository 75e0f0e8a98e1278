"""Replicas that train by themselves, and outer steps that bring them together."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    Mlp,
    On,
    Recorder,
    arrays,
    assert_close,
    batches,
    find_nodes,
    linear,
    make_small,
)

from jaxdp import LocalSGD, Sharded
from jaxdp.callbacks import GradientMonitor, WeightAveraging

DATA = batches(16, 16, 13, 16, 5)
"""Ragged: of 5 rows on 8 devices, three replicas have none."""
PLAIN = optax.sgd(1.0)


def fitted(strategy, optimizer, *callbacks, max_epochs=3, **options):
    """A trainer after a short fit, and its losses."""
    options |= {"strategy": strategy, "callbacks": [recorder := Recorder(), *callbacks]}
    trainer = make_small(Mlp(jax.random.key(0)), optimizer, **options)
    trainer.fit(DATA, max_epochs=max_epochs)
    return trainer, recorder.losses


def local_of(trainer):
    """The node of the optimizer's state that has the weights to evaluate."""
    is_local = lambda node: hasattr(node, "evaluated_params")  # noqa: E731
    (found,) = find_nodes(is_local, trainer.state.opt_state)
    return found


@pytest.mark.slow_but("1-1")
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_meeting_after_each_step_of_sgd_is_sharded(devices, accumulate):
    """Dropout, ragged batches and micro-batches included."""
    optimizer, options = optax.sgd(0.1), {"accumulate_grad_batches": accumulate}
    local = LocalSGD(every=1, outer=PLAIN, devices=devices)
    one, losses = fitted(local, optimizer, **options)
    other, expected = fitted(Sharded(devices), optimizer, **options)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(one.model, other.model)
    assert one.validate(DATA) == pytest.approx(other.validate(DATA), rel=1e-5)
    np.testing.assert_allclose(one.predict(DATA), other.predict(DATA), atol=1e-5)


def by_hand(model, inner, outer, data, replicas, every):
    """DiLoCo: the losses over all rows, the replicas and the outer weights."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def step(weights, state, x, y):
        def loss_of(weights):
            out = jax.vmap(eqx.combine(weights, static))(x)
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

        loss, grads = jax.value_and_grad(loss_of)(weights)
        updates, state = inner.update(grads, state, weights)
        return loss, eqx.apply_updates(weights, updates), state

    weights = [params] * replicas
    states, outer_state = [inner.init(params)] * replicas, outer.init(params)
    losses = []
    for number, (x, y) in enumerate(data, start=1):
        parts = zip(np.split(x, replicas), np.split(y, replicas), strict=True)
        found = [
            step(*own, *part) for *own, part in zip(weights, states, parts, strict=True)
        ]
        loss, weights, states = map(list, zip(*found, strict=True))
        losses.append(float(np.mean(loss)))
        if number % every == 0:
            mean = jax.tree.map(lambda *each: sum(each) / replicas, *weights)
            change = jax.tree.map(lambda old, new: old - new, params, mean)
            updates, outer_state = outer.update(change, outer_state, params)
            params = eqx.apply_updates(params, updates)
            weights = [params] * replicas
    return losses, weights, params


@pytest.mark.slow_cases("options1")
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 4}])
def test_the_numbers_are_those_of_a_loop_by_hand(options):
    data = batches(16, 16, 16, 16, 16, 16, 16)
    model = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    inner = optax.adamw(1e-2)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    losses, weights, params = by_hand(model, inner, outer, data * 2, 4, every=4)

    recorder = Recorder()
    strategy = LocalSGD(every=4, devices=4)  # the default is this outer optimizer
    trainer = make_small(
        model, inner, strategy=strategy, callbacks=[recorder], **options
    )
    trainer.fit(data, max_epochs=2)
    np.testing.assert_allclose(recorder.losses, losses, rtol=1e-5)
    assert_close(trainer.state.params, params)
    replicas = local_of(trainer).replicas
    for index, each in enumerate(weights):  # 14 steps: two since they last met
        assert_close(jax.tree.map(lambda leaf, i=index: leaf[i], replicas), each)

    mean = jax.tree.map(lambda *each: sum(each) / 4, *weights)
    assert_close(eqx.filter(trainer.model, eqx.is_inexact_array), mean)


def test_a_step_sends_the_gradients_bytes_by_how_often_replicas_meet():
    trainer = make_small(strategy=LocalSGD(every=10))
    plan = trainer.plan(DATA)
    assert "ZeRO" not in str(plan)
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(trainer.state.params))
    (outer,) = [each for each in plan.traffic if each.part == "update"]
    assert outer.optional and outer.kind == "all-reduce"
    assert outer.wire_bytes == pytest.approx(2 * 7 / 8 * parameters / 10)
    others = sum(each.operand_bytes for each in plan.traffic if each is not outer)
    assert others <= 8  # the loss and its metric
    bound = next(each for each in plan.bounds if "every 10 steps" in each.what)
    assert bound.least == pytest.approx(outer.wire_bytes)


def test_other_replicas_and_strategies_are_refused(tmp_path):
    trainer, _ = fitted(LocalSGD(every=3), optax.adam(1e-2), max_epochs=1)
    folder = trainer.save(tmp_path / "5")

    def load(strategy):
        make_small(Mlp(jax.random.key(0)), optax.adam(1e-2), strategy=strategy).load(
            folder
        )

    with pytest.raises(ValueError, match="devices=8.*devices=2"):
        load(LocalSGD(every=3, devices=2))
    text = r"`strategy` was LocalSGD\(.*, and is one that adds no state"
    with pytest.raises(ValueError, match=text):
        load(Sharded())


class Scaled(eqx.Module):
    layer: eqx.nn.Linear
    scale: jax.Array

    def __call__(self, x, key=None):
        return self.scale * self.layer(x)


def scaled():
    """A model with a parameter that is a scalar, as a learning rate is."""
    return Scaled(linear(), jnp.array(1.0))


@pytest.mark.parametrize("make_model", [lambda: Mlp(jax.random.key(0)), scaled])
def test_learning_rates_can_be_set(make_model):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    options = {"strategy": LocalSGD(every=2), "loss": "cross_entropy"}
    trainer = make_small(make_model(), optimizer, **options)
    trainer.fit(DATA)
    before = arrays(local_of(trainer).replicas)
    assert any(np.ptp(leaf, axis=0).any() for leaf in before)
    trainer.set_hyperparams(learning_rate=0.0)
    assert trainer.hyperparams == {"learning_rate": 0.0}

    # Replicas stay where they are, and meet at step 6: they are the outer weights then.
    trainer.fit(DATA, max_epochs=2, max_steps=6)
    after = arrays(local_of(trainer).replicas)
    for leaf, outer in zip(after, arrays(trainer.state.params), strict=True):
        np.testing.assert_array_equal(leaf, np.broadcast_to(outer, leaf.shape))


def test_optimizers_whose_scalars_differ_by_replica():
    optimizer = optax.contrib.dadapt_adamw(1.0)
    trainer, losses = fitted(LocalSGD(every=2), optimizer, max_epochs=1)
    assert np.isfinite(losses).all()
    (estimates,) = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(local_of(trainer).inner)
        if "estim_lr" in jax.tree_util.keystr(path)
    ]
    assert estimates.shape == (8,)


def test_hooks_of_the_step_see_the_mean_gradient_and_the_outer_weights():
    def fit(strategy):
        """Checks an average of weights, after steps without communication, too."""
        found, averaging = [], WeightAveraging(0.5)

        def note(trainer, metrics, batch_idx):
            squares = metrics["gradient_monitor/squares"]
            found.append(float(squares[0].sum() ** 0.5))

        hooks = GradientMonitor(), averaging, On(on_train_batch_end=note)
        trainer, _ = fitted(strategy, optax.sgd(0.1), *hooks, max_epochs=1)
        assert_close(trainer.model, averaging.averaged_model(trainer), 0, 0)
        return found, arrays(averaging.averaged_model(trainer))

    fit(LocalSGD(every=4))
    found, expected = fit(LocalSGD(1, PLAIN)), fit(Sharded())
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert_close(found[1], expected[1])


def test_changes_in_half_precision_are_averaged_in_float32():
    """In bfloat16 a sum of eight would lose the last bits of each."""
    start = jnp.zeros(1, jnp.bfloat16)
    strategy = LocalSGD(1, PLAIN)
    wrapped = make_small(None, optax.identity(), strategy=strategy).run.optimizer
    state = wrapped.init(start)._replace(replicas=jnp.zeros((8, 1), jnp.bfloat16))
    steps = jnp.arange(129, 137, dtype=jnp.bfloat16)[:, None]  # the mean is 132.5
    updates, _ = wrapped.update(steps, state, start)
    assert float(updates[0]) in (132.0, 133.0)  # bfloat16 has eight bits
    assert updates.dtype == jnp.bfloat16
