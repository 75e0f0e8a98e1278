"""The optimizer's state in the host's memory between steps."""

import importlib.util

import equinox as eqx
import jax
import optax
import pytest
from toys import assert_close, batches, make_small, read_meta

from jaxdp import FSDP, Bitwise, Pmap, Sharded, SingleDevice, ZeRO
from jaxdp.callbacks import DonateBuffers, WeightAveraging

DATA = batches(16, 16, 16, 16)
HIDDEN = 64 * 64
"""Elements of the only leaf that is large enough."""


def make(**options):
    model = eqx.nn.MLP(4, 3, 64, 2, key=jax.random.key(0))
    return make_small(model, optax.adam(1e-2), **options)


def fitted(**options):
    trainer = make(**options)
    trainer.fit(DATA, DATA[:1], max_epochs=2)
    return trainer


def assert_same_bits(trainer, other):
    assert_close(trainer.state, other.state, 0, 0)
    for name in "loss", "val_loss":
        assert trainer.history[name] == other.history[name]


def kinds(trainer):
    """Returns the kinds of memory that hold the optimizer's large and small leaves."""
    leaves = jax.tree.leaves(trainer.state.opt_state)
    return {(leaf.size > 1024, leaf.sharding.memory_kind) for leaf in leaves}


CASES = {
    "SingleDevice": lambda: {"strategy": SingleDevice()},
    "Sharded": lambda: {"strategy": Sharded(), "accumulate_grad_batches": 2},
    "Pmap": lambda: {"strategy": Pmap()},
    "ZeRO": lambda: {"strategy": ZeRO(), "steps_per_execution": 2},
    "FSDP": lambda: {"strategy": FSDP()},
    "bitwise": lambda: {"strategy": Bitwise(Sharded())},
}


@pytest.mark.slow_but("SingleDevice")
@pytest.mark.parametrize("case", CASES)
def test_it_is_on_the_host_between_steps_and_the_bits_are_the_same(case):
    donation = DonateBuffers()
    trainer = fitted(offload="optimizer", callbacks=[donation], **CASES[case]())
    assert kinds(trainer) == {(True, "pinned_host"), (False, "device")}
    assert donation.report["not_aliased"] == []
    assert_same_bits(trainer, fitted(**CASES[case]()))


@pytest.mark.slow
@pytest.mark.parametrize("first", [None, "optimizer"])
def test_checkpoints_are_those_of_runs_without(first, tmp_path):
    unbroken = fitted(offload=first)
    start = make(offload=first)
    start.fit(DATA, DATA[:1])
    start.save(tmp_path / "one")

    other = make(offload=None if first else "optimizer")
    other.load(tmp_path / "one")
    other.save(tmp_path / "two")
    one, two = (read_meta(tmp_path / name) for name in ("one", "two"))
    assert one["leaves"] == two["leaves"]

    other.fit(DATA, DATA[:1], max_epochs=2)
    where = "device" if first else "pinned_host"
    assert (True, where) in kinds(other)
    assert_same_bits(other, unbroken)


def test_averages_that_are_on_the_host_are_evaluated():
    pair = [
        fitted(offload=offload, precision="bf16-true", callbacks=[WeightAveraging(0.9)])
        for offload in ("optimizer", None)
    ]
    assert_same_bits(*pair)
    assert_close(*(trainer.model for trainer in pair), 0, 0)


@pytest.mark.slow_cases("ZeRO-8")
@pytest.mark.parametrize(("strategy", "parts"), [(Sharded, 1), (ZeRO, 8)])
def test_a_plan_shows_the_bytes_on_either_side(strategy, parts):
    without = make(strategy=strategy()).plan(DATA)
    plan = make(strategy=strategy(), offload="optimizer").plan(DATA)
    memory, host = plan.memory, 2 * 4 * HIDDEN // parts
    assert (memory.host, without.memory.host) == (host, 0)
    for field in ("optimizer", "arguments", "results", "overwritten"):
        assert getattr(memory, field) + host == getattr(without.memory, field)

    assert [leaf.path for leaf in plan.leaves if leaf.on_host] == [
        "[0].mu.layers[1].weight",
        "[0].nu.layers[1].weight",
    ]
    assert plan.not_overwritten == ()
    assert plan.bounds[1].ratio == without.bounds[1].ratio
    assert "optimizer state on the host" in str(plan)
    assert "on the host" not in str(without)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no compiler")
def test_tpus_hold_less():
    without, memory = (
        make(offload=offload).plan(DATA, topology="v5e-4").memory
        for offload in (None, "optimizer")
    )
    assert memory.host == 2 * 4 * HIDDEN
    assert without.arguments - memory.arguments >= memory.host  # or as tiles
