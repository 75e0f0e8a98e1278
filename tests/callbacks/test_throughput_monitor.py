"""Tests of the times of a fit's phases, and of the operations of a step."""

import equinox as eqx
import jax
import optax
import pytest
from toys import At, On, batches, on_one_device, read_table

from jaxdp.callbacks import CSVLogger, ModelCheckpoint, ThroughputMonitor


def slow(data, clock, seconds):
    """A loader whose every batch takes its time."""

    class Loader(list):
        def __iter__(self):
            for batch in super().__iter__():
                clock.turn(seconds)
                yield batch

    return Loader(data)


def turns(clock, seconds):
    return On(
        on_train_batch_end=lambda *_: clock.turn(seconds),
        on_validation_batch_end=lambda *_: clock.turn(10.0),
        on_save_checkpoint=lambda *_: clock.turn(0.5),
    )


def make_trainer(*callbacks, **options):
    model = eqx.nn.MLP(4, 3, 16, 2, key=jax.random.key(0))
    options = {"model": model, "log_every_n_steps": 2} | options
    return on_one_device(*callbacks, optimizer=optax.sgd(0.1), **options)


def test_each_phase_has_its_share_of_the_time(tmp_path, clock):
    monitor = ThroughputMonitor(100, peak_flops_per_device=1e4)
    trainer = make_trainer(CSVLogger(tmp_path), monitor, turns(clock, 1.0))
    trainer.fit(slow(batches(*[8] * 6), clock, 3.0), batches(8), max_epochs=2)
    first, second, *_ = [row for row in read_table(tmp_path) if row["loss"]]
    # The first batch is read before the clock starts; the callback comes last.
    assert float(first["throughput/data"]) == pytest.approx(3 / 4)
    assert float(first["throughput/callbacks"]) == pytest.approx(1 / 4)
    assert float(second["throughput/seconds"]) == 8
    assert float(second["throughput/data"]) == pytest.approx(6 / 8)
    assert float(second["throughput/steps_per_s"]) == pytest.approx(2 / 8)
    assert float(second["throughput/examples_per_s"]) == pytest.approx(16 / 8)
    assert float(second["throughput/flops_per_s"]) == pytest.approx(200)
    assert float(second["throughput/mfu"]) == pytest.approx(200 / 1e4)
    assert monitor.summary["validation"] * monitor.summary["seconds"] == 20
    assert monitor.summary["steps"] == 12 and monitor.summary["examples"] == 96
    phases = "data", "device", "callbacks", "checkpoints", "validation", "loop"
    assert sum(monitor.summary[phase] for phase in phases) == pytest.approx(1)
    # 11 batches of 3 s, 12 callbacks of 1 s and 2 validations of 10 s.
    assert monitor.summary["examples_per_s"] == pytest.approx(96 / 65)


def test_checkpoints_are_no_part_of_callbacks(tmp_path, clock, monkeypatch):
    import orbax.checkpoint as ocp

    save = ocp.AsyncCheckpointer.save

    def slow(*arguments, **options):
        clock.turn(7.0)
        return save(*arguments, **options)

    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", slow)
    monitor = ThroughputMonitor()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    trainer = make_trainer(saver, turns(clock, 0.0), monitor)
    trainer.fit(batches(*[8] * 4))
    seconds = monitor.summary["seconds"]
    assert monitor.summary["checkpoints"] * seconds == pytest.approx(14)
    # Callbacks hear of the last one when the fit ends, after the sums are made.
    assert monitor.summary["callbacks"] * seconds == pytest.approx(0.5)


def test_waits_for_the_device_count_where_a_fit_begins_at_an_epochs_end(tmp_path):
    def save(trainer):
        if not (tmp_path / "4").exists():
            trainer.save(tmp_path / "4")

    data = batches(*[8] * 4)
    make_trainer(At(4, save, "on_boundary")).fit(data)
    trainer = make_trainer(ThroughputMonitor())
    trainer.fit(data, max_epochs=3, ckpt_path=tmp_path / "4")
    untouched = make_trainer().run.engine.in_flight.wait
    assert trainer.run.engine.in_flight.wait is not untouched


def test_a_short_run_and_own_loops_are_measured_too():
    monitor = ThroughputMonitor()
    make_trainer(monitor).fit(batches(8))
    assert monitor.summary["examples"] == 8 and "mfu" not in monitor.summary
    for _ in make_trainer(ThroughputMonitor()).steps(batches(8, 8)):
        pass


def test_logs_the_peak_memory_of_devices_that_report_it(tmp_path, monkeypatch):
    monitor = ThroughputMonitor()
    make_trainer(monitor).fit(batches(8))
    assert "peak_bytes" not in monitor.summary  # CPUs
    stats = {"peak_bytes_in_use": 3}
    monkeypatch.setattr(type(jax.devices()[0]), "memory_stats", lambda device: stats)
    make_trainer(monitor, CSVLogger(tmp_path)).fit(batches(8, 8))
    (row, *_) = read_table(tmp_path)
    assert float(row["throughput/peak_bytes"]) == monitor.summary["peak_bytes"] == 3
