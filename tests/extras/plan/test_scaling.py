"""The largest batch that fits, and a step on other numbers of devices."""

import math

import pytest
from planned import PARAMS, batch, trainer

from jaxdp import Sharded
from jaxdp.extras.plan.hardware import HARDWARE
from jaxdp.extras.plan.plan import find_largest


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not(caplog):
    planned = trainer(Sharded(4))
    plan = planned.plan([batch(8)])
    limit = 10 * plan.memory.peak
    rows = plan.largest_batch(limit)
    assert rows % 4 == 0
    said = [each for each in caplog.messages if "rows in a step need" in each]
    assert 2 <= len(said) <= 12

    def peak(rows):
        return planned.plan([batch(rows)]).memory.peak

    assert peak(rows) <= limit < peak(rows + 4)
    assert plan.largest_batch(plan.memory.parameters) == 0


@pytest.mark.parametrize("peak", [
    lambda rows: 1000 + 17 * rows,
    lambda rows: 1000 + 128 * math.ceil(rows / 8),
    lambda rows: 5 * rows + rows**2 // 1000,
    lambda rows: max(7000, 3 * rows),
    lambda rows: 1000 + 40 * rows - 35 * max(0, rows - 300),
    lambda rows: 1000 + 2 * rows if rows < 450 else math.inf,
])  # fmt: skip
@pytest.mark.parametrize("limit", [900, 1017, 9000, 10**6])
@pytest.mark.parametrize("start", [1, 64, 5000])
def test_the_search_finds_the_largest(peak, limit, start):
    asked = []

    def asking(rows):
        asked.append(rows)
        return peak(rows)

    found = find_largest(asking, limit, start)
    assert found == 0 or peak(found) <= limit
    assert peak(found + 1) > limit
    assert len(asked) == len(set(asked)) <= 40
    assert all(n <= 16 * max(asked[:i]) for i, n in enumerate(asked) if i)


@pytest.mark.slow
def test_scaling_keeps_the_rows_of_a_device():
    plan = trainer(Sharded(4)).plan([batch(64)], hardware="h100")
    grown = plan.scaling([1, 4, 32]).rows
    assert [row.rows for row in grown] == [16, 64, 512]
    assert [row.wire_bytes for row in grown] == [
        2 * (n - 1) / n * (PARAMS + 4) * (n > 1) for n in (1, 4, 32)
    ]
    assert grown[1].peak == plan.memory.peak
    assert grown[0].efficiency == 1.0
    assert grown[1].step == plan.estimate.worst


@pytest.mark.parametrize("hardware", [None, "h100"])
def test_scaling_is_printed(hardware):
    scaling = trainer(Sharded(4)).plan([batch(64)], hardware=hardware).scaling([1, 2])
    header, *lines = str(scaling).splitlines()
    assert header.split()[0] == "devices"
    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert (lines[0].split()[-1] == "-") == (hardware is None)


@pytest.mark.slow_but("None")
@pytest.mark.parametrize("variable", [None, "XLA_CLIENT_", "XLA_PYTHON_CLIENT_"])
def test_jax_takes_a_share_of_a_gpu_and_all_of_a_tpu(variable, monkeypatch):
    for name in ("XLA_CLIENT_", "XLA_PYTHON_CLIENT_"):
        monkeypatch.delenv(f"{name}MEM_FRACTION", raising=False)
    if variable:
        monkeypatch.setenv(f"{variable}MEM_FRACTION", ".5")
    share = 0.5 if variable else 0.75
    gpu, tpu = (trainer().plan([batch()], hardware=name) for name in ("h100", "v5e"))
    assert gpu.planner.limit(None) == int(0.9 * share * 80e9)
    assert tpu.planner.limit(None) == int(0.9 * 16e9)
    assert f"{share * 80:.4g} GB of its 80 GB" in str(gpu)
    assert "the share that JAX takes" not in str(tpu)

    almost = gpu.memory.peak / share  # its share is just what the step needs
    for memory, fits in ((almost + 2, True), (almost - 2, False)):
        card = HARDWARE["h100"]._replace(memory=int(memory))
        plan = trainer().plan([batch()], hardware=card)
        assert plan.estimate.fits == fits
