"""`trainer.inference_model()`: a callable of one example."""

import copy

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, batches, quiet, rows

import jaxdp
from jaxdp import FSDP, SingleDevice
from jaxdp.callbacks import WeightAveraging

KEYS = jax.random.split(jax.random.key(0), 3)
KINDS = {
    "plain": lambda: dict(model=eqx.nn.MLP(4, 3, 8, 1, key=KEYS[0])),
    "dropout": lambda: dict(model=Mlp(KEYS[0])),
    "BatchNorm": lambda: with_state(eqx.nn.make_with_state(NormNet)(KEYS[0])),
    "average": lambda: (
        with_state(eqx.nn.make_with_state(NormNet)(KEYS[0]))
        | dict(callbacks=[WeightAveraging(0.9)])
    ),
    "ensemble": lambda: dict(model=eqx.filter_vmap(Mlp)(KEYS), ensemble=3),
    "ensemble of BatchNorm": lambda: (
        dict(ensemble=3)
        | with_state(eqx.filter_vmap(eqx.nn.make_with_state(NormNet))(KEYS))
    ),
    "split": lambda: (
        with_state(eqx.nn.make_with_state(NormNet)(KEYS[0]))
        | dict(strategy=FSDP(min_size=1))
    ),
}


def with_state(made):
    return dict(zip(("model", "state"), made, strict=True))


@pytest.mark.slow_cases("ensemble of BatchNorm", "average")
@pytest.mark.parametrize("kind", KINDS)
def test_it_predicts_as_predict_does_before_and_after_a_fit(kind, tmp_path):
    options = {"strategy": SingleDevice(), "loss": "cross_entropy"} | KINDS[kind]()
    trainer = quiet(options.pop("model"), optax.adam(1e-2), **options)
    x = rows(5, seed=3)[0]
    earlier = trainer.inference_model()
    before = np.asarray(jax.vmap(earlier)(x))
    for _ in range(2):
        infer, wanted = trainer.inference_model(), trainer.predict([x])
        found = jax.vmap(infer)(x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(infer(x[0]), wanted[0], rtol=1e-5, atol=1e-6)
        jitted = eqx.filter_jit(lambda infer, x: jax.vmap(infer)(x))
        np.testing.assert_allclose(jitted(infer, x), wanted, rtol=1e-5, atol=1e-6)
        if trainer.run.config.ensemble is not None:
            one = jax.vmap(trainer.inference_model(member=1))(x)
            np.testing.assert_allclose(one, wanted[:, 1], rtol=1e-5, atol=1e-6)
        trainer.fit(batches(8, 8, 8), max_epochs=trainer.current_epoch + 1)
    assert not np.allclose(before, wanted)
    np.testing.assert_array_equal(jax.vmap(earlier)(x), before)  # steps leave it alone

    # It can be copied, and saved as any model.
    infer = trainer.inference_model()
    jaxdp.save_model(tmp_path / "model.eqx", infer)
    again = jaxdp.load_model(tmp_path / "model.eqx", like=copy.deepcopy(infer))
    np.testing.assert_array_equal(again(x[0]), infer(x[0]))
