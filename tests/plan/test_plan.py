"""Plans against compiled programs, live arrays and arithmetic."""

import gc
import html.parser
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import textwrap
import xml.etree.ElementTree

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.serialization.replica_slices import get_replica_slices
from toys import Apart, Deep, NormNet, batches

from jaxdp import (
    FSDP,
    DataParallel,
    Pipeline,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    Trainer,
    ZeRO,
)
from jaxdp.callbacks import DonateBuffers, ModelCheckpoint, NanGuard
from jaxdp.plan.hardware import HARDWARE, Hardware, faked, slice_shape, topology
from jaxdp.plan.hosts import sent
from jaxdp.plan.page import _si
from jaxdp.plan.plan import largest
from jaxdp.step.collectives import Collectives
from jaxdp.step.jaxprs import repeated, times_of
from jaxdp.strategies.base import find_devices

WIDTHS = [16, 32, 32, 8]
PARAMS = sum(4 * (i + 1) * o for i, o in zip(WIDTHS, WIDTHS[1:], strict=False))


class Split(Sharded):
    """Every leaf split along the first axis that divides."""

    def param_spec(self, path, leaf):
        for axis, size in enumerate(leaf.shape):
            if size % self.num_shards == 0:
                return P(*[None] * axis, "data")
        return P()


def mlp():
    return eqx.nn.MLP(16, 8, 32, 2, key=jax.random.key(0))


def batch(rows=64):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 16)).astype(np.float32)
    return x, generator.integers(0, 8, rows).astype(np.int32)


def trainer(strategy=None, model=None, **options):
    options = {"loss": "cross_entropy", "enable_progress_bar": False} | options
    return Trainer(
        mlp() if model is None else model,
        optax.adam(1e-3),
        strategy=strategy or Sharded(),
        **options,
    )


HALVES = [("layers[1].weight", P("model", None))]

STRATEGIES = {
    "Sharded(8)": lambda: Sharded(8),
    "Sharded(2)": lambda: Sharded(2),
    "Sharded(1)": lambda: Sharded(1),
    "Pmap(4)": lambda: Pmap(4),
    "SingleDevice()": SingleDevice,
    "Split(8)": lambda: Split(8),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_are_those_of_the_program_that_fit_runs_and_of_live_arrays(name):
    trained = trainer(STRATEGIES[name]())
    plan = trained.plan([batch()])
    trained.fit([batch()], max_epochs=1)
    found = trained.compiled_train_step().memory_analysis()
    memory = plan.memory
    assert memory.arguments == found.argument_size_in_bytes
    assert memory.results == found.output_size_in_bytes
    assert memory.overwritten == found.alias_size_in_bytes
    assert memory.temporary == found.temp_size_in_bytes
    assert memory.peak == (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )

    def live(tree):
        return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))

    state = trained.state
    assert memory.parameters == live(state.params)
    assert memory.optimizer == live(state.opt_state)
    assert memory.other == live((state.key, state.step, state.totals))
    batch_bytes = memory.arguments - live(state)
    assert memory.batch == batch_bytes
    assert memory.batch == 64 // trained.strategy.num_shards * (16 + 1) * 4 + 4
    assert all(leaf.overwritten for leaf in plan.leaves if leaf.group != "batch")


@pytest.mark.parametrize("name", ["Sharded(8)", "Pmap(4)", "Split(8)"])
def test_the_step_that_runs_has_its_plan_without_another_compilation(name, monkeypatch):
    trained = trainer(STRATEGIES[name]())
    assert trained.running_plan() is None
    plan = trained.plan([batch()])
    trained.fit([batch()] * 2, max_epochs=1)
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    running = trained.running_plan()
    assert running is trained.running_plan()
    assert running.memory == plan.memory
    assert running.leaves == plan.leaves
    assert running.could_split == plan.could_split
    assert (running.rows, running.steps) == (plan.rows, 1)
    assert running.wire_bytes == plan.wire_bytes
    sent = [
        sorted((each.kind, each.axes, each.wire_bytes) for each in found.traffic)
        for found in (plan, running)
    ]
    assert sent[0] == sent[1]
    assert [each.ratio for each in running.bounds[1:]] == [1, 1]
    assert "as the compiler counts" in str(running)
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
    found = trained.compiled_train_step().memory_analysis()
    assert running.memory.temporary == found.temp_size_in_bytes
    assert "128 rows per step in 2 batches, 4 steps at a time" in str(running)


