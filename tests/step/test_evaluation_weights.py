"""Which weights are evaluated, handed out and saved as such."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import ScheduleFreeState, schedule_free_eval_params
from toys import arrays, assert_close, batches, find_nodes, mlp, quiet

from jaxdp import FSDP, Part, Sharded, SingleDevice, load_model
from jaxdp.callbacks import WeightAveraging

DATA = batches(16, 16, 16, 5)


def train(optimizer, model=None, steps=3, **options):
    options["loss"] = None if isinstance(optimizer, list) else "cross_entropy"
    trainer = quiet(mlp() if model is None else model, optimizer, **options)
    trainer.fit(DATA, max_steps=steps)
    return trainer


FREE = optax.contrib.schedule_free_adamw(3e-2)


@pytest.mark.parametrize("strategy, options", [
    (SingleDevice, {"offload": "optimizer"}),
    (Sharded, {}),
    (FSDP, {"gradient_clip_val": 1.0}),
    (FSDP, {"offload": "optimizer"}),
])  # fmt: skip
def test_schedule_free_weights_are_those_that_optax_evaluates(
    strategy, options, tmp_path
):
    trainer = train(FREE, strategy=strategy(), **options)
    is_node = lambda node: isinstance(node, ScheduleFreeState)  # noqa: E731
    (node,) = find_nodes(is_node, trainer.state.opt_state)
    trained = jax.device_get(trainer.state.params)
    expected = arrays(schedule_free_eval_params(jax.device_get(node), trained))
    differences = map(np.subtract, expected, arrays(trained))
    assert max(np.abs(difference).max() for difference in differences) > 1e-3
    assert_close(arrays(trainer.model), expected)
    assert_close(arrays(load_model(trainer.save(tmp_path / "a"), mlp())), expected)

    # A validation is of these weights, too.
    again = quiet(trainer.model, loss="cross_entropy", strategy=SingleDevice())
    found, val_loss = (each.validate(DATA)["val_loss"] for each in (trainer, again))
    assert found == pytest.approx(val_loss)


def labels(params):
    def label(path, _):
        return "free" if path[1].idx == 0 else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def mean_loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y)


ADAM = optax.adam(3e-2)
OF_FIRST_LAYER = {
    "a group": optax.partition({"free": FREE, "adam": ADAM}, labels),
    "a part": [
        Part("layers[0]", mean_loss, FREE, name="first"),
        Part("layers[1]", mean_loss, ADAM, name="second"),
    ],
}


@pytest.mark.parametrize("optimizer", OF_FIRST_LAYER.values(), ids=OF_FIRST_LAYER)
def test_those_of_one_group_of_parameters_are_its_own(optimizer):
    trainer = train(optimizer)
    first, second = zip(trainer.model.layers, trainer.state.params.layers, strict=True)
    assert not jnp.allclose(first[0].weight, first[1].weight, atol=1e-4)
    assert (second[0].weight == second[1].weight).all()


def test_those_of_an_ensemble_are_each_members():
    keys = jax.random.split(jax.random.key(0), 3)
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 3, 8, 1, key=key))(keys)
    alone = jax.tree.map(lambda x: x[1] if eqx.is_array(x) else x, models)
    together = train(FREE, models, ensemble=3)
    assert_close(arrays(together.member(1)), arrays(train(FREE, alone).model))


def test_an_average_of_a_callback_comes_first():
    trainer = train(FREE, callbacks=[WeightAveraging(0.5)])
    averages = arrays(trainer.model)
    other = train(FREE, callbacks=[WeightAveraging(0.5, evaluate=False)])
    assert_close(arrays(other.model), arrays(train(FREE).model))
    assert not jnp.allclose(averages[0], arrays(other.model)[0], atol=1e-4)
