"""Plans for devices that are not here, and what planning leaves alone."""

import gc
import math

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from planned import PARAMS, Split, batch, comparable, mlp, trainer

from jaxdp import FSDP, Arrays, DataParallel, Pmap, Sharded, SingleDevice
from jaxdp.callbacks import ModelCheckpoint
from jaxdp.strategies.meshes import find_devices


@pytest.mark.parametrize("kind", [Sharded, Split, Pmap])
def test_eight_devices_are_predicted_from_one(kind):
    predicted = trainer(kind(1)).plan([batch()], devices=8).to_dict()
    assert predicted["device"] == "8 x CPU, faked"
    real = trainer(kind(8)).plan([batch()]).to_dict()
    assert comparable(predicted) == comparable(real)


@pytest.mark.slow_cases("2048")
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
    assert not planned.run.has_engine


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


def test_an_iterator_is_not_used_up():
    batches = iter([batch()])
    with pytest.raises(TypeError, match="`loader` is an iterator"):
        trainer().plan(batches)
    next(batches)


def test_callbacks_make_no_folders(tmp_path):
    folder = tmp_path / "checkpoints"
    trainer(callbacks=[ModelCheckpoint(folder)]).plan([batch()])
    assert not folder.exists()


class Own(DataParallel):
    """A user's strategy that knows nothing of plans."""

    def __init__(self):
        self.device = find_devices(1)[0]

    def place(self, state):
        return SingleDevice().place(state)

    def compile(self, step, arguments, roles, results, *, donate=(), rows="apart"):
        return SingleDevice().compile(
            step, arguments, roles, results, donate=donate, rows=rows
        )


def test_a_strategy_of_ones_own_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match="no `mesh`"):
        trainer(Own()).plan([batch()])

    class Placed(Own):
        mesh = SingleDevice().mesh

    plan = trainer(Placed()).plan([batch()])
    assert plan.memory.parameters == PARAMS
    assert plan.flops == trainer(SingleDevice()).plan([batch()]).flops > 0
    with pytest.raises(NotImplementedError, match=r"no `on\(devices\)`"):
        trainer(Placed()).plan([batch()], devices=4)


def test_a_model_of_shapes_is_planned_as_the_model_itself():
    shapes = trainer(FSDP(min_size=1), eqx.filter_eval_shape(mlp))
    found, expected = (
        made.plan([batch()]).to_dict() for made in (shapes, trainer(FSDP(min_size=1)))
    )
    found.pop("compile_seconds"), expected.pop("compile_seconds")
    assert found == expected
    for run in (shapes.fit, shapes.predict, shapes.validate):
        with pytest.raises(ValueError, match="`model` has shapes instead of arr.*only"):
            run([batch()])


def test_arrays_are_planned_as_their_batches():
    loaders = [batch()], Arrays(*batch(), batch_size=64)
    plans = [trainer(SingleDevice()).plan(loader) for loader in loaders]
    assert plans[0].memory == plans[1].memory
