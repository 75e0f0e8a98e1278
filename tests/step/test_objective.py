"""`loss_fn` in every form, and how models are called."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, On, batches, linear, linear_on_one_device, make_small, quiet

from jaxdp import Pmap, Sharded, SingleDevice

softmax = optax.softmax_cross_entropy_with_integer_labels


OF_BATCHES = {
    "vmapped": jax.vmap(lambda p, y: -jax.nn.log_softmax(p)[y]),
    "pairs": lambda p, y: (
        jnp.abs(p[:, None] - p[None]).sum(-1) * (y[:, None] == y[None])
    ).mean(1),
    "a mean": lambda p, y: softmax(p, y).mean(),
}
"""Of as many rows as features."""


@pytest.mark.parametrize("name", OF_BATCHES)
def test_a_loss_that_is_written_for_a_batch_is_not_taken_for_one_of_an_example(name):
    data = [(np.ones((4, 4), np.float32), np.arange(4))]
    trainer = make_small(linear(4, 4), loss=OF_BATCHES[name])
    assert np.isfinite(trainer.fit(data)["loss"][-1])


def cross_entropy(model, x, y):
    return softmax(jax.vmap(model)(x), y)


@pytest.mark.parametrize("options", [
    {"strategy": SingleDevice()},
    {"strategy": Sharded(), "steps_per_execution": 2},
    {"strategy": Pmap(), "accumulate_grad_batches": 2},
])  # fmt: skip
def test_a_loss_may_name_the_step_and_whether_it_trains(options):
    seen = []

    def see(trainer, metrics, batch_idx):
        seen.append((metrics["step_no"], metrics["trains"]))

    def loss_fn(model, x, y, step, *, training):
        assert isinstance(training, bool) and step.dtype == jnp.int32
        here = {"step_no": jnp.full(len(x), step), "trains": jnp.full(len(x), training)}
        return cross_entropy(model, x, y) * (1 + step), here

    data, see = batches(16, 16, 16, 16), On(on_train_batch_end=see)
    trainer = make_small(loss_fn=loss_fn, callbacks=[see], **options)
    history = trainer.fit(data, data, max_epochs=2)
    steps = 8 // options.get("accumulate_grad_batches", 1)
    assert seen == [(step, 1) for step in range(steps)]
    assert history["val_step_no"] == [steps // 2, steps]
    assert history["val_trains"] == [0, 0]


def test_a_key_per_batch_differs_from_step_to_step_and_repeats_with_the_seed():
    def loss_fn(model, x, y, key):
        return cross_entropy(model, x, y), {"noise": jax.random.uniform(key)}

    def noise(seed):
        trainer = make_small(loss_fn=loss_fn, seed=seed)
        return [float(metrics["noise"]) for metrics in trainer.steps(batches(8, 8, 8))]

    found = [noise(seed) for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert len({*found[0], *found[2]}) == 6


def test_a_mean_by_the_mask_is_finite_where_a_micro_batch_is_empty():
    def loss_fn(model, x, y, mask):
        return jnp.where(mask, cross_entropy(model, x, y), 0).sum() / mask.sum()

    trainer = make_small(loss_fn=loss_fn, accumulate_grad_batches=3)
    trainer.fit(batches(8, 8, 8, 8), max_epochs=2)
    assert np.isfinite(trainer.history["loss"]).all()


def test_a_model_may_give_and_take_pytrees():
    class Two(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return {"a": self.linear(x["left"]), "b": x["right"].sum()}

    def loss(prediction, target):
        return ((prediction["a"] - target["a"]) ** 2).mean(axis=1)

    x = {"left": np.ones((9, 4), np.float32), "right": np.ones((9, 2), np.float32)}
    trainer = quiet(Two(linear()), loss=loss)
    trainer.fit([(x, {"a": np.zeros((9, 3), np.float32)})])
    predicted = trainer.predict([x])
    assert predicted["a"].shape == (9, 3)
    np.testing.assert_array_equal(predicted["b"], np.full(9, 2.0))


def test_of_a_scalar_metric_it_is_said_once_that_it_is_a_mean_of_batches(caplog):
    metrics = {
        "spread": lambda prediction, y: jnp.std(prediction),
        "narrow": lambda prediction, y: jnp.abs(prediction).mean(axis=1),
    }

    def told():
        return [each for each in caplog.messages if "is a scalar" in each]

    trainer, data = linear_on_one_device(metrics=metrics), batches(16, 5)
    trainer.plan(data)
    assert told() == []
    trainer.fit(data, data, max_epochs=2)
    found = trainer.validate(data)
    (text,) = told()
    assert "'spread' is a scalar" in text
    of_batches = [jnp.std(jax.vmap(trainer.model)(x)) for x, _ in data]
    expected = np.average(of_batches, weights=[16, 5])
    assert found["val_spread"] == pytest.approx(expected)


@pytest.mark.parametrize("returned, inference", [
    ("given", False), ("new", False), ("set", False), ("given", True), ("new", True),
])  # fmt: skip
def test_a_state_that_is_returned_as_it_was_given_is_said(returned, inference, caplog):
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))

    def loss_fn(model, x, y, state):
        over_rows = jax.vmap(model, (0, None), (0, None), axis_name="batch")
        if returned == "set":
            index = model.norm.batch_counter
            state = state.set(index, state.get(index) + 1)
        logits, new = over_rows(x, state)
        return softmax(logits, y), state if returned == "given" else new

    model = eqx.nn.inference_mode(model, inference)
    trainer = quiet(model, state=state, loss_fn=loss_fn)
    trainer.validate(batches(16))
    assert "returns the `state`" not in caplog.text
    trainer.fit(batches(16))
    is_said = "`loss_fn` returns the `state` that it was given" in caplog.text
    assert is_said == (returned == "given" and not inference)
