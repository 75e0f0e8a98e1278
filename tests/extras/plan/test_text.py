"""A plan in words."""

import dataclasses
import json

from planned import batch, trainer, whole_plan

from jaxdp import Sharded
from jaxdp.basics.units import format_short


def test_operations_are_those_of_the_traced_step():
    trained = trainer(Sharded(2))
    plan = trained.plan([batch()])
    trained.fit([batch()])
    assert trained.running_plan().flops == plan.flops > 0
    assert f"  {format_short(plan.flops)}FLOP per step in matrix products" in str(plan)
    unknown = dataclasses.replace(plan, flops=None)
    assert "\n  Not known for this strategy.\n" in str(unknown)


def test_the_text_and_the_dict_say_the_same():
    plan = whole_plan()
    plain = plan.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["memory"]["peak"] == plan.memory.peak
    assert sum(leaf["bytes"] for leaf in plain["leaves"]) > 0
    text = str(plan)
    assert "8 x cpu" in text
    assert "all-reduce" in text
    assert "\nExact\n" in text
