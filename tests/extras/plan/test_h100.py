"""Tests of the programs that XLA makes for an H100, which this machine lacks."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from planned import installed

from jaxdp import SingleDevice, Trainer
from jaxdp.engine.xla_options import DETERMINISTIC
from jaxdp.extras.plan.planner import make_topology_devices

pytestmark = [
    pytest.mark.slow,
    # A compiler without its devices can't take up what it compiled before.
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation"),
    pytest.mark.skipif(
        not installed("jax_cuda12_plugin", "nvidia"), reason="no GPU compiler"
    ),
]


def make_engine(trainer, strategy):
    run = trainer.run
    there = run.config.replace(strategy=strategy)
    return there.make_engine(run.hooks, abstract=True)


def compiled_for_h100(trainer, data, folder):
    """The machine code, as PTX, of the three kinds of steps."""
    trainer.run.config.compiler_options |= {"xla_dump_to": str(folder)}
    there = SingleDevice().on(make_topology_devices("h100x1").devices)
    engine = make_engine(trainer, there)
    if engine.pure.objective is None:
        engine.replace_pure(objective=trainer.run.config.make_objective(data))
    dispatch = engine.steps["train"].packer.pack([[data]])
    engine.get_program("train", dispatch)
    engine.prepare_evaluation("evaluate", data)
    engine.prepare_evaluation("predict", data[0])
    code = {}
    for kind in ("train", "evaluate", "predict"):
        files = [*folder.glob(f"*.jit_{kind}.*.ptx")]
        assert files
        code[kind] = "\n".join(path.read_text() for path in files)
    return code


def mlp_and_batch():
    model = eqx.nn.MLP(64, 16, 64, 2, key=jax.random.key(0))
    return model, (np.zeros((64, 64), np.float32), np.zeros(64, np.int32))


@pytest.mark.parametrize("precision", ["32-true", "32-highest"])
def test_products_in_float32_use_no_tf32(precision, tmp_path):
    model, data = mlp_and_batch()
    options = {"precision": precision, "enable_progress_bar": False}
    trainer = Trainer(model, strategy=SingleDevice(), loss="cross_entropy", **options)
    for code in compiled_for_h100(trainer, data, tmp_path).values():
        assert ("tf32" in code) == (precision == "32-true")
        assert precision == "32-true" or "fma.rn.f32" in code


class Reads(eqx.Module):
    """An embedding, a max-pool over its words, and a layer."""

    embedding: eqx.nn.Embedding
    pool: eqx.nn.MaxPool2d
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.embedding = eqx.nn.Embedding(100, 32, key=keys[0])
        self.pool = eqx.nn.MaxPool2d(3, 2)
        self.last = eqx.nn.Linear(105, 10, key=keys[1])

    def __call__(self, words):
        return self.last(self.pool(jax.vmap(self.embedding)(words)[None]).ravel())


@pytest.mark.parametrize("reproducible", [None, "run"])
def test_repeatable_runs_add_nothing_atomically(reproducible, tmp_path):
    data = np.zeros((64, 16), np.int32), np.zeros(64, np.int32)
    trainer = Trainer(
        Reads(jax.random.key(0)),
        optax.adam(1e-3),
        loss="cross_entropy",
        reproducible=reproducible,
        enable_progress_bar=False,
    )
    code = compiled_for_h100(trainer, data, tmp_path)["train"]
    assert ("atom." in code) == (reproducible is None)
    assert DETERMINISTIC.items() <= trainer.run.config.compiler_options.items() or (
        reproducible is None
    )
