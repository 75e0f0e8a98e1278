"""Trainers of one process share programs: what is the same is compiled once."""

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import Sharded, SingleDevice, Trainer
from jaxdp.callbacks import Callback, DonateBuffers

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(16, 2)
Y = np.cos(X.sum(1))
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: (
        COMPILED.append(name) if name.endswith("backend_compile_duration") else None
    )
)


def make(seed=0, width=8, rate=1e-2, model=None, **options):
    """A trainer whose functions are all its own."""
    if model is None:
        model = eqx.nn.MLP(2, "scalar", width, 1, key=jax.random.key(seed))
    if "loss_fn" not in options:
        options.setdefault("loss", "mse")
    options.setdefault("strategy", SingleDevice())
    optimizer = options.pop("optimizer", optax.adam(rate))
    options |= {"seed": seed, "enable_progress_bar": False}
    return Trainer(model, optimizer, **options)


def program(batch=(X, Y), **options):
    trainer = make(**options)
    trainer.fit([batch])
    return trainer.compiled_train_step()


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded])
def test_a_sweep_compiles_its_steps_once(strategy):
    optimizer = optax.adam(1e-2)

    def run(seed):
        trainer = make(seed, optimizer=optimizer, strategy=strategy())
        history = trainer.fit([(X, Y)] * 2, [(X, Y)], max_epochs=2)
        trainer.predict([X])
        return [*history["loss"], *history["val_loss"]]

    first, alone = run(0), run(1)
    COMPILED.clear()
    assert run(1) == alone != first
    assert run(2) != alone
    # Only what an optimizer starts from, which is a small program of each trainer.
    assert len(COMPILED) == 2


def other_constants(value):
    table = jnp.full(16, value).at[3].set(7)
    return lambda model, x, y: (jax.vmap(model)(x) - y) ** 2 * table


def of_columns(*names):
    def loss_fn(model, batch):
        x, y = (batch[name] for name in names)
        return (jax.vmap(model)(x) - y.sum(-1)) ** 2

    return loss_fn


class Inside(Callback):
    def __init__(self, name):
        self.name = name

    def inside_step(self, grads, updates, state):
        return {self.name: optax.tree.norm(grads)}


THREE = {"a": X, "b": X + 1, "c": X + 2}
DIFFERENT = {
    "width": ({"width": 8}, {"width": 9}),
    "rate": ({"rate": 1e-2}, {"rate": 2e-2}),
    "constants": (
        {"loss_fn": other_constants(1.0)},
        {"loss_fn": other_constants(2.0)},
    ),
    "which leaves of the batch are read": (
        {"loss_fn": of_columns("a", "b"), "batch": THREE},
        {"loss_fn": of_columns("a", "c"), "batch": THREE},
    ),
    "the names of results": (
        {"callbacks": [Inside("norm")]},
        {"callbacks": [Inside("size")]},
    ),
    "donation": (
        {"callbacks": [DonateBuffers("state")]},
        {"callbacks": [DonateBuffers("none")]},
    ),
    "options": (
        {"compiler_options": {"xla_cpu_enable_fast_math": False}},
        {"compiler_options": {"xla_cpu_enable_fast_math": True}},
    ),
    "device": (
        {"strategy": SingleDevice(jax.devices()[0])},
        {"strategy": SingleDevice(jax.devices()[1])},
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_programs_that_differ_are_not_shared(case):
    one, other = DIFFERENT[case]
    first = program(**one)
    assert program(**other) is not first
    if case != "options":
        assert program(seed=1, **one) is first


class Checked(eqx.Module):
    """Calls Python from the compiled step, as diffrax does."""

    layer: eqx.nn.MLP
    check: object = eqx.field(static=True)

    def __call__(self, x):
        return self.check(self.layer(x), x)


def checked(check, **options):
    layer = eqx.nn.MLP(2, "scalar", 8, 1, key=jax.random.key(0))
    return make(model=Checked(layer, check), **options)


def raising(message):
    return lambda value, x: eqx.error_if(value, x[0] > 5, message)


def test_a_step_that_calls_python_calls_its_own():
    alone = {"strategy": SingleDevice()}
    trainers = [checked(raising(text), **alone) for text in ("one", "other")]
    for trainer in trainers:
        trainer.fit([(X, Y)])
    for trainer, text in zip(trainers, ("one", "other"), strict=True):
        with pytest.raises(eqx.EquinoxRuntimeError, match=f"^{text}"):
            trainer.fit([(X + 9, Y)], max_epochs=2)

    def adding(number):
        def call(value):
            return np.asarray(value + number, np.float32)

        like = jax.ShapeDtypeStruct((), jnp.float32)

        def check(value, x):
            value_ = jax.lax.stop_gradient(value)
            return value + jax.pure_callback(
                call, like, value_, vmap_method="sequential"
            )

        return check

    kept = []
    for number in (1, 100, 1):
        kept.append(checked(adding(number), **alone).fit([(X, Y)])["loss"])
    assert kept[0] == kept[2] != kept[1]


def test_a_step_whose_calls_have_effects_is_not_shared(capfd):
    def printing(text):
        def check(value, x):
            jax.debug.print(text)
            return value

        return check

    for text in ("first", "second"):
        checked(printing(text)).fit([(X, Y)])
        jax.effects_barrier()
        assert text in capfd.readouterr().out


def test_nothing_of_a_trainer_is_kept_with_its_program():
    def train():
        def loss_fn(model, x, y):
            return (jax.vmap(model)(x) - y) ** 2

        trainers = [checked(raising("wrong")), make(loss_fn=loss_fn)]
        for each in trainers:
            each.fit([(X, Y)], [(X, Y)])
        return [
            weakref.ref(each) for each in (*trainers, loss_fn, each.run.recipe.model)
        ]

    gone = train()
    jax.clear_caches()  # JAX keeps what it has traced
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_an_argument_that_no_step_uses_may_be_of_another_kind():
    """It is not in the program's text, but each call checks it."""

    def loss_fn(model, x, y):
        return jax.vmap(model)(x) ** 2

    for kind in np.float32, np.int32:
        program((X, Y.astype(kind)), loss_fn=loss_fn)
