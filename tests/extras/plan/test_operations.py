"""Operations of a step, however its work is shared."""

import pytest
from planned import HALVES, WIDTHS, batch, trainer, whole_plan
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
from jaxdp.extras.plan.hardware import HARDWARE, Hardware


def test_operations_are_those_of_the_matrix_products():
    plan = whole_plan()
    products = [2 * 64 * i * o for i, o in zip(WIDTHS, WIDTHS[1:], strict=False)]
    # Forward, and backward for weights and inputs, but the batch needs no gradient.
    assert plan.flops == 3 * sum(products) - products[0]
    assert trainer(Pmap(4)).plan([batch(64)]).flops == plan.flops


WHOLE_WORK = {
    "SingleDevice": (SingleDevice, {}),
    "Sharded": (Sharded, {}),
    "Pmap": (Pmap, {}),
    "Bitwise": (lambda: Bitwise(Sharded()), {}),
    "ZeRO": (ZeRO, {}),
    "FSDP": (FSDP, {}),
    "TensorParallel 4x2": (lambda: TensorParallel({"data": 4, "model": 2}, HALVES), {}),
    "TensorParallel 2x4": (lambda: TensorParallel({"data": 2, "model": 4}, HALVES), {}),
    "accumulated": (
        lambda: TensorParallel({"data": 4, "model": 2}, HALVES),
        {"accumulate_grad_batches": 2},
    ),
}


@pytest.mark.slow_cases("accumulated")
@pytest.mark.parametrize("case", WHOLE_WORK)
def test_operations_are_as_many_however_they_are_shared(case):
    strategy, options = WHOLE_WORK[case]
    planned = trainer(strategy(), **options)
    products = [2 * 64 * i * o for i, o in zip(WIDTHS, WIDTHS[1:], strict=False)]
    slow = Hardware("slow", 1e9, 1e8, 10**6, 1e12, 1e5, 2, 1e4)
    plan = planned.plan([batch(64)], hardware=slow)
    times = options.get("accumulate_grad_batches", 1)
    assert plan.flops == times * (3 * sum(products) - products[0])
    assert plan.estimate.compute == plan.flops / plan.num_devices / 1e8


def test_time_is_by_what_products_are_computed_in():
    h100 = HARDWARE["h100"]
    rates = {
        "32-true": h100.flops_float32,
        "32-highest": h100.flops_highest,
        "bf16-mixed": h100.flops,
        "bf16-true": h100.flops,
    }
    for precision, rate in rates.items():
        planned = trainer(SingleDevice(), precision=precision)
        plan = planned.plan([batch(64)], hardware="h100")
        assert plan.estimate.compute == pytest.approx(plan.flops / rate)
    assert plan.products == {"bfloat16": plan.flops}
    assert "Computed 100% in bfloat16." in str(plan)


def test_operations_in_stages_are_those_of_the_blocks_and_of_stages_that_wait():
    def flops(strategy):
        planned = trainer(strategy, Deep(4), loss="cross_entropy")
        return planned.plan([batches(64)[0]]).flops

    def outside():
        first, last = 2 * 64 * 4 * 8, 2 * 64 * 8 * 3
        return 2 * first + 3 * last

    blocks = flops(SingleDevice()) - outside()
    # Four devices, two pipelines of two stages: 4 turns of work in 5 turns of time.
    found = flops(Pipeline(2, 4, 4)) - outside()
    assert found == blocks * 5 / 4
