"""Files in the names of well-known models fill Equinox models, and come back."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from published import (
    GPT2_NAMES,
    LAYERS,
    LLAMA_NAMES,
    WIDTH,
    Decoder,
    Resnet,
    gpt2,
    llama,
    numbers,
)
from toys import quiet

import jaxdp
from jaxdp import FSDP, Sharded
from jaxdp.checkpoint import CheckpointCorrupt

safetensors = pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file  # noqa: E402


def sharded(folder, tensors):
    """Two files and their index, as large models come."""
    weight_map = {}
    for number in (0, 1):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        part = dict(list(tensors.items())[number::2])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


BFLOAT16 = np.dtype("bfloat16").type


@pytest.mark.parametrize(
    "files, dtype",
    [("one", BFLOAT16), ("several", np.float32), ("several", np.float16)],
)
def test_layers_of_a_llama_fill_a_stack(tmp_path, dtype, files, caplog):
    caplog.set_level("INFO")
    tensors = llama(dtype)
    path = tmp_path
    if files == "several":
        sharded(tmp_path, tensors)
    else:
        save_file(tensors, path := tmp_path / "model.safetensors")
    shapes = eqx.filter_eval_shape(Decoder, False)
    model = jaxdp.load_weights(path, shapes, LLAMA_NAMES)
    assert model.blocks.stacked.attn.value.weight.dtype == jnp.float32
    for i in range(LAYERS):
        for name, field in zip(
            "qkvo", ("query", "key", "value", "output"), strict=True
        ):
            stack = getattr(model.blocks.stacked.attn, field).weight
            stored = tensors[f"model.layers.{i}.self_attn.{name}_proj.weight"]
            np.testing.assert_array_equal(stack[i], stored.astype(np.float32))
    assert model(jnp.arange(4)).shape == (4, 32)
    kind = np.dtype(dtype).name
    assert (
        "blocks.*.attn.query.weight float32(16, 16) <-"
        f" model.layers.*.self_attn.q_proj.weight {kind}(16, 16) (3 of them)"
    ) in caplog.text

    # Back into the same names: half as many bits come back as they were.
    out = jaxdp.save_weights(
        jax.tree.map(
            lambda leaf: leaf.astype(dtype) if eqx.is_array(leaf) else leaf, model
        ),
        tmp_path / "out" / "model.safetensors",
        LLAMA_NAMES,
    )
    saved = load_file(out)
    assert saved.keys() == tensors.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor, tensors[name])


def test_fused_and_transposed_tensors_of_a_gpt2_are_taken_apart(tmp_path):
    tensors = gpt2()
    save_file(tensors, path := tmp_path / "model.safetensors")
    start = Decoder()
    model = jaxdp.load_weights(path, start, GPT2_NAMES, ignore=["h.*.attn.bias"])
    assert model.head.weight is start.head.weight
    attention = model.blocks.stacked.attn
    for i in range(LAYERS):
        fused = tensors[f"h.{i}.attn.c_attn.weight"]  # x @ fused, as Conv1D does
        biases = tensors[f"h.{i}.attn.c_attn.bias"]
        for j, linear in enumerate((attention.query, attention.key, attention.value)):
            columns = slice(j * WIDTH, (j + 1) * WIDTH)
            np.testing.assert_array_equal(linear.weight[i], fused[:, columns].T)
            np.testing.assert_array_equal(linear.bias[i], biases[columns])

    out = jaxdp.save_weights(model, tmp_path / "out.safetensors", GPT2_NAMES)
    assert eqx.tree_equal(jaxdp.load_weights(out, start, GPT2_NAMES), model)
    saved = load_file(out)
    assert saved.keys() | {f"h.{i}.attn.bias" for i in range(3)} == tensors.keys()
    for name, tensor in saved.items():
        np.testing.assert_array_equal(tensor, tensors[name])


def test_operations_on_tensors_are_undone_when_they_are_saved(tmp_path):
    tensors = {"a": numbers(1, 1, 3), "b": numbers(2), "c": numbers(2, 3, 4)}
    save_file(tensors, path := tmp_path / "model.safetensors")
    like = {"a": jnp.zeros(3), "b": jnp.zeros((2, 1, 1)), "c": jnp.zeros((4, 2, 3))}
    names = {"a": ("a", ("squeeze", 0, 1)), "b": ("b", ("expand", -1, -2))}
    names["c"] = "c", ("T", 2, 0, 1)
    model = jaxdp.load_weights(path, like, names)
    np.testing.assert_array_equal(model["a"], tensors["a"][0, 0])
    np.testing.assert_array_equal(model["b"], tensors["b"][:, None, None])
    np.testing.assert_array_equal(model["c"], tensors["c"].transpose(2, 0, 1))
    saved = load_file(jaxdp.save_weights(model, tmp_path / "out.safetensors", names))
    jax.tree.map(np.testing.assert_array_equal, saved, tensors)


def test_a_resnet_of_torch_gives_the_same_here_and_comes_back(tmp_path):
    torch = pytest.importorskip("torch")

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.bn1 = torch.nn.BatchNorm2d(4)
            self.conv2 = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.bn2 = torch.nn.BatchNorm2d(4)

        def forward(self, x):
            y = torch.relu(self.bn1(self.conv1(x)))
            return torch.relu(x + self.bn2(self.conv2(y)))

    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"conv1": torch.nn.Conv2d(3, 4, 3, padding=1)})
    net["layer1"] = torch.nn.Sequential(Block(), Block())
    net["fc"] = torch.nn.Linear(4, 5)
    x = torch.randn(7, 3, 8, 8)
    for _ in range(3):  # running statistics of its own
        net["layer1"](net["conv1"](x))
    net.eval()
    expected = net["fc"](net["layer1"](net["conv1"](x)).mean((2, 3)))
    tensors = {name: value.numpy() for name, value in net.state_dict().items()}
    save_file(tensors, path := tmp_path / "model.safetensors")

    names = {"layers.*.**": "layer1.*.**", "head.*": "fc.*"}
    names |= {"stem.weight": "conv1.weight"}
    names["stem.bias"] = "conv1.bias", ("expand", 1, 2)
    ignore = "**.num_batches_tracked"
    make = eqx.nn.make_with_state(Resnet)
    like, of_shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    model, state = jaxdp.load_weights(path, like, names, state=of_shapes, ignore=ignore)
    inputs, expected = x.numpy(), expected.detach().numpy()

    def check_outputs(model, state, expected):
        infer = eqx.nn.inference_mode(model)
        found = jax.vmap(lambda x: infer(x, state)[0], axis_name="batch")(inputs)
        np.testing.assert_allclose(found, expected, atol=1e-5)

    check_outputs(model, state, expected)
    out = tmp_path / "out.safetensors"
    jaxdp.save_weights(model, out, names, state=state)
    for name, tensor in load_file(out).items():
        np.testing.assert_array_equal(tensor, tensors[name])

    # Training goes on from the statistics, and does not begin them again.
    data = [(inputs, np.zeros(7, np.int32))]
    trainer = quiet(model, optax.sgd(0.0), state=state)
    trainer.fit(data)
    jaxdp.save_weights(trainer.model, out, names, state=trainer.model_state)
    for name in (name for name in tensors if name.endswith("running_mean")):
        assert 0 < np.abs(load_file(out)[name] - tensors[name]).max() < 0.1

    # A trainer gets them into its own state.
    fresh, state = make(jax.random.key(1))
    untrained = quiet(fresh, optax.sgd(0.0), state=state)
    assert jaxdp.load_weights(path, untrained, names, ignore=ignore) is None
    found = jax.vmap(untrained.inference_model())(inputs)
    np.testing.assert_allclose(found, expected, atol=1e-5)

    # Those of few steps are saved as inference corrects them.
    young = quiet(model, optax.sgd(0.0), state=make(jax.random.key(1))[1])
    young.fit(data)
    jaxdp.save_weights(young.model, out, names, state=young.model_state)
    model, state = jaxdp.load_weights(out, like, names, state=of_shapes)
    check_outputs(model, state, jax.vmap(young.inference_model())(inputs))


@pytest.mark.parametrize("made_of", ["arrays", "shapes"])
def test_a_trainer_is_filled_where_its_arrays_are(tmp_path, made_of):
    save_file(llama(), path := tmp_path / "model.safetensors")
    model = (
        Decoder(False) if made_of == "arrays" else eqx.filter_eval_shape(Decoder, False)
    )

    def loss_fn(model, tokens):
        logits = jax.vmap(model)(tokens)
        loss = optax.softmax_cross_entropy_with_integer_labels
        return loss(logits[:, :-1], tokens[:, 1:]).mean(-1)

    placed = []

    class Watched(FSDP):
        def place(self, state):
            placed.append(state)
            return super().place(state)

    def trained(model, fill):
        trainer = quiet(
            model, optax.adam(1e-3), loss_fn=loss_fn, strategy=Watched(min_size=1)
        )
        if fill:
            jaxdp.load_weights(path, trainer, LLAMA_NAMES)
            assert not placed
            weight = trainer.run.config.model.blocks.stacked.attn.key.weight
            assert weight.addressable_shards[0].data.size == weight.size // 8
        (tokens,) = np.random.default_rng(0).integers(0, 32, (1, 8, 6))
        trainer.fit([tokens.astype(np.int32)] * 2)
        return trainer

    ours = trained(model, True)
    (adam, *_) = placed.pop().opt_state
    moments = adam.mu.blocks.stacked.attn.key.weight
    assert moments.addressable_shards[0].data.size == moments.size // 8
    theirs = trained(jaxdp.load_weights(path, Decoder(False), LLAMA_NAMES), False)
    assert eqx.tree_equal(ours.model, theirs.model)
    with pytest.raises(RuntimeError, match="taken 2 steps"):
        jaxdp.load_weights(path, ours, LLAMA_NAMES)


def test_only_the_slices_of_a_device_are_read(tmp_path):
    save_file(gpt2(), path := tmp_path / "model.safetensors")
    mesh = Sharded().mesh
    shapes = eqx.filter_eval_shape(Decoder)
    spec = jax.sharding.PartitionSpec(None, None, "data")
    weight = jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, WIDTH),
        jnp.bfloat16,
        sharding=jax.sharding.NamedSharding(mesh, spec),
    )
    where = lambda m: m.blocks.stacked.attn.key.weight  # noqa: E731
    shapes = eqx.tree_at(where, shapes, weight)
    shapes = eqx.tree_at(lambda m: m.head.weight, shapes, jnp.zeros((32, WIDTH)))
    ignore = "h.*.attn.bias"
    model = jaxdp.load_weights(path, shapes, GPT2_NAMES, ignore=ignore)
    whole = jaxdp.load_weights(path, Decoder(), GPT2_NAMES, ignore=ignore)
    assert where(model).sharding == weight.sharding
    assert where(model).dtype == jnp.bfloat16
    np.testing.assert_array_equal(where(model), where(whole).astype(jnp.bfloat16))


def test_what_does_not_fit_is_listed_on_both_sides_and_nothing_is_loaded(tmp_path):
    tensors = llama()
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    tensors["lm_head.weight"] = numbers(16, WIDTH)
    tensors["model.layers.0.extra"] = numbers(4)
    tensors["model.embed_tokens.weight"] = np.zeros((32, WIDTH), np.int32)
    save_file(tensors, path := tmp_path / "model.safetensors")
    names = dict(LLAMA_NAMES)
    del names["blocks.*.norm.weight"]
    with pytest.raises(ValueError, match="nothing was loaded") as raised:
        jaxdp.load_weights(path, Decoder(False), names)
    text = str(raised.value)
    for line in (
        "no name fills (None lets it stay as it is):\n"
        "    blocks.*.norm.weight float32(16,) (3 of them)",
        "not in the file:\n    model.layers.1.self_attn.q_proj.weight for"
        " blocks.1.attn.query.weight float32(16, 16)",
        "head.weight float32(32, 16) <- lm_head.weight float32(16, 16): is (16, 16)",
        "embed.weight float32(32, 16) <- model.embed_tokens.weight int32(32, 16): is of"
        " another kind",
        "model.layers.*.input_layernorm.weight float32(16,) (3 of them)",
        "model.layers.0.extra float32(4,)",
        "blocks.*.attn.key.weight float32(16, 16) <-"
        " model.layers.*.self_attn.k_proj.weight float32(16, 16) (3 of them)",
    ):
        assert line in text, text


def test_files_that_are_not_there_or_damaged_are_named(tmp_path):
    like = Decoder(False)
    save_file(llama(), path := tmp_path / "model.safetensors")
    whole = path.read_bytes()
    for damaged in whole[:-100], whole[:50], b"\xff" * 9, b"", whole[:8] + b"[]":
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorrupt, match="can't be read"):
            jaxdp.load_weights(path, like, LLAMA_NAMES)
    np.savez(tmp_path / "model.npz", w=np.ones(3))
    with pytest.raises(CheckpointCorrupt, match="is no safetensors file"):
        jaxdp.load_weights(tmp_path / "model.npz", like, LLAMA_NAMES)
    path.unlink()
    sharded(tmp_path, llama())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="there is no file .*00002-of-00002"):
        jaxdp.load_weights(tmp_path, like, LLAMA_NAMES)
    index = tmp_path / "model.safetensors.index.json"
    for text in "{}", "[1]", '{"weight_map": [1]}', '{"weight_map": {"w": 3}}':
        index.write_text(text)
        with pytest.raises(CheckpointCorrupt, match="weight_map"):
            jaxdp.load_weights(tmp_path, like, LLAMA_NAMES)
    for name in "../w.safetensors", str(tmp_path / "w.safetensors"), "a/w.safetensors":
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(CheckpointCorrupt, match="may only name files beside it"):
            jaxdp.load_weights(tmp_path, like, LLAMA_NAMES)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16])
def test_weights_are_saved_in_the_dtype_that_is_asked_for(tmp_path, dtype, caplog):
    model, names = {"weight": numbers(3, 2), "count": np.arange(3)}, {"*": "*"}
    asked = jaxdp.save_weights(model, tmp_path / "a.safetensors", names, dtype=dtype)
    again = jaxdp.load_weights(asked, model, names)
    assert eqx.tree_equal(again["count"], jnp.arange(3))
    narrow = model["weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(again["weight"], narrow.astype(np.float32))
    assert "`save_weights(..., like=path)` writes those of the file" in caplog.text
    alike = jaxdp.save_weights(model, tmp_path / "b.safetensors", names, like=asked)
    for file in (asked, alike):
        kinds = {name: tensor.dtype.name for name, tensor in load_file(file).items()}
        assert kinds == {"weight": "bfloat16", "count": model["count"].dtype.name}
    with pytest.raises(ValueError, match="`like` and `dtype`=bfloat16"):
        jaxdp.save_weights(model, alike, names, like=asked, dtype=dtype)


def test_a_leaf_that_stays_as_it_is_can_not_be_a_shape(tmp_path):
    def make():
        return eqx.nn.Linear(4, 3, key=jax.random.key(0))

    path = tmp_path / "model.safetensors"
    jaxdp.save_weights(make(), path, {"**": "**"})
    names = {"weight": "weight", "bias": None}
    loaded = jaxdp.load_weights(path, make(), names, ignore=["bias"])
    assert (loaded.weight == make().weight).all()
    with pytest.raises(ValueError, match="bias is to stay as it is, but `like` has"):
        jaxdp.load_weights(path, eqx.filter_eval_shape(make), names, ignore=["bias"])
