"""`validate`, `test` and `predict`: their loaders, and the hooks that they call."""

import jax
import numpy as np
import pytest
from toys import HOOKS, RAGGED, On, batches, make_small, mlp_trainer

from jaxdp import Callback, Sharded, SingleDevice
from jaxdp.callbacks import (
    CSVLogger,
    DonateBuffers,
    ModelCheckpoint,
    ThroughputMonitor,
)

METHODS = "validate", "test", "predict"


def hears():
    """A callback, and which of its hooks have run, but for those of single batches."""
    heard = []
    names = [name for name in HOOKS if "batch" not in name and name != "on_boundary"]
    return On(**{n: lambda *_, name=n: heard.append(name) for n in names}), heard


@pytest.mark.parametrize("method, doing", [
    ("validate", "validation"), ("test", "test"), ("predict", "predict"),
])  # fmt: skip
def test_callbacks_are_set_up_and_hear_of_a_pass(method, doing):
    callback, heard = hears()
    trainer = make_small(callbacks=[callback])
    getattr(trainer, method)(batches(8))
    around = [f"on_{doing}_start", f"on_{doing}_end"]
    assert heard == ["setup", *around, "teardown"]

    # What goes wrong, wherever.
    for loader, most in ((None, 1), ([], 2), ([(1, 2, 3)], 2)):
        heard.clear()
        with pytest.raises((TypeError, ValueError)):
            getattr(trainer, method)(loader)
        before = ["setup", around[0]][:most]
        assert heard == [*before, "on_exception", "teardown"], loader


def test_a_fit_ends_with_teardown_however_it_ends():
    callback, heard = hears()
    trainer = make_small(callbacks=[callback])
    trainer.fit(batches(8))
    assert heard[0] == "setup" and heard[-2:] == ["on_fit_end", "teardown"]

    heard.clear()
    with pytest.raises(ValueError):
        trainer.fit([], max_epochs=2)
    assert heard == ["setup", "on_exception", "on_fit_end", "teardown"]

    heard.clear()
    assert len([*trainer.steps(batches(8, 8))]) == 2
    assert (heard[0], heard[-1]) == ("setup", "teardown")


@pytest.mark.parametrize("method", ["fit", *METHODS])
def test_a_setup_that_fails_is_the_only_error(method, tmp_path):
    class Fails(Callback):
        def setup(self, trainer):
            raise OSError("no such disk")

    seen = []
    keep = On(on_exception=lambda trainer, exception: seen.append(exception))
    others = keep, ThroughputMonitor(), ModelCheckpoint(tmp_path)
    for callbacks in ([Fails(), *others], [*others, Fails()]):
        with pytest.raises(OSError, match="no such disk") as caught:
            getattr(make_small(callbacks=callbacks), method)(batches(8))
        first, about_frames = caught.value.__notes__
        assert first == "raised by the callback Fails in setup"
        assert "JAX_TRACEBACK_FILTERING=off" in about_frames
        assert seen.pop() is caught.value and not seen


@pytest.mark.parametrize("method", METHODS)
def test_a_pass_inside_a_fit_sets_nothing_up_again(method):
    def look(trainer, metrics):
        getattr(trainer, method)(batches(8))

    callback, heard = hears()
    trainer = make_small(callbacks=[callback, On(on_train_epoch_end=look)])
    trainer.fit(batches(8))
    assert heard == [
        "setup", "on_fit_start", "on_train_epoch_start", "on_train_epoch_end",
        "on_fit_end", "teardown",
    ]  # fmt: skip


def test_what_watches_training_is_left_alone_by_a_pass(tmp_path):
    donated, speed = DonateBuffers(), ThroughputMonitor()
    saver = ModelCheckpoint(tmp_path / "saved", monitor="val_loss")
    trainer = mlp_trainer(CSVLogger(tmp_path / "log"), saver, donated, speed)
    trainer.fit(batches(8, 8), batches(8), max_epochs=2)
    report, table = donated.report, (tmp_path / "log" / "metrics.csv").read_text()
    summary = speed.summary
    for method in METHODS:
        getattr(trainer, method)(batches(8))
    assert donated.report is report is not None
    assert speed.summary is summary
    assert (tmp_path / "log" / "metrics.csv").read_text() == table

    # Nor does a pass lock folders, or tidy up in them.
    other = mlp_trainer(ModelCheckpoint(tmp_path / "saved", monitor="val_loss"))
    kept = sorted(path.name for path in (tmp_path / "saved").iterdir())
    other.validate(batches(8), ckpt_path="best")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == kept


@pytest.mark.parametrize(
    "limit, rows", [(1, 16), (2, 32), (0.5, 32), (9, 53), (1.0, 53)]
)
def test_a_pass_may_be_limited(limit, rows):
    data = batches(16, 16, 16, 5)
    trainer = mlp_trainer()
    assert len(trainer.predict(data, limit_batches=limit)) == rows
    first = trainer.validate(
        [tuple(np.concatenate(each)[:rows] for each in zip(*data, strict=True))]
    )
    for method, prefix in (("validate", "val"), ("test", "test")):
        found = getattr(trainer, method)(data, limit_batches=limit)
        np.testing.assert_allclose(
            found[f"{prefix}_loss"], first["val_loss"], rtol=1e-6
        )
        named = getattr(trainer, method)({"a": data, "b": data}, limit_batches=limit)
        assert named[f"{prefix}_a_loss"] == named[f"{prefix}_b_loss"]


