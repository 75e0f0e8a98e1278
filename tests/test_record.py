"""The record of a run: when values are read, and which readers get them."""

import contextlib
import functools
import sys

import numpy as np
import pytest
from toys import IN_FLIGHT, At, On, batches, fail_with, linear_trainer

from jaxdp import Callback
from jaxdp.callbacks import Logger, NanGuard


class Keeps(Logger):
    """A sink that keeps its rows, and may refuse some."""

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
    """Keeps the steps that it reads, when it reads them, and the latest losses."""

    def __init__(self):
        self.read, self.latest = [], []

    def setup(self, trainer):
        def read(row):
            self.read.append((row.step, trainer.global_step))

        trainer.record.read_steps(read)

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.latest.append(trainer.record.latest("loss"))


def reads(function):
    """Returns a callback that has a function called with the means."""
    return On(setup=lambda trainer: trainer.record.read_means(function))


def test_steps_are_read_in_order_once_the_device_has_finished_them():
    watch = Watches()
    trainer = linear_trainer(watch)
    trainer.fit(batches(*[8] * 20))
    steps = range(1, 21)
    assert watch.read == [(step, min(step + IN_FLIGHT, 20)) for step in steps]
    assert watch.latest[:IN_FLIGHT] == [None] * IN_FLIGHT
    assert None not in watch.latest[IN_FLIGHT:]
    assert trainer.record.latest("loss") == trainer.history["loss"][-1]
    assert trainer.record.latest("nothing") is None
    watch = Watches()
    linear_trainer(watch, steps_per_execution=4).fit(batches(*[8] * 20))
    assert watch.read == [(step, min(step + 8, 20)) for step in steps]


def test_a_sink_that_fails_takes_nothing_from_the_others(tmp_path):
    full, other = Keeps(tmp_path, refuses=[2]), Keeps(tmp_path)
    trainer = linear_trainer(full, other, log_every_n_steps=1)
    with pytest.raises(OSError, match="no room for step 2"):
        trainer.fit(batches(*[8] * 20))
    assert [row.step for row in other.rows] == [*range(1, IN_FLIGHT + 2)]
    assert full.calls == other.calls == [("close",)]


def test_a_validation_has_its_own_row_or_that_of_its_epoch(tmp_path):
    sink, means = Keeps(tmp_path), []
    logs = On(
        on_validation_end=lambda trainer, metrics: trainer.log("worst", 1.0),
        on_train_epoch_end=lambda trainer, metrics: trainer.log("own", 2.0),
    )
    # The one that logs comes later in the list than the one that reads.
    callbacks = sink, reads(means.append), logs
    trainer = linear_trainer(*callbacks, log_every_n_steps=9)
    trainer.fit(batches(*[8] * 4), batches(8), val_check_interval=2)
    trainer.validate(batches(8))
    names = ["val_loss", "val_accuracy", "worst"]
    own = ["loss", "accuracy", "own"]
    assert [(row.kind, row.step, [*row.values]) for row in means] == [
        ("val", 2, names),
        ("val", 4, names),
        ("epoch", 4, own),
    ]
    (val, epoch) = sink.rows
    assert (val.kind, val.step, epoch.kind, epoch.step) == ("val", 2, "epoch", 4)
    assert [*val.numbers()] == names
    assert [*epoch.numbers()] == [*(f"epoch_{name}" for name in own), *names]


