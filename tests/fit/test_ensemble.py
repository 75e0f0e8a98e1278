"""Many models in one step, each as if it were trained alone."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, batches, make_small

from jaxdp import (
    FSDP,
    Callback,
    Ensemble,
    Members,
    Part,
    PassMetric,
    Pmap,
    Sharded,
    SingleDevice,
    Trainer,
)
from jaxdp.callbacks import (
    CSVLogger,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ReduceLROnPlateau,
)

SIZE = 4
KEYS = jax.random.split(jax.random.key(7), SIZE)
RATES = [1e-3, 3e-3, 1e-2, 3e-2]
DATA = batches(16, 16, 13, 5)


def make(key):
    return eqx.nn.MLP(4, 3, 8, 1, key=key)


def stack(maker=make):
    return eqx.filter_vmap(maker)(KEYS)


class Losses(Callback):
    """Every step's loss: of all members, or of the only model."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        names = [f"loss[{member}]" for member in range(SIZE)]
        names = names if names[0] in metrics else ["loss"]
        self.losses.append([float(metrics[name]) for name in names])


def fitted(model, optimizer, *, epochs=2, **options):
    recorder = Losses()
    options = {"loss": "cross_entropy", "metrics": ["accuracy"]} | options
    callbacks = [recorder, *options.pop("callbacks", ())]
    trainer = make_small(model, optimizer, callbacks=callbacks, **options)
    trainer.fit(DATA, DATA[:2], max_epochs=epochs)
    return trainer, np.array(recorder.losses).T


def adam(**values):
    """Adam whose learning rate is in its state, and the members' own."""
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    return optimizer, Ensemble(SIZE, **values)


@pytest.fixture(scope="module")
def alone():
    """Each member's own fit: its losses, and the trainer."""
    found = []
    for key, rate in zip(KEYS, RATES, strict=True):
        trainer, losses = fitted(
            make(key),
            optax.adam(rate),
            strategy=SingleDevice(),
            gradient_clip_val=0.5,
        )
        found.append((losses[0], trainer))
    return found


STRATEGIES = {
    "one": SingleDevice,
    "Sharded": Sharded,
    "Pmap": Pmap,
    "FSDP": FSDP,
    "Members": lambda: Members(4),
    "two each": lambda: Members(2),
}


@pytest.mark.slow_but("one")
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_members_run_is_its_own_fit(alone, name):
    optimizer, ensemble = adam(learning_rate=RATES)
    trainer, losses = fitted(
        stack(),
        optimizer,
        strategy=STRATEGIES[name](),
        ensemble=ensemble,
        gradient_clip_val=0.5,
    )
    means = trainer.validate(DATA)
    predictions = trainer.predict(DATA)
    for member, (expected, own) in enumerate(alone):
        np.testing.assert_allclose(losses[member], expected, rtol=1e-5)
        for key, value in own.validate(DATA).items():
            assert means[f"{key}[{member}]"] == pytest.approx(value, rel=1e-5)
            logged = trainer.history[f"{key}[{member}]"]
            assert logged == pytest.approx(own.history[key], rel=1e-5)
        theirs = own.predict(DATA)
        np.testing.assert_allclose(predictions[:, member], theirs, atol=1e-5)
        x = DATA[0][0][0]
        np.testing.assert_allclose(
            trainer.member(member)(x), own.model(x), rtol=1e-4, atol=1e-5
        )
    of_members = [means[f"val_loss[{member}]"] for member in range(SIZE)]
    assert means["val_loss"] == pytest.approx(np.mean(of_members), rel=1e-6)
    assert list(trainer.hyperparams["learning_rate"]) == pytest.approx(RATES)


def test_members_on_devices_of_their_own_send_their_losses_alone():
    trainer = make_small(stack(), strategy=Members(4), ensemble=SIZE)
    plan = trainer.plan(DATA)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state.params))
    # Each member's sum of losses, and once more where single ones are taken out; none
    # of the 16 rows.
    assert sum(each.operand_bytes for each in plan.traffic) <= 4 * SIZE * 2 + 8
    assert plan.memory.parameters * 4 == parameters


def test_keys_differ_by_member():
    same = jax.tree.map(
        lambda leaf: np.stack([leaf] * SIZE) if eqx.is_array(leaf) else leaf,
        Mlp(jax.random.key(0)),
    )
    _, losses = fitted(same, optax.sgd(0.0), ensemble=SIZE, epochs=1)
    assert len({*losses[:, 0]}) == SIZE  # dropout alone


