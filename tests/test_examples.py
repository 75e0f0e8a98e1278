"""Every example, at toy size, against the same thing written out in plain JAX."""

import re
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from toys import arrays, assert_close, cross_entropy, hand_written

import jaxdp
from jaxdp.strategies import tensor_rules

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(
    path
    for kind in ("*.py", "tutorials/*.py")
    for path in (ROOT / "examples").glob(kind)
)


# They are run for a few steps, which is less often than loggers write.


@pytest.fixture(autouse=True)
def plain_jax():
    """Examples add biases as everyone does, by implicit broadcasting."""
    with jax.numpy_rank_promotion("allow"):
        yield


def train_by_hand(model, optimizer, batches, loss_of):
    """The trained model and every step's loss, on one device."""
    data = (tuple(map(np.asarray, batch)) for batch in batches)
    return hand_written(model, optimizer, data, 1, loss_of)


def accuracy(model, x, y):
    logits = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(model, np.asarray(x))
    return float((logits.argmax(-1) == np.asarray(y)).mean())


def assert_same_weights(found, expected, atol=1e-6):
    assert_close(found, expected, 1e-4, atol)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_its_docstring_has_its_command_and_it_is_short(path):
    text = path.read_text()
    assert f"    python {path.relative_to(ROOT)}" in text.split('"""')[1]
    assert len(text.splitlines()) <= 150


def test_transformations_agree_on_one_device_and_on_eight():
    import transformations as example

    batch, *on_eight = example.main()
    assert batch[0].tolist() == [11.0, 20.0, 29.0]
    assert all(len(ys.sharding.device_set) == 8 for ys in on_eight)


