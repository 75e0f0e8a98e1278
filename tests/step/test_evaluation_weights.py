"""Which weights are evaluated, handed out and saved as such."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import ScheduleFreeState, schedule_free_eval_params
from toys import arrays, assert_close, batches, mlp, quiet

from jaxdp import FSDP, Part, Sharded, SingleDevice, Trainer, load_model
from jaxdp.callbacks import WeightAveraging

DATA = batches(16, 16, 16, 5)


def train(optimizer, model=None, steps=3, **options):
    options["loss"] = None if isinstance(optimizer, list) else "cross_entropy"
    trainer = quiet(mlp() if model is None else model, optimizer, **options)
    trainer.fit(DATA, max_steps=steps)
    return trainer


def node_of(kind, state):
    is_kind = lambda node: isinstance(node, kind)  # noqa: E731
    return next(filter(is_kind, jax.tree.leaves(state, is_leaf=is_kind)))


FREE = optax.contrib.schedule_free_adamw(3e-2)


@pytest.mark.parametrize("strategy", [SingleDevice, Sharded, FSDP])
@pytest.mark.parametrize(
    "options", [{}, {"offload": "optimizer"}, {"gradient_clip_val": 1.0}]
)
def test_schedule_free_weights_are_those_that_optax_evaluates(
    strategy, options, tmp_path
):
    trainer = train(FREE, strategy=strategy(), **options)
    state = trainer.state
    node = jax.device_get(node_of(ScheduleFreeState, state.opt_state))
    trained = jax.device_get(state.params)
    expected = jax.tree.leaves(schedule_free_eval_params(node, trained))
    assert (
        max(np.abs(a - b).max() for a, b in zip(expected, arrays(trained), strict=True))
        > 1e-3
    )
    assert_close(arrays(trainer.model), expected)
    assert_close(arrays(load_model(trainer.save(tmp_path / "a"), mlp())), expected)

    # A validation is of these weights, too.
    by_hand = Trainer(
        trainer.model, loss="cross_entropy", strategy=SingleDevice()
    ).validate(DATA)
    assert trainer.validate(DATA)["val_loss"] == pytest.approx(by_hand["val_loss"])


def test_those_of_one_group_of_parameters_are_its_own():
    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "free" if path[1].idx == 0 else "a", params
        )

    optimizer = optax.partition({"free": FREE, "a": optax.adam(3e-2)}, labels)
    trainer = train(optimizer)
    first, *others = zip(trainer.model.layers, trainer.state.params.layers, strict=True)
    assert not jnp.allclose(first[0].weight, first[1].weight, atol=1e-4)
    for handed_out, trained in others:
        assert (handed_out.weight == trained.weight).all()


def test_those_of_a_part_are_its_own():
    def loss_fn(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y)

    parts = [
        Part("layers[0]", loss_fn, FREE, name="first"),
        Part("layers[1]", loss_fn, optax.adam(3e-2), name="second"),
    ]
    trainer = train(parts)
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
