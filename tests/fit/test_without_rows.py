"""Training without rows: batches of a `Whole` alone, and no batches at all."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from toys import On, Recorder, quiet

from jaxdp import (
    FSDP,
    LocalSGD,
    Part,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    Whole,
    ZeRO,
)

POINTS = np.linspace(0, 1, 11, dtype=np.float32)
STEPS = 7


def net():
    return eqx.nn.MLP("scalar", "scalar", 16, 1, jnp.tanh, key=jax.random.key(0))


def residual(model, points):
    """Of y' = y, y(0) = 1."""
    slopes = jax.vmap(jax.grad(model))(points) - jax.vmap(model)(points)
    return jnp.mean(slopes**2) + (model(jnp.float32(0)) - 1) ** 2


def without_batch(model):
    return residual(model, jnp.asarray(POINTS))


def with_metrics(model, points):
    return residual(model, points), {"middle": model(points[5])}


def by_hand(loss=without_batch, steps=STEPS):
    model, optimizer = net(), optax.adam(0.01)
    state, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
    for _ in range(steps):
        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state)
        model = eqx.apply_updates(model, updates)
        losses.append(float(value))
    return losses


def trainer(loss_fn=without_batch, optimizer=None, **options):
    recorder, optimizer = Recorder(), optimizer or optax.adam(0.01)
    options |= {"loss_fn": loss_fn, "callbacks": [recorder]}
    return recorder, quiet(net(), optimizer, **options)


RULES = [("layers[0].weight", PartitionSpec("model"))]
LAYOUTS = {
    "one": lambda: {"strategy": SingleDevice()},
    "three": lambda: {"strategy": Sharded(3)},
    "jit": lambda: {"strategy": Sharded(), "steps_per_execution": 3},
    "pmap": lambda: {"strategy": Pmap()},
    "zero": lambda: {"strategy": ZeRO()},
    "fsdp": lambda: {"strategy": FSDP(min_size=1)},
    "tensors": lambda: {"strategy": TensorParallel({"data": 2, "model": 4}, RULES)},
    "local": lambda: {"strategy": LocalSGD(every=1, outer=optax.sgd(1.0))},
}


@pytest.mark.slow_but("jit", "fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_without_a_batch_is_trained(layout):
    recorder, found = trainer(**LAYOUTS[layout]())
    history = found.fit(max_steps=STEPS)
    np.testing.assert_allclose(recorder.losses, by_hand(), rtol=1e-4)
    assert history["loss"] == [pytest.approx(np.mean(recorder.losses), rel=1e-5)]
    assert found.global_step == STEPS


def test_a_loss_fn_may_be_an_empty_container():
    class Losses(list):
        def __call__(self, model):
            return without_batch(model)

    recorder, found = trainer(Losses(), strategy=SingleDevice())
    found.fit(max_steps=2)
    np.testing.assert_allclose(recorder.losses, by_hand(steps=2), rtol=1e-4)


@pytest.mark.slow_but("jit-alone", "pmap-tuple", "fsdp-list")
@pytest.mark.parametrize(
    "batch",
    [Whole(POINTS), (Whole(POINTS),), [Whole(jnp.asarray(POINTS))]],
    ids=["alone", "tuple", "list"],
)
@pytest.mark.parametrize("layout", ["jit", "pmap", "fsdp"])
def test_a_whole_counts_as_one_row(layout, batch, caplog):
    recorder, found = trainer(with_metrics, **LAYOUTS[layout]())
    history = found.fit([batch] * STEPS, [batch], max_epochs=1)
    np.testing.assert_allclose(recorder.losses, by_hand(), rtol=1e-4)
    expected = float(without_batch(found.model))
    assert history["val_loss"] == [pytest.approx(expected, rel=1e-4)]
    assert found.validate([batch])["val_loss"] == pytest.approx(expected, rel=1e-4)
    assert "middle" in history and "is a scalar" not in caplog.text
    with pytest.raises(ValueError, match="predictions are made of .*jaxdp.Whole"):
        found.predict([batch])


def test_batches_are_accumulated_and_seen_as_they_were_given():
    seen, data = [], [Whole(POINTS), Whole(POINTS / 2)] * 3
    recorder, found = trainer(residual, accumulate_grad_batches=2)
    found.callbacks += [On(on_train_batch_start=lambda trainer, b, _: seen.append(b))]
    found.fit(data, max_epochs=1)

    def both(model):
        return (residual(model, POINTS) + residual(model, POINTS / 2)) / 2

    np.testing.assert_allclose(recorder.losses, by_hand(both, 3), rtol=1e-4)
    assert [type(each) for each in seen[0]] == [Whole, Whole]
    np.testing.assert_array_equal(seen[0][1].array, POINTS / 2)


def test_epochs_parts_ensembles_and_own_loops():
    recorder, found = trainer()
    history = found.fit(max_epochs=3, limit_train_batches=2)
    assert len(history["loss"]) == 3 and len(recorder.losses) == 6

    parts = [Part("layers[0]", without_batch, optax.adam(0.01), name="first")]
    _, found = trainer(None, optimizer=parts)
    assert "first_loss" in found.fit(max_steps=2)

    many = jax.tree.map(lambda x: jnp.stack([x] * 2) if eqx.is_array(x) else x, net())
    found = quiet(many, loss_fn=without_batch, ensemble=2)
    assert "loss[1]" in found.fit(max_steps=2)

    _, found = trainer()
    steps = found.steps()
    assert float(next(steps)["loss"]) == pytest.approx(by_hand()[0], rel=1e-5)
    steps.close()


def test_it_is_planned():
    _, found = trainer()
    assert found.plan().num_devices == 8
    assert found.plan(devices=1).num_devices == 1
    _, found = trainer(with_metrics)
    assert found.plan([Whole(POINTS)]).rows == 1


@pytest.mark.parametrize("options, arguments, error, match", [
    ({}, {}, ValueError, "no `train_loader`.*pass `max_steps`"),
    ({}, {"max_steps": -1}, ValueError, "no `train_loader`.*pass `max_steps`"),
    ({"loss_fn": residual}, {"max_steps": 2}, TypeError, "0 element"),
    ({"loss_fn": None, "loss": "mse"}, {"max_steps": 2}, TypeError, "NoneType"),
])  # fmt: skip
def test_what_has_no_end_or_wants_a_batch_is_told(options, arguments, error, match):
    _, found = trainer(**options)
    with pytest.raises(error, match=match):
        found.fit(**arguments)
