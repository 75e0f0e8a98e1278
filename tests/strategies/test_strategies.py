"""Strategies: the shipped ones, the user's, and what they refuse."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from toys import Apart, Deep, Mlp, Recorder, batches, linear, quiet

import jaxdp
from jaxdp import (
    FSDP,
    Bitwise,
    DataParallel,
    LocalSGD,
    Members,
    Pipeline,
    Pmap,
    SequenceParallel,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)
from jaxdp.strategies import Collectives
from jaxdp.testing import check_strategy


class Columns(Sharded):
    """A user's layout: wide weights split by rows over the devices."""

    def param_spec(self, path, leaf):
        if path.endswith("layers[0].weight"):
            return PartitionSpec("data")
        return PartitionSpec()


class Threads(DataParallel):
    """A user's engine: everything replicated, and no sharding of rows at all."""

    def __init__(self, count):
        mesh = Mesh(np.array(jax.devices()[:count]), ("all",))
        self.whole = NamedSharding(mesh, PartitionSpec())

    def place(self, state):
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        return copy(jax.device_put(state, self.whole))

    def compile(self, step, arguments, roles, results, *, donate=(), rows="apart"):
        run, whole = functools.partial(step, Collectives()), self.whole
        layout = {"in_shardings": whole, "out_shardings": whole}
        return jax.jit(run, **layout, donate_argnums=donate)


RULES = [
    ("mlp.layers[0].*", PartitionSpec("model")),
    ("mlp.layers[1].weight", PartitionSpec(None, "model")),
    ("blocks.stacked.linear.*", PartitionSpec(None, "model")),
]
GRID, TOKENS = {"data": 4, "model": 2}, {"data": 4, "seq": 2}


def eight_models():
    keys = jax.random.split(jax.random.key(0), 8)
    return {"model": eqx.filter_vmap(Mlp)(keys), "ensemble": 8}


def deep():
    return {"model": Deep()}


CONFORMING = {
    "one": (SingleDevice,),
    "fourth": (lambda: SingleDevice(jax.devices()[3]),),
    "sharded": (Sharded,),
    "3": (lambda: Sharded(3),),
    "last three": (lambda: Sharded(jax.devices()[5:]),),
    "pmap": (Pmap,),
    "pmap 2": (lambda: Pmap(jax.devices()[:2]),),
    "own layout": (Columns,),
    "own engine": (lambda: Threads(2),),
    "zero": (ZeRO,),
    "zero 2": (lambda: ZeRO(devices=2),),
    "fsdp": (FSDP,),
    "fsdp 4": (lambda: FSDP(4, min_size=100),),
    "fsdp 1": (lambda: FSDP(1),),
    "tensors": (lambda: TensorParallel(GRID, RULES[:2]),),
    "fsdp of blocks": (lambda: FSDP(min_size=1), deep),
    "tensors of blocks": (lambda: TensorParallel(GRID, RULES[2:]), deep),
    "tokens": (lambda: SequenceParallel(TOKENS),),
    "tokens of blocks": (lambda: SequenceParallel(TOKENS, True), deep),
    "pipeline": (lambda: Pipeline(2, 3, devices=2), deep),
    "stages": (lambda: Pipeline(4, 4), deep),
    "members": (lambda: Members(2), eight_models),
    "bitwise": (lambda: Bitwise(Sharded()),),
    # With more devices or steps it is another algorithm.
    "local": (lambda: LocalSGD(1, optax.sgd(1.0), devices=1),),
}


@pytest.mark.slow_but("3", "stages")
@pytest.mark.parametrize("name", CONFORMING)
def test_strategy_conforms(name):
    make, make_arguments = (*CONFORMING[name], dict)[:2]
    check_strategy(make(), **make_arguments())


def test_conformance_is_checked_of_every_class_there_is():
    public = [
        getattr(module, name)
        for module in (jaxdp, jaxdp.strategies)
        for name in module.__all__
    ]
    classes = {c for c in public if isinstance(c, type) and issubclass(c, DataParallel)}
    checked = {type(make()) for make, *_ in CONFORMING.values()}
    assert classes - checked == {DataParallel}


def test_prepare_may_refuse_and_replace_arguments():
    class Calm(Sharded):
        def prepare(self, arguments):
            if arguments["after_update"] is not None:
                raise ValueError("Calm trains as it is")
            return {**arguments, "optimizer": optax.sgd(0.0)}

    options = {"loss": "mse", "strategy": Calm()}
    with pytest.raises(ValueError, match="Calm trains as it is"):
        quiet(linear(), optax.sgd(1.0), after_update=lambda model: model, **options)
    trainer = quiet(linear(), optax.sgd(1.0), **options)
    trainer.fit([(np.ones((8, 4)), np.ones((8, 3)))])
    np.testing.assert_array_equal(trainer.model.weight, linear().weight)


