"""What the progress bar shows, on a terminal, in a file and in a notebook."""

import io
import re
import subprocess
import sys
import time

import equinox as eqx
import jax
import numpy as np
import pytest
from toys import batches
from toys import linear_on_one_device as make_trainer
from tqdm import tqdm

from jaxdp import Callback, Trainer
from jaxdp.callbacks import ProgressBar
from jaxdp.step import IN_FLIGHT as LAG


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """In place of `time.perf_counter`; every step takes a second, validation two."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Ticking(Callback):
    def __init__(self, clock, seconds=1):
        self.clock = clock
        self.seconds = seconds

    def on_train_batch_start(self, trainer, batch, batch_idx):
        self.clock.now += self.seconds

    def on_validation_batch_end(self, trainer, batch_idx):
        self.clock.now += 2


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


def drawn(out):
    """The successive states of the line that bars are drawn on."""
    return [
        part.strip() for part in re.split(r"[\r\n]", out.getvalue()) if part.strip()
    ]


def test_a_terminal_sees_where_the_epoch_is(clock):
    out = Terminal()
    trainer = make_trainer(Ticking(clock), ProgressBar(file=out), metrics=["accuracy"])
    history = trainer.fit(batches(*[8] * 12), batches(8), max_epochs=2)
    lines = drawn(out)
    assert "epoch 0/1 |" in lines[0] and " 1/12 [" in lines[0]
    last = [line for line in lines if line.startswith("epoch 0/1 |")][-1]
    assert " 12/12, loss " in last
    assert re.search(r"12/12, loss [\d.]+ \[00:1\d<00:00, 8 examples/s\]$", last)
    summary = [line for line in lines if line.startswith("epoch 1/1:")]
    assert summary == [
        f"epoch 1/1: loss {history['loss'][1]:.4g},"
        f" accuracy {history['accuracy'][1]:.4g},"
        f" val_loss {history['val_loss'][1]:.4g},"
        f" val_accuracy {history['val_accuracy'][1]:.4g}, 14 s, 8 examples/s"
    ]
    assert any(line.startswith("validating") for line in lines)


def test_a_narrow_terminal_keeps_the_loss_longest(clock, monkeypatch):
    out = Terminal()
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (50, 24))
    trainer = make_trainer(Ticking(clock), ProgressBar(file=out))
    trainer.fit(batches(*[8] * 9))
    last = drawn(out)[-2]
    assert len(last) <= 50 and "loss" in last and "examples/s" not in last


def test_the_loss_shown_is_one_of_some_steps_ago(clock):
    out = Terminal()
    reads = []

    class Spy(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            number = trainer.global_step
            real = type(metrics).__getitem__

            class Watched(type(metrics)):
                def __getitem__(self, name):
                    reads.append((number, trainer.global_step))
                    return real(self, name)

            metrics.__class__ = Watched

    trainer = make_trainer(Ticking(clock), Spy(), ProgressBar(file=out))
    trainer.fit(batches(*[8] * 20))
    assert reads and all(now - number == LAG for number, now in reads)
    assert re.search(r"loss \d", out.getvalue())


def test_bars_are_drawn_ten_times_a_second_at_most(monkeypatch, clock):
    draws, display = [], tqdm.display

    def noting(bar, msg=None, *arguments, **options):
        if msg is None:
            draws.append(clock.now)
        return display(bar, msg, *arguments, **options)

    monkeypatch.setattr(tqdm, "display", noting)
    bar = ProgressBar(file=Terminal())
    make_trainer(Ticking(clock, 0.03), bar).fit(batches(*[8] * 100))
    np.testing.assert_allclose(np.diff(draws), 0.12, rtol=1e-6)
    assert len(draws) >= 100 * 0.03 / 0.12 - 1


def test_a_file_gets_a_line_per_epoch_and_no_carriage_returns(clock):
    out = io.StringIO()
    bar = ProgressBar(file=out, every_n_seconds=10.0)
    trainer = make_trainer(Ticking(clock), bar)
    trainer.fit(batches(*[8] * 25), batches(*[8] * 8), max_epochs=1)
    assert "\r" not in out.getvalue()
    lines = out.getvalue().splitlines()
    assert re.fullmatch(
        r"epoch 0/0: 10/25 batches \(40%\), loss [\d.]+, 00:15 left, 8 examples/s",
        lines[0],
    )
    assert lines[1].startswith("epoch 0/0: 20/25 batches (80%), loss ")
    assert lines[2].startswith("validating: ")
    assert re.fullmatch(
        r"epoch 0/0: loss [\d.]+, val_loss [\d.]+, 41 s, 8 examples/s", lines[-1]
    )
    assert len(lines) == 4


def test_a_terminal_without_columns_gets_lines(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    out = Terminal()
    trainer = make_trainer(Ticking(clock), ProgressBar(file=out))
    trainer.fit(batches(*[8] * 12))
    (line,) = out.getvalue().splitlines()
    assert line.startswith("epoch 0/0: loss ")


def test_unknown_lengths_and_max_steps_are_shown_for_what_they_are(clock):
    out = Terminal()
    trainer = make_trainer(Ticking(clock), ProgressBar(file=out))
    trainer.fit((batch for batch in batches(*[8] * 5)), max_epochs=1)
    assert any(line.startswith("epoch 0/0 5 batches [") for line in drawn(out))
    out.truncate(0)
    trainer.fit(batches(*[8] * 5), max_steps=8, max_epochs=-1)
    assert any(line.startswith("epoch 1 |") and " 3/3, " in line for line in drawn(out))
    out.truncate(0)
    trainer.fit(batches(*[8] * 9), max_steps=10, max_epochs=-1)  # inside the epoch
    assert any(line.startswith("epoch 1 |") and " 5/5, " in line for line in drawn(out))


def test_an_exception_leaves_the_line_empty(clock):
    class Fails(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            if batch_idx == 4:
                raise RuntimeError("no")

    out = Terminal()
    trainer = make_trainer(Ticking(clock), ProgressBar(file=out), Fails())
    with pytest.raises(RuntimeError):
        trainer.fit(batches(*[8] * 8))
    assert re.search(r"\r +\r$", out.getvalue())


def test_validation_outside_of_fit_has_a_bar_that_goes_away(clock):
    out = Terminal()
    trainer = make_trainer(Ticking(clock), ProgressBar(file=out))
    trainer.validate(batches(8, 8, 8))
    assert any(line.startswith("validating 2 batches") for line in drawn(out))
    assert re.search(r"\r +\r$", out.getvalue())


def test_owning_the_loop_shows_nothing():
    out = Terminal()
    trainer = make_trainer(ProgressBar(file=out))
    for _ in trainer.steps(batches(8, 8)):
        pass
    assert out.getvalue() == ""


def test_other_processes_show_nothing(capfd):
    trainer = make_trainer(ProgressBar())
    trainer.is_global_zero = False
    trainer.fit(batches(8, 8), batches(8))
    assert capfd.readouterr().err == ""


def test_the_trainer_adds_a_bar_unless_there_is_one_or_it_is_not_wanted(capfd):
    model = eqx.nn.Linear(4, 3, key=jax.random.key(0))
    trainer = Trainer(model, loss="cross_entropy")
    bars = [c for c in trainer.callbacks if isinstance(c, ProgressBar)]
    assert len(bars) == 1
    trainer.fit(batches(8))
    assert "epoch 0/0: " in capfd.readouterr().err
    mine = ProgressBar()
    trainer = Trainer(model, loss="cross_entropy", callbacks=[mine])
    assert trainer.callbacks == [mine]
    assert make_trainer().callbacks == []


NOTEBOOK = """
import sys, types, warnings
warnings.simplefilter("error")

