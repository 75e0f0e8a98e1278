"""Each refusal of a strategy is an error that says what to do."""

import equinox as eqx
import jax
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from toys import Deep, NormNet, batches, linear, make_small

import jaxdp
from jaxdp import (
    FSDP,
    Bitwise,
    DataParallel,
    LocalSGD,
    Pipeline,
    Pmap,
    Sharded,
    SingleDevice,
    TensorParallel,
    ZeRO,
)


class Own(DataParallel):
    """A strategy that has its own way with everything."""

    def place(self, state):
        return state


class Unnamed(Own):
    """An engine with a mesh, and no name of the axis that rows are split over."""

    def __init__(self):
        self.mesh = mesh("all")


def subclass(base, **members):
    return type("Mine", (base,), members)


def without_init(base):
    return lambda: fit(subclass(base, __init__=lambda self: None)())()


class Splitting(Sharded):
    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def param_spec(self, path, leaf):
        return PartitionSpec(self.axis)


def fit(strategy, model=None, optimizer=None, **options):
    optimizer = optimizer or optax.sgd(0.1)
    options |= {"loss": "cross_entropy", "optimizer": optimizer, "strategy": strategy}
    return lambda: make_small(model, **options).fit(batches(16))


def by_rules(pattern, spec, *more):
    model = eqx.nn.MLP(4, 3, 64, 1, key=jax.random.key(0))
    rules = [(pattern, spec), *more]
    return lambda: fit(TensorParallel({"data": 4, "model": 2}, rules), model)()


def with_state(strategy):
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(0))
    return fit(strategy, model, state=state)


def mesh(name, devices=2):
    return jax.make_mesh((devices,), (name,), (AxisType.Auto,))


P = PartitionSpec

