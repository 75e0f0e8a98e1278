"""The record of a run: what is read when, and who gets it."""

import functools
import sys

import numpy as np
import pytest
from toys import batches, linear_trainer

from jaxdp import Callback
from jaxdp.callbacks import Logger, NanGuard
from jaxdp.step import IN_FLIGHT


class Keeps(Logger):
    """A sink that keeps its rows, and may refuse some."""

    needs_fit = False

    def __init__(self, folder, refuses=()):
        super().__init__(folder)
        self.rows, self.calls, self.refuses = [], [], refuses

    def write(self, row):
        if row.step in self.refuses:
            raise OSError(f"no room for step {row.step}")
        self.rows.append(row)

    def rewind(self, step):
        self.calls.append(("rewind", step))

    def close(self):
        self.calls.append(("close",))


class Watches(Callback):
    def __init__(self):
        self.read, self.latest = [], []

    def setup(self, trainer):
        trainer.record.read_steps(lambda row: self.read.append((row.step, at(trainer))))

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.latest.append(trainer.record.latest("loss"))


def at(trainer):
    return trainer.global_step


def test_steps_are_read_in_order_and_late_and_the_latest_is_one_that_is_done():
    watch = Watches()
    trainer = linear_trainer(watch)
    trainer.fit(batches(*[8] * 20))
    steps = range(1, 21)
    assert watch.read == [(step, min(step + IN_FLIGHT, 20)) for step in steps]
    assert watch.latest[:IN_FLIGHT] == [None] * IN_FLIGHT
    assert None not in watch.latest[IN_FLIGHT:]
    assert trainer.record.latest("loss") == trainer.history["loss"][-1]
    assert trainer.record.latest("nothing") is None


def test_in_blocks_no_step_is_read_while_its_block_may_run():
    watch = Watches()
    linear_trainer(watch, steps_per_execution=4).fit(batches(*[8] * 20))
    assert watch.read == [(s, min(s + 8, 20)) for s in range(1, 21)]


def test_a_sink_that_fails_takes_nothing_from_the_others(tmp_path):
    full, other = Keeps(tmp_path, refuses=[2]), Keeps(tmp_path)
    trainer = linear_trainer(full, other, log_every_n_steps=1)
    with pytest.raises(OSError, match="no room for step 2"):
        trainer.fit(batches(*[8] * 20))
    steps = [row.step for row in other.rows]
    assert steps == [*range(1, IN_FLIGHT + 2)]
    assert full.calls == other.calls == [("close",)]


@pytest.mark.filterwarnings("ignore:no row of a step was logged")
def test_a_validation_joins_the_row_of_its_epoch_and_only_that(tmp_path):
    sink = Keeps(tmp_path)
    data = batches(*[8] * 4), batches(8)
    linear_trainer(sink, log_every_n_steps=9).fit(*data, val_check_interval=2)
    (val, epoch) = sink.rows
    assert (val.kind, val.step, epoch.kind, epoch.step) == ("val", 2, "epoch", 4)
    assert [*val.values] == ["val_loss", "val_accuracy"]
    assert [*epoch.numbers()] == [
        *("epoch_loss", "epoch_accuracy", "val_loss", "val_accuracy")
    ]


@pytest.mark.filterwarnings("ignore:no row of a step was logged")
def test_what_validations_log_has_one_name_wherever_its_row_is(tmp_path):
    class Logs(Callback):
        def on_validation_end(self, trainer, metrics):
            trainer.log("worst", 1.0)

    sink = Keeps(tmp_path)
    data = batches(*[8] * 4), batches(8)
    trainer = linear_trainer(sink, Logs(), log_every_n_steps=9)
    trainer.fit(*data, val_check_interval=2)
    val, epoch = [row.numbers() for row in sink.rows]
    assert "worst" in val and "worst" in epoch and "epoch_worst" not in epoch


def test_means_are_read_once_with_all_that_is_logged_of_them():
    rows = []

    class Reads(Callback):
        def setup(self, trainer):
            trainer.record.read_means(rows.append)

    class Logs(Callback):  # and comes later in the list
        def on_validation_end(self, trainer, metrics):
            trainer.log("worst", 1.0)

        def on_train_epoch_end(self, trainer, metrics):
            trainer.log("own", 2.0)

    trainer = linear_trainer(Reads(), Logs())
    trainer.fit(batches(*[8] * 4), batches(8), val_check_interval=2)
    trainer.validate(batches(8))
    names = ["val_loss", "val_accuracy", "worst"]
    assert [(row.kind, row.step, [*row.values]) for row in rows] == [
        ("val", 2, names),
        ("val", 4, names),
        ("epoch", 4, ["loss", "accuracy", "own"]),
    ]


