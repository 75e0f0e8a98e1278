"""Tests of the precision of float32 products, and of the messages about it."""

import types

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from toys import Deep, batches, cross_entropy, mlp, quiet

from jaxdp import FSDP, Part, Pipeline, Pmap, Sharded, SingleDevice
from jaxdp.callbacks.run_metadata import collect_metadata
from jaxdp.extras.plan.products import BY_DEFAULT, count_products
from jaxdp.step import (
    find_precision,
    float32_products,
    has_default_products,
    note_on_products,
)

DATA = batches(16, 16)


def device(platform, kind, **more):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **more)


H100 = device("gpu", "NVIDIA H100 80GB HBM3", compute_capability="9.0")
TPU = device("tpu", "TPU v5 lite")
T4 = device("gpu", "Tesla T4", compute_capability="7.5")


def products_of(trainer):
    """In what the three kinds of steps compute their products."""
    trainer.fit(DATA[:1])
    engine, (x, y) = trainer.run.engine, DATA[0]
    train = engine.compiled_steps["train"].packer.pack([[(x, y)]])
    programs = [engine.get_program("train", train)]
    programs += [
        engine.prepare_evaluation("evaluate", (x, y))[1],
        engine.prepare_evaluation("predict", x)[1],
    ]
    counts = [count_products(one.jaxpr) for one in programs]
    return [{name for name, n in count.items() if n} for count in counts]


PARTS = [Part("layers[0]", cross_entropy, optax.sgd(0.1))]


@pytest.mark.slow_cases("Pmap", "FSDP", "stages")
@pytest.mark.parametrize("options", [
    {"strategy": Sharded()},
    {"strategy": Pmap()},
    {"strategy": FSDP()},
    {"model": Deep(4), "strategy": Pipeline(2, 4, 4), "loss": "cross_entropy"},
    {"optimizer": PARTS, "strategy": SingleDevice()},
], ids=["Sharded", "Pmap", "FSDP", "stages", "parts"])  # fmt: skip
def test_products_are_in_float32_in_every_kind_of_step(options):
    trainer = quiet(**{"model": mlp(), "precision": "32-highest"} | options)
    assert products_of(trainer) == [{"float32"}] * 3
    assert not jax.config.jax_default_matmul_precision


def test_products_are_jax_s_default_unless_somebody_asks():
    assert products_of(quiet(mlp(), strategy=Sharded(2))) == [{BY_DEFAULT}] * 3
    with jax.default_matmul_precision("highest"):
        assert products_of(quiet(mlp(), strategy=Sharded(4))) == [{"float32"}] * 3


@pytest.mark.parametrize("device, name, bits", [
    (H100, "TF32", "10 bits"), (TPU, "bfloat16", "7 bits")
])  # fmt: skip
def test_what_the_default_is_and_how_to_change_it_is_said(device, name, bits):
    default, highest = map(find_precision, ("32-true", "32-highest"))
    note = note_on_products(default, device)
    assert f"computed in {name} here ({bits} of mantissa" in note
    assert device.device_kind in note and 'precision="32-highest"' in note
    assert float32_products(default, device) == name
    for other in (T4, jax.devices()[0]):
        assert note_on_products(default, other) is None

    assert note_on_products(highest, device) is None
    assert float32_products(highest, device) == "float32"
    with jax.default_matmul_precision("default"):
        assert note_on_products(default, device) is None
        assert float32_products(default, device) == "default"


@pytest.mark.parametrize("precision", ["32-true", "32-highest", "bf16-mixed"])
def test_loggers_are_told_and_a_cpu_says_nothing(precision, caplog):
    trainer = quiet(mlp(), strategy=SingleDevice(), precision=precision)
    trainer.fit(DATA)
    program = trainer.run.engine.get_train_program()
    assert has_default_products(program.jaxpr) is (precision == "32-true")
    facts = collect_metadata(trainer, None)["hyperparameters"]
    assert facts["float32_products"] == "float32"
    assert "matrix products" not in caplog.text


def test_flops_of_convolutions_scans_and_branches():
    def flops(function, *shapes):
        arguments = [jnp.zeros(shape) for shape in shapes]
        return count_products(jax.make_jaxpr(function)(*arguments)).total()

    conv = eqx.nn.Conv2d(3, 8, 5, stride=2, groups=1, key=jax.random.key(0))
    assert flops(jax.vmap(conv), (2, 3, 15, 15)) == 2 * 2 * 8 * 6 * 6 * (3 * 5 * 5)
    grouped = eqx.nn.Conv2d(4, 8, 3, groups=2, key=jax.random.key(0))
    assert flops(grouped, (4, 5, 5)) == 2 * 8 * 3 * 3 * (2 * 3 * 3)

    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=7)[0]

    assert flops(scanned, (2, 4), (4, 4)) == 7 * 2 * 2 * 4 * 4

    def branched(x):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x, x)

    assert flops(branched, (4, 4)) == 2 * 4**3
    batched = jax.vmap(lambda a, b: a @ b)
    assert flops(batched, (3, 2, 4), (3, 4, 5)) == 3 * 2 * 2 * 4 * 5
