"""`PassMetric`: of all predictions and targets of a validation, beside scikit-learn."""

import functools

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import batches, linear, make_small

from jaxdp import FSDP, Bitwise, PassMetric, Pmap, Sharded, SingleDevice, Trainer
from jaxdp.callbacks import EarlyStopping, ModelCheckpoint

softmax = optax.softmax_cross_entropy_with_integer_labels
DATA = batches(16, 11, 16, 3)
TARGETS = np.concatenate([y for _, y in DATA])


def make(metrics, strategy=None, **options):
    options = {"loss": "cross_entropy"} | options
    options |= {"metrics": metrics, "strategy": strategy}
    return make_small(None, optax.adam(0.05), **options)


def probabilities(logits):
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def area(logits, labels):
    """Of the first class, by counting pairs in NumPy."""
    scores, is_first = logits[:, 0], labels == 0
    pairs = scores[is_first][:, None] - scores[~is_first][None]
    return ((pairs > 0) + 0.5 * (pairs == 0)).mean()


class Keeps:
    """A metric that keeps what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, predictions, targets):
        self.calls.append((predictions, targets))
        return {"rows": len(targets), "sum": targets.sum()}


def mean_loss(logits, labels):
    return softmax(logits, labels).mean()


LAYOUTS = {
    "one": lambda: (SingleDevice(), {}),
    "jit": lambda: (Sharded(), {}),
    "pmap": lambda: (Pmap(), {}),
    "fsdp": lambda: (FSDP(min_size=1), {"accumulate_grad_batches": 2}),
    "bits": lambda: (Bitwise(Sharded(2)), {}),
    "scalar": lambda: (Bitwise(Sharded()), {"loss": mean_loss}),
}


@pytest.mark.slow_but("jit", "fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_given_the_rows_that_came_in_their_order(layout):
    strategy, options = LAYOUTS[layout]()
    keeps = Keeps()
    metrics = {"right": "accuracy", "area": PassMetric(area), "kept": PassMetric(keeps)}
    metrics["right"] = lambda p, y: p.argmax(-1) == y
    trainer = make(metrics, strategy, **options)
    history = trainer.fit(DATA, DATA, max_epochs=2)
    assert len(keeps.calls) == 2
    predictions, targets = keeps.calls[-1]
    assert type(predictions) is type(targets) is np.ndarray
    np.testing.assert_array_equal(targets, TARGETS)
    np.testing.assert_allclose(predictions, trainer.predict(DATA), rtol=1e-5)
    assert history["val_area"][-1] == area(predictions, targets)
    assert history["val_kept_rows"] == [46, 46]
    assert "area" not in history
    tested = trainer.test(DATA)
    assert tested["test_area"] == history["val_area"][-1]
    assert tested["test_kept_sum"] == TARGETS.sum()


def test_functions_of_scikit_learn_fit_as_they_are():
    sk = pytest.importorskip("sklearn.metrics")
    one_vs_rest = functools.partial(sk.roc_auc_score, multi_class="ovr")
    trainer = make(
        {
            "f1": PassMetric(lambda p, y: sk.f1_score(y, p.argmax(1), average="macro")),
            "area": PassMetric(lambda p, y: one_vs_rest(y, probabilities(p))),
            "direct": PassMetric(functools.partial(sk.log_loss, labels=[0, 1, 2])),
        },
        loss_fn=lambda model, x, y: (
            softmax(logits := jax.vmap(model)(x), y),
            {"predictions": jax.nn.softmax(logits), "targets": y, "one": 0 * y + 1},
        ),
        loss=None,
    )  # fmt: skip
    found = trainer.validate(DATA)
    p = probabilities(trainer.predict(DATA))
    assert found["val_f1"] == sk.f1_score(TARGETS, p.argmax(1), average="macro")
    assert found["val_direct"] == pytest.approx(sk.log_loss(TARGETS, p), rel=1e-6)
    assert found["val_direct"] == pytest.approx(found["val_loss"], rel=1e-5)
    assert found["val_one"] == 1
    trainer.fit(DATA, max_epochs=1)
    assert {*trainer.history} == {"loss", "one"}


def test_monitors_and_saves_by_it_in_one_forward_pass(tmp_path):
    values = [0.5, 0.7, 0.6, 0.6, 0.9]
    passes = []

    class Counted(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            jax.debug.callback(lambda _: passes.append(1), x[0])
            return self.linear(x)

    stop = EarlyStopping("val_area_best", patience=2, mode="max", verbose=False)
    saver = ModelCheckpoint(tmp_path, monitor="val_area_best", mode="max")
    trainer = Trainer(
        Counted(linear()), strategy=SingleDevice(),
        metrics={"area": PassMetric(lambda p, y: {"best": values.pop(0)})},
        callbacks=[stop, saver], enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(DATA[:1], DATA[:1], max_epochs=9)
    jax.effects_barrier()
    assert stop.stopped_epoch == 3 and saver.best_model_score == 0.7
    assert len(passes) == 4 * (16 + 16)  # four epochs: a step and a validation each


def test_names_that_nothing_gives_are_refused_when_they_are_needed():
    trainer = make(
        {"area": PassMetric(area)}, callbacks=[EarlyStopping("val_area_worst")]
    )
    with pytest.raises(ValueError, match="what is logged: .*'val_area'"):
        trainer.fit(DATA, DATA, max_epochs=2)
    assert trainer.global_step == 4


def bad(logits, labels):
    raise RuntimeError("no")


@pytest.mark.parametrize("given, error, match", [
    (
        lambda p, y: np.ones(3),
        TypeError,
        r"'m' is array\(\[1.*must return a number",
    ),
    (lambda p, y: {"a": "x"}, TypeError, "'m_a' is 'x' of type str"),
    (bad, RuntimeError, "no"),
])  # fmt: skip
def test_what_a_function_gives_is_checked(given, error, match):
    with pytest.raises(error, match=match) as caught:
        make({"m": PassMetric(given)}).validate(DATA)
    if given is bad:
        note = r"predictions of shape (46, 3) and targets of shape (46,)"
        assert note in caught.value.__notes__[0]


def test_what_a_loss_fn_must_return_for_it_is_said():
    def without(model, x, y):
        return softmax(jax.vmap(model)(x), y), {"targets": y}

    def whole(model, x, y):
        logits = jax.vmap(model)(x)
        return softmax(logits, y), {"targets": y, "predictions": logits.mean()}

    metrics = {"area": PassMetric(area)}
    for loss_fn, text in (
        (without, r"does not return \['predictions'\].*metrics \['targets'\]"),
        (whole, r"the predictions have an array of shape \(\) for a batch of 16 rows"),
    ):
        with pytest.raises(ValueError, match=text):
            make(metrics, loss=None, loss_fn=loss_fn).fit(DATA)


def test_values_of_a_pass_are_named_by_their_keys():
    metric = PassMetric(lambda p, y: {0: 0.5, 1: 0.25, "": 1.0})
    values = metric("f1", np.zeros(1), np.zeros(1))
    assert values == {"f1_0": 0.5, "f1_1": 0.25, "f1": 1.0}
