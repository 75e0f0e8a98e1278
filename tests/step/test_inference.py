"""`trainer.inference_model()`: a callable of one example."""

import copy

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, batches, mlp, quiet, rows

import jaxdp
from jaxdp import FSDP, SingleDevice
from jaxdp.callbacks import WeightAveraging

KEYS = jax.random.split(jax.random.key(0), 3)


def norm_net(over=lambda make: make, key=KEYS[0]):
    model, state = over(eqx.nn.make_with_state(NormNet))(key)
    return {"model": model, "state": state}


KINDS = {
    "plain": lambda: {"model": mlp()},
    "dropout": lambda: {"model": Mlp(KEYS[0])},
    "BatchNorm": norm_net,
    "average": lambda: norm_net() | {"callbacks": [WeightAveraging(0.9)]},
    "ensemble": lambda: {"model": eqx.filter_vmap(Mlp)(KEYS), "ensemble": 3},
    "ensemble of BatchNorm": lambda: norm_net(eqx.filter_vmap, KEYS) | {"ensemble": 3},
    "split": lambda: norm_net() | {"strategy": FSDP(min_size=1)},
}


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
        jitted = eqx.filter_jit(lambda infer, x: jax.vmap(infer)(x))
        found = [(jax.vmap(infer)(x), wanted), (infer(x[0]), wanted[0])]
        found.append((jitted(infer, x), wanted))
        if "ensemble" in options:
            of_member = trainer.inference_model(member=1)
            found.append((jax.vmap(of_member)(x), wanted[:, 1]))
        for one, other in found:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        trainer.fit(batches(8, 8, 8), max_epochs=trainer.current_epoch + 1)
    assert not np.allclose(before, wanted)
    np.testing.assert_array_equal(jax.vmap(earlier)(x), before)  # steps leave it alone

    # It can be copied, and saved as any model.
    infer = trainer.inference_model()
    jaxdp.save_model(tmp_path / "model.eqx", infer)
    again = jaxdp.load_model(tmp_path / "model.eqx", like=copy.deepcopy(infer))
    np.testing.assert_array_equal(again(x[0]), infer(x[0]))
