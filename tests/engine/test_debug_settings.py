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
from toys import Mlp, NormNet, batches

from jaxdp import FSDP, Bitwise, Pmap, Sharded, SingleDevice, Trainer, per_example
from jaxdp.callbacks import Callback, DonateBuffers, EarlyStopping

DATA = batches(8, 8, 8, 5)


def make_trainer(model=None, strategy=None, **options):
    if "loss_fn" not in options:
        options = {"loss": "cross_entropy"} | options
    return Trainer(
        Mlp(jax.random.key(0)) if model is None else model,
        optax.adam(1e-2),
        strategy=strategy or SingleDevice(),
        enable_progress_bar=False,
        **options,
    )


def plain():
    return eqx.nn.Linear(4, 3, key=jax.random.key(0))


def norm_net():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    return {"model": model, "state": state}


class Losses(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.seen.append(float(metrics["loss"]))


def numbers(**options):
    """Returns all results of a short run."""
    losses = Losses()
    trainer = make_trainer(callbacks=[losses], **options)
    trainer.fit(DATA, DATA[2:])
    return {
        "losses": losses.seen,
        "val_loss": trainer.history["val_loss"],
        "test": list(trainer.test(DATA).values()),
        "predictions": trainer.predict(DATA),
        "examples": trainer.run.progress.examples,
    }


SETTINGS = {
    "fsdp, clipped": lambda: {"strategy": FSDP(), "gradient_clip_val": 0.1},
    "norm": lambda: {"strategy": Sharded(), **norm_net()},
    "recomputed": lambda: {"strategy": Sharded(), "remat": "first"},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_without_jit_have_the_numbers_of_compiled_steps(setting):
    make = SETTINGS[setting]
    compiled = numbers(**make())
    with jax.disable_jit():
        uncompiled = numbers(**make())
    for name, expected in compiled.items():
        np.testing.assert_allclose(
            uncompiled[name], expected, rtol=1e-5, atol=2e-5, err_msg=name
        )


def test_a_loss_without_jit_gets_values_once_per_step():
    seen = []

    def loss_fn(model, x, y):
        if float(x.max()) > 0:  # impossible in a compiled step
            seen.append(np.array(x))
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    trainer = make_trainer(strategy=Sharded(), model=plain(), loss_fn=loss_fn)
    with jax.disable_jit():
        trainer.fit(DATA)
    assert len(seen) == len(DATA)
    for found, (x, _) in zip(seen, DATA, strict=True):
        np.testing.assert_array_equal(found, x)


def test_an_error_in_a_loss_without_jit_has_step_and_batch():
    def loss_fn(model, x, y):
        if len(x) == 5:
            raise LookupError("five")
        return jax.vmap(model)(x).sum(axis=1)

    for data, place in ((DATA, "step 4, in batch 3"), (DATA[3:], "step 1, in batch 0")):
        with jax.disable_jit(), pytest.raises(LookupError) as caught:
            make_trainer(model=plain(), loss_fn=loss_fn).fit(data)
        assert place in "".join(caught.value.__notes__)


def test_debug_settings_may_change_between_fits():
    def run(*contexts):
        trainer = make_trainer(plain(), Sharded())
        for epoch, context in enumerate(contexts):
            with context:
                trainer.fit(DATA, DATA[2:], max_epochs=epoch + 1)
        assert trainer.state.step.sharding.device_set == set(jax.devices())
        return trainer.history["loss"]

    nothing = contextlib.nullcontext
    changed = run(nothing(), jax.disable_jit(), jax.debug_nans(True), nothing())
    np.testing.assert_allclose(changed, run(*[nothing()] * 4), rtol=1e-5)


@pytest.mark.slow
def test_other_methods_work_without_jit(tmp_path):
    compiled = make_trainer(plain(), Sharded())
    compiled.fit(DATA)
    with jax.disable_jit():
        trainer = make_trainer(plain(), Sharded(), callbacks=[DonateBuffers("all")])
        trainer.fit(DATA)
        assert trainer.running_plan() is None
        assert "parameters" in str(trainer.plan(DATA))
        trainer.compare(DATA, SingleDevice(), steps=2).assert_close()
        trainer.save(tmp_path / "saved")
        other = make_trainer(plain(), Sharded())
        other.load(tmp_path / "saved")
        np.testing.assert_array_equal(other.predict(DATA), trainer.predict(DATA))
    assert trainer.history["loss"] == pytest.approx(compiled.history["loss"], rel=1e-5)


def bad_data():
    """The losses below raise in the fourth batch."""
    data = batches(8, 8, 8, 8, 8)
    data[3][0][5, 2] = 100
    return data


def losing(prediction_of):
    def loss_fn(model, x, y):
        logits = prediction_of(model, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    return loss_fn


@losing
def takes_logarithms(model, x):
    return jax.vmap(model)(jnp.log(50 - x))  # the user's own line


@losing
def checks(model, x):
    x = eqx.error_if(x, x > 50, "x is too large")  # the user's own line
    return jax.vmap(model)(x)


@losing
def checks_each(model, x):
    def one(row):
        row = eqx.error_if(row, row.max() > 50, "x is too large")  # the user's own line
        return model(row)

    return jax.vmap(one)(x)


def raises(x):
    if (x > 50).any():
        raise OverflowError("x is too large")
    return x


@losing
def calls(model, x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = functools.partial(jax.pure_callback, raises, shape)
    x = call(jax.lax.stop_gradient(x))  # the user's own line
    return jax.vmap(model)(x)


def assert_raised_in_the_step(trainer, error, text, line=False):
    """Checks the error of batch 3, and that the run continues with a valid one."""
    with pytest.raises(error) as caught:
        trainer.fit(bad_data())
    assert text in str(caught.value)
    assert "step 4, in batch 3 of epoch 0" in "".join(caught.value.__notes__)
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not line or any("the user's own line" in each for each in lines)
    assert trainer.global_step == 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.state))
    trainer.fit(batches(8, 8, 8, 8, 8))
    assert trainer.global_step == 5


WAYS = {
    "one device": {},
    "blocks": {"steps_per_execution": 5},
    "donated": {"callbacks": [DonateBuffers("state")]},
    "bitwise": {"strategy": Bitwise(SingleDevice())},
}


@per_example
def checks_one(model, x, y):
    x = eqx.error_if(x, x > 50, "x is too large")
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y)


@pytest.mark.slow_but("one device", "bitwise")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.DonateBuffers")
def test_error_if_raises_the_error_of_equinox(way):
    loss_fn = checks_one if way == "bitwise" else checks
    trainer = make_trainer(model=plain(), loss_fn=loss_fn, **WAYS[way])
    assert_raised_in_the_step(trainer, eqx.EquinoxRuntimeError, "x is too large")


@pytest.mark.parametrize("loss_fn", [checks, checks_each, calls])
@pytest.mark.parametrize("strategy", [Sharded, Pmap])
def test_steps_that_may_raise_are_refused_on_several_devices(strategy, loss_fn):
    trainer = make_trainer(plain(), strategy(), loss_fn=loss_fn)
    with pytest.raises(ValueError, match="EQX_ON_ERROR=nan.*throw=False.*SingleDevice"):
        trainer.fit(DATA)
    assert trainer.global_step == 0


def test_bitwise_runs_in_debugging():
    found = []
    for context in (
        contextlib.nullcontext(),
        jax.disable_jit(),
        jax.debug_nans(True),
    ):
        with context:
            trainer = make_trainer(plain(), Bitwise(SingleDevice()))
            found.append(trainer.fit(DATA)["loss"])
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)


