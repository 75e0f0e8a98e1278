"""A window of steps, traced into files that other tools read."""

import gzip
import json

import equinox as eqx
import jax
import optax
import pytest
from toys import At, batches, fail_with, on_one_device

from jaxdp import Sharded
from jaxdp.callbacks import Profiler


def make_trainer(*callbacks, **options):
    model = eqx.nn.MLP(4, 3, 64, 2, key=jax.random.key(0))
    return on_one_device(*callbacks, model=model, optimizer=optax.sgd(0.1), **options)


def step_numbers(folder):
    """The steps in the trace that Perfetto opens."""
    (path,) = folder.glob("plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [e for e in events if e.get("name") == "train" and e.get("ph") == "X"]
    return sorted({int(e["args"]["step_num"]) for e in steps})


@pytest.mark.parametrize("start, count, options, traced", [
    (3, 2, {}, [4, 5]),
    (3, 2, {"strategy": Sharded(2)}, [4, 5]),
    (6, 50, {}, [7, 8]),  # it ends with the fit
    (3, 2, {"steps_per_execution": 4}, [5, 6, 7, 8]),  # in whole calls
    (0, 1, {}, [1]),
])  # fmt: skip
def test_a_window_of_steps_is_traced(tmp_path, caplog, start, count, options, traced):
    profiler = Profiler(tmp_path, start_step=start, num_steps=count)
    make_trainer(profiler, **options).fit(batches(*[8] * 8))
    assert step_numbers(tmp_path) == traced
    steps = f"steps {traced[0]} to {traced[-1]}"
    assert f"Profiler: {steps} are traced in {tmp_path}" in caplog.text


def test_a_failing_fit_ends_the_window_too(tmp_path):
    fails = At(3, fail_with(RuntimeError("the cable")), "on_train_batch_start")
    profiler = Profiler(tmp_path, start_step=1)
    with pytest.raises(RuntimeError, match="the cable"):
        make_trainer(profiler, fails).fit(batches(*[8] * 5))
    assert step_numbers(tmp_path) == [2, 3, 4]
    trainer = make_trainer(Profiler(tmp_path / "b", start_step=4, num_steps=2))
    trainer.fit(batches(8, 8))
    trainer.fit(batches(*[8] * 8), max_epochs=2)  # each fit skips its own first steps
    assert step_numbers(tmp_path / "b") == [7, 8]


@pytest.mark.parametrize("start, when", [(10, "before 10 steps"), (2, "after step 2")])
def test_a_fit_that_is_too_short_says_so(tmp_path, caplog, start, when):
    make_trainer(Profiler(tmp_path, start)).fit(batches(8, 8))
    assert f"nothing was traced: the fit ended {when}" in caplog.text
