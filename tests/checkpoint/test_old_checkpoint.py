"""A checkpoint written before the package had rooms is gone on from as if it were new.

`python tests/checkpoint/test_old_checkpoint.py FOLDER` writes one, with `tests` in
PYTHONPATH. `old_checkpoint/5` was written by jaxdp 0.1.0 at commit c804c84, with jax
0.10.2.
"""

import os
import pathlib
import shutil
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
import pytest
from toys import Mlp, batches

from jaxdp import SingleDevice, Trainer
from jaxdp.callbacks import EarlyStopping, NanGuard, ReduceLROnPlateau, WeightAveraging
from jaxdp.checkpoint import changed_arguments
from jaxdp.fit.snapshot import described

KEPT = pathlib.Path(__file__).parent / "old_checkpoint"
TRAIN, VALID = batches(8, 8, 5), batches(8, 3)


def make_trainer(**options):
    return Trainer(
        Mlp(jax.random.key(0)),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
        strategy=SingleDevice(),
        metrics=["accuracy"],
        callbacks=[
            EarlyStopping("val_loss", patience=9),
            ReduceLROnPlateau("val_loss", patience=9),
            NanGuard(),
            WeightAveraging(0.5),
        ],
        enable_progress_bar=False,
        **{"seed": 3, **options},
    )


def test_an_old_checkpoint_is_gone_on_from_inside_its_epoch(tmp_path):
    unbroken = make_trainer()
    expected = unbroken.fit(TRAIN, VALID, max_epochs=3)

    shutil.copytree(KEPT / "5", tmp_path / "5")
    resumed = make_trainer()
    resumed.load(tmp_path / "5")
    assert (resumed.global_step, resumed.current_epoch) == (5, 1)
    history = resumed.fit(TRAIN, VALID, max_epochs=3)

    assert history.epochs == expected.epochs == [0, 1, 2]
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)
    for got, wanted in zip(
        jax.tree.leaves(resumed.state.params),
        jax.tree.leaves(unbroken.state.params),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_another_seed_than_that_of_an_old_checkpoint_is_told(caplog):
    make_trainer().load(KEPT / "5")
    assert "other arguments" not in caplog.text
    make_trainer(seed=4).load(KEPT / "5")
    assert "`seed` was 3, and is 4" in caplog.text


@pytest.mark.parametrize("options", [None, {"xla_cpu_enable_fast_min_max": True}])
def test_what_checkpoints_had_by_itself_is_compared_with_arguments(options):
    now = described(make_trainer(compiler_options=options).run.recipe, ())
    apart = {
        "seed": 3,
        "compiler_options": {n: str(v) for n, v in (options or {}).items()},
    }
    then = {name: text for name, text in now.items() if name not in apart}
    assert changed_arguments({"arguments": then, **apart}, now) == []
    changed = changed_arguments({"arguments": then, **apart, "seed": 5}, now)
    assert changed == ["  `seed` was 5, and is 3"]


if __name__ == "__main__":
    writing = make_trainer()
    writing.fit(TRAIN, VALID, max_steps=5)
    writing.save(pathlib.Path(sys.argv[1]) / "5")
