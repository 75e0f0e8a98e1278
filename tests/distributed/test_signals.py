"""Ctrl-C and other exceptions from outside arrive as what they are, all being whole."""

import contextlib
import os
import signal
import sys
import threading

import pytest
from toys import At, On, assert_equal_leaves, batches, fail_with, run_python
from toys import on_one_device as make

from jaxdp.callbacks import Callback, ModelCheckpoint, Preemption
from jaxdp.distributed import Preempted, ProcessGroup, SignalHandler


class Press:
    """Raises a signal, or several, at a call of some function, by its number."""

    def __init__(self, number, at=None, times=1):
        self.number, self.at, self.times, self.calls = number, at, times, 0

    def __enter__(self):
        sys.setprofile(self.count)
        return self

    def __exit__(self, *exception):
        sys.setprofile(None)

    def count(self, frame, event, argument):
        if event == "call":
            self.calls += 1
            if self.calls == self.at:
                for _ in range(self.times):
                    signal.raise_signal(self.number)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer, and a checkpoint of it."""
    trainer = make()
    trainer.fit(batches(8, 8, 8))
    return trainer, trainer.save(tmp_path_factory.mktemp("saved") / "3")


def assert_same(first, second):
    assert first.global_step == second.global_step
    assert_equal_leaves(first.state, second.state)


MOMENTS = [0.02, 0.3, 0.6, 0.9]


@pytest.mark.slow_cases("15-Preempted")
@pytest.mark.parametrize("number, kind", [
    (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted),
])  # fmt: skip
def test_a_signal_while_saving_is_raised_once_that_is_whole(
    trained, tmp_path, number, kind
):
    trainer, _ = trained
    with Press(number) as press:
        trainer.save(tmp_path / "whole")
    for index, moment in enumerate(MOMENTS):
        path = tmp_path / str(index)
        with pytest.raises(kind) as raised, Press(number, int(press.calls * moment)):
            trainer.save(path)
        assert raised.type is kind
        again = make()
        again.load(path)
        assert_same(again, trainer)
        assert sorted(os.listdir(tmp_path)) == [*map(str, range(index + 1)), "whole"]


class PressedAgain(ModelCheckpoint):
    """Gets a second Ctrl-C, or more, while it saves what the first has ended."""

    press = Press(signal.SIGINT)

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        signal.raise_signal(signal.SIGINT)

    def on_exception(self, trainer, exception):
        with self.press:
            super().on_exception(trainer, exception)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_another_one_is_answered_leaves_no_save_half_done(tmp_path, times):
    saver = PressedAgain(tmp_path / "0")
    with pytest.raises(KeyboardInterrupt):
        make(saver).fit(batches(8, 8, 8))
    threads = {*threading.enumerate()}
    for index, moment in enumerate(MOMENTS, 1):
        again = PressedAgain(tmp_path / str(index))
        at = int(saver.press.calls * moment)
        again.press = Press(signal.SIGINT, at, times)
        with pytest.raises(KeyboardInterrupt):
            make(again).fit(batches(8, 8, 8))
        for thread in {*threading.enumerate()} - threads:
            is_idle = type(thread) is threading.Thread  # of a pool, which has no end
            if not is_idle or thread.name == "jaxdp checkpoint":
                thread.join(20)
                assert not thread.is_alive()
        for path in (tmp_path / str(index)).glob("[0-9]"):  # that of step 1, or none
            make().load(path)


@pytest.mark.parametrize("number, kind", [
    (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted),
])  # fmt: skip
def test_a_signal_at_the_end_of_a_fit_waits_for_the_last_save(tmp_path, number, kind):
    class Signal(Callback):
        fit_end_order = -99  # before savers

        def on_fit_end(self, trainer):
            # Without a fit's handler, SIGTERM would end the process of the tests.
            assert signal.getsignal(number) not in (signal.SIG_DFL, previous)
            signal.raise_signal(number)

    previous = signal.getsignal(signal.SIGINT)
    trainer = make(Signal(), ModelCheckpoint(tmp_path, every_n_train_steps=2))
    with pytest.raises(kind):
        trainer.fit(batches(8, 8, 8))
    assert sorted(path.name for path in tmp_path.glob("[0-9]*")) == ["3"]
    assert signal.getsignal(signal.SIGINT) is previous
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_error_at_the_end_of_a_fit_is_not_hidden_by_a_signal(number):
    def fail(trainer):
        signal.raise_signal(number)
        raise OSError("the disk is full")

    for callbacks in (), (Preemption(action="return"),):
        with pytest.raises(OSError, match="the disk is full"):
            make(On(on_fit_end=fail), *callbacks).fit(batches(8, 8))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ctrl_c_while_restoring_is_raised_once_that_is_whole(trained):
    trainer, path = trained
    make().load(path)  # the first one imports and compiles what later ones have
    with Press(signal.SIGINT) as press:
        make().load(path)
    for moment in MOMENTS[:3]:  # its waits are more or fewer calls on a busy machine
        again = make()
        at = int(press.calls * moment)
        with pytest.raises(KeyboardInterrupt), Press(signal.SIGINT, at):
            again.load(path)
        assert_same(again, trainer)


@pytest.mark.parametrize("first, second", [
    ("SIGTERM", "SIGHUP"), ("SIGHUP", "SIGTERM"), ("SIGHUP", "SIGHUP"),
])  # fmt: skip
def test_a_hangup_beside_another_signal_ends_nothing_at_once(first, second):
    with pytest.raises(Preempted) as raised, SignalHandler(ProcessGroup()) as handler:
        signal.raise_signal(getattr(signal, first))
        signal.raise_signal(getattr(signal, second))
        handler.check()
    assert raised.value.signal == max(first, second)


TWO = """
import signal
from toys import On, batches, on_one_device
def twice(*_):
    signal.raise_signal(signal.SIGTERM)
    print("held back", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("not reached", flush=True)
on_one_device(On(on_train_batch_end=twice)).fit(batches(8, 8))
"""


def test_a_second_signal_ends_the_process_at_once_as_it_does_without_us():
    done = run_python(TWO)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "held back\n")


def test_an_error_without_a_text_after_ctrl_c_is_noted():
    careless = On(
        on_train_batch_end=fail_with(KeyboardInterrupt()),
        on_exception=fail_with(AssertionError()),
    )
    with pytest.raises(KeyboardInterrupt) as raised:
        make(careless).fit(batches(8, 8))
    assert raised.value.__notes__[-1] == "and after that: AssertionError: "


# Python ignores what is raised in a generator that it throws away.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_call_of_an_own_loop_loses_no_step():
    def loop():
        for metrics in trainer.steps(data):
            float(metrics["loss"])

    data, trainer = batches(8, 8, 8, 8, 8, 8), make(steps_per_execution=2)
    loop()
    with Press(signal.SIGINT) as press:
        loop()
    for at in range(1, press.calls, 11):
        with contextlib.suppress(KeyboardInterrupt), Press(signal.SIGINT, at):
            loop()
        assert trainer.global_step == int(trainer.state.step)
    loop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_the_callers_code_signals_do_what_they_did():
    heard, steps = [], make().steps(batches(8, 8, 8))
    next(steps)
    with pytest.raises(KeyboardInterrupt, match="^$"):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    next(steps)
    signal.raise_signal(signal.SIGTERM)
    steps.close()
    assert heard == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2  # the loop has not put its own back
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


ENDED = """
import signal
from toys import batches, on_one_device
steps = on_one_device().steps(batches(8, 8, 8))
next(steps)
signal.raise_signal(signal.SIGTERM)
"""


def test_in_the_callers_code_a_signal_ends_the_process():
    assert run_python(ENDED).returncode == -signal.SIGTERM


def test_a_handler_that_a_callback_sets_stays():
    mine = lambda *_: None  # noqa: E731
    make(At(1, lambda _: signal.signal(signal.SIGTERM, mine))).fit(batches(8, 8))
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is mine


def presses():
    return At(2, lambda trainer: signal.raise_signal(signal.SIGINT))


def test_another_trainer_holds_signals_back_between_the_steps_of_a_loop():
    data, first, second = batches(8, 8, 8, 8), make(), make(presses())
    steps = first.steps(data)
    next(steps), next(steps)  # a program's second call takes longer than the next ones
    with pytest.raises(KeyboardInterrupt, match="stopped after step 2"):
        second.fit(data)
    assert second.global_step == int(second.state.step) == 2
    with Press(signal.SIGINT) as press:
        next(steps)
    with pytest.raises(KeyboardInterrupt, match="nothing is lost"):
        with Press(signal.SIGINT, press.calls // 2):
            next(steps)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_loops_of_two_trainers_hold_signals_back_by_turns():
    data, first, second = batches(8, 8, 8), make(), make(presses())
    with pytest.raises(KeyboardInterrupt, match="nothing is lost"):
        for _ in zip(first.steps(data), second.steps(data), strict=True):
            pass
    assert (first.global_step, second.global_step) == (2, 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("method", ["validate", "predict", "steps"])
def test_a_signal_outside_of_a_fit_is_logged_once(method, caplog):
    def kill(*_):
        signal.raise_signal(signal.SIGTERM)

    def loader():
        for number, batch in enumerate(batches(8, 8, 8)):
            if number == 1 and method != "steps":
                kill()
            yield batch

    with pytest.raises(Preempted):
        for _ in getattr(make(On(on_train_batch_end=kill)), method)(loader()):
            pass
    assert caplog.text.count("SIGTERM: stopped between two steps") == 1
