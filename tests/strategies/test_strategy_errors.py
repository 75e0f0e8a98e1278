"""Each refusal of a strategy is an error that says what to do."""

import equinox as eqx
import jax
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from toys import Deep, NormNet, batches, each_refused, linear, make_small

import jaxdp
from jaxdp import (
    FSDP,
    Bitwise,
    LocalSGD,
    Pipeline,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)
from jaxdp.strategies.base import DataParallel


class Own(DataParallel):
    """A strategy that has its own way with everything."""

    def place(self, state):
        return state

    def compile(self, *arguments, **options):
        return arguments


class Unnamed(Own):
    """An engine with a mesh, and no name of the axis that rows are split over."""

    def __init__(self):
        self.mesh = mesh("all")


class Splitting(Sharded):
    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def param_spec(self, path, leaf):
        return PartitionSpec(self.axis)


def fit(strategy, model=None, optimizer=None, **options):
    options = {"loss": "cross_entropy"} | options
    trainer = make_small(
        model, optimizer or optax.sgd(0.1), strategy=strategy, **options
    )
    trainer.fit(batches(16))


def by_rules(pattern, spec, *more):
    model = eqx.nn.MLP(4, 3, 64, 1, key=jax.random.key(0))
    fit(TensorParallel({"data": 4, "model": 2}, [(pattern, spec), *more]), model)


def with_state(strategy):
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    fit(strategy, model, state=state)


def mesh(name, devices=2):
    return jax.make_mesh((devices,), (name,), (AxisType.Auto,))


P = PartitionSpec
WRONG = ValueError, TypeError

