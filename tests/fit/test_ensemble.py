"""Many models in one step, each as if it were trained alone."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, On, assert_equal_leaves, batches, make_small

from jaxdp import (
    FSDP,
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
softmax = optax.softmax_cross_entropy_with_integer_labels


def make(key):
    return eqx.nn.MLP(4, 3, 8, 1, key=key)


def stack(maker=make):
    return eqx.filter_vmap(maker)(KEYS)


def fitted(model, optimizer, *, epochs=2, **options):
    """The trainer, and every step's loss: of each member, or of the only model."""
    losses = []

    def keep(trainer, metrics, batch_idx):
        names = [name for name in metrics if name.startswith("loss[")] or ["loss"]
        losses.append([float(metrics[name]) for name in names])

    options = {"loss": "cross_entropy", "metrics": ["accuracy"]} | options
    callbacks = [On(on_train_batch_end=keep), *options.pop("callbacks", ())]
    trainer = make_small(model, optimizer, callbacks=callbacks, **options)
    trainer.fit(DATA, DATA[:2], max_epochs=epochs)
    return trainer, np.array(losses).T


def adam(**values):
    """Adam whose learning rate is in its state, and the members' own."""
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    return optimizer, Ensemble(SIZE, **values)


@pytest.fixture(scope="module")
def alone():
    """Each member's own fit: the trainer, and its losses."""
    options = {"strategy": SingleDevice(), "gradient_clip_val": 0.5}
    pairs = zip(KEYS, RATES, strict=True)
    return [fitted(make(key), optax.adam(rate), **options) for key, rate in pairs]


@pytest.mark.slow_but("SingleDevice()")
@pytest.mark.parametrize(
    "strategy",
    [SingleDevice(), Sharded(), Pmap(), FSDP(), Members(4), Members(2)],
    ids=repr,
)
def test_each_members_run_is_its_own_fit(alone, strategy):
    optimizer, ensemble = adam(learning_rate=RATES)
    options = {"strategy": strategy, "ensemble": ensemble, "gradient_clip_val": 0.5}
    trainer, losses = fitted(stack(), optimizer, **options)
    means, predictions = trainer.validate(DATA), trainer.predict(DATA)
    for member, (own, expected) in enumerate(alone):
        np.testing.assert_allclose(losses[member], expected[0], rtol=1e-5)
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
    assert "[0]" not in repr(trainer.history)  # it shows the means


class Scaled(eqx.Module):
    """Has a parameter that is a scalar, and so has scalar moments."""

    inner: eqx.nn.MLP
    scale: jax.Array

    def __call__(self, x):
        return self.scale * self.inner(x)


def written(model, x, y, keys):
    logits = jax.vmap(model)(x)
    return softmax(logits, y), {"accuracy": logits.argmax(1) == y}


def weighted(model, x, y):
    logits = jax.vmap(model)(x)
    return softmax(logits, y), jax.lax.stop_gradient(jax.nn.sigmoid(logits[:, 0]))


def plateau():
    lowers = optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
    return optax.chain(optax.sgd(0.5), lowers)


CASES = {
    "a loss of single rows, in micro-batches": (
        make, optax.adam(1e-2),
        {"loss": None, "metrics": (), "loss_fn": written, "accumulate_grad_batches": 2},
        {"steps_per_execution": 2}),
    "weights of each member": (
        make, optax.adam(1e-2), {"loss": None, "metrics": (), "loss_fn": weighted}, {}),
    "an optimizer that takes the loss": (make, plateau(), {"epochs": 4}, {}),
    "a rate in the state, and scalar moments": (
        lambda key: Scaled(make(key), jax.numpy.ones(())), adam()[0], {"epochs": 1},
        {}),
    "running statistics": (
        eqx.nn.make_with_state(NormNet), optax.adam(1e-2),
        {"strategy": Sharded(2), "epochs": 1}, {}),
}  # fmt: skip


@pytest.mark.slow_cases("running statistics")
@pytest.mark.parametrize("case", CASES)
def test_a_member_has_the_losses_and_means_of_its_own_fit(case):
    maker, optimizer, options, of_many = CASES[case]

    def fit(made, **more):
        if isinstance(made, tuple):
            made, more["state"] = made
        return fitted(made, optimizer, **options, **more)

    many, losses = fit(stack(maker), ensemble=SIZE, **of_many)
    for member in (1, 2):
        own, expected = fit(maker(KEYS[member]))
        np.testing.assert_allclose(losses[member], expected[0], rtol=1e-5)
        for name, values in own.history.items():
            assert many.history[f"{name}[{member}]"] == pytest.approx(values, rel=1e-5)


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


def test_one_learning_rate_is_set_for_all_members():
    optimizer, ensemble = adam()
    trainer, _ = fitted(stack(), optimizer, ensemble=ensemble, epochs=1)
    assert list(trainer.hyperparams["learning_rate"]) == pytest.approx([1e-3] * SIZE)
    trainer.set_hyperparams(learning_rate=1e-2)
    assert list(trainer.hyperparams["learning_rate"]) == pytest.approx([1e-2] * SIZE)


def test_a_resume_goes_on_to_the_bit_and_values_of_members_are_monitored(tmp_path):
    optimizer, ensemble = adam(learning_rate=RATES)
    options = {"ensemble": ensemble, "strategy": Members(4)}
    whole, _ = fitted(stack(), optimizer, epochs=3, **options)
    folder = tmp_path / "run"
    saver = ModelCheckpoint(folder, monitor="val_loss[2]")
    stopper = EarlyStopping("val_accuracy[1]", patience=9, mode="max")
    logger = CSVLogger(tmp_path)
    fitted(stack(), optimizer, callbacks=[saver, stopper, logger], **options)

    saver = ModelCheckpoint(folder, monitor="val_loss[2]")
    options |= {"loss": "cross_entropy", "metrics": ["accuracy"], "callbacks": [saver]}
    again = make_small(stack(), optimizer, **options)
    again.fit(DATA, DATA[:2], max_epochs=3, ckpt_path="last")
    assert_equal_leaves(again.state, whole.state)
    header = next(tmp_path.rglob("*.csv")).read_text().splitlines()[0]
    assert "loss[3]" in header.split(",")


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
        return softmax(found, y), {"right": (found.argmax(1) == y).astype(np.float32)}

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

    def see(trainer, metrics, batch_idx):
        seen.append([float(metrics[f"lr[{member}]"]) for member in range(SIZE)])

    plateau = ReduceLROnPlateau("loss", patience=1, min_delta=9.0, min_lr=2e-3)
    trainer = make_small(
        stack(), optimizer, ensemble=ensemble, strategy=SingleDevice(),
        callbacks=[LearningRateMonitor(), On(on_train_batch_end=see), plateau],
    )  # fmt: skip
    trainer.fit([DATA[0]], max_epochs=3)
    # The first epoch is the best so far; those below `min_lr` stay as they are.
    expected = np.array([RATES, RATES, [1e-3, 2e-3, 2e-3, 3e-3]])
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