REFUSED = {
    "devices": [
        (lambda: Sharded(9), "`devices`: 9 asked for, but there are 8"),
        (lambda: Pmap(9), "`devices`: 9 asked for, but there are 8"),
        (lambda: LocalSGD(4, devices=99), "`devices`: 99 asked for"),
        (lambda: Sharded(["cpu:0"]), r"list of jax\.Device .*'cpu:0'"),
        (lambda: SingleDevice("cpu:0"), "must be a jax.Device.*'cpu:0'"),
        (lambda: Pmap(jax.devices()[:1] * 2), "names a device twice"),
        (lambda: Sharded(2, mesh=mesh("data")), "a mesh has its devices already"),
        (lambda: Sharded(mesh=mesh("x")), "none is named 'data'"),
        (lambda: FSDP(mesh=mesh("data", 8), groups=2),
         "`groups` and `mesh` were both given"),
    ],
    "layouts": [
        (fit(Splitting("data"), linear()),
         r"weight of shape \(3, 4\): axis 0 of size 3"),
        (fit(Splitting("model")),
         "`param_spec` gave P.'model',. .*has the axes .'data',. only"),
        (fit(subclass(Sharded, update_spec=lambda self, path, leaf: P("model"))()),
         "`update_spec` gave P.'model',. .*has the axes .'data',. only"),
        (fit(Unnamed()), "Unnamed has `row_axes` .'data'.*axes .'all'"),
        (lambda: make_small(offload="parameters"),
         "`offload` must be one of 'optimizer', None"),
        (lambda: make_small(offload="optimizer", strategy=Own()),
         "`offload`='optimizer' needs a strategy with a mesh"),
    ],
    "methods": [
        *[(without_init(base), "`Mine` has no `mesh`: call `super.*or set `mesh`")
          for base in (DataParallel, Sharded, FSDP, TensorParallel, LocalSGD)],
        (fit(subclass(Sharded, __init__=lambda self: None,
                      prepare=lambda self, arguments: arguments)()),
         "`Mine` has no `mesh`: call `super"),
        *[(fit(subclass(base, **{name: method})()), rf"`Mine.{name}` .*`def {write}")
          for base, name, method, write in [
            (Sharded, "param_spec", lambda self, path: P(),
             r"param_spec\(self, path, leaf\)`"),
            (FSDP, "update_spec", lambda self, leaf: P(),
             r"update_spec\(self, path, leaf\)`"),
            (Sharded, "batch_spec", lambda self, path, leaf: P(),
             r"batch_spec\(self, leaf\)`"),
            (Sharded, "param_spec", P("data"), r"param_spec\(self, path, leaf\)`"),
            (SingleDevice, "compile", lambda self, step, arguments, roles, results: 0,
             r"compile\(self, step, arguments, roles, results, \*, donate="),
        ]],
    ],
    "FSDP and ZeRO": [
        (lambda: ZeRO(stage=4), r"`stage` must be 1; got 4.*use FSDP\(\)"),
        (lambda: FSDP(min_size=-1), "`min_size` must be 0 or more .elements"),
        (lambda: FSDP(gather="twice"), "`gather` must be 'auto', 'once', or a list"),
        (lambda: FSDP(gather=[]), "`gather` must be 'auto'"),
        (lambda: FSDP(gather=[3]), "`gather` must be 'auto'"),
        (lambda: FSDP(groups=3), "8 devices can't be divided into 3 groups"),
        (lambda: FSDP(groups=0), "`groups` must be"),
        (fit(FSDP(gather=["layer"])), "`gather`: 'layer' matches no submodule"),
    ],
    "LocalSGD": [
        (lambda: LocalSGD(0), "`every` must be 1 or more"),
        (lambda: LocalSGD(2.5), "`every` must be an int"),
        (lambda: LocalSGD(4, 0.7), r"`outer` must be an optax.*got 0\.7"),
        (with_state(LocalSGD(2)), r"LocalSGD.*eqx\.nn\.State.*LayerNorm"),
        (fit(LocalSGD(2), None, optax.lbfgs()), "`optimizer` evaluates the loss"),
    ],
    "Bitwise": [
        (lambda: Bitwise(LocalSGD(2)),
         r"`strategy`: Bitwise needs the state whole.*LocalSGD"),
        (lambda: Bitwise(Sharded(3)), r"the 3 devices of Sharded.* do not divide 8"),
        (lambda: Bitwise(FSDP()), r"needs the state whole on every device"),
        (lambda: make_small(reproducible=True),
         r"`reproducible` must be one of 'run', None"),
    ],
    "Pipeline": [
        (lambda: Pipeline(3, 2), "`stages`: 3 do not divide the 8 devices"),
        (lambda: Pipeline(2, 0), "`microbatches` must be 1 or more; got 0"),
        (fit(Pipeline(4, 2)), r"blocks of a jaxdp\.Stack, but the model ha"),
        (fit(Pipeline(4, 2), Deep(6)), "4 stages .* do not divide the 6 blocks of b"),
    ],
    "TensorParallel": [
        (lambda: TensorParallel({"data": 4, "model": 3}),
         r"4 x 3 = 12 devices, and there are 8.*=12"),
        (lambda: TensorParallel({"x": 4, "model": 2}), "with 'data', which rows"),
        (lambda: TensorParallel({"data": 8, "model": -1}),
         "`mesh_shape: model` must be 1 or more; got -1"),
        (lambda: TensorParallel((4, 2)), "`mesh_shape` must be a dict"),
        (by_rules("layers[0].weight", P("rows")),
         "the mesh has the axes .'data', 'model'. only"),
        (by_rules("layers[0].weight", "model"),
         "must be .path pattern, PartitionSpec. pairs"),
        (by_rules("layer.*", P("model")),
         r"'layer.\*' is used for no leaf.* The paths are layers\[\*\].weight"),
        (by_rules("**", P(), ("**.bias", P("model"))),
         r"'\*\*.bias' is used for no leaf.*put special rules before general ones"),
        (by_rules("layers[1].*", P("model")),
         r"the rule for 'layers\[1\].\*' gave .* for layers\[1\].weight of shape"
         r" \(3, 64\): axis 0 of size 3 is not divisible by 2"),
        (by_rules("layers[0].bias", P(None, "model")),
         r"for layers\[0\].bias of shape \(64,\): it must be .* one entry for each"),
        (lambda: TensorParallel({"data": 2, "fsdp": 4}),
         'has no axis "fsdp". Name "data" in the rules'),
    ],
}  # fmt: skip


@pytest.mark.parametrize("provoke, words", sum(REFUSED.values(), []))
def test_what_can_not_be_is_refused(provoke, words):
    with pytest.raises((ValueError, TypeError), match=words):
        provoke()


@pytest.mark.parametrize("base, name, meant", [
    (Sharded, "param_specs", "param_spec"),
    (FSDP, "params_spec", "param_spec"),
    (SingleDevice, "parma_spec", "param_spec"),
    (Sharded, "batchSpec", "batch_spec"),
    (FSDP, "upadte_spec", "update_spec"),
    (Sharded, "colectives", "collectives"),
])  # fmt: skip
def test_a_misspelt_method_warns(base, name, meant):
    text = rf"`Mine.{name}` is no method of a strategy.*`{meant}\(self"
    with pytest.warns(UserWarning, match=text):
        make_small(strategy=subclass(base, **{name: lambda self, *_: P()})())


def test_other_methods_and_names_of_arguments_are_left_alone():
    names = "placed compiled prepared row_spec batch_size find_spec spec_of collect"
    members = {name: lambda self: 0 for name in names.split()}
    members["param_spec"] = members["param_specs"] = lambda self, name, array: P()
    members["batch_spec"] = lambda self, *leaf: P("data")
    make_small(strategy=subclass(Sharded, **members)())


@pytest.mark.parametrize("members", [
    {"prepare": lambda self, arguments: arguments | {"strategy": SingleDevice()}},
    {"place": SingleDevice().place, "compile": SingleDevice().compile},
])  # fmt: skip
def test_a_mesh_may_come_later_or_not_be_needed(members):
    make_small(strategy=subclass(DataParallel, **members)())


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