class Longer:
    """A loader with more batches than its length says."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter(batches(*[8] * 8))


def stop(trainer):
    trainer.should_stop = True


FAILS = On(on_train_epoch_end=fail_with(KeyError("at the end")))


@pytest.mark.parametrize("loader, callback, steps", [
    pytest.param(Longer(), Callback(), [2, 4, 6, 8], id="longer than it says"),
    pytest.param(batches(*[8] * 8), At(4, stop), [2, 4], id="stopped at a validation"),
    pytest.param(batches(*[8] * 8), FAILS, [2, 4, 6, 8], id="failed at the end"),
])  # fmt: skip
def test_each_validation_is_written_once(loader, callback, steps, tmp_path):
    sink = Keeps(tmp_path)
    trainer = linear_trainer(sink, callback, log_every_n_steps=9)
    with contextlib.suppress(KeyError):
        trainer.fit(loader, batches(8), val_check_interval=2)
    assert [row.step for row in sink.rows if "val_loss" in row.numbers()] == steps


def test_passes_outside_of_fits_add_no_readers():
    def read(row):
        pass

    trainer = linear_trainer(reads(read))
    before = sys.getrefcount(read)
    for _ in range(3):
        trainer.validate(batches(8))
    assert sys.getrefcount(read) == before


def test_a_fit_inside_a_loop_gives_the_readers_of_the_loop_back(tmp_path):
    read = []

    class Keep(Callback):
        setups = 0

        def setup(self, trainer):
            self.setups += 1
            function = functools.partial(self.keep, f"setup {self.setups}")
            trainer.record.read_steps(function)
            trainer.record.read_means(function)

        def keep(self, *row):
            read.append((row[0], row[1].kind, row[1].step))

    trainer = linear_trainer(Keep())
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


def test_a_resumed_run_rewinds_once_and_writes_the_rest(tmp_path):
    data, options = (batches(*[8] * 5), batches(8)), {"val_check_interval": 2}
    first, second = Keeps(tmp_path), Keeps(tmp_path)
    saves = At(3, lambda trainer: trainer.save(tmp_path / "saved"), "on_boundary")
    linear_trainer(first, saves, log_every_n_steps=9).fit(*data, **options)
    resumed = linear_trainer(second, log_every_n_steps=9)
    resumed.load(tmp_path / "saved")
    resumed.fit(*data, **options)
    resumed.fit(*data, max_epochs=2, **options)
    written = [(row.kind, row.step) for row in first.rows]
    assert written == [("val", 2), ("val", 4), ("epoch", 5)]
    assert second.rows[:2] == first.rows[1:]
    assert second.calls == [("rewind", 3), ("close",), ("close",)]


def test_a_save_waits_for_no_step_without_readers(tmp_path):
    waits = []

    class Slow:
        def __array__(self, dtype=None, copy=None):
            waits.append(1)
            return np.float32(0)

    def replace(trainer, metrics, batch_idx):
        metrics.means = Slow()

    def save(trainer):
        trainer.save(tmp_path / "saved")
        assert not waits

    replaces = On(on_train_batch_end=replace)
    linear_trainer(replaces, At(2, save, "on_boundary")).fit(batches(*[8] * 3))


def test_a_guard_checks_own_loops_up_to_a_save_and_after_a_failed_fit(tmp_path):
    guard, data = NanGuard("skip"), batches(*[8] * 3)
    data[2][0][:] = np.nan
    trainer = linear_trainer(guard)
    for _ in trainer.steps(data):
        pass
    with pytest.warns(UserWarning, match="step 3 .*skipped"):
        trainer.save(tmp_path / "saved")
    assert guard.skipped_steps == [3]
    data = batches(*[8] * 12)
    data[1][0][:] = np.nan
    trainer = linear_trainer(NanGuard())
    for train in (lambda: trainer.fit(data), lambda: [*trainer.steps(data)]):
        with pytest.raises(FloatingPointError, match="NanGuard"):
            train()


def test_the_latest_logged_value_is_the_newest_one():
    def log(trainer, metrics, batch_idx):
        trainer.log("mine", batch_idx)
        assert trainer.record.latest("mine") == batch_idx

    def look(trainer, batch, batch_idx):
        assert not batch_idx or trainer.record.latest("mine") == batch_idx - 1

    mine = On(on_train_batch_end=log, on_train_batch_start=look)
    linear_trainer(mine).fit(batches(*[8] * 20))