def test_rows_that_interact_are_planned_at_their_true_size():
    def loss_fn(model, x, y):
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    trained = trainer(Sharded(4), loss=None, loss_fn=loss_fn)
    trained.fit([batch(30)])
    assert trained.running_plan().rows == 30


@pytest.mark.parametrize("shards", [2, 8])
def test_data_parallelism_sends_its_lower_bound(shards):
    for strategy in (Sharded(shards), Pmap(shards)):
        plan = trainer(strategy).plan([batch()])
        (traffic,) = plan.traffic
        assert traffic.kind == "all-reduce"
        assert traffic.axes == ("data",)
        assert traffic.group_size == shards
        # The gradients, and the sum of the loss.
        assert traffic.operand_bytes == PARAMS + 4
        assert plan.wire_bytes == 2 * (shards - 1) / shards * (PARAMS + 4)
        assert plan.bounds[0].least == 2 * (shards - 1) / shards * PARAMS
        assert plan.bounds[0].ratio == pytest.approx(1 + 4 / PARAMS)
        assert plan.bounds[1].ratio == plan.bounds[2].ratio == 1
        assert "6 leaves" in traffic.part
        assert "metrics" in traffic.part
        assert "backward" in traffic.part


@pytest.mark.parametrize(
    ("strategy", "hosts", "rows"),
    [
        (lambda: Sharded(8), 2, 32),
        (lambda: FSDP(min_size=0), 4, 16),
        (lambda: TensorParallel({"data": 4, "model": 2}, HALVES), 4, 16),
        # The devices of two hosts work on the same rows.
        (lambda: TensorParallel({"data": 2, "model": 4}, HALVES), 4, 32),
    ],
)
def test_each_host_has_the_share_of_its_devices(strategy, hosts, rows):
    planned = trainer(strategy())
    plan = planned.plan([batch(64)], hosts=hosts)
    found = plan.hosts
    assert (found.count, found.devices, found.rows) == (hosts, 8 // hosts, rows)
    assert found.batch_bytes == rows * (16 + 1) * 4 + 4
    written = dict.fromkeys(range(hosts), 0)
    for leaf in jax.tree.leaves(planned.state._replace(key=None)):
        slices = get_replica_slices(leaf, 0, use_replica_parallel=True)
        for each in slices.replica_slices:
            (device,) = each.unsliced_data.devices()
            size = math.prod(slices.local_shape) * leaf.dtype.itemsize
            written[device.id * hosts // 8] += size
    written[0] += 8  # the key
    assert found.checkpoint_bytes == max(written.values())
    assert found.checkpoint_total == sum(written.values())


def test_collectives_between_hosts_are_told_from_those_inside():
    planned = trainer(TensorParallel({"data": 4, "model": 2}, HALVES))
    assert not any(each.crosses for each in planned.plan([batch()]).traffic)
    plan = planned.plan([batch()], hosts=4)
    assert {each.crosses for each in plan.traffic} == {True, False}
    along = [each for each in plan.traffic if each.axes is not None]
    assert [each.crosses for each in along] == ["data" in each.axes for each in along]
    # Two rings, one for each device of a host, go round over all hosts.
    rings = sum(each.wire_bytes for each in along if each.axes == ("data",))
    assert plan.hosts.sent_bytes >= 2 * rings > 0
    faked = trainer().plan([batch()], devices=64, hosts=8)
    assert faked.hosts.count == faked.hosts.devices == 8
    assert faked.hosts.sent_bytes == faked.wire_bytes
    assert "Each of 8 hosts, with 8 devices" in str(faked)
    assert "(between hosts)" in str(faked)
    assert faked.to_dict()["hosts"]["rows"] == 8
    assert "hosts, with" not in str(trainer().plan([batch()]))


def test_what_goes_from_each_to_each_leaves_a_host_in_part():
    # Of four devices' three parts, those for the two on the other host.
    assert sent("all-to-all", [(0, 1, 2, 3)], 30.0, [0, 0, 1, 1]) == {0: 40, 1: 40}
    assert sent("all-reduce", [(0, 1), (2, 3)], 30.0, [0, 0, 1, 1]) == {}
    assert sent("all-reduce", [(0, 2), (1, 3)], 30.0, [0, 0, 1, 1]) == {0: 60, 1: 60}


def test_hosts_have_equally_many_devices():
    with pytest.raises(ValueError, match="`hosts`=3 does not divide the 8 devices"):
        trainer().plan([batch()], hosts=3)
    with pytest.raises(ValueError, match="a topology has its own hosts"):
        trainer().plan([batch()], topology="h100x16", hosts=2)
    with pytest.raises(ValueError, match="`hosts` must be 1 or more"):
        trainer().plan([batch()], hosts=0)


def test_operations_are_those_of_the_matrix_products():
    plan = trainer().plan([batch(64)])
    products = [2 * 64 * i * o for i, o in zip(WIDTHS, WIDTHS[1:], strict=False)]
    # Forward, and backward for weights and inputs, but the batch needs no gradient.
    assert plan.flops == 3 * sum(products) - products[0]
    assert trainer(Pmap(4)).plan([batch(64)]).flops == plan.flops


WHOLE_WORK = {
    "SingleDevice": (SingleDevice, {}),
    "Sharded": (Sharded, {}),
    "Pmap": (Pmap, {}),
    "Bitwise": (Sharded, {"reproducible": "bitwise"}),
    "ZeRO": (ZeRO, {}),
    "FSDP": (FSDP, {}),
    "TensorParallel 4x2": (lambda: TensorParallel({"data": 4, "model": 2}, HALVES), {}),
    "TensorParallel 2x4": (lambda: TensorParallel({"data": 2, "model": 4}, HALVES), {}),
    "TensorParallel 2x2x2": (
        lambda: TensorParallel({"data": 2, "fsdp": 2, "model": 2}, HALVES),
        {},
    ),
    "accumulated": (
        lambda: TensorParallel({"data": 4, "model": 2}, HALVES),
        {"accumulate_grad_batches": 2},
    ),
}


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


HERE = pathlib.Path(__file__).parent
CODE = """
import json, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
sys.path[:0] = {paths!r}
import test_plan
for strategy in (test_plan.Sharded(), test_plan.Split(), test_plan.Pmap()):
    assert strategy.num_shards == 1
    plan = test_plan.trainer(strategy).plan([test_plan.batch()], devices=8)
    print(json.dumps(plan.to_dict()))
assert len(jax.devices()) == 1
"""


def comparable(plan):
    """Without what may differ: times, and the words for what is not here."""
    left_out = ("device", "trace_seconds", "compile_seconds", "notes")
    return {key: value for key, value in plan.items() if key not in left_out}


def test_eight_devices_are_predicted_from_one():
    code = CODE.format(paths=[str(HERE), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    predicted = [json.loads(line) for line in done.stdout.splitlines()]
    for strategy, from_one in zip((Sharded(), Split(), Pmap()), predicted, strict=True):
        real = trainer(strategy).plan([batch()]).to_dict()
        assert from_one["device"] == "8 x CPU, faked"
        assert comparable(from_one) == comparable(real)


@pytest.mark.parametrize("devices", [3, 64, 2048])
def test_numbers_of_devices_that_are_not_here(devices):
    plan = trainer().plan([batch(64)], devices=devices)
    assert plan.num_devices == devices
    assert plan.rows == math.ceil(64 / devices) * devices
    assert plan.memory.parameters == PARAMS
    assert plan.memory.batch == plan.rows // devices * 17 * 4 + 4
    assert plan.wire_bytes == 2 * (devices - 1) / devices * (PARAMS + 4)
    assert "CPU compiler" in " ".join(plan.notes["indicative"])


def test_a_mesh_with_other_axes_keeps_them():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    class Columns(Sharded):
        def param_spec(self, path, leaf):
            return P("model") if leaf.shape[0] % 2 == 0 else P()

    planned = trainer(Columns(mesh=mesh)).plan([batch()], devices=16)
    assert planned.mesh == {"data": 8, "model": 2}
    # 6 leaves with an even first axis: all of them.
    assert planned.memory.parameters == PARAMS // 2
    assert planned.bounds[0].least == 2 * 7 / 8 * PARAMS / 2
    along = {each.axes for each in planned.traffic}
    assert ("data",) in along
    assert ("model",) in along
    with pytest.raises(ValueError, match="15 are not divisible by 2"):
        trainer(Columns(mesh=mesh)).plan([batch()], devices=15)


def test_nothing_is_moved_and_nothing_advances():
    model = mlp()
    planned = trainer(model=model)
    loader = [batch()]
    jax.random.key(0)
    gc.collect()
    before = len(jax.live_arrays())
    planned.plan(loader)
    planned.plan(loader, devices=4)
    gc.collect()
    assert len(jax.live_arrays()) == before
    assert planned.global_step == 0
    assert planned._engine is None


def test_a_torch_loader_is_left_as_it_was():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, batch(64)))

    def loader():
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.DataLoader(data, 16, shuffle=True, generator=generator)

    torch.manual_seed(5)
    state = torch.get_rng_state()
    plain = trainer().fit(loader(), max_epochs=2)
    planned_loader = loader()
    planned = trainer()
    plan = planned.plan(planned_loader)
    assert plan.rows == 16
    assert torch.equal(torch.get_rng_state(), state)
    assert planned.fit(planned_loader, max_epochs=2)["loss"] == plain["loss"]


def test_a_fit_that_follows_a_plan_is_the_same():
    plain = trainer().fit([batch()], max_epochs=3)
    planned = trainer()
    planned.plan([batch()])
    assert planned.fit([batch()], max_epochs=3)["loss"] == plain["loss"]
    after = planned.plan([batch()])
    assert comparable(after.to_dict()) == comparable(
        trainer().plan([batch()]).to_dict()
    )


def test_an_iterator_is_not_used_up():
    batches = iter([batch()])
    with pytest.raises(TypeError, match="`loader` is an iterator"):
        trainer().plan(batches)
    next(batches)


def test_callbacks_make_no_folders(tmp_path):
    folder = tmp_path / "checkpoints"
    trainer(callbacks=[ModelCheckpoint(folder)]).plan([batch()])
    assert not folder.exists()


def test_what_is_not_donated_costs_a_second_state():
    kept = trainer(callbacks=[DonateBuffers("none")]).plan([batch()])
    donated = trainer().plan([batch()])
    state = donated.memory.overwritten
    assert state == 3 * PARAMS + 4 + kept.memory.other  # Adam's count is one number
    assert kept.memory.overwritten == 0
    assert kept.memory.results == donated.memory.results
    assert not any(leaf.overwritten for leaf in kept.leaves)
    assert "memory of two states" in str(kept)
    assert kept.not_overwritten == donated.not_overwritten == ()


def test_a_leaf_that_is_donated_and_copied_is_named():
    class Widening(Sharded):
        """Hands back its state in another layout than it takes it in."""

        def compile(self, step, arguments, roles, results, *, donate=(), split=True):
            def whole(collectives, leaves, *rest):
                new, metrics = step(collectives, leaves, *rest)
                return [jnp.concatenate([new[0], new[0]]), *new[1:]], metrics

            everywhere = jax.sharding.NamedSharding(self.mesh, P())
            program = jax.jit(
                lambda *arguments: whole(Collectives(), *arguments),
                out_shardings=everywhere,
                donate_argnums=donate,
            )
            return self.build(program, arguments)

    plan = trainer(Widening(2)).plan([batch()])
    # Which of the equally large leaves goes without is the compiler's choice.
    (name,) = plan.not_overwritten
    assert name.endswith("layers[0].weight")
    assert f"copied all the same: {name}" in str(plan)


def test_nan_guards_are_planned_with():
    plain, guarded = trainer(), trainer(callbacks=[NanGuard()])
    plan = guarded.plan([batch()])
    guarded.fit([batch()])
    found = guarded.compiled_train_step().memory_analysis()
    assert plan.memory.temporary == found.temp_size_in_bytes
    assert plan.memory.results > plain.plan([batch()]).memory.results


def test_what_could_be_split_is_what_splitting_saves():
    whole = trainer(Sharded(8)).plan([batch()])
    split = trainer(Split(8)).plan([batch()])
    saved = sum(each.bytes_saved for each in whole.could_split)
    held = [plan.memory.parameters + plan.memory.optimizer for plan in (whole, split)]
    assert held[0] - held[1] == saved > 0
    assert split.could_split == ()
    assert trainer(SingleDevice()).plan([batch()]).could_split == ()


def test_micro_batches_are_counted():
    accumulated = trainer(Pmap(4), accumulate_grad_batches=3).plan([batch(64)])
    single = trainer(Pmap(4)).plan([batch(64)])
    assert (accumulated.micro_batches, accumulated.rows) == (3, 192)
    assert accumulated.flops == 3 * single.flops
    # Summed once, after the last of them.
    assert accumulated.wire_bytes == single.wire_bytes


def test_loops_multiply_what_is_sent():
    def loss_fn(model, x, y):
        def layer(x, _):
            return jax.lax.pmean(jnp.tanh(x), "data"), None

        x = jax.lax.scan(layer, x, None, length=5)[0]
        prediction = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(prediction, y).mean()

    plan = trainer(Apart(4), loss=None, loss_fn=loss_fn).plan([batch(64)])
    inside = [each for each in plan.traffic if each.times == 5]
    assert sum(each.operand_bytes for each in inside) == 5 * 16 * 16 * 4
    assert sum(each.wire_bytes for each in inside) == 5 * 16 * 16 * 4 * 2 * 3 / 4


def test_models_with_state_and_interacting_rows():
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    x = np.ones((24, 4), np.float32), np.zeros(24, np.int32)
    planned = trainer(model=model, state=state)
    plan = planned.plan([x])
    planned.fit([x])
    assert plan.memory.model_state == sum(
        leaf.addressable_data(0).nbytes
        for leaf in jax.tree.leaves(planned.state.model_state)
    )
    found = planned.compiled_train_step().memory_analysis()
    assert plan.memory.temporary == found.temp_size_in_bytes


def test_frozen_leaves_and_odd_ones_are_shown():
    class Odd(eqx.Module):
        linear: eqx.nn.Linear
        table: jax.Array
        key: jax.Array

        def __call__(self, x):
            return self.linear(x) + self.table[:8]

    model = Odd(
        eqx.nn.Linear(16, 8, key=jax.random.key(0)),
        jnp.zeros(5000),
        jax.random.key(1),
    )
    spec = jax.tree.map(lambda leaf: False, eqx.filter(model, eqx.is_inexact_array))
    spec = eqx.tree_at(lambda m: m.linear.weight, spec, True)
    plan = trainer(model=model, filter_spec=spec).plan([batch()])
    assert plan.memory.parameters == 16 * 8 * 4
    assert plan.memory.frozen == 5000 * 4 + 8 * 4 + 8
    assert str(plan)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not():
    planned = trainer(Sharded(4))
    plan = planned.plan([batch(8)])
    limit = 10 * plan.memory.peak
    rows = plan.largest_batch(limit)
    assert rows % 4 == 0

    def peak(rows):
        return planned.plan([batch(rows)]).memory.peak

    assert peak(rows) <= limit < peak(rows + 4)
    assert plan.largest_batch(plan.memory.parameters) == 0


@pytest.mark.parametrize(
    "peak",
    [
        lambda rows: 1000 + 17 * rows,
        lambda rows: 1000 + 128 * math.ceil(rows / 8),
        lambda rows: 5 * rows + rows**2 // 1000,
        lambda rows: max(7000, 3 * rows),
        lambda rows: 1000 + 40 * rows - 35 * max(0, rows - 300),
        lambda rows: 1000 + 2 * rows if rows < 450 else math.inf,
    ],
)
@pytest.mark.parametrize("limit", [900, 1017, 9000, 10**6])
@pytest.mark.parametrize("start", [1, 64, 5000])
def test_the_search_finds_the_largest(peak, limit, start):
    asked = []

    def asking(rows):
        asked.append(rows)
        return peak(rows)

    found = largest(asking, limit, start)
    assert found == 0 or peak(found) <= limit
    assert peak(found + 1) > limit
    assert len(asked) == len(set(asked)) <= 40


def test_scaling_keeps_what_it_is_told_to():
    plan = trainer(Sharded(4)).plan([batch(64)], hardware="h100")
    grown = plan.scaling([1, 4, 32]).rows
    assert [row.rows for row in grown] == [16, 64, 512]
    assert [row.wire_bytes for row in grown] == [
        2 * (n - 1) / n * (PARAMS + 4) * (n > 1) for n in (1, 4, 32)
    ]
    assert grown[1].peak == plan.memory.peak
    assert grown[0].efficiency == 1.0
    assert grown[1].step == plan.estimate.worst
    kept = plan.scaling([1, 8], keep="rows").rows
    assert [row.rows for row in kept] == [64, 64]
    with pytest.raises(ValueError, match="`keep` must be"):
        plan.scaling([1], keep="batch")


def test_scaling_is_drawn(tmp_path):
    for hardware in (None, "h100"):
        scaling = (
            trainer(Sharded(4)).plan([batch(64)], hardware=hardware).scaling([1, 2])
        )
        path = tmp_path / "scaling.svg"
        scaling.plot(path)
        root = xml.etree.ElementTree.parse(path).getroot()
        lines = [node for node in root.iter() if node.tag.endswith("polyline")]
        assert len(lines) == (2 if hardware is None else 4)
        assert "devices" in str(scaling)
        assert len(str(scaling).splitlines()) == 3


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
    assert trainer().plan([batch(64)]).estimate is None


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.loaded = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "rect", "path", "circle", "polyline"):
            self.open.append(tag)
        self.loaded += [v for k, v in attributes if k in ("src", "href")]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag not in ("rect", "path", "circle", "polyline"):
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
    for each, kinds in (
        (plan, ["matrix", "compiled"]),
        (trained.running_plan(), ["compiled"]),
    ):
        counts = {"matrix": each.flops, "compiled": each.flops_compiled * 2}
        shown = [
            f"{kind.capitalize()} operations: {_si(counts[kind])}FLOP per step"
            for kind in kinds
        ]
        lines = str(each).splitlines()
        told = [line for line in lines if " operations: " in line and "FLOP" in line]
        assert [line.partition(",")[0] for line in told] == shown
        each.to_html(path)
        text = path.read_text()
        assert all(f"{kind} operations per step" in text for kind in kinds)
        assert ("matrix operations per step" in text) == ("matrix" in kinds)
        assert ">operations per step" not in text


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
    plan = trainer().plan([batch()])
    plain = plan.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["memory"]["peak"] == plan.memory.peak
    assert sum(leaf["bytes"] for leaf in plain["leaves"]) > 0
    text = str(plan)
    assert "8 x cpu" in text
    assert "all-reduce" in text
    assert "Exact:" in text


class Own(DataParallel):
    """A user's engine that knows nothing of plans."""

    def __init__(self):
        self.device = find_devices(1)[0]

    def place(self, state):
        return SingleDevice().place(state)

    def compile(self, step, arguments, roles, results, *, donate=(), split=True):
        return SingleDevice().compile(
            step, arguments, roles, results, donate=donate, split=split
        )


def test_an_engine_of_ones_own_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="no `state_shardings"):
        trainer(Own()).plan([batch()])

    class Placed(Own):
        def state_shardings(self, state):
            return SingleDevice().state_shardings(state)

    plan = trainer(Placed()).plan([batch()])
    assert plan.memory.parameters == PARAMS
    assert plan.flops is None
    assert plan.flops_compiled > 0
    with pytest.raises(NotImplementedError, match=r"no `on\(devices\)`"):
        trainer(Placed()).plan([batch()], devices=4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"devices": 0}, ValueError, "`devices` must be 1 or more; got 0"),
        ({"devices": "8"}, TypeError, "`devices` must be an int"),
        ({"devices": 4096}, ValueError, "must be 1 to 2048"),
        ({"topology": "h100"}, ValueError, "`topology`='h100' is not known"),
        ({"topology": "v5p-12"}, ValueError, "has 6 chips"),
        ({"topology": "h100x8", "devices": 8}, ValueError, "were both given"),
        ({"hardware": "h1000"}, ValueError, "`hardware` must be one of 'a100'"),
    ],
)
def test_wrong_arguments_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        trainer().plan([batch()], **options)


