"""On accelerators, batches are transferred before the present step is launched."""

import queue
import threading

import jax
import numpy as np
import pytest
from toys import At, On, bits, on_one_device, rows

from jaxdp import Sharded, SingleDevice

X, Y = rows(24)
BATCHES = [(X[start : start + 4], Y[start : start + 4]) for start in range(0, 24, 4)]


def trainer(strategy=None, *callbacks, ahead=True, **options):
    """Returns a trainer that prefetches on CPUs too, if `ahead`."""
    made = on_one_device(*callbacks, strategy=strategy or SingleDevice(), **options)
    made.run.engine.prefetches = ahead
    return made


@pytest.fixture
def events(monkeypatch):
    """Records JAX's calls in order: ("put", first value) and ("call", None)."""
    happened = []
    put, call = jax.device_put, jax.stages.Compiled.__call__

    def putting(arrays, *others, **options):
        leaves = jax.tree.leaves(arrays)
        is_batch = leaves and type(leaves[0]) is np.ndarray and leaves[0].ndim == 3
        if is_batch:
            happened.append(("put", leaves[0][0, 0, 0].item()))
        return put(arrays, *others, **options)

    def calling(self, *arguments, **options):
        happened.append(("call", None))
        return call(self, *arguments, **options)

    monkeypatch.setattr(jax, "device_put", putting)
    monkeypatch.setattr(jax.stages.Compiled, "__call__", calling)
    return happened


@pytest.mark.parametrize("strategy", [SingleDevice, lambda: Sharded(4)])
def test_the_next_batch_is_transferred_before_the_present_step_is_launched(
    strategy, events
):
    made = trainer(strategy())
    made.fit(BATCHES[:1])
    events.clear()
    made.fit(BATCHES, max_epochs=2)
    puts = [("put", x[0, 0].item()) for x, _ in BATCHES]
    expected = [puts[0]]
    for following in puts[1:]:
        expected += [following, ("call", None)]
    assert events == [*expected, ("call", None)]

    made.run.engine.prefetches = False  # as on CPUs
    events.clear()
    made.fit(BATCHES, max_epochs=3)
    assert {what for what, _ in events} == {"call"}
    made.run.engine.prefetches = True

    for evaluate in made.validate, made.predict:
        evaluate(BATCHES)
        events.clear()
        evaluate(BATCHES)
        assert events == [*expected, ("call", None)]


@pytest.mark.parametrize("options, fit", [
    ({"accumulate_grad_batches": 4}, {"max_epochs": 2}),
    ({"steps_per_execution": 4}, {"max_steps": 7}),
    ({"steps_per_execution": 3}, {"val_check_interval": 2, "max_epochs": 2}),
])  # fmt: skip
def test_prefetching_does_not_change_numbers(options, fit):
    one, other = (trainer(ahead=ahead, **options) for ahead in (True, False))
    for each in one, other:
        each.fit(BATCHES, BATCHES, **fit)
    assert one.global_step == other.global_step
    assert bits(one.state) == bits(other.state)


def test_errors_are_raised_after_the_steps_before_them():
    wrong = X[:4], np.full(4, 7)
    made = trainer()
    with pytest.raises(ValueError, match="labels must be 0 to 2") as caught:
        made.fit([*BATCHES[:2], wrong, *BATCHES[2:]])
    assert made.global_step == 2
    assert "in batch 2 of epoch 0" in "".join(caught.value.__notes__)


def test_prefetched_batches_of_an_iterator_come_again():
    stop = lambda trainer: setattr(trainer, "should_stop", True)  # noqa: E731
    stream, made, whole = (
        iter(BATCHES),
        trainer(None, At(1, stop)),
        trainer(ahead=False),
    )
    made.fit(stream, max_epochs=-1)
    made.callbacks = []
    made.fit(stream, max_epochs=-1, max_steps=len(BATCHES))
    whole.fit(BATCHES)
    assert bits(made.state.params) == bits(whole.state.params)


def test_a_custom_loop_reads_no_batch_ahead():
    given = []
    stream = (given.append(batch) or batch for batch in BATCHES)
    for number, _ in enumerate(trainer().steps(stream), 1):
        assert len(given) == number


@pytest.mark.parametrize("ahead", [True, False])
def test_evaluations_bound_the_bytes_in_flight(ahead):
    made, waited = trainer(ahead=ahead), []
    made.fit(BATCHES)
    flight = made.run.engine.in_flight
    flight.max_bytes, flight.wait = 1, waited.append
    made.validate(BATCHES)
    made.predict(BATCHES)
    # Two dispatches are in flight; on CPUs eight are.
    assert len(waited) >= (2 * len(BATCHES) - 2) * ahead


@pytest.mark.parametrize("steps, waits", [(1, 12 - 8), (2, 6 - 2)])
def test_dispatches_in_flight_are_bounded(steps, waits):
    def spy(trainer):
        trainer.run.engine.in_flight.wait = waited.append

    waited, callback = [], On(on_train_epoch_start=spy)
    trainer(None, callback, ahead=False, steps_per_execution=steps).fit(BATCHES * 2)
    assert len(waited) == waits


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded])
def test_nothing_is_moved_that_the_transfer_guard_forbids(strategy):
    expected, guarded = trainer(strategy()), trainer(strategy())
    found = []
    for each, guard in ((expected, "allow"), (guarded, "disallow")):
        each.fit(BATCHES, BATCHES)  # compiles
        each.predict(BATCHES)
        with jax.transfer_guard(guard):
            each.fit(BATCHES, BATCHES, max_epochs=4)
            found.append((each.validate(BATCHES), each.predict(BATCHES).tolist()))
    assert guarded.history.state_dict() == expected.history.state_dict()
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("ahead", [False, True])
def test_ready_batches_pass_through_no_queue_and_no_thread(kind, ahead, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("ready batches need none")

    data, made = kind(BATCHES), trainer(ahead=ahead)
    made.fit(data, data)  # a thread says when compiling takes long
    for method in ("put", "get"):
        monkeypatch.setattr(queue.Queue, method, refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert made.fit(data, data, max_epochs=3).epochs == [0, 1, 2]
