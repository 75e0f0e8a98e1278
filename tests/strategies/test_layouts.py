"""Memory split over devices: one device's numbers, at the least bytes there are."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from layered_models import bytes_moved, make, on_one_device, resident, size, train
from toys import Mlp, assert_close, batches, cross_entropy, mlp

from jaxdp import FSDP, Sharded, SingleDevice, TensorParallel, Trainer, ZeRO
from jaxdp.extras.plan import hlo
from jaxdp.strategies import find_layouts, tensor_rules

SPLIT = [ZeRO, FSDP]


@pytest.mark.slow_but("mlp-3-Sharded", "mlp-3-FSDP", "gru-1-FSDP")
@pytest.mark.parametrize("strategy", [Sharded, ZeRO, FSDP])
@pytest.mark.parametrize("name, accumulate", [
    ("mlp", 1),
    ("mlp", 3),
    ("gru", 1),
    pytest.param("transformer", 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_least_bytes_are_moved_and_held(name, strategy, accumulate):
    """The ring's floor for a sum of gradients that everyone needs, or its two halves.

    An accumulating step moves no more than one that does not, nor does a loop in the
    model, whose gradients XLA by itself would reduce in every turn.
    """
    model, data = make(name)
    trainer, losses = train(model, data, strategy(), accumulate_grad_batches=accumulate)
    np.testing.assert_allclose(losses, on_one_device(name, accumulate), rtol=1e-5)
    state = trainer.state
    floor = 2 * 7 / 8 * size(state.params)
    moved, by_kind = bytes_moved(trainer)
    # What is more than the gradients: the sums of the loss.
    assert floor <= moved <= floor + 100
    program = hlo.read(trainer.compiled_train_step().as_text())
    reduces = [each for each in program.collectives if each.kind == "all-reduce"]
    assert len(reduces) == 1
    if strategy is Sharded:
        assert set(by_kind) == {"all-reduce"}
    else:
        assert set(by_kind) == {"all-reduce", "reduce-scatter", "all-gather"}
        assert by_kind["all-reduce"] < 0.01 * floor  # leaves that do not divide
        assert resident(state.opt_state) <= 1.05 * size(state.opt_state) / 8
    if strategy is FSDP:
        both = state.params, state.opt_state
        assert resident(both) <= 1.05 * size(both) / 8
    memory = trainer.compiled_train_step().memory_analysis()
    assert memory.alias_size_in_bytes == resident(state)


@pytest.mark.slow_cases("ZeRO")
@pytest.mark.parametrize("strategy", SPLIT)
def test_where_rows_interact_numbers_stay_and_bytes_are_known(strategy):
    """XLA on the CPU does not turn an all-reduce and slices into a reduce-scatter."""
    (model, data), options = make("mlp"), {"loss_fn": cross_entropy}
    expected = train(model, data, SingleDevice(), **options)[1]
    trainer, losses = train(model, data, strategy(), **options)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    state = trainer.state
    assert bytes_moved(trainer)[0] <= 1.51 * 2 * 7 / 8 * size(state.params)
    assert resident(state.opt_state) <= 1.05 * size(state.opt_state) / 8


def normal_noise(model, x, y, key):
    """Draws once for the whole batch."""
    logits = jax.vmap(model)(x + 0.3 * jax.random.normal(key, x.shape))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SPLIT)
@pytest.mark.parametrize("drawn", ["dropout", "noise"])
def test_what_rbg_draws_is_that_of_one_device(strategy, drawn):
    """It draws other numbers for other shapes."""
    data = batches(16, 16, 5)
    with jax.default_prng_impl("rbg"):
        model = Mlp(jax.random.key(0)) if drawn == "dropout" else mlp()
        how = {} if drawn == "dropout" else {"loss_fn": normal_noise}
        runs = [train(model, data, s, **how) for s in (SingleDevice(), strategy())]
        np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-5)
        validated = [trainer.validate(data)["val_loss"] for trainer, _ in runs]
        np.testing.assert_allclose(*validated, rtol=1e-5)


def test_layouts_say_how_each_leaf_is_split():
    model = eqx.nn.MLP(4, 3, 64, 1, key=jax.random.key(0))
    trainer, _ = train(model, batches(16), FSDP(min_size=192))
    found = find_layouts(trainer.strategy, trainer.state)
    assert found["params: layers[0].weight"] == PartitionSpec("data")
    assert found["params: layers[0].bias"] == PartitionSpec()  # below min_size
    assert found["params: layers[1].weight"] == PartitionSpec(None, "data")
    of_moment = found["opt_state: [0].mu.layers[1].weight"]
    assert of_moment == PartitionSpec(None, "data")
    assert found["step"] == PartitionSpec()
    shapes = jax.eval_shape(lambda: trainer.state)
    assert find_layouts(trainer.strategy, shapes) == found

    zero = find_layouts(ZeRO(devices=5), trainer.state)
    assert not any(map(any, zero.values()))  # five devices divide no axis
    with_state = TensorParallel({"data": 4, "model": 2}, tensor_rules(model))
    ruled = find_layouts(with_state, trainer.state)
    assert ruled["params: layers[0].bias"] == PartitionSpec("model")
    assert ruled["params: layers[1].bias"] == PartitionSpec()


def test_frozen_leaves_are_split_too_and_stay_as_they_are():
    model = eqx.nn.MLP(4, 3, 64, 2, key=jax.random.key(0))
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda tree: tree.layers[-1].weight, spec, True)
    (_, expected), (trainer, losses) = (
        train(model, batches(16, 5), strategy, filter_spec=spec)
        for strategy in (SingleDevice(), FSDP())
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert trainer.state.buffers.layers[1].weight.sharding.spec == PartitionSpec("data")
    assert_close(trainer.model.layers[1], model.layers[1], 0, 0)


class Splits(Sharded):
    """Splits the array at one path."""

    def __init__(self, path, devices=None):
        super().__init__(devices)
        self.path = path

    def param_spec(self, path, leaf):
        return PartitionSpec("data" if path == self.path else None)


@pytest.mark.parametrize("strategy, says", [
    (Splits("layrs[0].weight"), True),
    (Splits("layers[0].weight"), False),
    (Splits("layrs[0].weight", 1), False),
    (FSDP(min_size=10**6), False),  # as it was asked
    (FSDP(), False),
    (Sharded(), False),
    (ZeRO(), False),
    (SingleDevice(), False),
], ids=repr)  # fmt: skip
def test_a_custom_layout_that_splits_no_array_says_so(strategy, says, caplog):
    Trainer(mlp(), loss="cross_entropy", strategy=strategy).fit(batches(16))
    text = f"`param_spec` of {strategy!r} splits no array"
    assert caplog.text.count(text) == says
    assert ("splits no array" in caplog.text) == says
