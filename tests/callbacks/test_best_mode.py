"""Whether small or large values are best: by `mode`, or by the name of the metric."""

import warnings

import pytest
from toys import batches, linear_trainer

from jaxdp.basics.columns import resolve_mode
from jaxdp.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from jaxdp.losses import METRICS

WITH_MODE = [EarlyStopping, ModelCheckpoint, ReduceLROnPlateau]


def made(callback_class, monitor, **options):
    """A callback, and what was warned of when it was made."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        callback = callback_class(monitor=monitor, **options)
    return callback, [str(warning.message) for warning in told]


@pytest.mark.parametrize("callback_class", WITH_MODE)
@pytest.mark.parametrize("monitor, mode", [
    ("val_loss", "min"), ("loss", "min"), ("val_mse", "min"),
    ("val_top_5_error", "min"), ("val_cross_entropy", "min"),
    ("val_clean_loss[3]", "min"), ("perplexity", "min"),
    ("accuracy", "max"), ("val_accuracy", "max"), ("val_accuracy[1]", "max"),
    ("val_top_5_accuracy", "max"), ("val_auroc", "max"), ("val_f1", "max"),
])  # fmt: skip
def test_callbacks_take_the_direction_from_the_name(
    callback_class, monitor, mode, caplog
):
    other = {"min": "max", "max": "min"}[mode]
    for given in ({}, {"mode": mode}):
        callback, told = made(callback_class, monitor, **given)
        assert (callback.mode, told) == (mode, [])
    callback, (told,) = made(callback_class, monitor, mode=other)
    assert callback.mode == other
    assert f"`{callback_class.__name__}(monitor={monitor!r})`: `mode`={other!r}" in told
    assert "Leave `mode` out" in told and not caplog.text


@pytest.mark.parametrize("callback_class", WITH_MODE)
def test_what_a_name_that_tells_nothing_is_taken_for_is_said_once(
    callback_class, caplog
):
    for _ in range(2):
        callback, told = made(callback_class, f"val_of_{callback_class.__name__}")
        assert (callback.mode, told) == ("min", [])
    assert caplog.text.count("does not tell which values are better") == 1
    caplog.clear()
    for mode in ("min", "max"):
        assert made(callback_class, "val_area", mode=mode)[0].mode == mode
    assert not caplog.text


def test_the_name_decides_whatever_metric_has_it(caplog):
    stopping = EarlyStopping("quality", patience=1)
    trainer = linear_trainer(stopping, metrics={"quality": "accuracy"})
    trainer.fit(batches(8, 8))
    assert (stopping.mode, stopping.best_score) == (
        "min",
        trainer.history["quality"][0],
    )
    assert "`EarlyStopping(monitor='quality')`: the name does not tell" in caplog.text


def test_a_saver_without_a_monitor_has_no_direction(caplog):
    for options in ({}, {"mode": "min"}, {"mode": "max"}):
        assert made(ModelCheckpoint, None, **options)[1] == []
    assert not caplog.text


@pytest.mark.parametrize("callback_class", WITH_MODE)
def test_another_mode_is_refused(callback_class):
    with pytest.raises(ValueError, match="`mode`"):
        callback_class(monitor="loss", mode="least")


def test_all_metrics_by_name_have_the_direction_of_their_name():
    largest = {name for name in METRICS if resolve_mode(f"val_{name}") == "max"}
    assert largest == {"accuracy", "binary_accuracy", "top_5_accuracy"}
