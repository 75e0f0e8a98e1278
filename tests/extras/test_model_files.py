"""Weights alone: out of checkpoints, into files and back."""

import functools
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Mlp, NormNet, batches, linear, quiet

import jaxdp
from jaxdp.checkpoint import CheckpointCorrupt


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trainer = quiet(
        Mlp(jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        filter_spec=lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2,
    )
    trainer.fit(batches(16, 16))
    return trainer, trainer.save(tmp_path_factory.mktemp("run") / "saved")


def same(a, b):
    return eqx.tree_equal(eqx.filter(a, eqx.is_array), eqx.filter(b, eqx.is_array))


class WithKey(eqx.Module):
    linear: eqx.nn.Linear
    key: jax.Array

    def __init__(self, key):
        self.linear = eqx.nn.Linear(4, 3, key=key)
        self.key = jax.random.clone(key)

    def __call__(self, x):
        return self.linear(x)


def odd(key):
    return {"scale": jax.random.normal(key), "turned": jnp.ones((2, 3)).T}


def make(kind, seed):
    return kind(jax.random.key(seed, impl="rbg" if kind is WithKey else None))


@pytest.mark.parametrize("by_shape", [True, False])
@pytest.mark.parametrize("kind, file", [
    *((kind, file) for kind in (Mlp, WithKey, odd) for file in (
        "saved", "new/model.safetensors")),
    (Mlp, "model.eqx"),
])  # fmt: skip
def test_a_model_comes_back_as_it_was(kind, file, by_shape, tmp_path):
    model, like = make(kind, 0), make(kind, 1)
    path = tmp_path / file
    if file.endswith("safetensors"):
        pytest.importorskip("safetensors")
    if path.suffix:
        assert jaxdp.save_model(path, model) == str(path)
        assert [each.name for each in path.parent.iterdir()] == [path.name]
    else:
        quiet(model, loss_fn=lambda model, x: x.mean()).save(path)
    if path.suffix == ".eqx":  # Equinox's own format, which has no shapes
        assert same(eqx.tree_deserialise_leaves(path, like), model)
    elif by_shape:
        like = eqx.filter_eval_shape(lambda: make(kind, 1))
    assert same(jaxdp.load_model(path, like), model)


class WithLeaf(eqx.Module):
    linear: eqx.nn.Linear
    leaf: Any

    def __call__(self, x):
        return self.linear(x)


LEAVES = [
    np.arange(3), np.arange(3, dtype=np.uint64), np.arange(3.0), np.arange(3) * 1j,
    np.ones(3, np.complex64), np.ones(3, np.float32), np.array([True, False]),
    np.array(2), np.int64(2), np.float64(2), np.bool_(True), 2, 2.5, True, 1j,
]  # fmt: skip


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda x: f"{type(x).__name__} {x!r}")
@pytest.mark.parametrize("file", ["saved", "model.safetensors", "model.eqx"])
def test_leaves_of_numpy_and_python_come_back_as_they_were(leaf, file, tmp_path):
    is_complex128 = getattr(leaf, "dtype", None) == np.complex128
    if file == "model.safetensors" and is_complex128:
        pytest.skip("the format has no complex128")
    like = WithLeaf(linear(4, 3), leaf)
    trainer = quiet(like, loss="mse", filter_spec="linear.**")
    if file == "saved":
        trainer.fit([(np.ones((8, 4), "f4"), np.ones((8, 3), "f4"))])
        path = trainer.save(tmp_path / file)
    else:
        pytest.importorskip("safetensors")
        path = jaxdp.save_model(tmp_path / file, like)
    found = jaxdp.load_model(path, like).leaf
    assert type(found) is type(leaf)
    assert getattr(found, "dtype", None) == getattr(leaf, "dtype", None)
    np.testing.assert_array_equal(found, leaf)
    if file == "saved":
        trained = trainer.model
        assert same(jaxdp.load_model(path, trained), trained)
        other = quiet(like, loss="mse", filter_spec="linear.**")
        other.load(path)
        assert same(other.model, trained)
        more = [(np.ones((8, 4), "f4"), np.ones((8, 3), "f4"))] * 2
        again = quiet(like, loss="mse", filter_spec="linear.**")
        again.fit(more, max_epochs=2, ckpt_path=path)
        np.testing.assert_array_equal(again.model.leaf, leaf)


def test_integers_beyond_32_bits_come_back_from_a_file(tmp_path):
    pytest.importorskip("safetensors")
    model = {"seed": np.array([2**40])}
    path = jaxdp.save_model(tmp_path / "model.safetensors", model)
    assert jaxdp.load_model(path, like=model)["seed"] == 2**40
    with pytest.raises(ValueError, match="seed: the checkpoint has int64.*int32"):
        jaxdp.load_model(path, like={"seed": jnp.zeros(1, int)})


@pytest.mark.parametrize("narrow, wide", [
    ("int8", "int16"), ("int16", "int32"), ("uint8", "uint16"), ("int8", "int64"),
    ("float16", "float32"), ("float32", "float64"), ("complex64", "complex128"),
])  # fmt: skip
def test_wider_numbers_take_narrower_ones(tmp_path, narrow, wide):
    pytest.importorskip("safetensors")
    model, like = {"w": np.ones(2, narrow)}, {"w": np.zeros(2, wide)}
    path = jaxdp.save_model(tmp_path / "model.safetensors", model)
    found = jaxdp.load_model(path, like=like)["w"]
    assert found.dtype == wide and found.tolist() == [1, 1]


