"""The average of the weights: its numbers, who sees it, and that it is saved."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import NormNet, On, batches, cross_entropy, mlp, on_one_device, rows

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, ZeRO
from jaxdp.callbacks import LearningRateMonitor, NanGuard, WeightAveraging

STRATEGIES = [SingleDevice(), Sharded(8), Pmap(2)]


def keep_weights():
    """Returns a callback, and the trained weights after every step, as vectors."""
    seen = []

    def keep(trainer, metrics, batch_idx):
        seen.append(vector(trainer.state.params))

    return On(on_train_batch_end=keep), seen


def vector(tree):
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])


def make_trainer(*callbacks, **options):
    options = {"model": mlp(), "optimizer": optax.adam(0.05)} | options
    return on_one_device(*callbacks, **options)


@pytest.mark.slow_but("0.9-Sharded(8)", "0.0-SingleDevice()", "None-Pmap(2)")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("decay", [0.9, 0.0, None])
def test_the_average_is_that_of_torch(strategy, decay):
    torch = pytest.importorskip("torch")
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    keeps, weights = keep_weights()
    trainer = make_trainer(keeps, WeightAveraging(decay), strategy=strategy)
    trainer.fit(batches(*[8] * 12))
    live = torch.nn.Linear(1, 1, bias=False)
    average_of = None if decay is None else get_ema_multi_avg_fn(decay)
    expected = AveragedModel(live, multi_avg_fn=average_of)
    expected.module.weight = torch.nn.Parameter(torch.zeros(len(weights[0])))
    for seen in weights:
        live.weight = torch.nn.Parameter(torch.tensor(seen))
        expected.update_parameters(live)
    found = vector(trainer.model)
    np.testing.assert_allclose(found, expected.module.weight.detach(), atol=1e-6)
    np.testing.assert_array_equal(vector(trainer.state.params), weights[-1])


@pytest.mark.parametrize("n, start, steps", [
    (1, 0, [1, 2, 3, 4, 5, 6, 7]),
    (2, 0, [2, 4, 6]),
    (3, 0, [3, 6]),
    (2, 3, [4, 6]),
    (3, 3, [6]),
])  # fmt: skip
def test_only_the_chosen_steps_are_averaged(n, start, steps):
    keeps, weights = keep_weights()
    averaging = WeightAveraging(0.5, every_n_steps=n, start_step=start)
    trainer = make_trainer(keeps, averaging)
    data = batches(*[8] * 7)
    if start:
        trainer.fit(data, max_steps=start)
        np.testing.assert_array_equal(vector(trainer.model), weights[start - 1])
    trainer.fit(data)
    first, *rest = (weights[step - 1] for step in steps)
    for each in rest:
        first = 0.5 * first + 0.5 * each
    np.testing.assert_allclose(vector(trainer.model), first, atol=1e-6)


def test_training_is_as_without_it():
    seen, data = [], batches(*[8] * 10)
    for averaging in ([], [WeightAveraging()]):
        keeps, weights = keep_weights()
        on_one_device(keeps, *averaging).fit(data, batches(8), max_epochs=2)
        seen.append(weights)  # with dropout
    np.testing.assert_array_equal(*seen)


@pytest.mark.slow_but("Sharded(8)", "FSDP(8)")
@pytest.mark.parametrize("strategy", [*STRATEGIES, ZeRO(), FSDP()], ids=repr)
def test_evaluations_use_the_average(strategy):
    x, y = rows(16)
    trainer = make_trainer(WeightAveraging(0.9), strategy=strategy)
    history = trainer.fit(batches(*[8] * 12), [(x, y)])
    model = trainer.model
    loss = float(cross_entropy(model, jnp.asarray(x), jnp.asarray(y)))
    live = trainer.run.model_of(trainer.state)
    assert abs(loss - float(cross_entropy(live, x, y))) > 1e-3
    assert history["val_loss"] == [pytest.approx(loss, abs=1e-5)]
    assert trainer.test([(x, y)])["test_loss"] == pytest.approx(loss, abs=1e-5)
    predicted = trainer.predict([(x, y)])
    np.testing.assert_allclose(predicted, jax.vmap(model)(x), atol=1e-5)


def test_without_evaluate_only_the_callback_has_the_average():
    (x, y), data = rows(16), batches(*[8] * 12)
    averaging = WeightAveraging(0.9, evaluate=False)
    trainer, other = make_trainer(averaging), make_trainer(WeightAveraging(0.9))
    history = trainer.fit(data, [(x, y)])
    other.fit(data)
    loss = float(cross_entropy(trainer.model, x, y))
    assert history["val_loss"] == [pytest.approx(loss, abs=1e-5)]
    np.testing.assert_array_equal(vector(trainer.model), vector(trainer.state.params))
    averaged = averaging.averaged_model(trainer)
    np.testing.assert_array_equal(vector(averaged), vector(other.model))


def test_low_precision_weights_are_averaged_in_float32():
    def narrow(leaf):
        return leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf

    keeps, weights = keep_weights()
    model = jax.tree.map(narrow, mlp())
    trainer = make_trainer(keeps, WeightAveraging(0.999), model=model)
    trainer.fit(batches(*[8] * 30))
    expected = weights[0].astype(np.float32)
    for seen in weights[1:]:
        expected += np.float32(1e-3) * (seen.astype(np.float32) - expected)
    average = trainer.state.opt_state.average
    np.testing.assert_allclose(vector(average), expected, atol=1e-6)
    assert trainer.model.layers[0].weight.dtype == jnp.bfloat16
    assert trainer.predict([rows(4)[0]]).shape == (4, 3)


def test_frozen_leaves_and_running_statistics_are_left_alone():
    def is_trained(path, leaf):
        return eqx.is_inexact_array(leaf) and path[0].name != "last"

    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    spec = jax.tree_util.tree_map_with_path(is_trained, model)
    options = {"model": model, "state": state, "filter_spec": spec}
    trainer = make_trainer(WeightAveraging(0.5), **options)
    trainer.fit(batches(8, 8, 8), batches(8))
    np.testing.assert_array_equal(trainer.model.last.weight, model.last.weight)
    paths = jax.tree_util.tree_leaves_with_path(trainer.state.opt_state.average)
    assert not any("last" in jax.tree_util.keystr(path) for path, _ in paths)
    assert jax.tree.leaves(trainer.model_state)


def test_a_dropped_update_is_not_averaged():
    data = batches(*[8] * 6)
    data[2][0][:] = np.nan
    trainer = make_trainer(NanGuard("skip"), WeightAveraging(0.5))
    with pytest.warns(UserWarning, match="skipped this update"):
        trainer.fit(data)
    assert np.isfinite(vector(trainer.model)).all()
    assert int(trainer.state.opt_state.taken) == 5


def test_the_optimizer_inside_keeps_its_arguments_and_its_rate():
    optimizer = optax.chain(optax.sgd(0.25), optax.contrib.reduce_on_plateau())
    rate = LearningRateMonitor(schedule=0.25)
    make_trainer(WeightAveraging(0.5), rate, optimizer=optimizer).fit(batches(8, 8))
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.05)
    callbacks = WeightAveraging(0.5), LearningRateMonitor()
    with jax.numpy_dtype_promotion("strict"):
        trainer = make_trainer(*callbacks, optimizer=optimizer)
        seen = [float(m["lr"]) for m in trainer.steps(batches(8, 8))]
    assert seen == [pytest.approx(0.05)] * 2
