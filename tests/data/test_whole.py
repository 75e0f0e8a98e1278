"""Arrays without rows are neither split nor padded."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Deep, On, Recorder, counting, hand_written, on_one_device

from jaxdp import (
    FSDP,
    Arrays,
    PassMetric,
    Pipeline,
    Pmap,
    Sharded,
    SingleDevice,
    Whole,
)

ALL = [SingleDevice, Sharded, Pmap, FSDP]


class Ode(eqx.Module):
    """Steps of Euler from `y0` through `times`: `(times - 1, 2)`."""

    field: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, rate=0.0):
        self.field = eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0))
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x, *, key=None):
        y0, times = x

        def step(y, duration):
            y = y + duration * self.field(y)
            return y, y

        y0 = self.dropout(y0, key=key)
        return jax.lax.scan(step, y0, jnp.diff(times))[1]


def trajectories(rows, horizon, seed=0):
    """Returns a batch of float64 with times until `horizon`."""
    draw = np.random.default_rng([seed, rows, horizon])
    y0, y = draw.normal(size=(rows, 2)), draw.normal(size=(rows, horizon, 2))
    return (y0, Whole(np.linspace(0, horizon, horizon + 1) / (seed + 2))), y


DATA = [
    trajectories(16, 4), trajectories(16, 4, 1), trajectories(5, 4, 2),
    trajectories(16, 7), trajectories(3, 7, 1), trajectories(16, 4, 3),
]  # fmt: skip
"""Two horizons; every batch has times of its own, and some are ragged."""


def make(*callbacks, **options):
    loss = None if "loss_fn" in options else "mse"
    return on_one_device(*callbacks, **{"model": Ode(), "loss": loss} | options)


def by_row(model, x, y):
    found = jax.vmap(model, in_axes=((0, None),))(x)
    return jnp.square(found - y).mean(axis=(1, 2))


def as_plain(batch):
    (y0, times), y = batch
    return (y0, times.array), y


@pytest.fixture(scope="module")
def by_hand():
    data = [as_plain(batch) for batch in DATA]
    loss = lambda model, x, y: by_row(model, x, y).mean()  # noqa: E731
    return hand_written(Ode(), optax.adam(1e-2), data, 2, loss)


@pytest.mark.slow_but("SingleDevice")
@pytest.mark.parametrize("kind", ALL)
def test_times_without_rows_train_as_by_hand(kind, by_hand):
    model, losses = by_hand
    recorder, strategy = Recorder(), counting(kind)
    trainer = make(recorder, strategy=strategy)
    trainer.fit(DATA, max_epochs=2)
    np.testing.assert_allclose(recorder.losses, losses, rtol=1e-5)
    assert strategy.count == 2

    # Every row counts once, and predictions have rows.
    other = [DATA[0], DATA[2]]
    rows = np.concatenate([by_row(model, *as_plain(batch)) for batch in other])
    found = trainer.validate(other)["val_loss"]
    assert found == pytest.approx(rows.mean(), rel=1e-4)
    expected = [jax.vmap(model, ((0, None),))(as_plain(each)[0]) for each in other]
    predicted = trainer.predict(other)
    np.testing.assert_allclose(predicted, np.concatenate(expected), rtol=1e-3)


@pytest.mark.slow
def test_stages_of_a_pipeline_get_the_array():
    draw = np.random.default_rng(0)
    data = [
        (draw.normal(size=(rows, 4)).astype(np.float32), Whole(np.arange(length)))
        for rows, length in [(24, 3), (13, 3), (24, 5)]
    ]

    def loss_fn(model, x, weights, keys):
        logits = jax.vmap(lambda row, key: model(row, key=key))(x, keys)
        return jnp.square(logits).mean(axis=1) * weights.sum()

    def losses(strategy):
        recorder = Recorder()
        trainer = make(recorder, strategy=strategy, model=Deep(), loss_fn=loss_fn)
        trainer.fit(data, max_epochs=2)
        return recorder.losses

    expected = losses(SingleDevice())
    np.testing.assert_allclose(losses(Pipeline(4, 4)), expected, rtol=1e-5)


def scaled(rows, scale, length=3):
    """Returns a batch whose first keys have no rows."""
    x = np.random.default_rng(rows).normal(size=(rows, 2)).astype(np.float32)
    shift = np.arange(length, dtype=np.float32) * scale
    return {"scale": Whole(scale), "shift": Whole(shift), "x": x}


@pytest.mark.slow_cases("lengths1")
@pytest.mark.parametrize("lengths", [(3, 3, 3), (3, 5, 3)])
def test_each_micro_batch_has_its_own_array(lengths):
    sizes, scales = (16, 5, 8), (0.5, 2.0, -1.0)
    data = [scaled(*each) for each in zip(sizes, scales, lengths, strict=True)]

    def loss_fn(model, batch):
        x, drawn = batch["x"], jnp.square(jax.vmap(model.field)(batch["x"]))
        assert len(x) == len(drawn)
        return batch["scale"] * (drawn.mean(axis=1) + batch["shift"].sum())

    def loss_of(model, batches, _):
        rows = [loss_fn(model, jax.tree.map(jnp.asarray, each)) for each in batches]
        return jnp.concatenate(rows).mean()

    plain = [{k: getattr(v, "array", v) for k, v in each.items()} for each in data]
    _, losses = hand_written(Ode(), optax.adam(1e-2), [(plain, 0)], 2, loss_of)
    for kind in SingleDevice, Sharded:
        options = {"loss_fn": loss_fn, "accumulate_grad_batches": 3}
        trainer = make(recorder := Recorder(), strategy=kind(), **options)
        trainer.fit(data, max_epochs=2)
        np.testing.assert_allclose(recorder.losses, losses, rtol=1e-5)


@pytest.mark.slow
def test_a_loss_of_targets_may_have_weights_of_classes():
    x = np.random.default_rng(0).normal(size=(11, 2)).astype(np.float32)
    y, weights = (x.sum(1) > 0).astype(np.int32), np.array([1.0, 3.0], np.float32)

    def loss(prediction, target):
        own = target["weights"][target["y"]]
        labels = target["y"]
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(prediction, labels), own

    batch = x, {"y": y, "weights": Whole(weights)}
    model = Ode().field
    found = make(model=model, strategy=Sharded(), loss=loss).validate([batch])
    rows, own = loss(jax.vmap(model)(x), {"y": y, "weights": weights})
    expected = (rows * own).sum() / own.sum()
    assert found["val_loss"] == pytest.approx(float(expected), rel=1e-5)

    keeps = {"count": PassMetric(lambda predictions, targets: 0.0)}
    with pytest.raises(ValueError, match="targets have a Whole for a batch of 11 rows"):
        make(model=model, loss=loss, metrics=keeps).validate([batch])


# As data.


@pytest.mark.parametrize("loader", ["a list", "Arrays", "torch's"])
def test_arrays_of_a_whole_are_converted(loader):
    x, times = np.ones((2, 3)), np.ones(3)
    batch = (x, Whole({"times": times, "scale": 2}))
    if loader == "torch's":
        torch = pytest.importorskip("torch")
        collate = lambda _: (x, Whole({"times": torch.ones(3), "scale": 2}))  # noqa: E731
        loader = torch.utils.data.DataLoader([*x], 2, collate_fn=collate)
    else:
        loader = Arrays(*batch) if loader == "Arrays" else [batch]
    seen = []
    loss_fn = lambda model, x, _: jax.vmap(model.field)(x[:, :2]).sum(1)  # noqa: E731
    sees = On(on_train_batch_start=lambda trainer, batch, _: seen.append(batch))
    make(sees, loss_fn=loss_fn).fit(loader)
    ((x, whole),) = seen
    assert x.dtype == whole.array["times"].dtype == np.float32
    assert whole.array["times"].shape == (3,) and whole.array["scale"].shape == ()
    with pytest.raises(TypeError, match=r"batch\[1\]\.array is a str"):
        make(loss_fn=loss_fn).fit([(np.ones(2), Whole("times"))])


def test_predictions_and_all_batches_need_rows_in_the_same_places():
    with pytest.raises(ValueError, match=r"batch\[0\]\.array, which.*beside the inp"):
        make().predict([(Whole(np.ones(3)), np.ones(3))])
    rows = {"scale": np.ones(4, np.float32), "shift": Whole(1.0), "x": np.ones((4, 2))}
    loss_fn = lambda model, batch: jax.vmap(model.field)(batch["x"]).sum(1)  # noqa: E731
    with pytest.raises(ValueError, match="in structure"):
        make(loss_fn=loss_fn).fit([scaled(4, 1.0), rows])
