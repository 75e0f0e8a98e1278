"""Tests of the costs read from a compiled step, against live arrays and arithmetic."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from planned import PARAMS, Split, batch, comparable, trainer, whole_plan
from toys import Deep, NormNet, arrays, batches, linear

from jaxdp import FSDP, Bitwise, Pmap, Sharded, SingleDevice
from jaxdp.basics.units import format_short
from jaxdp.callbacks import DonateBuffers, NanGuard
from jaxdp.extras.plan import Hardware
from jaxdp.extras.plan.reading import StepAnalysis
from jaxdp.step.collectives import Collectives
from jaxdp.strategies.base import count_shards

STRATEGIES = {
    "Sharded(8)": lambda: Sharded(8),
    "Sharded(2)": lambda: Sharded(2),
    "Sharded(1)": lambda: Sharded(1),
    "Pmap(4)": lambda: Pmap(4),
    "SingleDevice()": SingleDevice,
    "Split(8)": lambda: Split(8),
}


def live(tree):
    return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))


def assert_is_of_the_program(memory, trained):
    found = trained.compiled_train_step().memory_analysis()
    assert memory.arguments == found.argument_size_in_bytes
    assert memory.results == found.output_size_in_bytes
    assert memory.overwritten == found.alias_size_in_bytes
    assert memory.temporary == found.temp_size_in_bytes
    held = memory.arguments + memory.results - memory.overwritten
    assert memory.peak == held + memory.temporary


@pytest.mark.slow_cases("Sharded(2)", "Pmap(4)", "SingleDevice()")
@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_are_those_of_the_program_that_fit_runs_and_of_live_arrays(name):
    trained = trainer(STRATEGIES[name]())
    plan = trained.plan([batch()])
    trained.fit([batch()], max_epochs=1)
    memory = plan.memory
    assert_is_of_the_program(memory, trained)
    state = trained.state
    assert memory.parameters == live(state.params)
    assert memory.optimizer == live(state.opt_state)
    assert memory.other == live((state.key, state.step, state.totals))
    batch_bytes = memory.arguments - live(state)
    assert memory.batch == batch_bytes
    assert memory.batch == 64 // count_shards(trained.strategy) * (16 + 1) * 4 + 4
    assert all(leaf.overwritten for leaf in plan.leaves if leaf.group != "batch")


@pytest.mark.parametrize(
    ("memory", "waiting"), [(None, 0), (0, 2), (10**9, 8), (4 * 17 * 64 * 100, 5)]
)
def test_batches_that_wait_on_accelerators_are_part_of_the_peak(memory, waiting):
    trained = trainer(SingleDevice())
    trained.fit([batch()], max_epochs=1)
    found = StepAnalysis(trained.run.engine, [0], memory).memory()
    nbytes = 64 * (16 + 1) * 4
    assert found.in_flight == waiting * nbytes
    without = StepAnalysis(trained.run.engine, [0]).memory()
    assert found.peak == without.peak + found.in_flight and not without.in_flight


@pytest.mark.parametrize("name", ["Sharded(8)", "Pmap(4)", "Split(8)"])
def test_the_step_that_runs_has_its_plan_without_another_compilation(name, monkeypatch):
    trained = trainer(STRATEGIES[name]())
    assert trained.running_plan() is None
    plan = trained.plan([batch()])
    trained.fit([batch()] * 2, max_epochs=1)
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    running = trained.running_plan()
    assert running.memory == plan.memory
    assert running.leaves == plan.leaves
    assert (running.rows, running.steps) == (plan.rows, 1)
    assert running.wire_bytes == plan.wire_bytes
    sent = [
        sorted((each.kind, each.axes, each.wire_bytes) for each in found.traffic)
        for found in (plan, running)
    ]
    assert sent[0] == sent[1]
    assert [each.ratio for each in running.bounds[1:]] == [1, 1]
    with pytest.raises(RuntimeError, match="make one with `trainer.plan"):
        running.largest_batch(1e9)


def test_a_program_of_several_steps_is_told_by_the_step():
    trained = trainer(Sharded(4), steps_per_execution=4, accumulate_grad_batches=2)
    trained.fit([batch()] * 8, max_epochs=1)
    plan, running = trained.plan([batch()]), trained.running_plan()
    assert (running.steps, running.rows, running.micro_batches) == (4, 128, 2)
    assert running.wire_bytes == plan.wire_bytes
    (each,) = running.traffic
    assert each.times == 1 and each.operand_bytes == plan.traffic[0].operand_bytes
    assert running.memory.batch == 4 * plan.memory.batch
    assert_is_of_the_program(running.memory, trained)
    assert "128 rows per step in 2 batches, 4 steps at a time" in str(running)


def of_batch(model, x, y):
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def test_rows_that_interact_are_planned_at_their_true_size():
    trained = trainer(Sharded(4), loss=None, loss_fn=of_batch)
    trained.fit([batch(30)])
    assert trained.running_plan().rows == 30


def test_what_is_not_donated_costs_a_second_state():
    kept = trainer(callbacks=[DonateBuffers("none")]).plan([batch()])
    donated = whole_plan()
    state = donated.memory.overwritten
    assert state == 3 * PARAMS + 4 + kept.memory.other  # Adam's count is one number
    assert kept.memory.overwritten == 0
    assert kept.memory.results == donated.memory.results
    assert not any(leaf.overwritten for leaf in kept.leaves)
    assert "memory of two states" in str(kept)
    assert kept.bounds[2].ratio == 1
    assert kept.not_overwritten == donated.not_overwritten == ()


def test_a_leaf_that_is_donated_and_copied_is_named():
    class Widening(Sharded):
        """Hands back its state in another layout than it takes it in."""

        def compile(self, step, arguments, roles, results, *, donate=(), rows="apart"):
            def whole(collectives, leaves, *rest):
                new, metrics = step(collectives, leaves, *rest)
                return [*new[:2], jnp.tile(new[2], 2), *new[3:]], metrics

            everywhere = jax.sharding.NamedSharding(self.mesh, P())
            return jax.jit(
                lambda *arguments: whole(Collectives(), *arguments),
                out_shardings=everywhere,
                donate_argnums=donate,
            )

    # The third leaf is the weights in the middle.
    model = eqx.nn.MLP(16, 8, 64, 2, key=jax.random.key(0))
    plan = trainer(Widening(2), model).plan([batch()])
    # Which of the equally large leaves goes without is the compiler's choice.
    (name,) = plan.not_overwritten
    assert name.endswith("layers[1].weight")
    assert f"copied anyway: {name}" in str(plan)


def test_micro_batches_are_counted():
    accumulated = trainer(Pmap(4), accumulate_grad_batches=3).plan([batch(64)])
    single = trainer(Pmap(4)).plan([batch(64)])
    assert (accumulated.micro_batches, accumulated.rows) == (3, 192)
    assert accumulated.flops == 3 * single.flops
    # Summed once, after the last of them.
    assert accumulated.wire_bytes == single.wire_bytes


def test_models_with_state_and_guards_are_planned_with_them():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    x = np.ones((24, 4), np.float32), np.zeros(24, np.int32)
    planned = trainer(model=model, state=state, callbacks=[NanGuard()])
    plan = planned.plan([x])
    planned.fit([x])
    assert plan.memory.model_state == live(planned.state.model_state)
    assert_is_of_the_program(plan.memory, planned)


def test_frozen_leaves_and_odd_ones_are_shown():
    class Odd(eqx.Module):
        linear: eqx.nn.Linear
        table: jax.Array
        key: jax.Array

        def __call__(self, x):
            return self.linear(x) + self.table[:8]

    model = Odd(
        eqx.nn.Linear(16, 8, key=jax.random.key(0)), jnp.zeros(5000), jax.random.key(1)
    )
    spec = jax.tree.map(lambda leaf: False, eqx.filter(model, eqx.is_inexact_array))
    spec = eqx.tree_at(lambda m: m.linear.weight, spec, True)
    plan = trainer(model=model, filter_spec=spec).plan([batch()])
    assert plan.memory.parameters == 16 * 8 * 4
    assert plan.memory.frozen == 5000 * 4 + 8 * 4 + 8
    assert str(plan)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("devices", [2, 8])
def test_the_bitwise_step_is_planned_with_its_turns(devices):
    trained = trainer(Bitwise(Sharded(devices)))
    plan = trained.plan([batch()])
    trained.fit([batch()])
    assert_is_of_the_program(plan.memory, trained)
    assert plan.rows == 64
    plain = trainer(Sharded(devices)).plan([batch()])
    assert plan.flops == plain.flops
    assert plan.memory.batch == plain.memory.batch
    # In each turn every device sends what it found, all of it small, to every other.
    turns = 8 // devices
    gradients = turns * (devices - 1) * PARAMS
    assert 0 < plan.wire_bytes - gradients <= turns * (devices - 1) * 64
    assert plan.notes["unknown"] == plain.notes["unknown"]
    assert trained.running_plan().wire_bytes == plan.wire_bytes
    predicted = trainer(Bitwise(Sharded(8))).plan([batch()], devices=devices)
    assert comparable(predicted.to_dict()) == comparable(plan.to_dict())
    with pytest.raises(ValueError, match="Use 1, 2, 4 or 8 devices"):
        trained.plan([batch()], devices=16)


@pytest.mark.parametrize("strategy", [SingleDevice(), Sharded()], ids=["one", "all"])
def test_a_leaf_of_the_batch_may_be_for_nothing(strategy):
    def plan(loss_fn, *batch):
        model = linear()
        made = trainer(strategy, model, loss=None, loss_fn=loss_fn)
        return made.plan([batch]).memory.batch

    numbers, x = np.arange(8), np.ones((8, 4), np.float32)
    both = plan(lambda model, numbers, x: jax.vmap(model)(x).sum(1), numbers, x)
    alone = plan(lambda model, x: jax.vmap(model)(x).sum(1), x)
    assert both - alone == 4 * 8 / count_shards(strategy)


@pytest.mark.parametrize("strategy", [FSDP(), FSDP(groups=2), FSDP(gather="once")])
def test_the_bound_counts_gradients_in_full_however_they_are_gathered(strategy):
    plan = trainer(strategy, Deep(4), loss="cross_entropy").plan([batches(64)[0]])
    parameters = sum(
        leaf.nbytes for leaf in arrays(eqx.filter(Deep(4), eqx.is_inexact_array))
    )
    assert plan.bounds[0].least == 2 * 7 / 8 * parameters


def test_time_is_the_roofline():
    slow = Hardware("slow", 1e9, 1e8, 10**6, 1e12, 1e5, 2, 1e4)
    plan = trainer(Sharded(8)).plan([batch(64)], hardware=slow)
    found = plan.estimate
    memory = plan.memory  # not what this compiler counts, which others do otherwise
    least = memory.arguments + memory.results + 2 * memory.temporary
    assert found.memory == least / 1e12
    assert found.compute == plan.flops / 8 / 1e8
    # A group of 8 in domains of 2: two adapters of 1e4 each.
    assert found.communication == plan.wire_bytes / 2e4
    assert found.best == max(found.compute, found.memory, found.communication)
    assert found.worst == max(found.compute, found.memory) + found.communication
    assert found.fits
    near = trainer(Sharded(2)).plan([batch(64)], hardware=slow)
    assert near.estimate.communication == near.wire_bytes / 1e5
    small = slow._replace(memory=1000)
    assert not trainer().plan([batch(64)], hardware=small).estimate.fits
    assert whole_plan().estimate is None


def test_the_text_and_the_dict_say_the_same():
    plan = whole_plan()
    plain = plan.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["memory"]["peak"] == plan.memory.peak
    assert sum(leaf["bytes"] for leaf in plain["leaves"]) > 0
    text = str(plan)
    assert all(word in text for word in ("8 x cpu", "all-reduce", "\nExact\n"))
    assert f"  {format_short(plan.flops)}FLOP per step in matrix products" in text
    unknown = dataclasses.replace(plan, flops=None)
    assert "\n  Not known for this strategy.\n" in str(unknown)
