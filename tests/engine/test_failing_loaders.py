"""The batches of steps where a loader fails, stops or continues."""

import contextlib
import itertools
import re

import numpy as np
import pytest
from toys import At, On, Recorder, batches, on_one_device

from jaxdp.callbacks import ThroughputMonitor


class Flaky:
    """Raises once, before batch 4, and continues afterwards."""

    def __init__(self, data):
        self.given, self.data = 0, data

    def __iter__(self):
        return self

    def __next__(self):
        self.given += 1
        if self.given == 5:
            raise TimeoutError("once")
        if self.given > len(self.data) + 1:
            raise StopIteration
        return self.data[self.given - 1 - (self.given > 5)]


@pytest.mark.parametrize("steps, trained", [(1, 4), (3, 3)])
def test_calls_before_an_error_of_the_loader_are_made(steps, trained):
    trainer, data = in_blocks(steps), Flaky(batches(*[8] * 8))
    with pytest.raises(TimeoutError, match="once"):
        trainer.fit(data)
    assert trainer.global_step == trained
    trainer.fit(data)
    assert trainer.global_step == trained + 4


def in_blocks(steps, *callbacks):
    return on_one_device(*callbacks, steps_per_execution=steps)


def raised(call, *arguments, **options):
    """The text of an error, with its notes."""
    with pytest.raises((ValueError, TypeError)) as caught:  # ours, or of the model
        call(*arguments, **options)
    return "\n".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.slow_cases("1-labels must be 0 to 2", "1-a training batch differs")
@pytest.mark.parametrize("wrong", ["labels must be 0 to 2", "a training batch differs"])
@pytest.mark.parametrize("steps", [1, 4])
def test_dispatches_before_an_invalid_batch_run(steps, wrong):
    data = batches(*[8] * 8)
    x, y = data[6]
    data[6] = (x, y + 7) if "labels" in wrong else (x[:, :3], y)
    trainer = in_blocks(steps, recorder := Recorder(), ThroughputMonitor())
    text = raised(trainer.fit, data)
    # Batches of other shapes are single steps; labels are checked per dispatch.
    is_together = steps == 4 and "labels" in wrong
    assert trainer.global_step == len(recorder.losses) == (4 if is_together else 6)
    where = "in one of the batches 4 to 7" if is_together else "in batch 6"
    assert wrong in text
    assert re.search(f"{where} of epoch 0 of `train_loader`$", text, re.MULTILINE)


def test_errors_have_the_number_of_the_invalid_batch():
    data, trainer = batches(*[8] * 4), in_blocks(1)
    x, y = data[3]
    wrong = [*data[:3], (x[:, :3], y)]
    for take, what in ((trainer.validate, "validat"), (trainer.predict, "predic")):
        text = raised(take, wrong)
        assert re.search("^in batch 3$", text, re.MULTILINE)
        assert re.search(f"a {what}.* batch differs", text)
    text = raised(trainer.test, [*data, (x, y + 7)])
    assert re.search("labels must be 0 to 2.*\nin batch 4", text, re.DOTALL)
    text = raised(on_one_device(accumulate_grad_batches=3).fit, [*data, *wrong])
    where = "in one of the batches 6 to 8 of epoch 0 of `train_loader`$"
    assert re.search(where, text, re.MULTILINE) and "differs" in text


def numbered():
    """Yields endless batches, each full of its number."""
    for number in itertools.count():
        yield np.full((4, 4), number, np.float32), np.arange(4) % 3


def numbers(steps, at=None, end=None):
    """A trainer, and the number of each step's batch; the fit may end at a step."""
    seen = []

    def note(trainer, batch, batch_idx):
        seen.append(int(batch[0][0, 0]))

    def stop(trainer):
        if end == "raise":
            raise KeyError(at)
        trainer.should_stop = end == "stop"

    return in_blocks(steps, On(on_train_batch_start=note), At(at, stop)), seen


class Positioned:
    """An iterator over `numbered` with a state."""

    def __init__(self):
        self.load_state_dict({"given": 0})

    def __iter__(self):
        return self

    def __next__(self):
        self.given += 1
        return next(self.batches)

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]
        self.batches = itertools.islice(numbered(), self.given, None)


@pytest.mark.parametrize("steps", [1, 4])
def test_an_iterator_is_not_read_ahead_of_a_dispatch(steps):
    def look(trainer, metrics, batch_idx):
        given.append((stream.given, batch_idx + 1))

    stream, given = Positioned(), []
    in_blocks(steps, On(on_train_batch_end=look)).fit(stream, max_steps=9)
    ends = [-(-number // steps) * steps for number in range(1, 9)] + [9]
    assert given == [*zip(ends, range(1, 10), strict=True)]


@pytest.mark.slow_but("4-raise", "4-break")
@pytest.mark.parametrize("end", ["stop", "raise", "break"])
@pytest.mark.parametrize("steps", [1, 4])
def test_batches_of_an_iterator_that_were_not_trained_on_come_again(steps, end):
    at = {1: 6, 4: 8}[steps]
    trainer, seen = numbers(steps, at, end)
    stream = numbered()
    if end == "break":
        for _ in trainer.steps(stream):
            if trainer.global_step == at:
                break
    else:
        with contextlib.suppress(KeyError):
            trainer.fit(stream, max_steps=100)
    assert trainer.global_step == at
    trainer.fit(stream, max_steps=10)
    assert seen == list(range(10))


def test_a_custom_loop_continues_after_a_load(tmp_path):
    trainer, seen = numbers(4)
    for _ in trainer.steps(itertools.islice(numbered(), 6)):
        if trainer.global_step == 4:
            trainer.load(trainer.save(tmp_path / "saved"))
    assert seen == list(range(6))
    assert trainer.global_step == 6