@pytest.mark.parametrize(
    ("memory", "error", "words"),
    [
        (None, ValueError, "`memory` is needed"),
        ("16GB", TypeError, "`memory` must be a number, in bytes"),
        (0, ValueError, "`memory` must be more than 0"),
    ],
)
def test_wrong_memory_is_refused(memory, error, words):
    plan = trainer().plan([batch()])
    with pytest.raises(error, match=words):
        plan.largest_batch(memory)


def test_a_single_device_is_not_planned_for_more():
    with pytest.raises(ValueError, match="SingleDevice uses 1 device, not 4"):
        trainer(SingleDevice()).plan([batch()], devices=4)


def test_stand_ins_are_apart_from_the_devices_here():
    before = jax.devices()
    assert len(faked(300).devices) == 300
    assert jax.devices() == before
    assert not set(faked(300).devices) & set(before)


def test_slices_have_the_shapes_that_are_offered():
    assert [slice_shape("v5p", n, "") for n in (4, 8, 16, 32, 64, 128, 1024)] == [
        (2, 2, 1),
        (2, 2, 2),
        (2, 2, 4),
        (2, 4, 4),
        (4, 4, 4),
        (4, 4, 8),
        (8, 8, 16),
    ]
    assert [slice_shape("v5e", n, "") for n in (1, 4, 8, 256)] == [
        (1, 1),
        (2, 2),
        (2, 4),
        (16, 16),
    ]