class Stale(SingleDevice):
    def place(self, state):
        return jax.device_put(state, self.mesh.devices.flat[0])


class OneKey(Sharded):
    """Gives every row the key of the first."""

    def collectives(self, groups, rows):
        class First(Collectives):
            def row_ids(self, rows):
                return jnp.zeros(rows, int)

        return First()


@pytest.mark.parametrize("strategy, promise", [
    (Stale, "your model is yours"),
    (OneKey, "same numbers anywhere"),
    (Apart, "same numbers anywhere: where a loss is written for a batch"),
])  # fmt: skip
def test_check_strategy_finds_broken_promises(strategy, promise):
    with pytest.raises(AssertionError, match=promise):
        check_strategy(strategy())


def test_param_spec_lays_out_parameters_and_their_optimizer_state():
    model = eqx.nn.MLP(4, 3, 32, 1, key=jax.random.key(0))
    options = {"loss": "cross_entropy", "strategy": Columns()}
    trainer = quiet(model, optax.adam(1e-2), **options)
    trainer.fit(batches(16, 5))
    adam = trainer.state.opt_state[0]
    for tree in (trainer.state.params, adam.mu, adam.nu):
        assert tree.layers[0].weight.sharding.spec == PartitionSpec("data")
        assert tree.layers[1].weight.sharding.is_fully_replicated
    assert trainer.model.layers[0].weight.shape == (32, 4)
    assert trainer.model.layers[0].weight.sharding.is_fully_replicated


def test_batch_spec_lays_out_batches():
    class Features(Sharded):
        def batch_spec(self, leaf):
            return PartitionSpec(*[None] * (leaf.ndim - 1), "data")

    data = [(x, np.tile(x, 2)) for x, _ in batches(16, 16)]
    runs = []
    for strategy in (SingleDevice(), Features(4)):
        options = {"strategy": strategy, "callbacks": [recorder := Recorder()]}
        quiet(linear(4, 8), loss="mse", **options).fit(data)
        runs.append(recorder.losses)
    np.testing.assert_allclose(*runs, rtol=1e-5)


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, Pmap])
def test_a_model_on_an_explicit_mesh_and_an_ambient_mesh_are_taken(strategy):
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,))
    assert {*Sharded(mesh=mesh).mesh.axis_types} == {AxisType.Auto}
    model = linear()
    model = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        trainer = quiet(model, loss="cross_entropy", strategy=strategy())
        trainer.fit(batches(16, 5), batches(8))
        assert trainer.predict(batches(5)).shape == (5, 3)


def test_the_users_arrays_may_live_anywhere():
    model = jax.device_put(Mlp(jax.random.key(0)).first, jax.devices()[6])
    trainer = quiet(model, loss="mse", strategy=Sharded(4))
    trainer.fit([(jnp.ones((8, 4)), jnp.ones((8, 16)))])
    assert not model.weight.is_deleted()


@pytest.mark.parametrize("devices, spec", [(1, []), (8, []), (8, ["data"])])
def test_placed_arrays_share_no_memory_with_those_they_are_copies_of(devices, spec):
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    layout = NamedSharding(mesh, PartitionSpec(*spec))
    there, elsewhere = (
        jax.device_put(jnp.ones((8, 1024)), place)
        for place in (layout, jax.devices()[3])
    )
    data = np.ones((8, 1024), np.float32)
    originals = [data, jnp.asarray(data), there, elsewhere]

    class Own(Sharded):
        def param_spec(self, path, leaf):
            return layout.spec

    state = quiet(linear(), optax.sgd(0.1), loss="mse").state
    copies = Own(mesh=mesh).place(state._replace(params=originals)).params
    assert all(copy.sharding == layout for copy in copies)
    kept = {data.ctypes.data, *itertools.chain(*map(addresses, originals[1:]))}
    for copy in copies:
        assert not kept & addresses(copy)
        kept |= addresses(copy)


def addresses(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def test_a_subclass_is_itself_on_another_device():
    class Mine(SingleDevice):
        def param_spec(self, path, leaf):
            return PartitionSpec(None)

    device = jax.devices()[1]
    other = Mine().on([device])
    assert type(other) is Mine and [*other.mesh.devices.flat] == [device]
