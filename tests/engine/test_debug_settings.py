"""JAX's settings for debugging: no jit, NaN, and errors that a step raises."""

import contextlib
import functools
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, Recorder, batches, linear, quiet

from jaxdp import FSDP, Bitwise, Pmap, Sharded, SingleDevice, per_example
from jaxdp.callbacks import DonateBuffers, EarlyStopping

DATA = batches(8, 8, 8, 5)
softmax = optax.softmax_cross_entropy_with_integer_labels
nothing = contextlib.nullcontext
debugs_nans = functools.partial(jax.debug_nans, True)


def make(strategy=None, model=None, **options):
    options = {"strategy": strategy or SingleDevice()} | options
    options.setdefault("loss", None if "loss_fn" in options else "cross_entropy")
    model = linear() if model is None else model
    return quiet(model, optax.adam(1e-2), **options)


@contextlib.contextmanager
def debugs_nans_without_jit():
    with debugs_nans(), jax.disable_jit():
        yield


def mlp(**options):
    return {"model": Mlp(jax.random.key(0)), **options}


def norm_net():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    return {"model": model, "state": state, "strategy": Sharded()}


def bitwise():
    return {"strategy": Bitwise(SingleDevice())}


SETTINGS = {
    "dropout": (debugs_nans, mlp),
    "bitwise, no jit": (jax.disable_jit, bitwise),
    "norm": (jax.disable_jit, norm_net),
    "fsdp": (jax.disable_jit, lambda: mlp(strategy=FSDP(), remat="first")),
}


@pytest.mark.slow_cases("norm", "fsdp")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_no_numbers(setting):
    context, options = SETTINGS[setting]

    def numbers():
        recorder = Recorder()
        trainer = make(callbacks=[recorder], **options())
        trainer.fit(DATA, DATA[2:])
        val_loss, tested = trainer.history["val_loss"], trainer.test(DATA)["test_loss"]
        predicted, rows = trainer.predict(DATA), trainer.run.progress.examples
        return recorder.losses, val_loss, tested, predicted, rows

    compiled = numbers()
    with context():
        debugged = numbers()
    for one, other in zip(debugged, compiled, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


def test_a_loss_without_jit_gets_values_once_per_step():
    seen = []

    def loss_fn(model, x, y):
        if float(x.max()) > 0:  # impossible in a compiled step
            seen.append(np.array(x))
        return softmax(jax.vmap(model)(x), y)

    with jax.disable_jit():
        make(Sharded(), loss_fn=loss_fn).fit(DATA)
    assert len(seen) == len(DATA)
    for found, (x, _) in zip(seen, DATA, strict=True):
        np.testing.assert_array_equal(found, x)


def test_debug_settings_may_change_between_fits():
    def run(*contexts):
        trainer = make(Sharded())
        for epoch, context in enumerate(contexts, 1):
            with context():
                trainer.fit(DATA, DATA[2:], max_epochs=epoch)
        assert trainer.state.step.sharding.device_set == set(jax.devices())
        return trainer.history["loss"]

    changed = run(nothing, jax.disable_jit, debugs_nans, nothing)
    np.testing.assert_allclose(changed, run(*[nothing] * 4), rtol=1e-5)


@pytest.mark.slow
def test_other_methods_work_without_jit(tmp_path):
    compiled = make(Sharded()).fit(DATA)["loss"]
    with jax.disable_jit():
        trainer = make(Sharded(), callbacks=[DonateBuffers("all")])
        trainer.fit(DATA)
        assert trainer.running_plan() is None
        assert "parameters" in str(trainer.plan(DATA))
        trainer.compare(DATA, SingleDevice(), steps=2).assert_close()
        trainer.load(trainer.save(tmp_path / "saved"))
    assert trainer.history["loss"] == pytest.approx(compiled, rel=1e-5)


# Losses that raise in the fourth of these batches.


def bad_data():
    data = batches(8, 8, 8, 8, 8)
    data[3][0][5, 2] = 100
    return data


def losing(prediction_of):
    return lambda model, x, y: softmax(prediction_of(model, x), y)


@losing
def takes_logarithms(model, x):
    return jax.vmap(model)(jnp.log(50 - x))  # the user's own line


@losing
def checks(model, x):
    return jax.vmap(model)(eqx.error_if(x, x > 50, "x is too large"))


@losing
def checks_each(model, x):
    return jax.vmap(lambda x: model(eqx.error_if(x, x.max() > 50, "too large")))(x)


@per_example
def checks_one(model, x, y):
    return softmax(model(eqx.error_if(x, x > 50, "x is too large")), y)


def raises(x):
    if (x > 50).any():
        raise OverflowError("x is too large")
    return x


@losing
def calls(model, x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = functools.partial(jax.pure_callback, raises, shape)
    return jax.vmap(model)(call(jax.lax.stop_gradient(x)))


@losing
def looks(model, x):
    raises(np.asarray(x))  # impossible in a compiled step
    return jax.vmap(model)(x)


def divides(model, x, y):
    return jax.vmap(model)(x).sum(axis=1) / jnp.where(x.max() > 50, 0.0, 1.0)


JAX = jax.errors.JaxRuntimeError
EQUINOX = JAX, "EquinoxRuntimeError: x is too large"
NAN = FloatingPointError, "invalid value (nan)"
SHARDED = {"strategy": Sharded()}
RAISING = {
    "one device": (nothing, checks, {}, *EQUINOX),
    "donated": (nothing, checks, {"callbacks": [DonateBuffers("state")]}, *EQUINOX),
    "bitwise": (nothing, checks_one, bitwise(), *EQUINOX),
    "a callback": (nothing, calls, {}, JAX, "OverflowError: x is too large"),
    "error_if, no jit": (jax.disable_jit, checks, SHARDED, RuntimeError, "too large"),
    "no jit": (jax.disable_jit, looks, SHARDED, OverflowError, "x is too large"),
    "NaN": (debugs_nans, takes_logarithms, {}, *NAN),
    "NaN, Sharded": (debugs_nans, takes_logarithms, SHARDED, *NAN),
    "NaN, Pmap": (debugs_nans, takes_logarithms, {"strategy": Pmap()}, *NAN),
    "NaN, no jit": (debugs_nans_without_jit, takes_logarithms, {}, *NAN),
    "infinity": (lambda: jax.debug_infs(True), divides, {}, NAN[0], "inf"),
}
"""By case: a setting, a loss, options of the trainer, and the error with its words."""


@pytest.mark.slow_cases("donated")
@pytest.mark.parametrize("case", RAISING)
@pytest.mark.filterwarnings("ignore:.DonateBuffers")
def test_an_error_has_its_step_and_batch_and_the_run_continues(case):
    context, loss_fn, options, error, text = RAISING[case]
    with context():
        trainer = make(loss_fn=loss_fn, **options)
        with pytest.raises(error) as caught:
            trainer.fit(bad_data())
        assert text in str(caught.value)
        assert "step 4, in batch 3 of epoch 0" in "".join(caught.value.__notes__)
        frames = traceback.extract_tb(caught.value.__traceback__)
        has_line = any("the user's own line" in frame.line for frame in frames)
        assert has_line or loss_fn is not takes_logarithms
        assert trainer.global_step == 3
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.state))
        trainer.fit(batches(8, 8, 8, 8, 8))
        assert trainer.global_step == 5