def installed(*modules):
    return all(importlib.util.find_spec(module) is not None for module in modules)


@pytest.mark.skipif(installed("libtpu"), reason="the TPU compiler is installed")
def test_a_missing_tpu_compiler_names_the_extra():
    with pytest.raises(
        ImportError, match=r"libtpu is not.*pip install 'jaxdp\[plan\]'"
    ):
        trainer().plan([batch()], topology="v5e-8")


@pytest.mark.skipif(
    installed("jax_cuda12_plugin"), reason="the GPU compiler is installed"
)
def test_a_missing_gpu_compiler_names_the_extra():
    with pytest.raises(ImportError, match=r"jax-cuda12-plugin.*'jaxdp\[plan\]'"):
        trainer().plan([batch()], topology="h100x8")


@pytest.mark.skipif(not installed("libtpu"), reason="no TPU compiler")
@pytest.mark.parametrize(
    ("name", "devices"), [("v5e-8", 8), ("v5p-2048", 1024), ("v6e:2x4", 8)]
)
def test_tpus_that_are_not_here(name, devices):
    plan = trainer().plan([batch(64)], topology=name)
    assert plan.platform == "tpu"
    assert plan.num_devices == len(topology(name).devices) == devices
    assert plan.estimate.hardware == name[:3]
    assert plan.wire_bytes == 2 * (devices - 1) / devices * (PARAMS + 4)
    assert plan.memory.parameters == PARAMS
    # Arrays are padded to tiles on a TPU.
    assert plan.memory.arguments >= 3 * PARAMS
    assert [row.devices for row in plan.scaling([1, 2]).rows] == [1, 2]


