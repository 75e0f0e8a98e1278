"""Batches of several shapes: one program each, and the numbers of a plain loop."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    On,
    Recorder,
    assert_close,
    bits,
    counting,
    cross_entropy,
    hand_written,
    on_one_device,
)

from jaxdp import FSDP, Pmap, Sharded, SingleDevice


class Text(eqx.Module):
    """Classifies rows of any number of tokens."""

    embedding: eqx.nn.Embedding
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear
    per_token: bool = False

    def __init__(self, rate=0.0, per_token=False):
        keys = jax.random.split(jax.random.key(0))
        self.embedding = eqx.nn.Embedding(20, 8, key=keys[0])
        self.dropout = eqx.nn.Dropout(rate)
        self.last = eqx.nn.Linear(8, 3, key=keys[1])
        self.per_token = per_token

    def __call__(self, tokens, *, key=None):
        found = self.dropout(jnp.tanh(jax.vmap(self.embedding)(tokens)), key=key)
        return jax.vmap(self.last)(found) if self.per_token else self.last(found.sum(0))


def bucket(rows, length, seed=0):
    draw = np.random.default_rng([seed, rows, length])
    tokens = draw.integers(0, 20, (rows, length)).astype(np.int32)
    return tokens, (tokens.sum(1) % 3).astype(np.int32)


DATA = [
    bucket(16, 4), bucket(16, 8), bucket(16, 8, 1), bucket(16, 4, 1), bucket(5, 8),
    bucket(8, 12), bucket(3, 4), bucket(16, 8, 2),
]  # fmt: skip
"""Three lengths; the last batch of two of them is ragged."""


def make(*callbacks, **options):
    options.setdefault("loss", None if "loss_fn" in options else "cross_entropy")
    return on_one_device(*callbacks, **{"model": Text()} | options)


@pytest.fixture(scope="module")
def by_hand():
    return hand_written(Text(), optax.adam(1e-2), DATA, 2, cross_entropy)


@pytest.mark.slow_but("SingleDevice")
@pytest.mark.parametrize("kind", [SingleDevice, Sharded, Pmap, FSDP])
def test_buckets_train_as_by_hand_with_one_program_each(kind, by_hand, caplog):
    model, losses = by_hand
    recorder, strategy = Recorder(), counting(kind)
    trainer = make(recorder, strategy=strategy)
    trainer.fit(DATA, max_epochs=2)
    np.testing.assert_allclose(recorder.losses, losses, rtol=1e-5)
    rows = [len(labels) for _, labels in DATA]
    means = np.average(np.reshape(losses, (2, -1)), axis=1, weights=rows)
    np.testing.assert_allclose(trainer.history["loss"], means, rtol=1e-5)
    assert_close(trainer.model.last, model.last, rtol=1e-4, atol=1e-5)
    assert strategy.count == 3
    again = [text for text in caplog.messages if "compiled again" in text]
    assert [re.sub(r".*because |in \d.*?, ", "", text) for text in again] == [
        "batch[0] was (16, 4) and is (16, 8)",
        "batch[0] was (16, 8) and is (8, 12), batch[1] was (16,) and is (8,)",
    ]


@pytest.mark.slow_but("SingleDevice")
@pytest.mark.parametrize("kind", [SingleDevice, Sharded, Pmap])
def test_unequal_micro_batches_have_one_mean_over_rows(kind):
    windows = [DATA[:3], DATA[3:6], DATA[6:]]

    def window_loss(model, xs, ys):
        losses = [cross_entropy(model, *each) * len(each[1]) for each in zip(xs, ys)]  # noqa: B905
        return sum(losses) / sum(map(len, ys))

    data = [tuple(zip(*window, strict=True)) for window in windows]
    _, losses = hand_written(Text(), optax.adam(1e-2), data, 2, window_loss)
    recorder, strategy = Recorder(), counting(kind)
    trainer = make(recorder, strategy=strategy, accumulate_grad_batches=3)
    trainer.fit(DATA, max_epochs=2)
    np.testing.assert_allclose(recorder.losses, losses, rtol=1e-5)
    assert strategy.count == 2  # the last window is padded with an empty batch


def test_batches_of_equal_shapes_form_dispatches():
    data = [bucket(16, n, s) for n in (4, 8, 4) for s in range(4)] + [bucket(5, 4)]

    def train(steps):
        recorder, strategy = Recorder(), counting(SingleDevice)
        trainer = make(
            recorder, strategy=strategy, model=Text(0.3), steps_per_execution=steps
        )
        trainer.fit(data, max_epochs=2)
        return recorder.losses, bits(trainer.state), strategy.count

    losses, state, count = train(1)
    assert count == 2
    assert train(4) == (losses, state, 3)  # of four steps for each shape, and of one


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 6, 13])
def test_a_run_over_buckets_is_resumed_bit_for_bit(stop, tmp_path):
    # The first batch of a bucket is short: its padded size grows, and is restored.
    data = [bucket(3, 4), *DATA, bucket(16, 12), bucket(2, 4, 3)]

    def train(**fit):
        recorder = Recorder()
        trainer = make(recorder, model=Text(0.3), strategy=Sharded())
        trainer.fit(data, DATA, **fit)
        return recorder.losses, trainer

    losses, expected = train(max_epochs=2)
    first, saved = train(max_steps=stop)
    path = saved.save(tmp_path / "saved")
    second, again = train(max_epochs=2, ckpt_path=str(path))
    assert first + second == losses
    assert bits(again.state) == bits(expected.state)
    assert again.history.state_dict() == expected.history.state_dict()


def test_validation_and_prediction_accept_other_shapes():
    trainer = make(strategy=Sharded())
    trainer.fit(DATA[:1])
    other = [bucket(5, 9), bucket(7, 6), bucket(2, 9)]
    losses = [cross_entropy(trainer.model, *each) for each in other]
    found = trainer.validate(other)["val_loss"]
    assert found == pytest.approx(np.average(losses, weights=[5, 7, 2]), rel=1e-5)
    expected = [jax.vmap(trainer.model)(tokens) for tokens, _ in other]
    predicted = trainer.predict(other)
    np.testing.assert_allclose(predicted, np.concatenate(expected), rtol=1e-5)
    seen = []
    hook = On(on_predict_batch_end=lambda trainer, rows, idx: seen.append(rows.shape))
    per_token = make(hook, model=Text(per_token=True))
    with pytest.raises(ValueError, match=r"\(6, .*batch 1 and \(9, .*batch 0.*Pad"):
        per_token.predict(other)
    assert len(seen) == 1  # and not after the last batch
    per_token.predict(other, return_predictions=False)
    assert [shape[:2] for shape in seen[1:]] == [(5, 9), (7, 6), (2, 9)]


def test_structure_and_dtypes_may_not_vary():
    x, y = bucket(4, 4)
    with pytest.raises(ValueError, match=r"batch\[1\] was int32 .*is float32.*dtypes"):
        make().fit([(x, y), (x, y.astype(np.float32))])
    with pytest.raises(ValueError, match="in structure: .* missing"):
        make(loss_fn=lambda m, x, y=None: jax.vmap(m)(x).sum(1)).fit([(x, y), (x,)])


def test_labels_are_checked_per_shape():
    def rows(length, label):
        return np.ones((4, length), np.float32), np.full(4, label, np.int32)

    class Scale(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return x * self.weight

    trainer = make(model=Scale(jnp.ones(())))
    trainer.fit([rows(6, 5), rows(3, 2), rows(6, 5)])
    with pytest.raises(ValueError, match="labels must be 0 to 2"):
        trainer.fit([rows(6, 5), rows(3, 5)], max_epochs=2)


def test_a_plan_names_the_shape_it_is_for():
    plan = make().plan(DATA)
    assert any("batch[0] (16, 4)" in note for note in plan.notes["indicative"])
