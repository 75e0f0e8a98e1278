"""Weights alone: out of checkpoints, into files and back."""

import json
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from toys import Mlp, NormNet, batches, quiet

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


def test_the_model_of_a_checkpoint_needs_no_optimizer(trained):
    trainer, path = trained
    other = Mlp(jax.random.key(1))
    model = jaxdp.load_model(path, like=other)
    assert same(model, trainer.model)
    shapes = eqx.filter_eval_shape(Mlp, jax.random.key(1))
    assert same(jaxdp.load_model(path, like=shapes), trainer.model)
    model(jnp.ones(4), key=jax.random.key(0))


@pytest.mark.parametrize("suffix", [".eqx", ".safetensors"])
def test_a_file_of_weights_comes_back_as_it_was(trained, tmp_path, suffix):
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    trainer, _ = trained
    path = jaxdp.save_model(tmp_path / "new" / f"model{suffix}", trainer.model)
    like = Mlp(jax.random.key(1))
    assert same(jaxdp.load_model(path, like=like), trainer.model)
    if suffix == ".eqx":
        assert same(eqx.tree_deserialise_leaves(path, like), trainer.model)
    wide = eqx.tree_at(lambda m: m.last.bias, like, jnp.ones(4))
    with pytest.raises(
        ValueError, match="last.bias|damaged or belongs to another model"
    ):
        jaxdp.load_model(path, like=wide)
    assert [p.name for p in (tmp_path / "new").iterdir()] == [f"model{suffix}"]


class WithKey(eqx.Module):
    linear: eqx.nn.Linear
    key: jax.Array

    def __init__(self, seed):
        self.linear = eqx.nn.Linear(4, 3, key=jax.random.key(seed))
        self.key = jax.random.key(seed, impl="rbg")

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize("name", ["checkpoint", "weights.safetensors"])
@pytest.mark.parametrize("by_shape", [True, False])
def test_a_key_in_a_model_comes_back_as_one(tmp_path, name, by_shape):
    if name.endswith("safetensors"):
        pytest.importorskip("safetensors")
    trainer = quiet(WithKey(0))
    trainer.fit(batches(8))
    if name == "checkpoint":
        trainer.save(tmp_path / name)
    else:
        jaxdp.save_model(tmp_path / name, trainer.model)
    like = eqx.filter_eval_shape(WithKey, 1) if by_shape else WithKey(1)
    model = jaxdp.load_model(tmp_path / name, like)
    assert eqx.tree_equal(model, trainer.model)


def test_a_scalar_leaf_comes_back_as_one(tmp_path):
    pytest.importorskip("safetensors")
    model = {"scale": jnp.float32(2), "turned": jnp.arange(6.0).reshape(2, 3).T}
    path = jaxdp.save_model(tmp_path / "model.safetensors", model)
    assert same(jaxdp.load_model(path, like=model), model)


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


class Longer(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    extra: jax.Array

    def __init__(self, key):
        self.first = eqx.nn.Linear(4, 16, key=key)
        self.last = eqx.nn.Linear(16, 5, key=key)
        self.extra = jnp.ones(2)


def test_part_of_a_model_is_taken_and_the_rest_is_listed(trained, caplog):
    trainer, path = trained
    like = Longer(jax.random.key(3))
    with pytest.raises(ValueError, match="(?s)extra.*nothing.*last.weight.*float32"):
        jaxdp.load_model(path, like=like)
    model = jaxdp.load_model(path, like=like, partial=True)
    assert same(model.first, trainer.model.first)
    assert same(model.last, like.last)
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


def loaded(path, like, **options):
    """Returns the loaded model or the text of the error, and the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            result = jaxdp.load_model(path, like, **options)
        except ValueError as error:
            result = str(error)
    return result, [str(warning.message) for warning in told]


@pytest.mark.parametrize("partial", [False, True])
def test_a_state_that_is_not_asked_for_is_warned_of(with_state, trained, partial):
    trainer, path = with_state
    model, (told,) = loaded(path, made()[0], partial=partial)
    assert same(model, trainer.model)
    assert f"{path} has a model state" in told
    assert "`model, state = load_model(path, like=model, state=state)`" in told
    like, state = made()
    assert loaded(path, like, state=state, partial=partial)[1] == []
    assert loaded(trained[1], Mlp(jax.random.key(1)), partial=partial)[1] == []


@pytest.mark.parametrize("partial", [False, True])
def test_a_state_inside_of_like_is_told_where_it_belongs(with_state, partial):
    text, told = loaded(with_state[1], made(), partial=partial)
    assert "pass the model alone, and the state as `state`: `model, state =" in text
    assert told == []


@pytest.mark.parametrize("like, options", [
    (lambda: {"net": Mlp(jax.random.key(1))}, {}),
    (lambda: jax.nn.relu, {}),
    (lambda: {"net": made()[0]}, {"state": True}),
])  # fmt: skip
@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_a_model_of_which_nothing_is_found_is_an_error(
    with_state, tmp_path, like, options, suffix
):
    trainer, path = with_state
    if suffix:
        pytest.importorskip("safetensors")
        options = {}
        path = jaxdp.save_model(tmp_path / f"model{suffix}", trainer.model)
    if options:
        options = {"state": made()[1]}
    text, _ = loaded(path, like(), partial=True, **options)
    assert f"no array of the model in {path} fits" in text
    assert "first.weight: the checkpoint has float32(8, 4), the model nothing" in text


def test_the_state_of_batch_norm_comes_along(with_state):
    trainer, path = with_state
    model, state = made()
    model, state = jaxdp.load_model(path, like=model, state=state)
    assert same(model, trainer.model)
    assert same(state, trainer.model_state)


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
