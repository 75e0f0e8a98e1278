"""A model that is handed over in inference mode is trained so, and it is said once."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, batches, make_small

KEY = jax.random.key(0)


def norm_net():
    return eqx.nn.make_with_state(NormNet)(KEY)


def frozen_part():
    model, state = norm_net()
    return eqx.tree_at(
        lambda m: m.norm, model, eqx.nn.inference_mode(model.norm)
    ), state


@pytest.mark.parametrize("make, listed", [
    (lambda: (eqx.nn.inference_mode(Mlp(KEY)), None), "1 Dropout"),
    (lambda: (eqx.nn.inference_mode(norm_net()[0]), norm_net()[1]), "1 BatchNorm"),
    (frozen_part, "1 BatchNorm"),
    (lambda: (make_small(Mlp(KEY)).inference_model(), None), "1 Dropout"),
    (lambda: (Mlp(KEY), None), None),
    (norm_net, None),
])  # fmt: skip
def test_layers_in_inference_mode_are_named_at_the_first_fit(make, listed, caplog):
    model, state = make()
    trainer = make_small(model, optax.sgd(0.1), state=state, loss="cross_entropy")
    assert "inference mode" not in caplog.text
    trainer.fit(batches(8), max_epochs=1)
    trainer.fit(batches(8), max_epochs=2)
    assert caplog.text.count("are in inference mode") == (listed is not None)
    if listed is not None:
        assert f"stay so in training: {listed} (no dropout" in caplog.text


def test_statistics_move_in_a_frozen_part_unless_it_is_in_inference_mode():
    for make, moves in (norm_net, True), (frozen_part, False):
        model, state = make()
        before = [np.array(leaf) for leaf in jax.tree.leaves(state)]
        trainer = make_small(model, optax.sgd(0.1), state=state, filter_spec=["last"])
        trainer.fit(batches(8))
        after = jax.tree.leaves(trainer.model_state)
        same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
        assert all(same) != moves


@pytest.mark.parametrize(("filter_spec", "share"), [
    (["layers[1]"], "2 of 4 arrays: 36 of 76 parameters"),
    (["**.bias"], "2 of 4 arrays: 12 of 76 parameters"),
    (lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2, "2 of 4 arrays: 64 "),
    (None, None),
])  # fmt: skip
def test_a_fit_says_how_much_a_filter_spec_trains(filter_spec, share, caplog):
    model = eqx.nn.MLP(4, 4, 8, 1, key=KEY)
    options = {} if filter_spec is None else {"filter_spec": filter_spec}
    trainer = make_small(model, optax.sgd(0.1), loss="cross_entropy", **options)
    trainer.fit(batches(8), max_epochs=1)
    trainer.fit(batches(8), max_epochs=2)
    assert caplog.text.count("`filter_spec` trains") == (share is not None)
    assert share is None or f"`filter_spec` trains {share}" in caplog.text