def test_errors_of_a_pure_callback_are_raised():
    trainer = make_trainer(model=plain(), loss_fn=calls, strategy=SingleDevice())
    error = "OverflowError: x is too large"
    assert_raised_in_the_step(trainer, jax.errors.JaxRuntimeError, error)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_steps_that_may_raise_accept_numpy_and_jax_arrays(convert, capfd):
    data = [tuple(map(convert, batch)) for batch in DATA]
    trainer = make_trainer(
        plain(), SingleDevice(), loss_fn=checks, steps_per_execution=2
    )
    trainer.fit(data, data[2:], max_epochs=2)
    assert capfd.readouterr().err.count("1 at a time, because a step calls Python") == 1
    same = losing(lambda model, x: jax.vmap(model)(x))
    same = make_trainer(plain(), SingleDevice(), loss_fn=same)
    same.fit(DATA, DATA[2:], max_epochs=2)
    for name in ("loss", "val_loss"):
        found, expected = trainer.history[name], same.history[name]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_error_if_is_raised_without_jit():
    with jax.disable_jit():
        trainer = make_trainer(model=plain(), loss_fn=checks, strategy=Sharded())
        with pytest.raises(RuntimeError, match="x is too large"):
            trainer.fit(bad_data())


def test_error_if_in_an_evaluation_has_the_batch():
    class Checked(eqx.Module):
        inner: Mlp

        def __call__(self, x):
            return self.inner(eqx.error_if(x, x > 50, "x is too large"))

    trainer = make_trainer(Checked(Mlp(jax.random.key(0), rate=0)), SingleDevice())
    for method in (trainer.validate, trainer.predict):
        with pytest.raises(eqx.EquinoxRuntimeError, match="x is too large") as caught:
            method(bad_data())
        assert caught.value.__notes__[0] == "in batch 3"


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap])
def test_debug_nans_has_the_line_in_the_traceback(strategy):
    with jax.debug_nans(True):
        trainer = make_trainer(plain(), strategy(), loss_fn=takes_logarithms)
        assert_raised_in_the_step(
            trainer, FloatingPointError, "invalid value (nan)", line=True
        )


