"""The learning-rate range test: its numbers, and what it leaves alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    Mlp,
    assert_close,
    batches,
    cross_entropy,
    hand_written,
    injected,
    quiet,
)

from jaxdp import Sharded, SingleDevice
from jaxdp.callbacks import CSVLogger, WeightAveraging
from jaxdp.extras.finders import LRFinder, lr_find

DATA = batches(*[8] * 6)


def perceptron():
    return eqx.nn.MLP(4, 3, 16, 1, key=jax.random.key(0))


def make_trainer(optimizer=None, *callbacks, model=None, strategy=None):
    return quiet(
        perceptron() if model is None else model,
        optimizer,
        loss="cross_entropy",
        strategy=strategy or SingleDevice(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("mode, strategy, optimizer, plain", [
    ("exponential", Sharded(4), optax.adam, optax.adam),
    ("linear", SingleDevice(), injected, optax.sgd),
])  # fmt: skip
def test_losses_are_those_of_steps_with_those_rates(mode, strategy, optimizer, plain):
    options = {"min_lr": 1e-4, "max_lr": 0.5, "num_training": 15, "mode": mode}
    trainer = make_trainer(strategy=strategy)
    found = lr_find(trainer, DATA, **options, optimizer=optimizer)
    space = np.geomspace if mode == "exponential" else np.linspace
    rates = space(1e-4, 0.5, 15)
    assert found.results["lr"] == pytest.approx(list(rates))
    by_step = jnp.asarray(rates, jnp.float32)
    expected = hand_written(
        perceptron(), plain(lambda step: by_step[step]), DATA, 3, cross_entropy
    )[1]
    assert found.results["loss"] == pytest.approx(expected[:15], abs=1e-4)


def test_the_trainer_and_the_loader_stay_as_they_are(tmp_path):
    torch = pytest.importorskip("torch")
    x, y = (np.concatenate(parts) for parts in zip(*DATA, strict=True))
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))

    def run(find):
        trainer = make_trainer(
            optax.adam(0.01),
            CSVLogger(tmp_path / str(find)),
            WeightAveraging(0.9),
            model=Mlp(jax.random.key(0)),
        )
        loader = torch.utils.data.DataLoader(
            data, 8, shuffle=True, generator=torch.Generator().manual_seed(1)
        )
        trainer.fit(loader)
        if find:
            before = torch.get_rng_state()
            lr_find(trainer, loader, num_training=10, optimizer=optax.adam)
            assert torch.equal(before, torch.get_rng_state())
            assert trainer.global_step == 6 and len(trainer.history.epochs) == 1
        trainer.fit(loader, max_epochs=2)
        return trainer.state

    assert_close(run(True), run(False), 0, 0)


def test_it_stops_when_the_loss_explodes(tmp_path):
    trainer = make_trainer(optax.sgd(0.1))
    found = lr_find(trainer, DATA, min_lr=1e-3, max_lr=1e6, optimizer=optax.sgd)
    losses = found.results["loss"]
    assert 10 < len(losses) < 100 and len(found.results["lr"]) == len(losses)
    assert losses[-1] > 4 * min(losses) or not np.isfinite(losses[-1])
    best = found.suggestion()
    assert 1e-3 < best < 100
    figure = found.plot(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["loss", "smoothed", f"suggestion {best:.2g}"]
    assert figure.axes[0].get_ylim()[1] < 4 * losses[0]  # what explodes is left out


def test_the_suggestion_is_where_the_loss_falls_fastest():
    rates = np.geomspace(1e-6, 1.0, 200)
    losses = 1 / (1 + np.exp(6 * (np.log10(rates) + 3)))  # falls fastest at 1e-3
    finder = LRFinder(list(rates), list(losses))
    assert 1e-3 < finder.suggestion() < 3e-3  # smoothing looks back
    assert LRFinder(list(rates), [1.0] * 200).suggestion() is None
    assert LRFinder([0.1], [1.0]).suggestion() is None
    rising = LRFinder(list(rates), list(1 - losses))
    assert rising.suggestion() is None
    spoilt = LRFinder([*rates, 2.0], [*losses, float("nan")])
    assert spoilt.suggestion() == pytest.approx(finder.suggestion(), rel=0.1)


@pytest.mark.parametrize("threshold", [4.0, None])
def test_a_loss_that_is_not_finite_is_the_last(threshold, caplog):
    data = batches(*[8] * 40)
    data[30] = data[30][0] * np.nan, data[30][1]
    options = {"optimizer": optax.sgd, "early_stop_threshold": threshold}
    with caplog.at_level("INFO", "jaxdp"):
        found = lr_find(make_trainer(), data, min_lr=1e-3, max_lr=0.1, **options)
    losses = found.results["loss"]
    assert len(losses) == len(found.results["lr"]) == 31 and np.isnan(losses[-1])
    assert np.isfinite(losses[:-1]).all() and found.suggestion() is not None
    assert f"ends at a rate of {found.results['lr'][-1]:.3g}: nan loss" in caplog.text
