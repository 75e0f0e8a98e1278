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
    "narrow": {"precision": "bf16-true"},
    "scaled": {"precision": "16-mixed"},
}


@pytest.mark.slow_but("sharded", "clipped", "blocks", "narrow", "scaled")
@pytest.mark.parametrize("way", WAYS)
def test_the_next_step_uses_the_new_value(way):
    options, seen = dict(WAYS[way]), []
    note = lambda trainer, metrics, batch_idx: seen.append(float(metrics["lr"]))  # noqa: E731
    set_rate = lambda trainer: trainer.set_hyperparams(learning_rate=0.5)  # noqa: E731
    callbacks = [
        LearningRateMonitor(), At(2, set_rate, "on_boundary"),
        On(on_train_batch_end=note), *options.pop("callbacks", []),
    ]  # fmt: skip
    trainer = make_trainer(callbacks=callbacks, **options)
    trainer.fit(DATA)
    rtol = 1e-2 if "precision" in options else 1e-5
    assert_close(trainer.model, by_hand([0.1, 0.1, 0.5, 0.5]), rtol, 100 * rtol**2)
    assert trainer.hyperparams == {"learning_rate": 0.5}
    rtol = 1e-2 if "precision" in options else 1e-6
    np.testing.assert_allclose(seen, [0.1, 0.1, 0.5, 0.5], rtol=rtol)


def test_accumulated_steps_use_the_new_value():
    seen = []
    note = On(on_train_batch_end=lambda t, metrics, _: seen.append(metrics["lr"]))
    change = At(1, lambda trainer: trainer.set_hyperparams(learning_rate=0.5))
    callbacks = [LearningRateMonitor(), change, note]
    make_trainer(callbacks=callbacks, accumulate_grad_batches=2).fit(DATA)
    np.testing.assert_allclose([float(rate) for rate in seen[:2]], [0.1, 0.5])


def test_set_hyperparams_compiles_no_step():
    trainer = make_trainer()
    trainer.fit(DATA)
    compiled = trainer.compiled_train_step()
    for rate in (0.3, np.float64(0.2), np.array(0.1), jax.numpy.float32(0.05), 1):
        trainer.set_hyperparams(learning_rate=rate)
        trainer.fit(DATA, max_epochs=trainer.current_epoch + 1)
        assert trainer.hyperparams["learning_rate"] == np.float32(rate)
    assert trainer.compiled_train_step() is compiled
    assert len(trainer.run.engine.compiled_steps["train"].programs) == 1


def test_a_value_set_before_the_fit_is_used_in_the_first_step():
    trainer = make_trainer()
    trainer.set_hyperparams(learning_rate=0.5)
    trainer.fit(DATA)
    assert_close(trainer.model, by_hand([0.5] * 4))


LABELS = jax.tree.map(lambda leaf: "wide" if leaf.ndim == 2 else "thin", linear())


def masked(rate, dims):
    mask = jax.tree.map(lambda leaf: leaf.ndim == dims, linear())
    return optax.masked(injected(rate), lambda _: mask)


SEVERAL = {
    "partition": (
        optax.partition({"wide": injected(), "thin": injected(0.2)}, lambda _: LABELS),
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
        optax.MultiSteps(injected(), 2).gradient_transformation(),
        {"learning_rate": 0.1},
    ),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_hyperparams_of_a_name_have_labels(kind):
    optimizer, expected = SEVERAL[kind]
    trainer = make_trainer(optimizer)
    assert trainer.hyperparams == pytest.approx(expected)
    new = {name: 1.0 + number for number, name in enumerate(expected)}
    for name, value in new.items():
        trainer.set_hyperparams(**{name: value})
    trainer.fit(DATA)
    assert dict(trainer.hyperparams) == new


COUNTED = optax.inject_hyperparams(lambda k: optax.trace(0.1 * k))(k=1)
RATE = "learning_rate"
REFUSED = {
    "unknown": (injected(), {"rate": 1.0}, "no 'rate'; there are 'lea"),
    "another word": (injected(), {"lr": 1.0}, "for 'lr' write 'learning_rate'"),
    "ambiguous": (SEVERAL["partition"][0], {RATE: 0.1},
        "no 'learning_rate'; there are 'thin/learning_rate', 'wide/learning_rate'"),
    "plain": (optax.sgd(0.1), {RATE: 1.0}, "inject_hyperparams"),
    "scheduled": (injected(optax.linear_schedule(0.1, 0.0, 10)), {RATE: 1.0},
        "set by a schedule in every step"),
    "shape": (injected(), {RATE: [0.1]}, "of shape"),
    "text": (injected(), {RATE: "0.1"}, "can't be set to '0.1'"),
    "bool": (injected(), {RATE: True}, "can't be set to True"),
    "None": (injected(), {RATE: None}, "can't be set to None"),
    "not an int": (COUNTED, {"k": 1.5}, "'k' is int32 .* can't be set to 1.5"),
    "too large an int": (COUNTED, {"k": 2**40}, "can't be set to 1099511627776"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_hyperparams_are_refused_without_a_change(case):
    optimizer, values, message = REFUSED[case]
    trainer = make_trainer(optimizer)
    before = dict(trainer.hyperparams)
    with pytest.raises(ValueError, match=f"`set_hyperparams`.*{message}"):
        trainer.set_hyperparams(**values)
    assert dict(trainer.hyperparams) == before


USES = {
    "step": lambda trainer, path: trainer.fit(DATA, max_epochs=2),
    "state": lambda trainer, path: trainer.state,
    "model": lambda trainer, path: trainer.model,
    "save": lambda trainer, path: trainer.save(path / "saved"),
}


@pytest.mark.parametrize("use", USES)
def test_writing_to_the_state_is_refused_at_the_next_use(use, tmp_path):
    trainer = make_trainer()
    trainer.fit(DATA)
    with pytest.raises(TypeError):
        trainer.hyperparams["learning_rate"] = 0.5
    trainer.state.opt_state.hyperparams["learning_rate"] = 0.5
    with pytest.raises(RuntimeError, match=r"written to.*trainer\.set_hyperparams"):
        USES[use](trainer, tmp_path)
    assert trainer.hyperparams["learning_rate"] == pytest.approx(0.1)
    trainer.fit(DATA, max_epochs=2)  # nothing has changed
