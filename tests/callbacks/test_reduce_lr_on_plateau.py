"""`ReduceLROnPlateau`: when it lowers the rates of an optimizer."""

import jax
import numpy as np
import optax
import pytest
from toys import On, batches, injected, linear_on_one_device, scores

from jaxdp.callbacks import ReduceLROnPlateau

DATA = batches(8, 8, 8, 8)


def plateau(values, name="val_loss", **options):
    """Returns the rate after each epoch with these scores."""
    rates = []

    def note(trainer):
        rates.append(float(trainer.hyperparams["learning_rate"]))

    callbacks = [ReduceLROnPlateau(name, **options), scores(values, name)]
    callbacks += [On(on_train_epoch_start=note), On(on_fit_end=note)]
    trainer = linear_on_one_device(*callbacks, optimizer=injected(1.0))
    trainer.fit(DATA[:1], DATA[:1], max_epochs=len(values))
    return rates[1:]


def keras_plateau(scores, factor, patience, min_delta, cooldown, min_lr, better):
    """Returns the rates by Keras's documented rules."""
    rate, best, waited, cooling, found = 1.0, None, 0, 0, []
    for score in scores:
        if cooling > 0:
            cooling, waited = cooling - 1, 0
        if best is None or better(score, best, min_delta):
            best, waited = score, 0
        elif cooling <= 0:
            waited += 1
            if waited >= patience and rate > min_lr:
                rate = max(rate * factor, min_lr)
                cooling, waited = cooldown, 0
        found.append(rate)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_plateaus_lower_the_rate_as_keras_does(seed):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=14).round(1).tolist()
    options = {
        "factor": 0.5,
        "patience": int(generator.integers(1, 3)),
        "min_delta": 0.2,
        "cooldown": int(generator.integers(0, 3)),
        "min_lr": 0.1,
    }
    name = ("val_loss", "val_accuracy")[seed % 2]
    better = (lambda a, b, d: a < b - d, lambda a, b, d: a > b + d)[seed % 2]
    expected = keras_plateau(values, **options, better=better)
    assert len({*expected}) > 1
    np.testing.assert_allclose(plateau(values, name, **options), expected, rtol=1e-6)


def test_nan_is_no_improvement():
    found = plateau([1.0, np.nan, np.nan], "val_area", factor=0.5, patience=2)
    assert found == [1.0, 1.0, 0.5]


def test_a_plateau_lowers_all_rates_of_an_optimizer(capsys):
    callback = ReduceLROnPlateau(factor=0.5, patience=1, min_delta=1e9, verbose=True)
    labels = {"weight": "wide", "bias": "thin"}
    optimizer = optax.partition(
        {"wide": injected(0.1), "thin": injected(0.2)},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: labels[path[-1].name], params
        ),
    )
    trainer = linear_on_one_device(callback, optimizer=optimizer)
    trainer.fit(DATA, DATA, max_epochs=2)
    expected = {"thin/learning_rate": 0.1, "wide/learning_rate": 0.05}
    assert trainer.hyperparams == pytest.approx(expected)
    assert "thin/learning_rate is 0.1" in capsys.readouterr().err
