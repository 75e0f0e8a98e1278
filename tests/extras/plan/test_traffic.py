"""Collectives of a step: bytes, axes, hosts and places."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from planned import HALVES, PARAMS, batch, plan, trainer
from toys import Apart

from jaxdp import Pmap, Sharded, SingleDevice, TensorParallel
from jaxdp.extras.plan import hlo, repeated
from jaxdp.extras.plan.products import read_num_runs
from jaxdp.extras.plan.reading import StepAnalysis, describe_place


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("shards", [2, 8])
def test_data_parallelism_sends_its_lower_bound(shards):
    for strategy in (Sharded(shards), Pmap(shards)):
        found = plan(strategy)
        (traffic,) = found.traffic
        assert (traffic.kind, traffic.axes) == ("all-reduce", ("data",))
        assert traffic.group_size == shards
        # The gradients, and the sum of the loss.
        assert traffic.operand_bytes == PARAMS + 4
        assert found.wire_bytes == 2 * (shards - 1) / shards * (PARAMS + 4)
        assert found.bounds[0].least == 2 * (shards - 1) / shards * PARAMS
        assert found.bounds[0].ratio == pytest.approx(1 + 4 / PARAMS)
        assert found.bounds[1].ratio == found.bounds[2].ratio == 1


def test_a_batch_may_be_split_over_more_axes_than_its_rows():
    class ByColumns(Sharded):
        batch_axes = "data", "columns"

        def batch_spec(self, leaf):
            return P(*self.batch_axes[: len(leaf.shape)])

    mesh = jax.make_mesh((4, 2), ByColumns.batch_axes)
    assert plan(ByColumns(mesh=mesh)).bounds[0].least == 2 * 7 / 8 * PARAMS


def test_collectives_between_hosts_are_told_from_those_inside():
    planned = TensorParallel({"data": 4, "model": 2}, HALVES)
    alone, found = plan(planned), plan(planned, hosts=2)
    assert alone.num_hosts == 1 and "hosts" not in str(alone)
    assert not any(each.crosses for each in alone.traffic)
    assert found.num_hosts == 2
    assert {each.crosses for each in found.traffic} == {True, False}
    along = [each for each in found.traffic if each.axes is not None]
    assert [each.crosses for each in along] == ["data" in each.axes for each in along]
    faked = plan(devices=64, hosts=8)
    assert all(each.crosses for each in faked.traffic)
    assert faked.to_dict()["num_hosts"] == faked.num_hosts == 8
    assert "on 8 hosts, 64 rows" in str(faked) and "(between hosts)" in str(faked)


def of_known_length(x, y):
    layer = lambda x, _: (jax.lax.pmean(jnp.tanh(x), "data"), None)  # noqa: E731
    return jax.lax.scan(layer, x, None, length=5)[0]


def of_named_length(x, y):
    """Only its scope says how often it runs."""

    def turn(carry):
        index, x = carry
        return index + 1, jax.lax.pmean(jnp.tanh(x), "data")

    with jax.named_scope(repeated(5)):
        bound = 5 + jnp.minimum(0, y.sum())  # nobody knows that this is 5
        x = jax.lax.while_loop(lambda c: c[0] < bound, turn, (0, x))[1]
    return jax.lax.stop_gradient(x)


@pytest.mark.parametrize("loop", [of_known_length, of_named_length])
def test_loops_multiply_what_is_sent(loop):
    def loss_fn(model, x, y):
        prediction = jax.vmap(model)(loop(x, y))
        return optax.softmax_cross_entropy_with_integer_labels(prediction, y).mean()

    found = plan(Apart(4), loss=None, loss_fn=loss_fn)
    (inside,) = (each for each in found.traffic if each.times == 5)
    assert inside.operand_bytes == 5 * 16 * 16 * 4
    assert inside.wire_bytes == 5 * 16 * 16 * 4 * 2 * 3 / 4
    assert read_num_runs("jit(f)/runs_2_times/while/body/add") is None


MLP = "eqx.nn.MLP/eqx.nn.Linear"
PLACES = {
    "jit(train_all)/shard_map/transpose(jvp(vmap(eqx.nn.MLP)))/eqx.nn.Linear/dot": (
        f"backward: {MLP}"
    ),
    "jit(train_all)/jvp(vmap(eqx.nn.MLP))/eqx.nn.Linear/jit(relu)/max": (
        f"forward: {MLP}"
    ),
    "jit(train_all)/shard_map/own_loop/while/body/closed_call/jvp()/sum": "forward",
    "jit(train_all)/gradients/shard_map/psum": "gradients",
    "jit(program)/shard_map/runs_8_times/while/body/all_to_all": "other arrays",
    "jit(train_all)/while/body/blocks/attention/checkpoint/add": "blocks/attention",
    "arrays[0]": "other arrays",
    "": "other arrays",
}
CALLED = """HloModule jit_step, num_partitions=8

ENTRY %main (p: f32[8], q: f32[8]) -> f32[64] {{
  %p = f32[8] parameter(0)
  %sum = f32[8] add(%p, %p){moved}
  %joined = f32[8] fusion(%sum), kind=kLoop
  ROOT %all = f32[64] all-gather(%joined), replica_groups={{}}, dimensions={{0}}{own}
}}
"""


def named(path):
    return f', metadata={{op_name="{path}"}}' if path else ""


@pytest.mark.parametrize("path", PLACES)
def test_the_place_of_a_collective_is_its_own_or_that_of_what_it_moves(path):
    (own,) = hlo.read(CALLED.format(own=named(path), moved="")).collectives
    assert describe_place(own) == PLACES[path]
    (moved,) = hlo.read(CALLED.format(own="", moved=named(path))).collectives
    assert describe_place(moved) == PLACES[path]


@pytest.mark.parametrize(
    ("memory", "waiting"), [(None, 0), (0, 2), (10**9, 8), (4 * 17 * 64 * 100, 5)]
)
def test_batches_that_wait_on_accelerators_are_part_of_the_peak(memory, waiting):
    trained = trainer(SingleDevice())
    trained.fit([batch()], max_epochs=1)
    found = StepAnalysis(trained.run.engine, [0], memory).memory()
    assert found.in_flight == waiting * 64 * (16 + 1) * 4
    without = StepAnalysis(trained.run.engine, [0]).memory()
    assert found.peak == without.peak + found.in_flight and not without.in_flight
