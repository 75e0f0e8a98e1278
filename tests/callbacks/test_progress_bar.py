"""The progress bar on a terminal, in a file and in a notebook."""

import io
import os
import re
import sys
import threading
import types

import pytest
from toys import IN_FLIGHT, At, On, batches, fail_with
from toys import linear_on_one_device as make_trainer
from tqdm import tqdm

from jaxdp import Trainer
from jaxdp.callbacks import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make(clock, out, *callbacks, seconds=1.0, **options):
    """A trainer with a bar, whose steps take a second, validation batches two."""
    turns = On(
        on_train_batch_start=lambda *_: clock.turn(seconds),
        on_validation_batch_end=lambda *_: clock.turn(2),
    )
    return make_trainer(turns, *callbacks, ProgressBar(10.0, 10.0, out), **options)


def shown(out):
    """The successive states of the line that bars are drawn on."""
    parts = re.split(r"[\r\n]", out.getvalue())
    return [part.strip() for part in parts if part.strip()]


def test_a_terminal_shows_where_the_epoch_is(clock):
    member = On(on_validation_end=lambda trainer, _: trainer.log("member[0]", 1.0))
    trainer = make(clock, out := Terminal(), member, metrics=["accuracy"])
    history = trainer.fit(batches(*[8] * 12), batches(8), max_epochs=2)
    lines = shown(out)
    assert "epoch 0/1 |" in lines[0] and " 1/12 batches, " in lines[0]
    last = [line for line in lines if line.startswith("epoch 0/1 |")][-1]
    assert re.search(r" 12/12 batches, loss [\d.]+, 8 examples/s$", last)
    names = "loss", "accuracy", "val_loss", "val_accuracy"
    values = [f"{name} {history[name][1]:.4g}" for name in names]
    summary = f"epoch 1/1: {', '.join(values)}, 14 s, 6.857 examples/s"
    assert [line for line in lines if line.startswith("epoch 1/1:")] == [summary]
    assert any(line.startswith("validating") for line in lines)


def test_a_narrow_terminal_keeps_the_loss_longest(clock, monkeypatch):
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (46, 24))
    make(clock, out := Terminal()).fit(batches(*[8] * 9))
    last = shown(out)[-2]
    assert len(last) <= 46 and "loss" in last and "examples/s" not in last


def test_the_loss_is_that_of_a_step_that_the_device_has_finished(clock):
    out, reads = Terminal(), []

    def watch(trainer, metrics, batch_idx):
        number, real = trainer.global_step, type(metrics).__getitem__

        class Watched(type(metrics)):
            def __getitem__(self, name):
                reads.append((number, trainer.global_step))
                return real(self, name)

        metrics.__class__ = Watched

    make(clock, out, On(on_train_batch_end=watch)).fit(batches(*[8] * 20))
    assert reads and all(now - number == IN_FLIGHT for number, now in reads)
    assert re.search(r"loss \d", out.getvalue())


def test_bars_are_drawn_ten_times_a_second_at_most(clock):
    make(clock, out := Terminal(), seconds=0.03).fit(batches(*[8] * 100))
    drawn = re.findall(r"\| (\d+)/100 ", out.getvalue())
    assert drawn == [str(step) for step in range(4, 101, 4)]  # each 0.12 s


def test_a_file_gets_a_line_per_epoch_and_no_carriage_returns(clock):
    out = io.StringIO()
    make(clock, out).fit(batches(*[8] * 25), batches(*[8] * 8))
    says = On(on_train_batch_end=lambda *_: tqdm.write("a message", file=out))
    make(clock, out, says).fit(batches(8, 8))
    patterns = (
        r"epoch 0/0: 10/25 batches, loss [\d.]+, 15 s left, 8 examples/s",
        r"epoch 0/0: 20/25 batches, loss .*",
        r"validating: 5/8 batches, 6 s left",
        r"epoch 0/0: loss [\d.]+, val_loss [\d.]+, 41 s, 4.878 examples/s",
        *["a message"] * 2,
        r"epoch 0/0: loss .*",
    )
    assert "\r" not in out.getvalue()
    for line, pattern in zip(out.getvalue().splitlines(), patterns, strict=True):
        assert re.fullmatch(pattern, line)


def test_unknown_lengths_and_max_steps_are_shown(clock):
    trainer = make(clock, out := Terminal())
    trainer.fit((batch for batch in batches(*[8] * 5)), max_epochs=1)
    assert any(line.startswith("epoch 0/0 5 batches,") for line in shown(out))
    for size, max_steps, last in (5, 8, " 3/3 batches, "), (9, 10, " 5/5 batches, "):
        out.truncate(0)  # the second one ends within the epoch
        trainer.fit(batches(*[8] * size), max_steps=max_steps, max_epochs=-1)
        assert any(line.startswith("epoch 1 |") and last in line for line in shown(out))


def test_an_epoch_that_an_earlier_fit_began_has_the_speed_of_this_one(clock):
    trainer, data = make(clock, out := Terminal()), batches(*[8] * 12)
    trainer.fit(data, max_steps=4)
    trainer.fit(data)
    line = r" 6/12 batches, loss [\d.]+, 6 s left, 8 examples/s"
    assert re.search(line, out.getvalue())


def test_bars_of_failed_fits_and_of_validations_go_away(clock):
    trainer = make(clock, out := Terminal(), At(5, fail_with(RuntimeError("no"))))
    with pytest.raises(RuntimeError):
        trainer.fit(batches(*[8] * 8))
    assert re.search(r"\r +\r$", out.getvalue())
    out.truncate(0)
    trainer.validate(batches(8, 8, 8))
    assert any(line.startswith("validating 2 batches") for line in shown(out))
    assert re.search(r"\r +\r$", out.getvalue())


def test_own_loops_and_other_processes_show_nothing_and_no_thread_stays(clock):
    out, before = Terminal(), set(threading.enumerate())
    list(make(clock, out).steps(batches(8, 8)))
    other = make(clock, out)
    other.is_global_zero = False
    other.fit(batches(8, 8), batches(8))
    assert out.getvalue() == ""
    make(clock, out).fit(batches(8, 8), max_epochs=2)
    new = {type(thread).__name__ for thread in {*threading.enumerate()} - before}
    assert out.getvalue() and "TMonitor" not in new


def test_the_trainer_adds_a_bar_unless_there_is_one_or_it_is_not_wanted(capfd):
    plain, mine = make_trainer(), ProgressBar()
    assert plain.callbacks == []
    trainer = Trainer(plain.model, loss="cross_entropy")
    assert [type(callback) for callback in trainer.callbacks] == [ProgressBar]
    trainer.fit(batches(8))
    assert "epoch 0/0: " in capfd.readouterr().err
    assert Trainer(plain.model, callbacks=[mine]).callbacks == [mine]


def test_a_notebook_gets_a_text_bar_and_a_terminal_without_columns_lines(
    clock, monkeypatch
):
    for columns, width in ("0", 80), ("", 0):
        monkeypatch.setenv("COLUMNS", columns)
        size = os.terminal_size((width, 24))
        monkeypatch.setattr(os, "get_terminal_size", lambda _, size=size: size)
        out = Terminal()
        out.fileno = lambda: 2
        make(clock, out).fit(batches(*[8] * 9))
        (line,) = shown(out)
        assert line.startswith("epoch 0/0: loss ")
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    make(clock, None).fit(batches(8, 8, 8))
    assert shown(out)[0].startswith("epoch 0/0 |") and "epoch 0/0: " in out.getvalue()
