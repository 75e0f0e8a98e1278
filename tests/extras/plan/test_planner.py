"""Plans for devices that are not here, and what planning leaves alone."""

import gc
import math

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from planned import PARAMS, Split, batch, comparable, mlp, plan, trainer

from jaxdp import FSDP, Arrays, DataParallel, Pmap, Sharded, SingleDevice
from jaxdp.callbacks import ModelCheckpoint


@pytest.mark.parametrize("kind", [Sharded, Split, Pmap])
def test_eight_devices_are_predicted_from_one(kind):
    predicted = plan(kind(1), devices=8).to_dict()
    assert predicted["device"] == "8 x CPU, faked"
    assert comparable(predicted) == comparable(plan(kind(8)).to_dict())


@pytest.mark.slow_cases("2048")
@pytest.mark.parametrize("devices", [3, 64, 2048])
def test_numbers_of_devices_that_are_not_here(devices):
    here = jax.devices()
    found = plan(devices=devices)
    assert jax.devices() == here
    assert found.num_devices == devices
    assert found.rows == math.ceil(64 / devices) * devices
    assert found.memory.parameters == PARAMS
    assert found.memory.batch == found.rows // devices * 17 * 4 + 4
    assert found.wire_bytes == 2 * (devices - 1) / devices * (PARAMS + 4)
    assert "CPU compiler" in " ".join(found.notes["indicative"])


def test_a_mesh_with_other_axes_keeps_them():
    class Columns(Sharded):
        def param_spec(self, path, leaf):
            return P("model") if leaf.shape[0] % 2 == 0 else P()

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    planned = plan(Columns(mesh=mesh), devices=16)
    assert planned.mesh == {"data": 8, "model": 2}
    # 6 leaves with an even first axis: all of them.
    assert planned.memory.parameters == PARAMS // 2
    assert planned.bounds[0].least == 2 * 7 / 8 * PARAMS / 2
    assert {("data",), ("model",)} <= {each.axes for each in planned.traffic}
    with pytest.raises(ValueError, match="15 are not divisible by 2"):
        plan(Columns(mesh=mesh), devices=15)


def test_nothing_is_moved_made_or_used_up(tmp_path):
    folder = tmp_path / "checkpoints"
    planned = trainer(model=mlp(), callbacks=[ModelCheckpoint(folder)])
    loader = [batch()]
    jax.random.key(0)
    gc.collect()
    before = len(jax.live_arrays())
    planned.plan(loader)
    planned.plan(loader, devices=4)
    gc.collect()
    assert len(jax.live_arrays()) == before
    assert planned.global_step == 0
    assert not planned.run.has_engine and not folder.exists()

    batches = iter([batch()])
    with pytest.raises(TypeError, match="`loader` is an iterator"):
        planned.plan(batches)
    next(batches)


def test_a_torch_loader_is_left_as_it_was():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, batch(64)))

    def fit(plans):
        generator = torch.Generator().manual_seed(3)
        loader = torch.utils.data.DataLoader(
            data, 16, shuffle=True, generator=generator
        )
        fitted = trainer()
        torch.manual_seed(5)
        state = torch.get_rng_state()
        assert not plans or fitted.plan(loader).rows == 16
        assert not plans or torch.equal(torch.get_rng_state(), state)
        return fitted.fit(loader, max_epochs=2)["loss"]

    assert fit(plans=True) == fit(plans=False)


class Own(DataParallel):
    """A user's strategy that knows nothing of plans."""

    def place(self, state):
        return SingleDevice().place(state)

    def compile(self, *call, **options):
        return SingleDevice().compile(*call, **options)


def test_a_strategy_of_ones_own_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="no `mesh`"):
        plan(Own())

    class Placed(Own):
        mesh = SingleDevice().mesh

    found = plan(Placed())
    assert found.memory.parameters == PARAMS
    assert found.flops == plan(SingleDevice()).flops > 0
    with pytest.raises(NotImplementedError, match=r"no `on\(devices\)`"):
        plan(Placed(), devices=4)


def test_a_model_of_shapes_is_planned_as_the_model_itself():
    strategy = FSDP(min_size=1)
    shapes = trainer(strategy, eqx.filter_eval_shape(mlp))
    found, expected = (
        made.plan([batch()]).to_dict() for made in (shapes, trainer(strategy))
    )
    found.pop("compile_seconds"), expected.pop("compile_seconds")
    assert found == expected
    for run in (shapes.fit, shapes.predict, shapes.validate):
        with pytest.raises(ValueError, match="`model` has shapes instead of arr.*only"):
            run([batch()])


def test_arrays_are_planned_as_their_batches():
    of_arrays = plan(SingleDevice(), Arrays(*batch(), batch_size=64))
    assert of_arrays.memory == plan(SingleDevice()).memory


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not(caplog):
    found = plan(Sharded(4), [batch(8)])
    limit = 10 * found.memory.peak
    rows = found.largest_batch(limit)
    assert rows % 4 == 0
    said = [each for each in caplog.messages if "rows in a step need" in each]
    assert 2 <= len(said) <= 12

    def peak(rows):
        return plan(Sharded(4), [batch(rows)]).memory.peak

    assert peak(rows) <= limit < peak(rows + 4)
    assert found.largest_batch(found.memory.parameters) == 0


@pytest.mark.parametrize("hardware", [None, "h100"])
def test_scaling_keeps_the_rows_of_a_device(hardware):
    found = plan(Sharded(4), hardware=hardware)
    scaling = found.scaling([1, 4, 32])
    grown = scaling.rows
    assert [row.rows for row in grown] == [16, 64, 512]
    assert [row.wire_bytes for row in grown] == [
        2 * (n - 1) / n * (PARAMS + 4) * (n > 1) for n in (1, 4, 32)
    ]
    assert grown[1].peak == found.memory.peak
    if hardware:
        assert grown[0].efficiency == 1.0
        assert grown[1].step == found.estimate.worst
    header, *lines = str(scaling).splitlines()
    assert header.split()[0] == "devices"
    assert [line.split()[0] for line in lines] == ["1", "4", "32"]
    assert (lines[0].split()[-1] == "-") == (hardware is None)