def test_equinox_autoparallel_equals_a_hand_written_loop():
    import equinox_autoparallel as example

    trainer, losses = example.main(["--steps", "30"])

    batches = example.batches(example.make_data(), 16)
    first_30 = (batch for _, batch in zip(range(30), batches, strict=False))
    model, expected = train_by_hand(
        example.make_model(), optax.adam(3e-4), first_30, example.compute_loss
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_weights(trainer.model, model)
    assert len(trainer.state.params.layers[0].weight.sharding.device_set) == 8


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("tensor", [1, 2])
def test_distributed_arrays_equals_a_hand_written_loop(tensor):
    import distributed_arrays as example

    size = ["--width", "64", "--batch-size", "96", "--tensor", str(tensor)]
    trainer, history = example.main(size)
    specs = [weight.sharding.spec for weight, _ in trainer.state.params]
    if tensor == 2:
        columns, rows = PartitionSpec(None, "model"), PartitionSpec("model", None)
        assert specs == [PartitionSpec(), columns, rows, PartitionSpec()]

    sizes = [784, 64, 64, 64, 10]
    x, y = example.make_batch(96, 784, 10)

    def loss_of(params, x, y):
        *hidden, (weight, bias) = params
        for w, b in hidden:
            x = jnp.maximum(x @ w + b, 0)
        return jnp.mean(jnp.sum((x @ weight + bias - y) ** 2, axis=-1))

    params = example.make_params(sizes, jax.random.key(0))
    params, expected = hand_written(params, optax.sgd(1e-5), [(x, y)], 30, loss_of)
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
    assert_same_weights(trainer.model, params)
    assert expected[-1] < expected[0]


@pytest.mark.slow_but("pmap")
@pytest.mark.parametrize("strategy", ["single", "sharded", "pmap"])
def test_big_mlp_equals_a_hand_written_loop(strategy, capsys):
    import big_mlp as example

    size = ["--depth", "3", "--width", "16", "--batch-size", "64", "--steps", "5"]
    found = example.main(["--strategy", strategy, *size])

    model = example.make_model(3, 16)
    _, expected = train_by_hand(
        model, optax.adam(1e-4), example.make_batches(64, 6), cross_entropy
    )
    np.testing.assert_allclose(found["losses"], expected, rtol=1e-5)
    weights = sum(leaf.nbytes for leaf in arrays(model))
    assert 3 * weights <= found["state_bytes"] <= 3 * weights + 1000
    printed = capsys.readouterr().out
    assert "step time" in printed and "step: arguments" in printed


def test_digits_equals_a_hand_written_loop(tmp_path, capsys, monkeypatch):
    torch = pytest.importorskip("torch")
    import sklearn.datasets

    few = [part[:490] for part in sklearn.datasets.load_digits(return_X_y=True)]
    monkeypatch.setattr(sklearn.datasets, "load_digits", lambda return_X_y: few)
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    import digits as example

    train, val, test = example.load_data()
    found = example.main(["--epochs", "1", "--output", str(tmp_path)])

    loader = torch.utils.data.DataLoader(
        train, 64, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    rows = [len(y) for _, y in loader]
    loader.generator.manual_seed(0)
    rate = optax.cosine_decay_schedule(5e-3, len(loader))
    model = example.LeNet(jax.random.key(0))
    model, losses = train_by_hand(model, optax.adam(rate), loader, cross_entropy)

    history = found["history"]
    assert history["loss"] == pytest.approx([np.average(losses, weights=rows)], 1e-5)
    x, y = (part.numpy() for part in val.tensors)
    assert history["val_loss"] == pytest.approx(
        [float(cross_entropy(model, x, y))], 1e-4
    )
    assert history["val_accuracy"] == pytest.approx([accuracy(model, x, y)])
    assert found["test"]["test_accuracy"] == pytest.approx(
        accuracy(model, *test.tensors)
    )

    printed = capsys.readouterr().out
    for name in ("curves.png", "metrics.csv", "checkpoints"):
        assert (tmp_path / name).exists()
        assert name in printed


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def small_fashion(tmp_path):
    """A folder like the real one, with 300 and 60 random images."""
    random = np.random.default_rng(0)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, rows in (("train", 300), ("t10k", 60)):
        labels = random.integers(0, 10, rows)
        images = random.integers(0, 20, (rows, 28, 28)) + 20 * labels[:, None, None]
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels)
    return tmp_path


@pytest.fixture
def no_torchvision(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)


@pytest.mark.slow
def test_fashion_mnist_equals_a_hand_written_loop(small_fashion, no_torchvision):
    torch = pytest.importorskip("torch")
    import fashion_mnist as example

    folder, output = str(small_fashion), str(small_fashion / "out")
    options = ["--data", folder, "--output", output, "--epochs", "2", "--devices", "2"]
    trainer, history = example.main(options)
    assert trainer.strategy.mesh.size == 2

    generator = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(
        example.load(folder, train=True), 256, shuffle=True, generator=generator
    )
    twice = (batch for _ in range(2) for batch in loader)
    model, losses = train_by_hand(
        example.LeNet(jax.random.key(0)), optax.sgd(0.2), twice, cross_entropy
    )
    expected = np.average(np.reshape(losses, (2, 2)), axis=1, weights=[256, 44])
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
    assert_same_weights(trainer.model, model, atol=1e-7)
    x, y = example.load(folder, train=False).tensors
    assert history["val_accuracy"][-1] == pytest.approx(accuracy(model, x, y))


def test_fashion_mnist_reads_the_same_with_and_without_torchvision(
    small_fashion, capsys
):
    pytest.importorskip("torch")
    import fashion_mnist as example
    import torchvision_shim

    with pytest.MonkeyPatch.context() as without:
        without.setitem(sys.modules, "torchvision.datasets", None)
        plain = example.load(str(small_fashion), train=True)
    torchvision_shim.import_or_skip()
    assert "without torchvision" in capsys.readouterr().out
    through = example.load(str(small_fashion), train=True)
    assert capsys.readouterr().out == ""
    for found, expected in zip(through.tensors, plain.tensors, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_the_code_in_the_readme_runs(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(block, namespace)
    assert namespace["history"]["loss"][-1] < 0.1


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        attention, mlp = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 16, key=attention)
        self.mlp = eqx.nn.MLP(16, 16, 32, 1, key=mlp)

    def __call__(self, x):
        x = x + self.attention(x, x, x)
        return x + jax.vmap(self.mlp)(x)


class Transformer(eqx.Module):
    blocks: jaxdp.Stack

    def __call__(self, x):
        return self.blocks(x)


@pytest.mark.slow
def test_the_losses_in_the_readme_are_those_of_each_strategy():
    keys = jax.random.split(jax.random.key(0), 8)
    model = Transformer(jaxdp.Stack([Block(key) for key in keys]))
    rows = np.random.default_rng(0).normal(size=(64, 8, 16)).astype(np.float32)
    loader = jaxdp.Arrays(rows, np.tanh(rows), batch_size=32)
    text = (ROOT / "README.md").read_text()
    table = re.findall(r"^\| `((\w+)\(.*?\))`.*\| (0\.\d{4}) \|$", text, re.M)
    assert len(table) == 9
    for code, name, loss in table:
        names = {name: getattr(jaxdp, name), "rules": tensor_rules(model)}
        strategy = eval(code, names)
        trainer = jaxdp.Trainer(model, optax.adam(1e-3), loss="mse", strategy=strategy)
        history = trainer.fit(loader, max_epochs=5)
        np.testing.assert_allclose(history["loss"][-1], float(loss), atol=1e-4)


@pytest.mark.slow
def test_gpt_learns_the_same_whatever_the_layout():
    import gpt

    toy = "--text none --steps 4 --batch 16 --context 16 --width 32 --depth 2".split()
    toy += ["--sampled", "5"]
    found = gpt.main([*toy, "--strategy", "SingleDevice"])
    losses = [found["val_loss"]]
    layouts = (
        "FSDP --groups 2 --accumulate 2 --remat",
        "TensorParallel",
        "SequenceParallel --fused --chunked --remat",
    )
    for options in layouts:
        options = ["--strategy", *options.split()]
        losses.append(gpt.main([*toy, *options])["val_loss"])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    other = gpt.main([*toy, "--strategy", "SequenceParallel", "--muon"])["val_loss"]
    assert other < np.log(len(set(gpt.SHORT)))
    narrow = gpt.main([*toy, "--precision", "bf16-mixed"])["val_loss"]
    assert narrow == pytest.approx(losses[0], rel=2e-2)
    assert losses[0] < np.log(len(set(gpt.SHORT)))  # better than guessing
    assert len(found["text"]) == 6 and set(found["text"]) <= set(gpt.SHORT)


def test_gpt_attends_as_equinox_does():
    pytest.importorskip("torch")
    import gpt

    block = gpt.Block(32, 4, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (6, 32))
    h = jax.vmap(block.norm1)(x)
    after = x + block.attention(h, h, h, mask=jnp.tril(jnp.ones((6, 6), bool)))
    expected = after + jax.vmap(block.mlp)(jax.vmap(block.norm2)(after))
    np.testing.assert_allclose(block(x), expected, rtol=1e-4, atol=1e-5)
