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
from jaxdp.callbacks.profiler import lacks_device_events


def make_trainer(*callbacks, **options):
    model = eqx.nn.MLP(4, 3, 64, 2, key=jax.random.key(0))
    return on_one_device(*callbacks, model=model, optimizer=optax.sgd(0.1), **options)


def step_numbers(folder):
    """The steps in the trace that Perfetto opens."""
    (path,) = folder.glob("plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [e for e in events if e.get("name") == "train" and e.get("ph") == "X"]
    return sorted({int(e["args"]["step_num"]) for e in steps})


@pytest.mark.parametrize("start, number, options, steps", [
    (3, 2, {}, [4, 5]),
    (3, 2, {"strategy": Sharded(2)}, [4, 5]),
    (5, 50, {}, [6, 7, 8]),  # it ends with the fit
    (3, 2, {"steps_per_execution": 4}, [5, 6, 7, 8]),  # begins with a call of several
])  # fmt: skip
def test_a_window_of_steps_is_traced(tmp_path, caplog, start, number, options, steps):
    profiler = Profiler(tmp_path, start_step=start, num_steps=number)
    make_trainer(profiler, **options).fit(batches(*[8] * 8))
    assert step_numbers(tmp_path) == steps
    assert f"Profiler: steps {steps[0]} to {steps[-1]} are traced in" in caplog.text


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


def test_a_fit_that_is_too_short_says_so(tmp_path, caplog):
    make_trainer(Profiler(tmp_path)).fit(batches(8, 8))
    assert "nothing was traced: the fit ended before 10 steps" in caplog.text


@pytest.mark.parametrize("events", ["", "events { metadata_id: 1 }"])
def test_a_trace_without_operations_of_the_device_is_recognised(
    tmp_path, monkeypatch, events
):
    Data = jax.profiler.ProfileData
    host = 'planes { name: "/host:CPU" lines { events { metadata_id: 1 } } }'
    device = f'planes {{ name: "/device:GPU:0" lines {{ {events} }} }}'
    raw = Data.text_proto_to_serialized_xspace(f"{host} {device}")
    monkeypatch.setattr(Data, "from_file", lambda _: Data.from_serialized_xspace(raw))
    (tmp_path / "host.xplane.pb").touch()
    assert lacks_device_events(tmp_path, "gpu") == (not events)
    assert not lacks_device_events(tmp_path, "cpu")
