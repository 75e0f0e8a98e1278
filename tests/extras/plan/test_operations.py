"""Operations of a step, however its work is shared, and the time that they take."""

import pytest
from planned import HALVES, WIDTHS, card, plan, whole_plan
from toys import Deep, batches

from jaxdp import (
    FSDP,
    Bitwise,
    Pipeline,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)
from jaxdp.extras.plan import Hardware

SLOW = Hardware("slow", 1e9, 1e8, 10**6, 1e12, 1e5, 2, 1e4)


def halved():
    return TensorParallel({"data": 4, "model": 2}, HALVES)


WHOLE_WORK = {
    "SingleDevice": (SingleDevice, 1),
    "Sharded": (Sharded, 1),
    "Pmap": (Pmap, 1),
    "Bitwise": (lambda: Bitwise(Sharded(2)), 1),
    "ZeRO": (ZeRO, 1),
    "FSDP": (FSDP, 1),
    "TensorParallel": (halved, 1),
    "accumulated": (halved, 2),
}


@pytest.mark.slow_cases("accumulated")
@pytest.mark.parametrize("case", WHOLE_WORK)
def test_operations_are_those_of_the_products_however_they_are_shared(case):
    strategy, times = WHOLE_WORK[case]
    found = plan(strategy(), hardware=SLOW, accumulate_grad_batches=times)
    products = [2 * 64 * i * o for i, o in zip(WIDTHS, WIDTHS[1:], strict=False)]
    # Forward, and backward for weights and inputs, but the batch needs no gradient.
    assert found.flops == times * (3 * sum(products) - products[0])
    assert found.estimate.compute == found.flops / found.num_devices / 1e8


def test_operations_in_stages_are_those_of_the_blocks_and_of_stages_that_wait():
    def flops(strategy):
        return plan(strategy, [batches(64)[0]], model=Deep(4)).flops

    first, last = 2 * 64 * 4 * 8, 2 * 64 * 8 * 3
    outside = 2 * first + 3 * last
    blocks = flops(SingleDevice()) - outside
    # Four devices, two pipelines of two stages: 4 turns of work in 5 turns of time.
    assert flops(Pipeline(2, 4, 4)) - outside == blocks * 5 / 4


@pytest.mark.parametrize("precision, rate", [
    ("32-true", "flops_float32"),
    ("32-highest", "flops_highest"),
    ("bf16-mixed", "flops"),
    ("bf16-true", "flops"),
])  # fmt: skip
def test_time_is_by_what_products_are_computed_in(precision, rate):
    found = plan(SingleDevice(), hardware="h100", precision=precision)
    rate = getattr(card("NVIDIA H100 80GB HBM3"), rate)
    assert found.estimate.compute == pytest.approx(found.flops / rate)
    if precision.startswith("bf16"):
        assert found.products == {"bfloat16": found.flops}
        assert "Computed 100% in bfloat16." in str(found)


def test_time_is_the_roofline():
    made = plan(Sharded(8), hardware=SLOW)
    found, memory = made.estimate, made.memory
    # Not the bytes that this compiler counts, which others do otherwise.
    least = memory.arguments + memory.results + 2 * memory.temporary
    assert found.memory == least / 1e12
    # A group of 8 in domains of 2: two adapters of 1e4 each.
    assert found.communication == made.wire_bytes / 2e4
    assert found.best == max(found.compute, found.memory, found.communication)
    assert found.worst == max(found.compute, found.memory) + found.communication
    assert found.fits
    near = plan(Sharded(2), hardware=SLOW)
    assert near.estimate.communication == near.wire_bytes / 1e5
    small = SLOW._replace(memory=1000)
    assert not plan(hardware=small).estimate.fits
    assert whole_plan().estimate is None
