"""Hyperparameters in the optimizer's state: set, saved, refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    At,
    On,
    assert_close,
    batches,
    cross_entropy,
    hand_written,
    linear,
    linear_on_one_device,
)

from jaxdp import FSDP, Bitwise, Pmap, Sharded
from jaxdp.callbacks import LearningRateMonitor, WeightAveraging

DATA = batches(8, 8, 8, 8)


def injected(rate=0.1):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)


def make_trainer(optimizer=None, callbacks=(), **options):
    optimizer = injected() if optimizer is None else optimizer
    return linear_on_one_device(*callbacks, optimizer=optimizer, **options)


def set_rate(step, rate, hook="on_train_batch_end"):
    """Sets the rate after a step."""
    return At(step, lambda trainer: trainer.set_hyperparams(learning_rate=rate), hook)


def note_rates():
    """A callback, and the rates of steps that it notes."""
    seen = []
    note = lambda trainer, metrics, batch_idx: seen.append(float(metrics["lr"]))  # noqa: E731
    return On(on_train_batch_end=note), seen


def by_hand(rates):
    """Returns the weights after a step of plain SGD on each batch with these rates."""
    optimizer = optax.sgd(lambda step: jnp.asarray(rates)[step])
    return hand_written(linear(), optimizer, DATA, 1, cross_entropy)[0]


WAYS = {
    "one device": {},
    "sharded": {"strategy": Sharded()},
    "pmap": {"strategy": Pmap()},
    "fsdp": {"strategy": FSDP()},
    "blocks": {"steps_per_execution": 2},
    "clipped": {"gradient_clip_val": 1e6},
    "bitwise": {"strategy": Bitwise(Sharded())},
    "averaged": {"callbacks": [WeightAveraging(evaluate=False)]},
}


@pytest.mark.slow_but("sharded", "clipped", "blocks")
@pytest.mark.parametrize("way", WAYS)
def test_the_next_step_uses_the_new_value(way):
    options = dict(WAYS[way])
    rates, seen = note_rates()
    own = LearningRateMonitor(), set_rate(2, 0.5, "on_boundary"), rates
    callbacks = [*own, *options.pop("callbacks", [])]
    trainer = make_trainer(callbacks=callbacks, **options)
    trainer.fit(DATA)
    assert_close(trainer.model, by_hand([0.1, 0.1, 0.5, 0.5]))
    assert trainer.hyperparams == {"learning_rate": 0.5}
    np.testing.assert_allclose(seen, [0.1, 0.1, 0.5, 0.5], rtol=1e-6)


def test_set_hyperparams_compiles_no_step():
    traces = []

    def loss_fn(model, x, y):
        traces.append(1)
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    trainer = make_trainer(loss=None, loss_fn=loss_fn)
    trainer.fit(DATA)
    compiled, before = trainer.compiled_train_step(), len(traces)
    for rate in (0.3, np.float64(0.2), np.array(0.1), jax.numpy.float32(0.05), 1):
        trainer.set_hyperparams(learning_rate=rate)
        trainer.fit(DATA, max_epochs=trainer.current_epoch + 1)
        assert trainer.hyperparams["learning_rate"] == np.float32(rate)
    assert trainer.compiled_train_step() is compiled
    assert len(traces) == before


def test_a_value_set_before_the_fit_is_used_in_the_first_step():
    trainer = make_trainer()
    trainer.set_hyperparams(learning_rate=0.5)
    trainer.fit(DATA)
    assert_close(trainer.model, by_hand([0.5] * 4))


@pytest.mark.parametrize("options", [
    {"accumulate_grad_batches": 2},
    {"precision": "bf16-true"},
    {"precision": "16-mixed"},
])  # fmt: skip
def test_accumulated_steps_and_other_precisions_use_the_new_value(options):
    rates, seen = note_rates()
    callbacks = [LearningRateMonitor(), set_rate(1, 0.5), rates]
    trainer = make_trainer(callbacks=callbacks, **options)
    trainer.fit(DATA)
    np.testing.assert_allclose(seen[:2], [0.1, 0.5], rtol=1e-2)
    assert trainer.hyperparams["learning_rate"] == 0.5


LABELS = jax.tree.map(lambda leaf: "wide" if leaf.ndim == 2 else "thin", linear())


def masked(rate, dims):
    mask = jax.tree.map(lambda leaf: leaf.ndim == dims, linear())
    return optax.masked(injected(rate), lambda _: mask)


SEVERAL = {
    "partition": (
        optax.partition(
            {"wide": injected(0.1), "thin": injected(0.2)}, lambda _: LABELS
        ),
        {"thin/learning_rate": 0.2, "wide/learning_rate": 0.1},
    ),
    "masked": (
        optax.chain(masked(0.1, dims=2), masked(0.2, dims=1)),
        {"0/learning_rate": 0.1, "1/learning_rate": 0.2},
    ),
    "one in the other": (
        optax.inject_hyperparams(
            lambda decay: optax.chain(optax.add_decayed_weights(decay), injected())
        )(decay=0.3),
        {"decay": 0.3, "learning_rate": 0.1},
    ),
    "nested": (
        optax.MultiSteps(
            optax.chain(optax.clip(9.0), injected()), 2
        ).gradient_transformation(),
        {"learning_rate": 0.1},
    ),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_hyperparams_of_a_name_have_labels(kind):
    optimizer, expected = SEVERAL[kind]
    trainer = make_trainer(optimizer)
    assert trainer.hyperparams == pytest.approx(expected)
    for number, name in enumerate(expected):
        trainer.set_hyperparams(**{name: 1.0 + number})
    trainer.fit(DATA)
    assert dict(trainer.hyperparams) == {
        name: 1.0 + number for number, name in enumerate(expected)
    }


def counted():
    return optax.inject_hyperparams(lambda k: optax.trace(0.1 * k))(k=1)


RATE = "learning_rate"
REFUSED = {
    "unknown": (injected(), {"rate": 1.0}, "no 'rate'; there are 'lea"),
    "ambiguous": (SEVERAL["partition"][0], {RATE: 0.1},
        "no 'learning_rate'; there are 'thin/learning_rate', 'wide/learning_rate'"),
    "plain": (optax.sgd(0.1), {RATE: 1.0}, "inject_hyperparams"),
    "scheduled": (injected(optax.linear_schedule(0.1, 0.0, 10)), {RATE: 1.0},
        "set by a schedule in every step"),
    "shape": (injected(), {RATE: [0.1]}, "of shape"),
    "text": (injected(), {RATE: "0.1"}, "can't be set to '0.1'"),
    "bool": (injected(), {RATE: True}, "can't be set to True"),
    "None": (injected(), {RATE: None}, "can't be set to None"),
    "not an int": (counted(), {"k": 1.5}, "'k' is int32 .* can't be set to 1.5"),
    "too large an int": (counted(), {"k": 2**40}, "can't be set to 1099511627776"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_hyperparams_are_refused_without_a_change(case):
    optimizer, values, message = REFUSED[case]
    trainer = make_trainer(optimizer)
    before = dict(trainer.hyperparams)
    with pytest.raises(ValueError, match=f"`set_hyperparams`.*{message}"):
        trainer.set_hyperparams(**values)
    assert dict(trainer.hyperparams) == before


@pytest.mark.parametrize("use", ["step", "state", "model", "save"])
def test_writing_to_the_state_is_refused_at_the_next_use(use, tmp_path):
    trainer = make_trainer()
    trainer.fit(DATA)
    with pytest.raises(TypeError):
        trainer.hyperparams["learning_rate"] = 0.5
    trainer.state.opt_state.hyperparams["learning_rate"] = 0.5
    uses = {
        "step": lambda: trainer.fit(DATA, max_epochs=2),
        "state": lambda: trainer.state,
        "model": lambda: trainer.model,
        "save": lambda: trainer.save(tmp_path / "saved"),
    }
    with pytest.raises(RuntimeError, match=r"written to.*trainer\.set_hyperparams"):
        uses[use]()
    assert trainer.hyperparams["learning_rate"] == pytest.approx(0.1)
    trainer.fit(DATA, max_epochs=2)  # nothing has changed