@pytest.mark.parametrize("options, loss_fn, words", [
    (SHARDED, checks, "EQX_ON_ERROR=nan.*throw=False.*SingleDevice"),
    (SHARDED, checks_each, "EQX_ON_ERROR=nan"),
    ({"strategy": Pmap()}, calls, "EQX_ON_ERROR=nan"),
    ({"steps_per_execution": 2}, checks, "calls Python .* with steps_per_execution=1"),
])  # fmt: skip
def test_steps_that_may_raise_are_refused_elsewhere(options, loss_fn, words):
    trainer = make(loss_fn=loss_fn, **options)
    with pytest.raises(ValueError, match=words):
        trainer.fit(DATA)
    assert trainer.global_step == 0


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_steps_that_may_raise_accept_numpy_and_jax_arrays(convert):
    data = [tuple(map(convert, batch)) for batch in DATA]
    trainer, same = make(loss_fn=checks), make()
    trainer.fit(data, data[2:], max_epochs=2)
    same.fit(DATA, DATA[2:], max_epochs=2)
    for name in ("loss", "val_loss"):
        found, expected = trainer.history[name], same.history[name]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_error_if_in_an_evaluation_has_the_batch():
    class Checked(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x):
            return self.inner(eqx.error_if(x, x > 50, "x is too large"))

    trainer = make(model=Checked(linear()))
    for method in (trainer.validate, trainer.predict):
        with pytest.raises(JAX, match=EQUINOX[1]) as caught:
            method(bad_data())
        assert caught.value.__notes__[0] == "in batch 3"


@pytest.mark.parametrize(
    "context", [jax.checking_leaks, lambda: jax.enable_x64(True)], ids=["leaks", "x64"]
)
def test_a_fit_passes_other_checks_of_jax(context):
    with context():
        trainer = make(Sharded(), accumulate_grad_batches=2)
        trainer.fit(DATA, DATA)
    assert np.isfinite(trainer.history["val_loss"]).all()


def test_debug_nans_knows_the_names_of_metrics_and_the_classes():
    with jax.debug_nans(True):
        trainer = make(callbacks=[EarlyStopping("loss", patience=3)], **mlp())
        assert trainer.fit(DATA).epochs == [0]
        (x, y), *_ = DATA
        with pytest.raises(ValueError, match="labels must be 0 to 2, .* from 9 to 9"):
            make(**mlp()).fit([(x, np.full_like(y, 9))])
