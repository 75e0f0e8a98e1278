"""A plan as text and as a page."""

import dataclasses
import html.parser
import json

import equinox as eqx
import jax.numpy as jnp
import pytest
from planned import Split, batch, trainer, whole_plan

from jaxdp import (
    Sharded,
    SingleDevice,
)
from jaxdp.plan.text import in_short


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.loaded = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        self.loaded += [v for k, v in attributes if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("strategy", [Sharded, Split, SingleDevice])
def test_the_page_is_whole_and_loads_nothing(tmp_path, strategy):
    plan = trainer(strategy()).plan([batch()], hardware="h100")
    path = tmp_path / "plan.html"
    plan.to_html(path)
    page = Page(path.read_text())
    assert page.open == []
    assert page.loaded == []
    text = " ".join(page.text)
    assert all(leaf.path in text for leaf in plan.leaves)
    assert f"{plan.memory.peak:,}" in text


def test_two_counts_of_operations_have_two_names(tmp_path):
    trained = trainer(Sharded(2))
    plan = trained.plan([batch()])
    trained.fit([batch()])
    path = tmp_path / "plan.html"
    running = trained.running_plan()
    assert running.flops == plan.flops > 0
    unknown = dataclasses.replace(plan, flops=None)
    for each, kinds in (
        (plan, ["matrix", "compiled"]),
        (running, ["matrix", "compiled"]),
        (unknown, ["compiled"]),
    ):
        counts = {"matrix": each.flops, "compiled": each.flops_compiled * 2}
        shown = [
            f"{kind.capitalize()} operations: {in_short(counts[kind])}FLOP per step"
            for kind in kinds
        ]
        lines = str(each).splitlines()
        told = [line for line in lines if " operations: " in line and "FLOP" in line]
        assert [line.strip().partition(",")[0] for line in told] == shown
        each.to_html(path)
        assert all(line in path.read_text() for line in shown)


def test_names_of_leaves_can_not_break_the_page(tmp_path):
    class Wild(eqx.Module):
        weights: dict

        def __call__(self, x):
            return x @ self.weights["<b>&'\""]

    plan = trainer(model=Wild({"<b>&'\"": jnp.ones((16, 8))})).plan([batch()])
    path = tmp_path / "plan.html"
    plan.to_html(path)
    assert Page(path.read_text()).open == []


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