def test_loss_fn_micro_batches_and_several_steps_per_dispatch(alone):
    def loss_fn(model, x, y, keys):
        logits = jax.vmap(model)(x)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return each, {"accuracy": logits.argmax(1) == y}

    options = {
        "loss": None,
        "metrics": (),
        "loss_fn": loss_fn,
        "accumulate_grad_batches": 2,
        "strategy": SingleDevice(),
    }
    one, expected = fitted(make(KEYS[1]), optax.adam(1e-2), **options)
    many, losses = fitted(
        stack(), optax.adam(1e-2), ensemble=SIZE, steps_per_execution=2, **options
    )
    np.testing.assert_allclose(losses[1], expected[0], rtol=1e-5)
    for name in ("val_accuracy", "accuracy"):
        assert many.history[f"{name}[1]"] == pytest.approx(one.history[name])


@pytest.mark.slow
def test_models_with_state(alone):
    def with_state(key):
        return eqx.nn.make_with_state(NormNet)(key)

    options = {"strategy": Sharded(2), "epochs": 1}
    models, states = eqx.filter_vmap(with_state)(KEYS)
    trainer, losses = fitted(
        models, optax.adam(1e-2), state=states, ensemble=SIZE, **options
    )
    model, state = with_state(KEYS[2])
    own, expected = fitted(model, optax.adam(1e-2), state=state, **options)
    np.testing.assert_allclose(losses[2], expected[0], rtol=1e-5)
    assert trainer.validate(DATA)["val_loss[2]"] == pytest.approx(
        own.validate(DATA)["val_loss"], rel=1e-5
    )


def test_a_resume_goes_on_to_the_bit_and_values_of_members_are_monitored(tmp_path):
    optimizer, ensemble = adam(learning_rate=RATES)
    options = {"ensemble": ensemble, "strategy": Members(4)}
    whole, _ = fitted(stack(), optimizer, epochs=3, **options)
    folder = tmp_path / "run"
    saver = ModelCheckpoint(folder, monitor="val_loss[2]")
    stopper = EarlyStopping("val_accuracy[1]", patience=9, mode="max")
    logger = CSVLogger(tmp_path)
    fitted(stack(), optimizer, callbacks=[saver, stopper, logger], **options)

    again = make_small(
        stack(),
        optimizer,
        loss="cross_entropy",
        metrics=["accuracy"],
        callbacks=[ModelCheckpoint(folder, monitor="val_loss[2]")],
        **options,
    )
    again.fit(DATA, DATA[:2], max_epochs=3, ckpt_path="last")
    for own, expected in zip(
        jax.tree.leaves(again.state), jax.tree.leaves(whole.state), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(expected))
    header = next(tmp_path.rglob("*.csv")).read_text().splitlines()[0]
    assert "loss[3]" in header.split(",")


def test_the_history_has_each_member_and_shows_the_means():
    optimizer, ensemble = adam(learning_rate=RATES)
    trainer, _ = fitted(stack(), optimizer, ensemble=ensemble)
    history = trainer.history
    last = [history[f"val_loss[{member}]"][-1] for member in range(SIZE)]
    assert np.mean(last) == pytest.approx(history["val_loss"][-1])
    assert "[0]" not in repr(history)


@pytest.mark.slow
def test_more_values_than_other_trainers_may_have():
    size = 40
    models = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), size))
    trainer = make_small(
        models, loss="cross_entropy", metrics=["accuracy"], ensemble=size
    )
    history = trainer.fit(DATA[:1])
    losses = [history[f"loss[{member}]"][0] for member in range(size)]
    assert len({*losses}) == size
    assert history["loss"][0] == pytest.approx(np.mean(losses), rel=1e-6)


def test_an_optimizer_that_takes_the_loss_is_given_that_of_each_member(alone):
    def plateau():
        return optax.chain(
            optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
        )

    options = {"strategy": SingleDevice(), "epochs": 4}
    _, losses = fitted(stack(), plateau(), ensemble=SIZE, **options)
    for member in (0, 2):
        _, expected = fitted(make(KEYS[member]), plateau(), **options)
        np.testing.assert_allclose(losses[member], expected[0], rtol=1e-5)


