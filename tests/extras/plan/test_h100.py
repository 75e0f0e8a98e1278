"""Tests of the programs that XLA makes for H100s, which this machine lacks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned import installed
from toys import make_small

from jaxdp import FSDP, SingleDevice, Stack, Trainer
from jaxdp.engine.xla_options import DETERMINISTIC
from jaxdp.extras.plan.planner import make_topology_devices

pytestmark = [
    # A compiler without its devices can't take up what it compiled before.
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation"),
    pytest.mark.skipif(
        not installed("jax_cuda12_plugin", "nvidia"), reason="no GPU compiler"
    ),
]


def compiled_for_h100(model, data, folder, **options):
    """The machine code, as PTX, of the three kinds of steps."""
    trainer = make_small(model, loss="cross_entropy", **options)
    run, config = trainer.run, trainer.run.config
    config.compiler_options |= {"xla_dump_to": str(folder)}
    there = SingleDevice().on(make_topology_devices("h100x1").devices)
    engine = config.replace(strategy=there).make_engine(run.hooks, abstract=True)
    if engine.step_functions.objective is None:
        engine.replace_step_functions(objective=config.make_objective(data))
    dispatch = engine.compiled_steps["train"].packer.pack([[data]])
    engine.get_program("train", dispatch)
    engine.prepare_evaluation("evaluate", data)
    engine.prepare_evaluation("predict", data[0])
    code = {}
    for kind in ("train", "evaluate", "predict"):
        files = [*folder.glob(f"*.jit_{kind}.*.ptx")]
        assert files
        code[kind] = "\n".join(path.read_text() for path in files)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "32-highest"])
def test_products_in_float32_use_no_tf32(precision, tmp_path):
    model = eqx.nn.MLP(64, 16, 64, 2, key=jax.random.key(0))
    data = np.zeros((64, 64), np.float32), np.zeros(64, np.int32)
    found = compiled_for_h100(model, data, tmp_path, precision=precision)
    for code in found.values():
        assert ("tf32" in code) == (precision == "32-true")
        assert precision == "32-true" or "fma.rn.f32" in code


class Reads(eqx.Module):
    """An embedding, a max-pool over its words, and a layer."""

    embedding: eqx.nn.Embedding
    last: eqx.nn.Linear

    def __call__(self, words):
        pool = eqx.nn.MaxPool2d(3, 2)
        return self.last(pool(jax.vmap(self.embedding)(words)[None]).ravel())


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", [None, "run"])
def test_repeatable_runs_add_nothing_atomically(reproducible, tmp_path):
    keys = jax.random.split(jax.random.key(0))
    embedding = eqx.nn.Embedding(100, 32, key=keys[0])
    model = Reads(embedding, eqx.nn.Linear(105, 10, key=keys[1]))
    data = np.zeros((64, 16), np.int32), np.zeros(64, np.int32)
    found = compiled_for_h100(model, data, tmp_path, reproducible=reproducible)
    assert ("atom." in found["train"]) == (reproducible is None)
    options = make_small(reproducible=reproducible).run.config.compiler_options
    assert reproducible is None or DETERMINISTIC.items() <= options.items()


TOKENS = 512


class Block(eqx.Module):
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, key):
        sizes = (1, 3), (1, 1), (1, 4), (4, 1)
        self.qkv, self.out, self.up, self.down = (
            eqx.nn.Linear(a * width, b * width, use_bias=False, key=k)
            for (a, b), k in zip(sizes, jax.random.split(key, 4), strict=True)
        )

    def __call__(self, x):
        parts = jnp.split(jax.vmap(self.qkv)(x), 3, axis=-1)
        heads = (part.reshape(TOKENS, 8, -1) for part in parts)
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + jax.vmap(self.out)(mixed.reshape(x.shape))
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


def planned(width, blocks, gather="auto", loss_fn=None, **options):
    """The plan of a transformer made of shapes, recomputed and gathered by block."""

    def make_model():
        keys = jax.random.split(jax.random.key(0), blocks)
        return {"blocks": Stack([Block(width, key) for key in keys])}

    trainer = Trainer(
        eqx.filter_eval_shape(make_model),
        strategy=FSDP(gather=gather),
        precision="bf16-mixed",
        remat="blocks.stacked",
        loss_fn=loss_fn or of_rows,
        **options,
    )
    batch = np.zeros((16, TOKENS, width), np.float32)
    return trainer.plan([(batch, batch)], topology="h100x8")


def of_rows(model, x, y):
    return ((jax.vmap(model["blocks"])(x) - y) ** 2).mean(axis=(1, 2))


def scalar(model, x, y):
    return of_rows(model, x, y).mean()


def penalized(model, x, y):
    weights = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    squares = [jnp.sum(weight.astype(jnp.float32) ** 2) for weight in weights]
    return of_rows(model, x, y) + 1e-4 * sum(squares)


def test_an_effort_level_hides_the_gathering_of_blocks_behind_matrix_products():
    def hidden(options):
        """Which part of the bytes of parameters matrix products hide."""
        traffic = planned(1024, 8, compiler_options=options).traffic
        of_blocks = [each for each in traffic if "parameters" in each.part]
        sent = sum(each.wire_bytes for each in of_blocks)
        return sum(each.wire_bytes for each in of_blocks if each.hidden) / sent

    with_level = hidden("O1")
    assert with_level >= 0.5
    assert with_level > hidden(None)


def test_thirteen_billion_parameters_fit_on_eight_cards():
    memory = planned(5120, 42).memory
    parameters = 8 * memory.parameters / 4  # a share of float32 each
    assert parameters > 13e9
    assert memory.peak < 60e9
    assert memory.temporary < 2 * parameters  # what they take whole, in bfloat16


@pytest.mark.parametrize("loss_fn", [scalar, penalized])
def test_blocks_are_gathered_by_xla_where_rows_interact_or_weights_are_read(loss_fn):
    apart = planned(1024, 16)
    by_blocks = planned(1024, 16, loss_fn=loss_fn)
    once = planned(1024, 16, gather="once", loss_fn=loss_fn)
    assert by_blocks.memory.temporary <= 1.1 * apart.memory.temporary
    assert by_blocks.memory.temporary < 0.5 * once.memory.temporary
    assert by_blocks.wire_bytes <= once.wire_bytes
    assert by_blocks.wire_bytes == pytest.approx(apart.wire_bytes, rel=1e-6)