@pytest.mark.skipif(
    not installed("jax_cuda12_plugin", "nvidia"), reason="no GPU compiler"
)
@pytest.mark.parametrize(
    ("name", "devices"), [("h100x8", 8), ("h100x1024", 1024), ("a100x4", 4)]
)
def test_gpus_that_are_not_here(name, devices):
    plan = trainer().plan([batch(64)], topology=name)
    assert plan.platform == "gpu"
    assert plan.num_devices == devices
    assert plan.estimate.hardware == name.split("x")[0]
    assert plan.wire_bytes == 2 * (devices - 1) / devices * (PARAMS + 4)
    assert plan.memory.arguments == (
        plan.memory.parameters
        + plan.memory.optimizer
        + plan.memory.other
        + plan.memory.batch
    )
    assert [row.devices for row in plan.scaling([1, 2]).rows] == [1, 2]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("strategy", [Sharded, ZeRO, FSDP])
@pytest.mark.parametrize("name", ["h100x8", "v5e-8"])
def test_layouts_send_the_least_by_the_compilers_for_other_hardware(
    name, strategy, accumulate
):
    needed = ["libtpu"] if name == "v5e-8" else ["jax_cuda12_plugin", "nvidia"]
    if not installed(*needed):
        pytest.skip("no compiler for it")
    # Of tiny arrays the TPU compiler makes all-reduces.
    model = eqx.nn.MLP(256, 128, 1024, 2, key=jax.random.key(0))
    planned = trainer(strategy(), model, accumulate_grad_batches=accumulate)
    data = np.zeros((512, 256), np.float32), np.zeros(512, np.int32)
    plan = planned.plan([data], topology=name)
    assert plan.bounds[0].ratio < 1.05
    if plan.platform == "gpu":  # a TPU pads arrays
        assert [each.ratio for each in plan.bounds[1:]] == [1, 1]