def test_passes_outside_of_fits_add_no_readers():
    def read(row):
        pass

    class Reads(Callback):
        def setup(self, trainer):
            trainer.record.read_means(read)

    trainer, before = linear_trainer(Reads()), sys.getrefcount(read)
    for _ in range(3):
        trainer.validate(batches(8))
    assert sys.getrefcount(read) == before


def test_a_fit_inside_a_loop_gives_the_readers_of_the_loop_back(tmp_path):
    read = []

    class Reads(Callback):
        setups = 0

        def setup(self, trainer):
            self.setups += 1
            told = functools.partial(self.keep, f"setup {self.setups}")
            trainer.record.read_steps(told)
            trainer.record.read_means(told)

        def keep(self, *row):
            read.append((row[0], row[1].kind, row[1].step))

    trainer = linear_trainer(Reads())
    for step, _ in enumerate(trainer.steps(batches(*[8] * 4)), 1):
        if step == 2:
            trainer.fit(batches(*[8] * 3), batches(8), max_epochs=1)
            of_fit, read[:] = read[:], []
            trainer.record.put("epoch", {"worst": 1.0})
    trainer.save(tmp_path / "saved")
    assert of_fit[-2:] == [("setup 2", "val", 3), ("setup 2", "epoch", 3)]
    first = ("setup 1", "epoch", 3)
    assert read == [first, ("setup 1", "step", 4), ("setup 1", "step", 5)]


def test_a_fit_logs_no_step_of_a_loop_before_it(tmp_path):
    sink, watch = Keeps(tmp_path), Watches()
    trainer = linear_trainer(sink, watch, log_every_n_steps=1)
    for _ in trainer.steps(batches(*[8] * 3)):
        pass
    trainer.fit(batches(*[8] * 2), max_epochs=2)
    assert [row.step for row in sink.rows] == [4, 5, 5]
    assert [step for step, _ in watch.read] == [1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore:no row of a step was logged")
def test_a_resumed_run_rewinds_once_and_writes_the_rest(tmp_path):
    class Saves(Callback):
        def on_boundary(self, trainer):
            if trainer.global_step == 3:
                trainer.save(tmp_path / "saved")

    data, options = (batches(*[8] * 5), batches(8)), {"val_check_interval": 2}
    first, second = Keeps(tmp_path), Keeps(tmp_path)
    linear_trainer(first, Saves(), log_every_n_steps=9).fit(*data, **options)
    resumed = linear_trainer(second, log_every_n_steps=9)
    resumed.load(tmp_path / "saved")
    resumed.fit(*data, **options)
    resumed.fit(*data, max_epochs=2, **options)
    written = [(row.kind, row.step) for row in first.rows]
    assert written == [("val", 2), ("val", 4), ("epoch", 5)]
    assert second.rows[:2] == first.rows[1:]
    assert second.calls == [("rewind", 3), ("close",), ("close",)]


def test_a_save_waits_for_no_step_that_nobody_reads(tmp_path):
    waits = []

    class Slow:
        def __array__(self, dtype=None, copy=None):
            waits.append(1)
            return np.float32(0)

    class Saves(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            metrics.means = Slow()

        def on_boundary(self, trainer):
            if trainer.global_step == 3:
                return
            trainer.save(tmp_path / str(trainer.global_step))
            assert not waits

    linear_trainer(Saves()).fit(batches(*[8] * 3))


def test_a_guard_has_looked_at_all_that_is_saved_in_an_own_loop_too(tmp_path):
    guard = NanGuard("skip")
    data = batches(*[8] * 3)
    data[2][0][:] = np.nan
    trainer = linear_trainer(guard)
    for _ in trainer.steps(data):
        pass
    with pytest.warns(UserWarning, match="step 3 .*skipped"):
        trainer.save(tmp_path / "saved")
    assert guard.skipped_steps == [3]


def test_a_guard_looks_on_in_an_own_loop_after_a_fit_that_failed():
    data = batches(*[8] * 12)
    data[1][0][:] = np.nan
    trainer = linear_trainer(NanGuard())
    for train in (lambda: trainer.fit(data), lambda: [*trainer.steps(data)]):
        with pytest.raises(FloatingPointError, match="NanGuard"):
            train()


def test_the_latest_logged_value_is_the_newest_one():
    class Logs(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            trainer.log("mine", batch_idx)
            assert trainer.record.latest("mine") == batch_idx

        def on_train_batch_start(self, trainer, batch, batch_idx):
            assert not batch_idx or trainer.record.latest("mine") == batch_idx - 1

    linear_trainer(Logs()).fit(batches(*[8] * 20))
