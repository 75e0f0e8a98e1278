"""A model and a loss are called with the arguments they name, and with state."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import linear, quiet

from jaxdp import FSDP, SingleDevice
from jaxdp.step.mask_and_keys import MaskAndKeys
from jaxdp.step.model_call import call_model, check_training_flags, find_keywords
from jaxdp.step.objective import LossFnObjective
from jaxdp.step.per_example import Arguments

X = np.arange(6, dtype=np.float32).reshape(3, 2)
KEY = jax.random.key(0)
ROWS = MaskAndKeys(
    jnp.ones(3, bool), jax.random.split(KEY, 3), KEY, jnp.int32(0), training=True
)


class Switch(eqx.Module):
    """Sets its state to a constant, through a part of the whole state."""

    was_called: eqx.nn.StateIndex
    unused: eqx.nn.StateIndex

    def __init__(self):
        self.was_called = eqx.nn.StateIndex(jnp.array(False))
        self.unused = eqx.nn.StateIndex(jnp.array(2.0))

    def __call__(self, x, state):
        own = state.substate(self.was_called)
        own = own.set(self.was_called, jnp.array(True))
        return x.sum(), state.update(own)


def test_a_state_is_left_as_it_was_and_may_be_set_to_a_constant():
    model, state = eqx.nn.make_with_state(Switch)()

    def by_model(state):
        return call_model(model, state, X, ROWS)

    def by_loss(state):
        def loss_fn(model, x, state):
            state = state.set(model.unused, state.get(model.unused))
            return jax.vmap(model, (0, None), (0, None))(x, state)

        found = LossFnObjective(loss_fn)(model, state, X, ROWS)
        return found.by_name["loss"].values, found.model_state

    for call in (by_model, by_loss):
        # A state can be used once, and optimizers may evaluate the loss twice.
        for found, new in jax.jit(lambda state, call=call: [call(state), call(state)])(
            state
        ):
            np.testing.assert_array_equal(found, X.sum(axis=1))
            assert new.get(model.was_called)
            assert new.get(model.unused) == 2
    assert not state.get(model.was_called)


class Told(eqx.Module):
    """Adds what it is told of to its predictions: 1 in training, else 0."""

    linear: eqx.nn.Linear = eqx.field(default_factory=linear)

    def __call__(self, x, key=None, training=None):
        assert isinstance(training, bool)
        return 0 * self.linear(x) + training


class ToldWithState(Told):
    count: eqx.nn.StateIndex = eqx.field(
        default_factory=lambda: eqx.nn.StateIndex(jnp.array(0))
    )

    def __call__(self, x, state, *, training):  # pyright: ignore
        return super().__call__(x, training=training), state


MODELS = {
    "with a state": lambda: dict(zip(
        ("model", "state"), eqx.nn.make_with_state(ToldWithState)(), strict=True
    )),
    "split and recomputed": lambda: {
        "model": Told(), "strategy": FSDP(2, min_size=1), "remat": "linear"
    },
    "an ensemble": lambda: {
        "model": eqx.filter_vmap(lambda _: Told())(jnp.arange(2)), "ensemble": 2
    },
    "a partial": lambda: {
        "model": eqx.Partial(Told(), key=None), "precision": "bf16-mixed"
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_names_training_is_told_in_each_pass(kind):
    options = {"strategy": SingleDevice(), "loss": lambda p, y: p.mean(-1)}
    trainer = quiet(**options | MODELS[kind]())
    x = np.ones((8, 4), np.float32)
    data = [(x, np.zeros(8, np.int32))]
    assert trainer.fit(data)["loss"] == [1.0]
    assert trainer.validate(data)["val_loss"] == 0
    assert trainer.test(data)["test_loss"] == 0
    assert not trainer.predict([x]).any()
    assert not trainer.inference_model()(x[0]).any()


@pytest.mark.parametrize("model, names", [
    (lambda x, key=None, training=True: x, {"x", "key", "training"}),
    (lambda *given, training: given, {"given", "training"}),
    (functools.partial(lambda training, x: x, True), {"x"}),
    (functools.partial(lambda x, training: x, training=True), {"x"}),
    (eqx.Partial(functools.partial(lambda w, x, key: x, 1), key=KEY), {"x"}),
    (jax.jit(lambda x, training: x), {"x", "training"}),
    (eqx.nn.Dropout(0.5), {"x", "key", "inference"}),
    (dict, set()),
])  # fmt: skip
def test_what_a_call_names_is_seen_through_what_is_around_it(model, names):
    assert {*find_keywords(model)} - {"deterministic"} == names


def named(name, default):
    """A function whose argument has this name and default."""
    scope = {"default": default}
    exec(f"def call(x, {name}=default): return x", scope)
    return scope["call"]


@pytest.mark.parametrize("name", ["train", "is_training", "deterministic", "inference"])
def test_a_name_that_nobody_passes_is_refused(name):
    check_training_flags(named(name, None))
    check_training_flags(eqx.Partial(named(name, True), **{name: False}))
    for model in (named(name, True), eqx.Partial(named(name, False))):
        with pytest.raises(TypeError, match=f"`{name}`, .* Call it `training`"):
            quiet(model, loss="mse")


@pytest.mark.parametrize("names", [True, False])
def test_a_loss_fn_that_can_not_tell_the_model_is_said(names, caplog):
    def naming(model, x, y, training):
        return jax.vmap(lambda x: model(x, training=training))(x).mean(1)

    loss_fn = naming if names else lambda model, x, y: naming(model, x, y, True)
    quiet(Told(), loss_fn=loss_fn, strategy=SingleDevice())
    assert ("Name `training` in `loss_fn`" in caplog.text) is not names


OFFERED = {name: name for name in ("keys", "key", "mask", "state")}


@pytest.mark.parametrize("loss_fn, batch", [
    (lambda model, x, y: (x, y), ("x", "y")),
    (lambda model, x, y, keys, mask: (x, y, keys, mask), ("x", "y")),
    (lambda model, x, y, *, keys, mask: (x, y, keys, mask), ("x", "y")),
    (lambda model, keys, mask, x, y: (x, y, keys, mask), ("x", "y")),
    (lambda model, state, x, y: (x, y, state), ("x", "y")),
    (lambda model, *batch: batch, ("x", "y")),
    (lambda model, *batch, key: (*batch, key), ("x", "y")),
    (lambda model, x, y=None: (x,), ("x",)),
    (lambda model, x, y=None, *rest: (x, *rest), ("x",)),
    (functools.partial(lambda model, w, x, key: (x, key), w=1), ("x",)),
    (functools.partial(lambda model, w, x, t1, key: (x, key), w=1, t1=2), ("x",)),
    (functools.partial(lambda w, model, x: (x,), 1), ("x",)),
])  # fmt: skip
def test_arguments_are_bound_by_place_and_ours_by_name(loss_fn, batch):
    arguments, keywords = Arguments(loss_fn).bind(batch, OFFERED)
    result = loss_fn("model", *arguments, **keywords)
    for value in result:
        assert value in {*batch, *OFFERED}
    assert result[: len(batch)] == batch


@pytest.mark.parametrize("loss_fn", [
    lambda model, x, mask: x, lambda model, x: x, lambda model, x, y, z: x,
    lambda model, x, *, weight=1: x,
])  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused(loss_fn):
    """An element never takes the place of a name of ours, or of an option."""
    with pytest.raises(TypeError, match="has 2 element.*keys, key, mask.* Rename"):
        Arguments(loss_fn).bind(("x", "y"), OFFERED)