def test_profiles_are_in_order():
    for name, each in HARDWARE.items():
        assert each.name == name
        assert each.flops >= each.flops_float32 > 1e13
        assert each.far_bandwidth <= each.link_bandwidth < each.memory_bandwidth
        assert 10e9 < each.memory < 1e12


def test_a_model_of_shapes_is_planned_as_the_model_itself():
    def make(model):
        return Trainer(model, loss="cross_entropy", strategy=FSDP(min_size=1))

    def build():
        return eqx.nn.MLP(4, 3, 64, 2, key=jax.random.key(0))

    data = batches(16)
    trainer = make(eqx.filter_eval_shape(build))
    found, expected = (t.plan(data).to_dict() for t in (trainer, make(build())))
    for name in ("trace_seconds", "compile_seconds"):
        found.pop(name), expected.pop(name)
    assert found == expected
    for run in (trainer.fit, trainer.predict, trainer.validate):
        with pytest.raises(ValueError, match="`model` has shapes for arrays.*only `pl"):
            run(data)


@pytest.mark.parametrize("devices", [2, 8])
def test_the_bitwise_step_is_planned_with_its_turns(devices):
    bitwise = {"reproducible": "bitwise"}
    trained = trainer(Sharded(devices), **bitwise)
    plan = trained.plan([batch()])
    trained.fit([batch()])
    found = trained.compiled_train_step().memory_analysis()
    assert plan.memory.temporary == found.temp_size_in_bytes
    assert plan.memory.arguments == found.argument_size_in_bytes
    assert plan.rows == 64
    plain = trainer(Sharded(devices)).plan([batch()])
    assert plan.flops == plain.flops
    assert plan.memory.batch == plain.memory.batch
    # In each turn every device sends what it found, all of it small, to every other.
    turns = 8 // devices
    gradients = turns * (devices - 1) * PARAMS
    assert 0 < plan.wire_bytes - gradients <= turns * (devices - 1) * 64
    assert plan.notes["unknown"] == plain.notes["unknown"]
    assert plan.could_split == ()
    assert trained.running_plan().wire_bytes == plan.wire_bytes
    predicted = trainer(Sharded(8), **bitwise).plan([batch()], devices=devices)
    assert comparable(predicted.to_dict()) == comparable(plan.to_dict())
    with pytest.raises(ValueError, match="Use 1, 2, 4 or 8 devices"):
        trained.plan([batch()], devices=16)


