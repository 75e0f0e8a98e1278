"""The batches that a `loss_fn` is traced with: the loader's, each once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import linear, quiet

from jaxdp import FSDP, LocalSGD, Pmap, Sharded, SingleDevice, ZeRO

hypothesis = pytest.importorskip("hypothesis")
draw, settings = hypothesis.strategies, hypothesis.settings

KINDS = {
    "SingleDevice": lambda devices: SingleDevice(),
    "Sharded": Sharded,
    "Pmap": Pmap,
    "ZeRO": lambda devices: ZeRO(devices=devices),
    "FSDP": lambda devices: FSDP(devices, min_size=1),
}


class Seen:
    """A loss of a batch that keeps the sizes that it is traced with."""

    def __init__(self):
        self.sizes = []

    def __call__(self, model, x):
        self.sizes.append(len(x))
        return values_of(model, x)


def values_of(model, x):
    return jnp.square(jax.vmap(model)(x) - jnp.sin(9 * x)).sum(axis=1)


def rows_of(sizes):
    """Batches `(size, 1)` over distinct rows."""
    x = np.random.default_rng(len(sizes)).normal(size=(sum(sizes), 1))
    return np.split(x.astype(np.float32), np.cumsum(sizes)[:-1])


def make(loss_fn, strategy, **options):
    """A trainer whose parameters stay as they are."""
    options |= {"loss_fn": loss_fn, "strategy": strategy}
    return quiet(linear(1, 1), optax.sgd(0.0), **options)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    sizes=draw.lists(draw.integers(1, 17), min_size=1, max_size=5),
    accumulated=draw.sampled_from([1, 2, 3]),
    kind=draw.sampled_from([*KINDS]),
    devices=draw.sampled_from([1, 2, 8]),
)
@hypothesis.example((16, 13, 16, 3), 2, "FSDP", 8)
@hypothesis.example((16, 13, 16, 3), 1, "Pmap", 8)
def test_each_size_is_traced_once_and_each_row_counts_once(
    sizes, accumulated, kind, devices
):
    seen, data = Seen(), rows_of(sizes)
    trainer = make(seen, KINDS[kind](devices), accumulate_grad_batches=accumulated)
    expected = np.concatenate([values_of(trainer.model, x) for x in data]).mean()

    # Training. Each window of micro-batches is a program, with a loop for each run of
    # equal sizes.
    history = trainer.fit(data, max_epochs=2)
    assert history["loss"] == pytest.approx([expected] * 2, rel=1e-5)
    starts = range(0, len(sizes), accumulated)
    windows = {tuple(sizes[start : start + accumulated]) for start in starts}
    runs = [size for window in windows for size, _ in itertools.groupby(window)]
    assert {*seen.sizes} == {*sizes} and len(seen.sizes) <= len(runs)
    if accumulated == 1:
        assert sorted(seen.sizes) == sorted({*sizes})

    # Validation.
    seen.sizes.clear()
    for _ in range(2):
        found = trainer.validate(data)["val_loss"]
        assert found == pytest.approx(expected, rel=1e-5)
    assert sorted(seen.sizes) == sorted({*sizes})


def test_sizes_that_devices_do_not_divide_are_said_once(caplog):
    data = rows_of((16, 12, 13, 12))
    make(values_of, Sharded(8)).fit(data, data, max_epochs=2)
    texts = [each for each in caplog.messages if "on each device" in each]
    for size, text in zip((12, 13), texts, strict=True):
        assert f"{size} rows" in text and "the 8 shards" in text
    caplog.clear()
    make(values_of, Sharded(2)).fit(rows_of((16, 12)))
    assert "on each device" not in caplog.text


def test_under_local_sgd_a_batch_is_the_rows_of_a_replica():
    seen = Seen()
    data = rows_of((16, 16, 8))
    trainer = make(seen, LocalSGD(every=2, devices=4))
    expected = np.concatenate([values_of(trainer.model, x) for x in data])
    history = trainer.fit(data, max_epochs=2)
    assert {*seen.sizes} == {4, 2}
    assert history["loss"] == pytest.approx([expected.mean()] * 2, rel=1e-5)