def test_one_learning_rate_is_set_for_all_members_whatever_the_model_has():
    """Also of a model with a parameter that is a scalar, and so has scalar moments."""

    class Scaled(eqx.Module):
        inner: eqx.nn.MLP
        scale: jax.Array

        def __call__(self, x):
            return self.scale * self.inner(x)

    def scaled(key):
        return Scaled(make(key), jax.numpy.ones(()))

    optimizer, ensemble = adam()
    trainer, losses = fitted(stack(scaled), optimizer, ensemble=ensemble, epochs=1)
    assert list(trainer.hyperparams["learning_rate"]) == pytest.approx([1e-3] * SIZE)
    trainer.set_hyperparams(learning_rate=1e-2)
    assert list(trainer.hyperparams["learning_rate"]) == pytest.approx([1e-2] * SIZE)
    _, expected = fitted(scaled(KEYS[3]), optax.adam(1e-3), epochs=1)
    np.testing.assert_allclose(losses[3], expected[0], rtol=1e-5)


def test_each_member_has_weights_of_its_own():
    def weighted(model, x, y):
        logits = jax.vmap(model)(x)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return each, jax.lax.stop_gradient(jax.nn.sigmoid(logits[:, 0]))

    options = {"loss": None, "metrics": (), "loss_fn": weighted}
    trainer, losses = fitted(stack(), optax.adam(1e-2), ensemble=SIZE, **options)
    own, expected = fitted(make(KEYS[1]), optax.adam(1e-2), **options)
    np.testing.assert_allclose(losses[1], expected[0], rtol=1e-5)
    assert trainer.history["val_loss[1]"] == pytest.approx(own.history["val_loss"])


@pytest.mark.parametrize("strategy", [Sharded(8), Members(2)])
def test_a_metric_over_a_pass_is_of_each_member(strategy):
    def counts(logits, labels):
        assert logits.shape == (50, 3) and labels.shape == (50,)
        return {"hits": (logits.argmax(1) == labels).sum(), "rows": len(labels)}

    metrics = {"n": PassMetric(counts)}
    trainer = make_small(stack(), ensemble=SIZE, metrics=metrics, strategy=strategy)
    found = trainer.validate(DATA)
    labels = np.concatenate([y for _, y in DATA])
    hits = (trainer.predict(DATA).argmax(2) == labels[:, None]).sum(0)
    assert [found[f"val_n_hits[{i}]"] for i in range(SIZE)] == hits.tolist()
    assert found["val_n_hits"] == hits.mean() and found["val_n_rows"] == 50


@pytest.mark.slow_cases("strategy1")
@pytest.mark.parametrize("strategy", [Sharded(8), Members(2)])
def test_parts_train_the_members_each_by_itself(strategy):
    def hinge(model, x, y):
        return jax.nn.relu(1 - jax.vmap(model)(x)[:, 0])

    def logits(model, x, y):
        found = jax.vmap(model)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(found, y)
        return losses, {"right": (found.argmax(1) == y).astype(np.float32)}

    def train(model, first, second, **options):
        parts = [
            Part("layers[0]", hinge, first, name="one", gradient_clip_val=0.1),
            Part("layers[1]", logits, second, name="two", every=2),
        ]
        trainer = Trainer(model, parts, enable_progress_bar=False, **options)
        return trainer.fit(DATA, DATA[3:], max_epochs=2)

    optimizer, ensemble = adam(learning_rate=RATES)
    options = {"ensemble": ensemble, "strategy": strategy, "steps_per_execution": 2}
    together = train(stack(), optimizer, optimizer, **options)
    own = optax.adam(RATES[2])
    for name, values in train(make(KEYS[2]), own, own, strategy=SingleDevice()).items():
        np.testing.assert_allclose(together[f"{name}[2]"], values, rtol=1e-5)
        members = [together[f"{name}[{i}]"] for i in range(SIZE)]
        np.testing.assert_allclose(together[name], np.mean(members, 0), rtol=1e-5)


def test_rates_of_members_are_logged_and_lowered():
    optimizer, ensemble = adam(learning_rate=RATES)
    seen = []

    class Rates(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            seen.append([float(metrics[f"lr[{member}]"]) for member in range(SIZE)])

    plateau = ReduceLROnPlateau("loss", patience=1, min_delta=9.0, min_lr=2e-3)
    trainer = make_small(
        stack(), optimizer, ensemble=ensemble, strategy=SingleDevice(),
        callbacks=[LearningRateMonitor(), Rates(), plateau],
    )  # fmt: skip
    trainer.fit([DATA[0]], max_epochs=3)
    # The first epoch is the best so far; those below `min_lr` stay as they are.
    expected = np.array([RATES, RATES, [1e-3, 2e-3, 2e-3, 3e-3]])
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


def test_a_strategy_of_another_type_is_named_first():
    with pytest.raises(TypeError, match="`strategy` must be an instance"):
        Trainer(stack(), ensemble=4, strategy="sharded")