def test_a_loop_of_unknown_length_may_say_how_often_it_runs():
    def loss_fn(model, x, y):
        def turn(carry):
            index, x = carry
            return index + 1, jax.lax.pmean(jnp.tanh(x), "data")

        with jax.named_scope(repeated(5)):
            bound = 5 + jnp.minimum(0, y.sum())  # nobody knows that this is 5
            x = jax.lax.while_loop(lambda c: c[0] < bound, turn, (0, x))[1]
        prediction = jax.vmap(model)(jax.lax.stop_gradient(x))
        return optax.softmax_cross_entropy_with_integer_labels(prediction, y).mean()

    plan = trainer(Apart(4), loss=None, loss_fn=loss_fn).plan([batch(64)])
    (inside,) = (each for each in plan.traffic if each.times == 5)
    assert inside.operand_bytes == 5 * 16 * 16 * 4
    assert times_of("jit(f)/runs_2_times/while/body/add") is None


@pytest.mark.parametrize("strategy", [SingleDevice(), Sharded()], ids=["one", "all"])
def test_a_leaf_of_the_batch_may_be_for_nothing(strategy):
    numbers, x = np.arange(8), np.ones((8, 4), np.float32)
    trainer = Trainer(
        eqx.nn.Linear(4, 3, key=jax.random.key(0)),
        loss_fn=lambda model, numbers, x: jax.vmap(model)(x).sum(axis=1),
        strategy=strategy,
    )
    plan = trainer.plan([(numbers, x)])
    alone = Trainer(
        trainer.model,
        loss_fn=lambda model, x: jax.vmap(model)(x).sum(axis=1),
        strategy=strategy,
    ).plan([x])
    assert plan.memory.batch - alone.memory.batch == 4 * 8 / strategy.num_shards
