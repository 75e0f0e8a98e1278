"""`Trainer.log`: values of callbacks in rows, means, the history and `monitor=`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import On, batches, read_table
from toys import linear_on_one_device as make

from jaxdp import Callback
from jaxdp.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint

DATA = batches(8, 8, 8)


class Logs(Callback):
    """Logs what functions of the trainer give, in the hooks of their names."""

    def __init__(self, **values):
        self.values = values
        for hook in {hook.rpartition("__")[0] for hook in values}:
            setattr(self, hook, lambda trainer, *_, hook=hook: self.log(trainer, hook))

    def log(self, trainer, hook):
        for key, value in self.values.items():
            where, _, name = key.rpartition("__")
            if where == hook:
                trainer.log(name, value(trainer))


AREAS = [0.5, 0.7, 0.6, 0.65, 0.9]


def test_a_value_of_a_validation_is_stopped_at_judged_and_written(tmp_path):
    """Also where the callback that logs it comes last in the list."""
    stop = EarlyStopping("val_area", patience=2, mode="max", verbose=False)
    saver = ModelCheckpoint(tmp_path / "saved", monitor="val_area", mode="max")
    area = Logs(
        on_validation_start__val_count=lambda t: np.int64(3),
        on_validation_end__val_area=lambda t: AREAS[t.current_epoch],
    )
    trainer = make(stop, saver, CSVLogger(tmp_path), area)
    history = trainer.fit(DATA, DATA, max_epochs=5)
    assert history["val_area"] == AREAS[:4]
    assert history["val_count"] == [3.0] * 4
    assert stop.best_score == saver.best_model_score == 0.7
    assert saver.best_model_path.endswith("6")
    assert [float(row["val_area"]) for row in read_table(tmp_path)] == AREAS[:4]
    assert trainer.validate(DATA)["val_area"] == AREAS[trainer.current_epoch]


def test_values_of_steps_are_in_their_rows_and_the_last_one_in_the_epoch(tmp_path):
    logs = Logs(
        on_train_batch_start__before=lambda t: t.global_step,
        on_train_batch_end__after=lambda t: jax.numpy.float32(t.global_step),
    )
    trainer = make(CSVLogger(tmp_path), logs, log_every_n_steps=1)
    trainer.fit(DATA, max_epochs=2)
    rows = [row for row in read_table(tmp_path) if row["loss"]]
    assert [float(row["before"]) for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [float(row["after"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert trainer.history["before"] == [2, 5]
    assert trainer.history["after"] == [3, 6]
    epochs = [row for row in read_table(tmp_path) if row["epoch_loss"]]
    assert [row["epoch_after"] for row in epochs] == ["3.0", "6.0"]
    of_steps = [dict(metrics) for metrics in trainer.steps(DATA)]
    assert [step["after"] for step in of_steps] == [7, 8, 9]


def test_values_of_epochs_and_fits_are_where_their_hooks_are(tmp_path):
    logs = Logs(
        on_fit_start__first=lambda t: 1,
        on_train_epoch_start__start=lambda t: t.current_epoch,
        on_train_epoch_end__val_own=lambda t: 10 - t.current_epoch,
        on_fit_end__end=lambda t: True,
    )
    stop = EarlyStopping("val_own", patience=1, mode="max", verbose=False)
    trainer = make(stop, CSVLogger(tmp_path), logs)
    history = trainer.fit(DATA, max_epochs=5)
    assert history["val_own"] == [10, 9] and history["start"] == [0, 1]
    assert history["first"][0] == 1 and np.isnan(history["first"][1])
    assert history["end"][1] == 1
    *epochs, last = read_table(tmp_path)
    assert [float(row["val_own"]) for row in epochs] == [10, 9]
    assert float(last["end"]) == 1


@pytest.mark.parametrize(
    "watcher", [EarlyStopping("val_area"), ModelCheckpoint(monitor="val_area")]
)
@pytest.mark.parametrize("val_loader", [DATA, None])
def test_a_monitor_is_looked_up_when_it_is_first_needed(watcher, val_loader, tmp_path):
    logs = Logs(on_train_batch_end__area=lambda t: 1)
    trainer = make(watcher, logs, default_root_dir=tmp_path)
    text = r"monitor='val_area'.*: nothing of that name is logged; .*'loss'.*'area'"
    with pytest.raises(ValueError, match=text):
        trainer.fit(DATA, val_loader, max_epochs=2)
    assert trainer.global_step == 3


def test_a_monitor_may_be_missing_in_an_epoch_later_on():
    def log(trainer, metrics):
        if trainer.current_epoch not in (1, 2):
            trainer.log("area", trainer.current_epoch)

    stop = EarlyStopping("area", patience=1, verbose=False)
    make(stop, On(on_train_epoch_end=log)).fit(DATA, max_epochs=9)
    assert stop.stopped_epoch == 3


def test_what_was_logged_before_a_resume_is_in_the_history(tmp_path):
    def log(trainer, metrics, batch_idx):
        if batch_idx == 0:
            trainer.log("early", float(metrics["loss"]))

    whole, first, second = (make(On(on_train_batch_end=log)) for _ in range(3))
    whole.fit(DATA, max_epochs=1)
    first.fit(DATA, max_steps=2)
    second.load(first.save(tmp_path / "saved"))
    second.fit(DATA, max_epochs=1)
    assert second.history["early"] == whole.history["early"]


@pytest.mark.parametrize("value", [
    2, np.float32(2.0), np.array(2.0), np.full((1, 1), 2.0), jnp.full((1,), 2.0),
    jnp.full((1, 1, 1), 2, jnp.bfloat16), np.array([True]) * 2,
])  # fmt: skip
def test_an_array_of_one_number_is_a_number(value):
    logs = Logs(on_train_batch_end__area=lambda t: value)
    assert make(logs).fit(DATA)["area"] == [2.0]


def test_outside_of_hooks_there_is_nothing_to_log_to():
    trainer = make()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in a hook of a callback"):
            trainer.log("area", 1.0)
        list(trainer.steps(DATA))


def test_who_writes_into_the_metrics_of_an_epoch_is_told_to_log():
    writes = On(on_train_epoch_end=lambda trainer, metrics: metrics.update(area=1.0))
    with pytest.raises(ValueError, match=r"'area'.*`trainer\.log\(name, value\)`"):
        make(EarlyStopping("area"), writes).fit(DATA)


def test_a_hook_s_own_error_is_not_replaced_by_that_of_a_missing_value():
    def fail(trainer, metrics):
        trainer.log("seen", 1.0)
        raise KeyError("my own")

    stopping = EarlyStopping("score", mode="max")
    trainer = make(On(on_train_epoch_end=fail), stopping)
    with pytest.raises(KeyError, match="my own") as caught:
        trainer.fit(batches(8))
    assert any("nothing of that name is logged" in n for n in caught.value.__notes__)
    assert trainer.history["seen"] == [1.0]  # as in the row of loggers
