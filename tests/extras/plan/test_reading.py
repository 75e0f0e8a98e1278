"""Tests of the costs read from a compiled step, against live arrays and arithmetic."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from planned import PARAMS, Split, batch, comparable, plan, trainer, whole_plan
from toys import Deep, NormNet, arrays, batches, linear

from jaxdp import FSDP, Bitwise, Pmap, Sharded, SingleDevice
from jaxdp.callbacks import DonateBuffers, NanGuard
from jaxdp.strategies import Collectives


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


STRATEGIES = {
    "Sharded(8)": lambda: Sharded(8),
    "Sharded(1)": lambda: Sharded(1),
    "Pmap(4)": lambda: Pmap(4),
    "SingleDevice()": SingleDevice,
    "Split(8)": lambda: Split(8),
}


@pytest.mark.slow_cases("Pmap(4)", "SingleDevice()")
@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_are_those_of_the_program_that_fit_runs_and_of_live_arrays(
    name, monkeypatch
):
    trained = trainer(STRATEGIES[name]())
    assert trained.running_plan() is None
    planned = trained.plan([batch()])
    trained.fit([batch()] * 2, max_epochs=1)
    memory, state = planned.memory, trained.state
    assert_is_of_the_program(memory, trained)
    assert memory.parameters == live(state.params)
    assert memory.optimizer == live(state.opt_state)
    assert memory.other == live((state.key, state.step, state.totals))
    assert memory.batch == memory.arguments - live(state)
    shards = max(1, trained.strategy.mesh.size)
    assert memory.batch == 64 // shards * (16 + 1) * 4 + 4
    assert all(leaf.overwritten for leaf in planned.leaves if leaf.group != "batch")

    # The plan of the step that runs takes no other compilation.
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    running = trained.running_plan()
    assert (running.memory, running.leaves) == (planned.memory, planned.leaves)
    assert (running.rows, running.steps) == (planned.rows, 1)
    assert running.wire_bytes == planned.wire_bytes
    sent = [
        sorted((each.kind, each.axes, each.wire_bytes) for each in found.traffic)
        for found in (planned, running)
    ]
    assert sent[0] == sent[1]
    assert [each.ratio for each in running.bounds[1:]] == [1, 1]
    with pytest.raises(RuntimeError, match="make one with `trainer.plan"):
        running.largest_batch(1e9)


def test_a_program_of_several_steps_is_told_by_the_step():
    trained = trainer(Sharded(4), steps_per_execution=4, accumulate_grad_batches=2)
    trained.fit([batch()] * 8, max_epochs=1)
    planned, running = trained.plan([batch()]), trained.running_plan()
    assert (running.steps, running.rows, running.micro_batches) == (4, 128, 2)
    # Summed once, after the last micro-batch.
    assert running.wire_bytes == planned.wire_bytes == plan(Sharded(4)).wire_bytes
    assert running.flops == planned.flops == 2 * plan(Sharded(4)).flops
    (each,) = running.traffic
    assert each.times == 1 and each.operand_bytes == planned.traffic[0].operand_bytes
    assert running.memory.batch == 4 * planned.memory.batch
    assert_is_of_the_program(running.memory, trained)
    assert "128 rows per step in 2 batches, 4 steps at a time" in str(running)


def test_rows_that_interact_are_planned_at_their_true_size():
    def of_batch(model, x, y):
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    trained = trainer(Sharded(4), loss=None, loss_fn=of_batch)
    trained.fit([batch(30)])
    assert trained.running_plan().rows == 30


def test_what_is_not_donated_costs_a_second_state():
    kept, donated = plan(callbacks=[DonateBuffers("none")]), whole_plan()
    # Adam's count is one number.
    assert donated.memory.overwritten == 3 * PARAMS + 4 + kept.memory.other
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
            def whole(leaves, *rest):
                new, metrics = step(Collectives(), leaves, *rest)
                return [*new[:2], jnp.tile(new[2], 2), *new[3:]], metrics

            everywhere = jax.sharding.NamedSharding(self.mesh, P())
            return jax.jit(whole, out_shardings=everywhere, donate_argnums=donate)

    # The third leaf is the weights in the middle.
    model = eqx.nn.MLP(16, 8, 64, 2, key=jax.random.key(0))
    found = plan(Widening(2), model=model)
    # Which of the equally large leaves goes without is the compiler's choice.
    (name,) = found.not_overwritten
    assert name.endswith("layers[1].weight")
    assert f"copied anyway: {name}" in str(found)


def test_models_with_state_and_guards_are_planned_with_them():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    data = batches(24)
    planned = trainer(model=model, state=state, callbacks=[NanGuard()])
    found = planned.plan(data)
    planned.fit(data)
    assert found.memory.model_state == live(planned.state.model_state)
    assert_is_of_the_program(found.memory, planned)


def test_frozen_leaves_and_odd_ones_are_shown():
    class Odd(eqx.Module):
        linear: eqx.nn.Linear
        table: jax.Array
        key: jax.Array

        def __call__(self, x):
            return self.linear(x) + self.table[:8]

    model = Odd(linear(16, 8), jnp.zeros(5000), jax.random.key(1))
    found = plan(model=model, filter_spec=["linear.weight"])
    assert found.memory.parameters == 16 * 8 * 4
    assert found.memory.frozen == 5000 * 4 + 8 * 4 + 8
    assert str(found)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("devices", [2, 8])
def test_the_bitwise_step_is_planned_with_its_turns(devices):
    trained = trainer(Bitwise(Sharded(devices)))
    found, plain = trained.plan([batch()]), plan(Sharded(devices))
    trained.fit([batch()])
    assert_is_of_the_program(found.memory, trained)
    assert found.rows == 64
    assert found.flops == plain.flops
    assert found.memory.batch == plain.memory.batch
    # In each turn every device sends what it found, all of it small, to every other.
    # Before that, rows may go to the device that has their turn.
    turns = 8 // devices
    gradients, rows = turns * (devices - 1) * PARAMS, found.memory.batch
    assert 0 < found.wire_bytes - gradients <= turns * (devices - 1) * 64 + rows
    assert found.notes["unknown"] == plain.notes["unknown"]
    assert trained.running_plan().wire_bytes == found.wire_bytes
    predicted = plan(Bitwise(Sharded(8)), devices=devices)
    assert comparable(predicted.to_dict()) == comparable(found.to_dict())
    with pytest.raises(ValueError, match="Use 1, 2, 4 or 8 devices"):
        trained.plan([batch()], devices=16)


@pytest.mark.parametrize("strategy", [SingleDevice(), Sharded()], ids=["one", "all"])
def test_a_leaf_of_the_batch_may_be_for_nothing(strategy):
    def held(loss_fn, *batch):
        options = {"model": linear(), "loss": None, "loss_fn": loss_fn}
        return plan(strategy, [batch], **options).memory.batch

    numbers, x = np.arange(8), np.ones((8, 4), np.float32)
    both = held(lambda model, numbers, x: jax.vmap(model)(x).sum(1), numbers, x)
    alone = held(lambda model, x: jax.vmap(model)(x).sum(1), x)
    assert both - alone == 4 * 8 / max(1, strategy.mesh.size)


@pytest.mark.parametrize("strategy", [FSDP(), FSDP(groups=2), FSDP(gather="once")])
def test_the_bound_counts_gradients_in_full_however_they_are_gathered(strategy):
    found = plan(strategy, batches(64), model=Deep(4))
    trained = arrays(eqx.filter(Deep(4), eqx.is_inexact_array))
    parameters = sum(leaf.nbytes for leaf in trained)
    assert found.bounds[0].least == 2 * 7 / 8 * parameters


def test_the_text_and_the_dict_say_the_same():
    found = whole_plan()
    plain = found.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["memory"]["peak"] == found.memory.peak
    assert sum(leaf["bytes"] for leaf in plain["leaves"]) > 0
    text = str(found)
    assert all(word in text for word in ("8 x cpu", "all-reduce", "\nExact\n"))
    assert f"  {found.flops / 1e3:.4g} kFLOP per step in matrix products" in text
    unknown = dataclasses.replace(found, flops=None)
    assert "\n  Not known for this strategy.\n" in str(unknown)