def test_each_batch_of_a_pass_has_a_key_of_its_own():
    def loss_fn(model, x, y, key):
        return jax.vmap(model)(x).sum() * 0 + jax.random.uniform(key)

    trainer, data = make_small(loss_fn=loss_fn), batches(8)
    both = trainer.validate(data * 2)
    assert both == trainer.validate(data * 2) != trainer.validate(data)


def test_what_is_logged_in_a_test_is_among_its_values():
    def log(trainer, metrics):
        trainer.log("test_double", 2 * metrics["test_loss"])

    found = make_small(callbacks=[On(on_test_end=log)]).test(batches(8))
    assert found["test_double"] == 2 * found["test_loss"]


@pytest.mark.parametrize("strategy", [SingleDevice(), Sharded(4)])
def test_a_callback_gets_the_predictions_of_each_batch(strategy):
    kept, data = {}, batches(*RAGGED)

    def keep(trainer, outputs, batch_idx):
        kept[batch_idx] = outputs

    trainer = mlp_trainer(On(on_predict_batch_end=keep), strategy=strategy)
    predicted = trainer.predict(data)
    for returns in (True, False):
        if not returns:
            kept.clear()
            assert trainer.predict(data, return_predictions=False) is None
        assert [*kept] == [0, 1, 2, 3, 4]
        assert all(type(rows) is np.ndarray for rows in kept.values())
        assert tuple(map(len, kept.values())) == RAGGED
        np.testing.assert_array_equal(np.concatenate([*kept.values()]), predicted)
        with pytest.raises(ValueError, match="no batches"):
            trainer.predict([], return_predictions=returns)


DATA = batches(16, 16, 5)
CLEAN, SHIFTED = batches(16, 3, seed=1), [(x + 1, y) for x, y in batches(8, 8, seed=2)]
BOTH = {"clean": CLEAN, "shifted": SHIFTED}


def test_each_of_several_loaders_has_the_means_that_it_has_alone(tmp_path):
    starts, numbers, ends = [], [], []
    hears = On(
        on_validation_start=starts.append,
        on_validation_batch_end=lambda trainer, batch_idx: numbers.append(batch_idx),
        on_validation_end=lambda trainer, metrics: ends.append(dict(metrics)),
    )
    saver = ModelCheckpoint(tmp_path, monitor="val_shifted_loss")
    trainer = mlp_trainer(hears, saver, CSVLogger(tmp_path / "logs"))
    history = trainer.fit(DATA, BOTH, max_epochs=2)
    alone = {name: trainer.validate(each) for name, each in BOTH.items()}
    ends.clear()
    found = trainer.validate(BOTH)
    expected = {
        name.replace("val", f"val_{which}", 1): value
        for which, values in alone.items()
        for name, value in values.items()
    }
    assert found == expected == ends[0]
    assert {name: history[name][-1] for name in expected} == expected
    assert "val_loss" not in history.state_dict()["metrics"]
    tested = {name.replace("val", "test", 1): v for name, v in expected.items()}
    assert trainer.test(BOTH) == tested

    # In a fit callbacks hear of one validation.
    starts.clear(), numbers.clear()
    trainer.fit(DATA, BOTH, max_epochs=3, limit_val_batches=1)
    assert len(starts) == 1 and numbers == [0, 1]


def test_mistakes_in_loaders_are_told():
    trainer = mlp_trainer()
    with pytest.raises(TypeError, match="`val_loader` is a list of 2 loaders.*'clean'"):
        trainer.fit(DATA, [map(tuple, CLEAN), map(tuple, SHIFTED)])
    with pytest.raises(
        TypeError, match=r"`val_loader\['x'\]` is an ndarray, not an iter"
    ):
        trainer.fit(DATA, {"x": np.ones((4, 4)), "y": np.ones(4)})
    for wrong in {}, {0: CLEAN}, {"": CLEAN}, {1: CLEAN, "1": SHIFTED}:
        with pytest.raises(TypeError, match="name each of them"):
            trainer.validate(wrong)
    with pytest.raises(ValueError, match=r"`loader\['empty'\]` gave no batches"):
        trainer.validate({"clean": CLEAN, "empty": []})
    with pytest.raises(ValueError, match="'val_clean_loss'"):
        mlp_trainer(ModelCheckpoint("runs", monitor="val_loss")).fit(DATA, BOTH)


def test_names_that_would_be_the_same_are_refused():
    def loss_fn(model, x, y):
        each = jax.vmap(model)(x).sum(-1)
        return each, {"b_loss": each}

    trainer = make_small(loss_fn=loss_fn)
    with pytest.raises(ValueError, match="val_a_b_loss.*Rename one of them"):
        trainer.fit(DATA, {"a": CLEAN, "a_b": CLEAN})


def once(*sizes):
    yield from batches(*sizes)


def test_a_generator_is_for_one_validation():
    trainer = mlp_trainer()
    with pytest.raises(ValueError, match="`val_loader` is a generator.* iterated once"):
        trainer.fit(batches(8, 8), once(8, 8), max_epochs=2)
    assert trainer.global_step == 0
    trainer.fit(batches(8, 8), once(8, 8), max_epochs=2, limit_val_batches=1)
    assert trainer.validate(once(8, 8))


def test_one_iterator_is_not_both_loaders():
    both = iter(batches(*[8] * 12))
    with pytest.raises(ValueError, match="`val_loader\\['a'\\]` is the iterator that"):
        mlp_trainer().fit(both, {"a": both}, max_steps=4)
