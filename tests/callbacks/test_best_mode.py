"""Whether small or large values are best: by `mode`, or by the name of the metric."""

import warnings

import pytest
from toys import batches, linear_trainer

from jaxdp.basics.columns import resolve_mode
from jaxdp.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from jaxdp.losses import METRICS

MIN = """loss val_loss val_mse val_top_5_error val_cross_entropy val_clean_loss[3]
perplexity""".split()
MAX = """accuracy val_accuracy val_accuracy[1] val_top_5_accuracy val_auroc
val_f1""".split()


def make(kind, monitor, **options):
    """Returns a callback, and the warnings when it was made."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        callback = kind(monitor=monitor, **options)
    return callback, [str(warning.message) for warning in told]


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint, ReduceLROnPlateau])
def test_the_name_of_the_monitor_gives_the_mode(kind, caplog):
    name = kind.__name__
    for monitor in (*MIN, *MAX):
        mode, other = ("min", "max") if monitor in MIN else ("max", "min")
        for options in ({}, {"mode": mode}):
            callback, told = make(kind, monitor, **options)
            assert (callback.mode, told) == (mode, [])
        assert kind(monitor=monitor, mode=other).mode == other
    assert not caplog.text
    for _ in range(2):
        callback, told = make(kind, f"val_of_{name}")
        assert (callback.mode, told) == ("min", [])
    assert caplog.text.count("does not tell which values are better") == 1
    caplog.clear()
    for mode in ("min", "max"):
        assert make(kind, "val_area", mode=mode)[0].mode == mode
    assert not caplog.text
    with pytest.raises(ValueError, match="`mode`"):
        kind(monitor="loss", mode="least")


def test_the_name_decides_whatever_metric_has_it(caplog):
    stopping = EarlyStopping("quality", patience=1)
    trainer = linear_trainer(stopping, metrics={"quality": "accuracy"})
    history = trainer.fit(batches(8, 8))
    assert (stopping.mode, stopping.best_score) == ("min", history["quality"][0])
    assert "`EarlyStopping(monitor='quality')`: the name does not tell" in caplog.text


def test_a_saver_without_a_monitor_has_no_direction(caplog):
    for options in ({}, {"mode": "min"}, {"mode": "max"}):
        assert make(ModelCheckpoint, None, **options)[1] == []
    assert not caplog.text


def test_all_metrics_by_name_have_the_mode_of_their_name():
    largest = {name for name in METRICS if resolve_mode(f"val_{name}") == "max"}
    assert largest == {"accuracy", "binary_accuracy", "top_5_accuracy"}