def test_debug_nans_without_jit_raises():
    with jax.debug_nans(True), jax.disable_jit():
        trainer = make_trainer(model=plain(), loss_fn=takes_logarithms)
        assert_raised_in_the_step(trainer, FloatingPointError, "invalid value (nan)")


def test_debug_nans_changes_no_numbers():
    trainer = make_trainer()
    with jax.debug_nans(True):
        debugged = make_trainer()
        debugged.fit(DATA, DATA[2:])
    trainer.fit(DATA, DATA[2:])
    assert debugged.history["loss"] == pytest.approx(trainer.history["loss"])
    ours, expected = debugged.predict(DATA), trainer.predict(DATA)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_debug_infs_raises():
    def loss_fn(model, x, y):
        return jax.vmap(model)(x).sum(axis=1) / jnp.where(x.max() > 50, 0.0, 1.0)

    with jax.debug_infs(True):
        trainer = make_trainer(model=plain(), loss_fn=loss_fn)
        assert_raised_in_the_step(trainer, FloatingPointError, "inf", line=False)


@pytest.mark.parametrize(
    "context",
    [jax.checking_leaks, lambda: jax.enable_x64(True)],
    ids=["leaks", "x64"],
)
def test_a_fit_passes_other_checks_of_jax(context):
    with context():
        model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
        trainer = make_trainer(model, Sharded(), accumulate_grad_batches=2)
        trainer.fit(DATA, DATA)
    assert np.isfinite(trainer.history["val_loss"]).all()


def test_debug_nans_knows_the_names_of_metrics_and_the_classes():
    with jax.debug_nans(True):
        trainer = make_trainer(callbacks=[EarlyStopping("loss", patience=3)])
        assert trainer.fit(DATA).epochs == [0]
        (x, y), *_ = DATA
        with pytest.raises(ValueError, match="labels must be 0 to 2, .* from 9 to 9"):
            make_trainer().fit([(x, np.full_like(y, 9))])


def test_options_that_xla_does_not_take_are_named_with_the_argument():
    trainer = make_trainer(compiler_options={"xla_no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_opt") as caught:
        trainer.fit(DATA)
    notes = caught.value.__notes__
    assert "`compiler_options` was {'xla_no_such_option': 1}" in notes