class ZMQInteractiveShell:
    kernel = object()

shell = ZMQInteractiveShell()
ipython = types.ModuleType("IPython")
ipython.get_ipython = lambda: shell
sys.modules["IPython"] = ipython
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")

import io, time
import equinox as eqx, jax, numpy as np
from jaxdp import SingleDevice, Trainer
from jaxdp.callbacks import ProgressBar

def slow():
    for _ in range(3):
        time.sleep(0.01)
        yield np.ones((8, 4), np.float32), np.zeros(8, np.int32)

out = io.StringIO()
trainer = Trainer(
    eqx.nn.Linear(4, 3, key=jax.random.key(0)),
    loss="cross_entropy",
    strategy=SingleDevice(),
    callbacks=[ProgressBar(file=out, refresh_per_second=1e9)],
)
trainer.fit(slow())
print("1 batches" in out.getvalue(), "epoch 0/0: " in out.getvalue())
"""


def test_a_notebook_without_widgets_gets_a_text_bar_and_no_warning():
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_no_thread_is_left_behind(clock):
    import threading

    before = set(threading.enumerate())
    make_trainer(ProgressBar(file=Terminal())).fit(batches(8, 8))
    new = {thread for thread in threading.enumerate() if thread not in before}
    assert not any("TMonitor" in type(thread).__name__ for thread in new)


def test_a_message_in_the_middle_of_an_epoch_adds_no_line_to_a_file(clock):
    class Says(Callback):
        def on_train_batch_end(self, trainer, metrics, batch_idx):
            tqdm.write("a message", file=out)

    out = io.StringIO()
    make_trainer(Ticking(clock), ProgressBar(file=out), Says()).fit(batches(*[8] * 3))
    *messages, last = out.getvalue().split("\n")[:-1]
    assert messages == ["a message"] * 3 and last.startswith("epoch 0/0: loss")
    assert "\r" not in out.getvalue()