REFUSED = {
    "devices": [
        (lambda: Sharded(9), ValueError, "`devices`: 9 asked for, but there are 8"),
        (lambda: Pmap(9), ValueError, "`devices`: 9 asked for, but there are 8"),
        (lambda: LocalSGD(4, devices=99), ValueError, "`devices`: 99 asked for"),
        (lambda: Sharded(["cpu:0"]), TypeError, r"list of jax\.Device .*'cpu:0'"),
        (lambda: SingleDevice("cpu:0"), TypeError, "must be a jax.Device.*'cpu:0'"),
        (lambda: Pmap(jax.devices()[:1] * 2), ValueError, "names a device twice"),
        (lambda: Sharded(2, mesh=mesh("data")), ValueError,
         "a mesh has its devices already"),
        (lambda: Sharded(mesh=mesh("x")), ValueError, "none is named 'data'"),
        (lambda: FSDP(mesh=mesh("data", 8), groups=2), ValueError,
         "`groups` and `mesh` were both given"),
    ],
    "layouts": [
        (lambda: fit(Splitting("data"), linear()),
         ValueError, r"weight of shape \(3, 4\): axis 0 of size 3"),
        (lambda: fit(Splitting("model")), ValueError, "has the axes .'data',. only"),
        (lambda: fit(Unnamed()), ValueError,
         "Unnamed has `row_axes` .'data'.*axes .'all'"),
        (lambda: make_small(offload="parameters"), ValueError,
         "`offload` must be one of 'optimizer', None"),
        (lambda: make_small(offload="optimizer", strategy=Own()), ValueError,
         "`offload`='optimizer' needs a strategy with a mesh"),
    ],
    "FSDP and ZeRO": [
        (lambda: ZeRO(stage=4), ValueError, r"`stage` must be 1; got 4.*use FSDP\(\)"),
        (lambda: FSDP(min_size=-1), ValueError,
         "`min_size` must be 0 or more .elements"),
        (lambda: FSDP(gather="twice"), WRONG,
         "`gather` must be 'auto', 'once', or a list"),
        (lambda: FSDP(gather=[]), WRONG, "`gather` must be 'auto'"),
        (lambda: FSDP(gather=[3]), WRONG, "`gather` must be 'auto'"),
        (lambda: FSDP(groups=3), WRONG, "8 devices can't be divided into 3 groups"),
        (lambda: FSDP(groups=0), WRONG, "`groups` must be"),
        (lambda: fit(FSDP(gather=["layer"])), ValueError,
         "`gather`: 'layer' matches no submodule"),
    ],
    "LocalSGD": [
        (lambda: LocalSGD(0), ValueError, "`every` must be 1 or more"),
        (lambda: LocalSGD(2.5), TypeError, "`every` must be an int"),
        (lambda: LocalSGD(4, 0.7), TypeError, r"`outer` must be an optax.*got 0\.7"),
        (lambda: with_state(LocalSGD(2)), ValueError,
         r"LocalSGD.*eqx\.nn\.State.*LayerNorm"),
        (lambda: fit(LocalSGD(2), None, optax.lbfgs()), ValueError,
         "`optimizer` evaluates the loss"),
    ],
    "Bitwise": [
        (lambda: Bitwise(LocalSGD(2)), ValueError,
         r"`strategy`: Bitwise needs the state whole.*LocalSGD"),
        (lambda: Bitwise(Sharded(3)), ValueError,
         r"the 3 devices of Sharded.* do not divide 8"),
        (lambda: Bitwise(FSDP()), ValueError,
         r"needs the state whole on every device"),
        (lambda: make_small(reproducible=True), ValueError,
         r"`reproducible` must be one of 'run', None"),
    ],
    "Pipeline": [
        (lambda: Pipeline(3, 2), ValueError, "`stages`: 3 do not divide the 8 devices"),
        (lambda: Pipeline(2, 0), ValueError, "`microbatches` must be 1 or more; got 0"),
        (lambda: fit(Pipeline(4, 2)), ValueError,
         r"blocks of a jaxdp\.Stack, but the model ha"),
        (lambda: fit(Pipeline(4, 2), Deep(6)), ValueError,
         "4 stages .* do not divide the 6 blocks of b"),
    ],
    "TensorParallel": [
        (lambda: TensorParallel({"data": 4, "model": 3}), ValueError,
         r"4 x 3 = 12 devices, and there are 8.*=12"),
        (lambda: TensorParallel({"x": 4, "model": 2}), ValueError,
         "with 'data', which rows"),
        (lambda: TensorParallel({"data": 8, "model": -1}), ValueError,
         "`mesh_shape: model` must be 1 or more; got -1"),
        (lambda: TensorParallel((4, 2)), TypeError,
         "`mesh_shape` must be a dict"),
        (lambda: by_rules("layers[0].weight", P("rows")), WRONG,
         "the mesh has the axes .'data', 'model'. only"),
        (lambda: by_rules("layers[0].weight", "model"), WRONG,
         "must be .path pattern, PartitionSpec. pairs"),
        (lambda: by_rules("layer.*", P("model")), WRONG,
         r"'layer.\*' is used for no leaf.* The paths are layers\[\*\].weight"),
        (lambda: by_rules("**", P(), ("**.bias", P("model"))), WRONG,
         r"'\*\*.bias' is used for no leaf.*put special rules before general ones"),
        (lambda: by_rules("layers[1].*", P("model")), WRONG,
         r"the rule for 'layers\[1\].\*' gave .* for layers\[1\].weight of shape"
         r" \(3, 64\): axis 0 of size 3 is not divisible by 2"),
        (lambda: by_rules("layers[0].bias", P(None, "model")), WRONG,
         r"for layers\[0\].bias of shape \(64,\): it must be .* one entry for each"),
        (lambda: TensorParallel({"data": 2, "fsdp": 4}), ValueError,
         'has no axis "fsdp". Name "data" in the rules'),
    ],
}  # fmt: skip


@each_refused(REFUSED)
def test_what_can_not_be_is_refused(provoke, error, words):
    with pytest.raises(error, match=words):
        provoke()


@pytest.mark.parametrize("text", [
    "SingleDevice()",
    "Sharded(8)",
    "Sharded(mesh=jax.make_mesh((4, 2), ('data', 'model')))",
    "Pmap(4)",
    "ZeRO(devices=4, min_size=9)",
    "FSDP(8, gather=('blocks[*]',), groups=2)",
    "TensorParallel({'data': 4, 'model': 2}, rules=[('a.*', P('model', None))])",
    "jaxdp.Pipeline(4, 2, devices=8)",
    "jaxdp.LocalSGD(every=4, devices=8)",
    "jaxdp.Members(8)",
    "jaxdp.SequenceParallel({'data': 2, 'seq': 4}, fsdp=True)",
    "jaxdp.Bitwise(Sharded(2))",
])  # fmt: skip
def test_the_repr_of_a_strategy_can_be_typed(text):
    assert repr(eval(text)) == text.removeprefix("jaxdp.")


def test_the_repr_of_a_part_names_its_functions():
    part = jaxdp.Part("critic", optax.l2_loss, optax.adam(1e-3), every=3)
    assert repr(part) == "Part('critic', l2_loss, ..., every=3)"