def test_wider_floats_take_narrower_ones_and_not_the_other_way(tmp_path):
    pytest.importorskip("safetensors")
    narrow, wide = {"w": jnp.ones(2, jnp.bfloat16) / 3}, {"w": jnp.zeros(2)}
    path = jaxdp.save_model(tmp_path / "narrow.safetensors", narrow)
    found = jaxdp.load_model(path, like=wide)
    assert same(found, {"w": narrow["w"].astype(jnp.float32)})
    for stored, like in (wide, narrow), ({"w": jnp.ones(2, jnp.int8)}, wide):
        path = jaxdp.save_model(tmp_path / "other.safetensors", stored)
        with pytest.raises(ValueError, match="w: the checkpoint has .*, the model "):
            jaxdp.load_model(path, like=like)


def test_part_of_a_model_is_taken_and_the_rest_is_listed(trained, caplog):
    trainer, path = trained
    like = {"first": linear(4, 16), "last": linear(16, 5), "extra": jnp.ones(2)}
    with pytest.raises(ValueError, match="(?s)extra.*nothing.*last.weight.*float32"):
        jaxdp.load_model(path, like=like)
    model = jaxdp.load_model(path, like=like, partial=True)
    assert same(model["first"], trainer.model.first)
    assert same(model["last"], like["last"])
    assert "last.weight: the checkpoint has float32(3, 16)" in caplog.text
    assert "extra: the checkpoint has nothing" in caplog.text


def made(seed=1):
    return eqx.nn.make_with_state(NormNet)(jax.random.key(seed))


@pytest.fixture(scope="module")
def with_state(tmp_path_factory):
    model, state = made(0)
    trainer = quiet(model, loss="cross_entropy", state=state)
    trainer.fit(batches(16, 16))
    return trainer, trainer.save(tmp_path_factory.mktemp("norm") / "saved")


@pytest.mark.parametrize("partial", [False, True])
def test_a_state_is_loaded_where_it_is_asked_for_and_else_warned_of(
    with_state, trained, partial
):
    (trainer, path), (model, state) = with_state, made()
    load = functools.partial(jaxdp.load_model, partial=partial)
    with pytest.warns(UserWarning, match=f"{path} has a model state.*`model, state ="):
        assert same(load(path, model), trainer.model)
    with pytest.raises(ValueError, match="the state as `state`: `model, state ="):
        load(path, made())
    # Neither warns.
    assert same(load(path, model, state=state), (trainer.model, trainer.model_state))
    assert same(load(trained[1], Mlp(jax.random.key(1))), trained[0].model)


@pytest.mark.parametrize("like, state", [
    ({"net": Mlp(jax.random.key(1))}, None),
    (jax.nn.relu, None),
    ({"net": made()[0]}, made()[1]),
])  # fmt: skip
@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_a_model_of_which_nothing_is_found_is_an_error(
    with_state, tmp_path, like, state, suffix
):
    trainer, path = with_state
    if suffix:
        pytest.importorskip("safetensors")
        path = jaxdp.save_model(tmp_path / f"model{suffix}", trainer.model)
        state = None
    with pytest.raises(ValueError) as caught:
        jaxdp.load_model(path, like, state=state, partial=True)
    text = str(caught.value)
    assert f"no array of the model in {path} fits" in text
    assert "first.weight: the checkpoint has float32(8, 4), the model nothing" in text


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
WRONG = {"dtype": ["F4", ["F32"]], "shape": [[-1], ["2"], [3], 2]}
WRONG["data_offsets"] = [[8], ["0", 8], [-16, 8], [0, 4], [12, 20], [8, 0]]
HEADERS = [
    ("not JSON", ""),
    (b"\xff\xfe", ""),
    ([1], r"`header` is \[1\], and must be an object"),
    ('{"w": 1, "w": 2}', "a key of its header is there twice"),
    pytest.param(b"[" * 10**5, "it is nested too deeply", id="deep"),
    ({"w": F32}, "or some of its bytes are no tensor"),
    ({"v": F32, "w": F32 | {"data_offsets": [4, 12]}}, "its tensors overlap"),
    ({"w": [1]}, r"w is \[1\], and must have a dtype of F64, F32, .* the file's 16"),
    *(({"w": {k: v for k, v in F32.items() if k != key}}, "w is {") for key in F32),
    *(({"w": F32 | {k: v}}, "w is {'dtype'") for k, vs in WRONG.items() for v in vs),
]


@pytest.mark.parametrize(("header", "match"), HEADERS)
def test_a_header_that_is_wrong_is_told_in_a_sentence(tmp_path, header, match):
    if not isinstance(header, str | bytes):
        header = json.dumps(header)
    content = header if isinstance(header, bytes) else header.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(16))
    with pytest.raises(CheckpointCorrupt, match=f"{path} can't be read: .*{match}"):
        jaxdp.load_model(path, like={"w": jnp.ones(2)})
