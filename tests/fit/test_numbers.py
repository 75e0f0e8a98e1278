"""A fit has the numbers of a loop by hand, under every strategy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    RAGGED,
    Mlp,
    Recorder,
    assert_close,
    assert_equal_leaves,
    batches,
    cross_entropy,
    hand_written,
    linear,
    on_one_device,
    quiet,
    run,
)

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, Trainer


class Weak(eqx.Module):
    """With leaves that JAX types weakly: it computes in the type of the other side."""

    linear: eqx.nn.Linear
    scale: jax.Array

    def __call__(self, x):
        return (self.linear(x).astype(jnp.bfloat16) * self.scale).astype(jnp.float32)


def test_weakly_typed_leaves_are_the_same_in_all_layouts(tmp_path):
    model = Weak(eqx.nn.Linear(4, 3, key=jax.random.key(0)), jnp.array(1.37))
    assert model.scale.weak_type
    data = batches(8, 8, 8)
    expected, _ = run(SingleDevice(), model, data=data, epochs=4)
    losses, _ = run(FSDP(min_size=1), model, data=data, epochs=4)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

    part, rest = (on_one_device(model=model, strategy=FSDP()) for _ in range(2))
    part.fit(data, max_epochs=2)
    rest.fit(data, max_epochs=4, ckpt_path=part.save(tmp_path / "part"))
    _, whole = run(FSDP(), model, data=data, epochs=4)
    assert_equal_leaves(rest.state, whole.state)


@pytest.mark.slow_but("SingleDevice")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap])
def test_row_counts_are_sent_to_the_devices_once_for_each_size(strategy, monkeypatch):
    from jaxdp.callbacks import DonateBuffers

    sent, device_put = [], jax.device_put

    def put(leaf, *arguments, **options):
        if getattr(leaf, "shape", None) == (1, 1):
            sent.append(leaf.tolist())
        return device_put(leaf, *arguments, **options)

    monkeypatch.setattr(jax, "device_put", put)
    shared, _ = run(strategy(), epochs=3)
    assert sent == [[[16]], [[5]]]
    # Where the step may overwrite them they can't be.
    own, _ = run(strategy(), epochs=3, callbacks=[DonateBuffers("all")])
    assert len(sent) == 2
    np.testing.assert_array_equal(shared, own)


def test_batches_are_not_padded_to_one_that_was_refused():
    def losses(*before):
        trainer = on_one_device(recorder := Recorder(), strategy=Sharded())
        for data in before:
            with pytest.raises(ValueError, match="labels must be 0 to"):
                trainer.fit(data)
            with pytest.raises(ValueError, match="labels must be 0 to"):
                trainer.validate(data)
        trainer.fit(batches(8, 8), batches(8), max_epochs=2)
        return recorder.losses, trainer.history["val_loss"], trainer.run.engine.padding

    ((x, y),) = batches(64)
    assert losses([(x, y + 100)]) == losses()


def test_batches_are_not_padded_to_one_that_does_not_compile():
    def loss_fn(model, x, y, mask):
        if len(x) > 8:
            raise ValueError("too many rows")
        return jnp.square(jax.vmap(model)(x) - y).mean(-1)

    trainer = quiet(linear(4, 4), loss_fn=loss_fn, strategy=SingleDevice())
    few, many = np.ones((8, 4), np.float32), np.ones((64, 4), np.float32)
    trainer.fit([(few, few)])
    with pytest.raises(ValueError, match="too many rows"):
        trainer.fit([(many, many)], max_epochs=2)
    trainer.fit([(few, few)], max_epochs=2)
    assert trainer.run.engine.compiled_steps["train"].packer.size == 8


@jax.tree_util.register_pytree_node_class
class Counting:
    """A weight that counts how often a model is taken apart."""

    times = 0

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return x * self.weight

    def tree_flatten(self):
        Counting.times += 1
        return (self.weight,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_no_batch_takes_the_model_apart():
    x = np.ones((8, 4), np.float32)
    model = Counting(jnp.ones(4))
    trainer = Trainer(model, loss="mse", enable_progress_bar=False)
    epoch = 0

    def fit(data):
        nonlocal epoch
        epoch += 1
        trainer.fit(data, max_epochs=epoch)

    for call in (fit, trainer.validate, trainer.predict):
        call([(x, x)])  # which compiles
        times = []
        for number in (2, 9):
            Counting.times = 0
            call([(x, x)] * number)
            times.append(Counting.times)
        assert times[0] == times[1], call


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap])
def test_losses_equal_a_hand_written_loop(strategy):
    model, data = Mlp(jax.random.key(0), rate=0.0), batches(*RAGGED)
    trained, expected = hand_written(model, optax.adam(1e-2), data, 3, cross_entropy)
    losses, trainer = run(strategy(), model, epochs=3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(trainer.model, trained, rtol=1e-4)


def test_dropout_makes_a_difference_and_the_seed_decides_it():
    first, _ = run(SingleDevice(), epochs=1)
    again, _ = run(SingleDevice(), epochs=1)
    other, _ = run(SingleDevice(), epochs=1, seed=1)
    without, _ = run(SingleDevice(), Mlp(jax.random.key(0), rate=0.0), epochs=1)
    assert (first == again).all()
    assert (first != other).all()
    assert (first != without).all()


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap])
def test_metrics_and_predictions_count_every_row_once(strategy):
    data = batches(16, 16, 3)
    model = Mlp(jax.random.key(0))
    trainer = quiet(
        model, loss="cross_entropy", metrics=["accuracy"], strategy=strategy()
    )
    found = trainer.validate(data)
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    logits = jax.vmap(eqx.nn.inference_mode(model))(x)
    assert found["val_loss"] == pytest.approx(
        float(cross_entropy(eqx.nn.inference_mode(model), x, y)), rel=1e-6
    )
    assert found["val_accuracy"] == pytest.approx(
        (np.asarray(logits).argmax(1) == y).mean(), rel=1e-6
    )
    assert trainer.test(data) == {
        "test_loss": found["val_loss"],
        "test_accuracy": found["val_accuracy"],
    }
    predicted = trainer.predict(data)
    assert isinstance(predicted, np.ndarray)
    np.testing.assert_allclose(predicted, logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(trainer.predict([x for x, _ in data]), predicted)


@pytest.mark.slow_but("Pmap")
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap])
def test_accumulated_batches_equal_one_large_batch(strategy):
    """Dropout included: a row's key depends on its place in the whole step's rows."""
    small = batches(8, 8, 5, 8, 8, 5)
    large = [
        tuple(np.concatenate(part) for part in zip(*small[i : i + 3], strict=True))
        for i in (0, 3)
    ]
    expected, reference = run(SingleDevice(), epochs=3, data=large)
    losses, trainer = run(strategy(), epochs=3, data=small, accumulate_grad_batches=3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert trainer.global_step == 6
    # Four batches are one step of three and one of the batch that is left.
    losses, trainer = run(
        strategy(), epochs=1, data=small[:4], accumulate_grad_batches=3
    )
    assert trainer.global_step == 2
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-5)


@pytest.mark.slow_but("SingleDevice-options0", "Sharded-options1", "FSDP-options2")
@pytest.mark.parametrize("options", [{}, {"ensemble": 2}, {"steps_per_execution": 2}])
@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap, FSDP])
def test_losses_under_x64_are_float64(strategy, options):
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        x, y, weight = (draw.normal(size=s) for s in ((24, 4), 24, 24))
        model = eqx.nn.Linear(4, "scalar", key=jax.random.key(0))
        if options.get("ensemble"):
            model = jax.tree.map(lambda w: jnp.stack([w, w]), model)
        trainer = quiet(
            model, optax.sgd(0.0), loss="mse", metrics=["mae"], strategy=strategy(),
            **options,
        )  # fmt: skip
        one = trainer.member(0) if "ensemble" in options else model
        errors = np.asarray(jax.vmap(one)(x)) - y
        data = [tuple(each[i : i + 8] for each in (x, y)) for i in (0, 8, 16)]
        for metrics, own in zip(trainer.steps(data), errors.reshape(3, 8), strict=True):
            assert metrics["loss"].dtype == np.float64
            np.testing.assert_allclose(metrics["loss"], (own**2).mean(), rtol=1e-14)
            np.testing.assert_allclose(metrics["mae"], abs(own).mean(), rtol=1e-14)
        found = trainer.validate([(x, y, weight**2)])
        mean = np.average(errors**2, weights=weight**2)
        np.testing.assert_allclose(found["val_loss"], mean, rtol=1e-14)


def test_a_loop_inside_a_loop_has_the_numbers_of_jax():
    """An option of XLA that spares copies made other ones of it."""

    def accumulate(x):
        def turn(carry, _):
            a, b = carry
            b = jax.lax.fori_loop(0, 3, lambda i, b: b.at[i].add(a), b)
            return (a * 0.5, b), None

        return jax.lax.scan(turn, (x, jnp.zeros(4)), None, 4)[0][1]

    def loss_fn(model, x, y):
        return jax.vmap(accumulate)(jax.vmap(model)(x)[:, 0]).sum(axis=1) ** 2

    ((x, y),) = batches(8)
    model = linear()
    mean = eqx.filter_value_and_grad(lambda model: loss_fn(model, x, y).mean())
    loss, grads = mean(model)
    trainer = quiet(model, optax.sgd(1.0), loss_fn=loss_fn, strategy=SingleDevice())
    assert trainer.fit([(x, y)])["loss"][0] == pytest.approx(float(loss), rel=1e-6)
    np.testing.assert_allclose(
        trainer.model.weight, model.weight - grads.weight, rtol=1e-5, atol=1e-7
    )


def mean_over_a_mask(model, x, y, mask):
    values = ((jax.vmap(model)(x) - y) ** 2).mean(axis=1)
    return (values * mask).sum() / mask.sum()


def test_a_mask_is_never_all_false_where_a_window_lacks_a_batch():
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    data = [(part, np.sin(part)) for part in np.split(x, 3)]
    options = {"strategy": SingleDevice(), "accumulate_grad_batches": 2}
    losses = [
        quiet(linear(4, 4), optax.sgd(0.1), **options, **loss).fit(data)["loss"]
        for loss in ({"loss_fn": mean_over_a_mask}, {"loss": "mse"})
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
