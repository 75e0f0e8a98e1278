"""Each refusal to plan or to read a plan is an error that says why."""

import pytest
from planned import plan, whole_plan

from jaxdp import SingleDevice
from jaxdp.extras.plan import hlo
from jaxdp.extras.plan.hlo_text import parse_groups


@pytest.mark.parametrize("provoke, error, words", [
    (lambda: plan(devices=0), ValueError, "`devices` must be 1 or more; got 0"),
    (lambda: plan(devices="8"), TypeError, "`devices` must be an int"),
    (lambda: plan(devices=4096), ValueError, "must be 1 to 2048"),
    (lambda: plan(topology="h100"), ValueError, "`topology`='h100' is not known"),
    (lambda: plan(topology="v5p-12"), ValueError, "has 6 chips"),
    (lambda: plan(topology="h100x8", devices=8), ValueError, "were both given"),
    (lambda: plan(hardware="h1000"), ValueError, "`hardware` must be one of 'a100'"),
    (lambda: plan(SingleDevice(), devices=4), ValueError,
     "SingleDevice uses 1 device, not 4"),
    (lambda: plan(hosts=3), ValueError, "`hosts`=3 does not divide the 8 devices"),
    (lambda: plan(topology="h100x16", hosts=2), ValueError,
     "a topology has its own hosts"),
    (lambda: plan(hosts=0), ValueError, "`hosts` must be 1 or more"),
    (lambda: whole_plan().largest_batch(None), ValueError, "`memory` is needed"),
    (lambda: whole_plan().largest_batch("16GB"), TypeError,
     "`memory` must be a number, in bytes"),
    (lambda: whole_plan().largest_batch(0), ValueError, "`memory` must be more than 0"),
    (lambda: parse_groups("everyone", 8), ValueError, "unknown spelling"),
    (lambda: hlo.read("module @jit_f {}"), ValueError,
     "does not start with HloModule"),
    (lambda: hlo.count_ring_bytes("broadcast", 2, 1, 1), ValueError,
     "`kind` must be one of"),
])  # fmt: skip
def test_what_can_not_be_planned_or_read_is_refused(provoke, error, words):
    with pytest.raises(error, match=words):
        provoke()
