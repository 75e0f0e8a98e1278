"""Memory split over devices: one device's numbers, at the least bytes there are."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from optax import contrib
from toys import Mlp, NormNet, Recorder, batches

from jaxdp import FSDP, Sharded, SingleDevice, TensorParallel, Trainer, ZeRO
from jaxdp.callbacks import NanGuard
from jaxdp.plan import hlo
from jaxdp.strategies import tensor_rules

SPLIT = [ZeRO, FSDP]


class Cnn(eqx.Module):
    """(1, 8, 8) -> 10."""

    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(16, 32, 3, padding=1, key=keys[1]),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(512, 10, key=keys[2]),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key=None):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.dropout(self.attention(y, y, y), key=key)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    """(8,) tokens -> (8, 40) logits."""

    embedding: eqx.nn.Embedding
    places: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key, width=32):
        keys = jax.random.split(key, 5)
        self.embedding = eqx.nn.Embedding(40, width, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (8, width))
        self.blocks = [Block(width, keys[2])]
        self.head = eqx.nn.Linear(width, 40, key=keys[4])

    def __call__(self, tokens, key=None):
        x = jax.vmap(self.embedding)(tokens) + self.places
        for index, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, index))
        return jax.vmap(self.head)(x)


class Gru(eqx.Module):
    """(6, 8) -> (10,) logits, by a loop."""

    cell: eqx.nn.GRUCell
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, 64, key=keys[0])
        self.last = eqx.nn.Linear(64, 10, key=keys[1])

    def __call__(self, x):
        def turn(hidden, row):
            return self.cell(row, hidden), None

        return self.last(jax.lax.scan(turn, jnp.zeros(64), x)[0])


def make(name):
    """A model, and three batches of 32, 32 and 13 rows."""
    key, random = jax.random.key(0), np.random.default_rng(0)
    sizes = (32, 32, 13)
    labels = [random.integers(0, 10, size).astype(np.int32) for size in sizes]
    if name == "mlp":
        x = [random.normal(size=(size, 64)) for size in sizes]
        model = eqx.nn.MLP(64, 10, 128, 3, key=key)
    elif name == "cnn":
        x = [random.normal(size=(size, 1, 8, 8)) for size in sizes]
        model = Cnn(key)
    elif name == "gru":
        x = [random.normal(size=(size, 6, 8)) for size in sizes]
        model = Gru(key)
    else:
        x = [random.integers(0, 40, (size, 8)) for size in sizes]
        labels = x
        model = Transformer(key)
    return model, list(zip(x, labels, strict=True))


def train(model, data, strategy, optimizer=None, epochs=2, **arguments):
    recorder = Recorder()
    if "loss_fn" not in arguments:
        arguments.setdefault("loss", "cross_entropy")
    trainer = Trainer(
        model, optimizer or optax.adamw(1e-2), strategy=strategy,
        callbacks=[recorder, *arguments.pop("callbacks", ())],
        enable_progress_bar=False, **arguments,
    )  # fmt: skip
    trainer.fit(data, max_epochs=epochs)
    return trainer, recorder.losses


@functools.cache
def on_one_device(name, accumulate):
    model, data = make(name)
    return train(model, data, SingleDevice(), accumulate_grad_batches=accumulate)[1]


def bytes_moved(trainer):
    """Bytes that a device sends in one train step, and those by kind."""
    program = hlo.read(trainer.compiled_train_step().as_text())
    assert not program.unknown_loops
    by_kind = {}
    for each in program.collectives:
        moved = each.times * each.wire_bytes
        by_kind[each.kind] = by_kind.get(each.kind, 0) + moved
    return sum(by_kind.values()), by_kind


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def resident(tree):
    """Bytes of the fullest device."""
    leaves = jax.tree.leaves(tree)
    devices = leaves[0].sharding.device_set
    return max(
        sum(
            shard.data.nbytes
            for leaf in leaves
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        for device in devices
    )


@pytest.mark.parametrize("strategy", [Sharded, ZeRO, FSDP])
@pytest.mark.parametrize(
    "name, accumulate",
    [
        ("mlp", 1),
        ("mlp", 3),
        ("gru", 1),
        pytest.param("cnn", 1, marks=pytest.mark.slow),
        pytest.param("transformer", 1, marks=pytest.mark.slow),
    ],
)
def test_least_bytes_are_moved_and_held(name, strategy, accumulate):
    """The ring's floor for a sum of gradients that everyone needs, or its two halves.

    An accumulating step moves no more than one that does not, nor does a loop in the
    model, whose gradients XLA by itself would reduce in every turn.
    """
    model, data = make(name)
    trainer, losses = train(model, data, strategy(), accumulate_grad_batches=accumulate)
    np.testing.assert_allclose(losses, on_one_device(name, accumulate), rtol=1e-5)
    state = trainer.state
    floor = 2 * 7 / 8 * size(state.params)
    moved, by_kind = bytes_moved(trainer)
    # What is more than the gradients: the sums of the loss.
    assert floor <= moved <= floor + 100
    program = hlo.read(trainer.compiled_train_step().as_text())
    reduces = [each for each in program.collectives if each.kind == "all-reduce"]
    assert len(reduces) == 1
    if strategy is Sharded:
        assert set(by_kind) == {"all-reduce"}
    else:
        assert set(by_kind) == {"all-reduce", "reduce-scatter", "all-gather"}
        assert by_kind["all-reduce"] < 0.01 * floor  # leaves that do not divide
        assert resident(state.opt_state) <= 1.05 * size(state.opt_state) / 8
    if strategy is FSDP:
        both = state.params, state.opt_state
        assert resident(both) <= 1.05 * size(both) / 8
    memory = trainer.compiled_train_step().memory_analysis()
    assert memory.alias_size_in_bytes == resident(state)


@pytest.mark.parametrize("strategy", SPLIT)
def test_where_rows_interact_numbers_stay_and_bytes_are_known(strategy):
    """XLA on the CPU does not turn an all-reduce and slices into a reduce-scatter."""

    def mean(model, x, y):
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    model, data = make("mlp")
    expected = train(model, data, SingleDevice(), loss_fn=mean)[1]
    trainer, losses = train(model, data, strategy(), loss_fn=mean)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    moved, _ = bytes_moved(trainer)
    assert moved <= 1.51 * 2 * 7 / 8 * size(trainer.state.params)
    assert resident(trainer.state.opt_state) <= (
        1.05 * size(trainer.state.opt_state) / 8
    )


@pytest.mark.parametrize("strategy", [ZeRO(), FSDP(2), FSDP(8)], ids=str)
def test_batch_norm_sees_every_row(strategy):
    runs = []
    for each in (SingleDevice(), strategy):
        model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(1))
        data = batches(16, 16, 5)
        trainer, losses = train(
            model, data, each, state=state, accumulate_grad_batches=2
        )
        found = trainer.validate(data)
        runs.append([*losses, found["val_loss"], *trainer.predict(data).ravel()])
    np.testing.assert_allclose(*runs, rtol=1e-4)


def normal_noise(model, x, y, key):
    """Draws once for the whole batch."""
    logits = jax.vmap(model)(x + 0.3 * jax.random.normal(key, x.shape))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


@pytest.mark.parametrize("strategy", [ZeRO, FSDP])
@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_randomness_is_that_of_one_device(strategy, generator):
    data = batches(16, 16, 5)
    with jax.default_prng_impl(generator):
        for model, how in (
            (Mlp(jax.random.key(0)), {}),  # dropout
            (eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)), {"loss_fn": normal_noise}),
        ):
            runs = [train(model, data, s, **how) for s in (SingleDevice(), strategy())]
            np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-5)
            validated = [trainer.validate(data)["val_loss"] for trainer, _ in runs]
            np.testing.assert_allclose(*validated, rtol=1e-5)


def kronecker(rate):
    """A small Shampoo: two matrices per weight, none of the weight's shape."""

    def init(params):
        return [
            jax.tree.map(lambda p: 1e-3 * jnp.eye(p.shape[0]), params),
            jax.tree.map(lambda p: 1e-3 * jnp.eye(p.shape[-1]), params),
        ]

    def root(matrix):
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * jnp.maximum(values, 1e-6)[None] ** -0.25) @ vectors.T

    def update(grads, state, params=None):
        def both(g, left, right):
            g = g if g.ndim == 2 else g[:, None]
            left = left + g @ g.T
            right = right + g.T @ g if right.shape[0] == g.shape[1] else right
            step = root(left) @ g
            step = step @ root(right) if right.shape[0] == g.shape[1] else step
            return -rate * step, left, right

        found = jax.tree.map(both, grads, *state)
        is_three = lambda node: isinstance(node, tuple) and len(node) == 3  # noqa: E731
        take = lambda i: jax.tree.map(lambda t: t[i], found, is_leaf=is_three)  # noqa: E731
        updates = jax.tree.map(lambda u, g: u.reshape(g.shape), take(0), grads)
        return updates, [take(1), take(2)]

    return optax.GradientTransformation(init, update)


def by_rank(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


OPTIMIZERS = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-3),
    "muon": lambda: contrib.muon(1e-3),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-3), "vector": optax.sgd(1e-2, 0.9)}, by_rank
    ),
    "masked": lambda: optax.masked(
        optax.adam(1e-3), lambda p: jax.tree.map(lambda leaf: leaf.ndim == 2, p)
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(1e-2, 0, 10)
    ),
    "kronecker": lambda: kronecker(1e-3),
    "flatten": lambda: optax.flatten(optax.adam(1e-3)),
    "lamb": lambda: optax.lamb(1e-3),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(1e-3), 2
    ).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_gives_the_numbers_of_one_device(name):
    """Norms over all parameters, and over rows and columns, are those of the whole."""
    # Adafactor keeps rows and columns only of what is as wide as this.
    width = 128 if name == "adafactor" else 32
    model = eqx.nn.MLP(width, 16, width, 1, key=jax.random.key(0))
    data = [(np.tile(x, 2)[:, :width], y) for x, y in make("mlp")[1]]
    optimizer = OPTIMIZERS[name]()
    one, expected = train(model, data, SingleDevice(), optimizer)
    whole = eqx.filter(one.model, eqx.is_array)
    for strategy in (ZeRO(), FSDP()):
        trainer, losses = train(model, data, strategy, optimizer)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        found = eqx.filter(trainer.model, eqx.is_array)
        for ours, theirs in zip(
            jax.tree.leaves(found), jax.tree.leaves(whole), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-6)
        opt_state = trainer.state.opt_state
        if name != "flatten":  # one vector, of a length that 8 does not divide
            assert resident(opt_state) <= 1.05 * size(opt_state) / 8 + 100


def test_layouts_say_how_each_leaf_is_split_and_why():
    model = eqx.nn.MLP(4, 3, 64, 1, key=jax.random.key(0))
    trainer, _ = train(model, batches(16), FSDP(min_size=100))
    found = trainer.strategy.layouts(trainer.state)
    assert found["params: layers[0].weight"] == (
        PartitionSpec("data"), "split along axis 0",
    )  # fmt: skip
    assert found["params: layers[0].bias"].reason == (
        "whole: 64 elements are fewer than min_size=100"
    )
    assert found["params: layers[1].weight"].spec == PartitionSpec(None, "data")
    assert found["opt_state: [0].mu.layers[1].weight"] == (
        PartitionSpec(None, "data"), "as its parameter layers[1].weight",
    )  # fmt: skip
    assert found["step"].reason == "whole"
    shapes = jax.eval_shape(lambda: trainer.state)
    assert trainer.strategy.layouts(shapes) == found

    zero = ZeRO(devices=5).layouts(trainer.state)
    assert zero["params: layers[0].weight"] == (
        PartitionSpec(),
        "whole; its gradient and optimizer state whole: 5 devices divide no axis of"
        " (64, 4)",
    )
    with_state = TensorParallel({"data": 4, "model": 2}, tensor_rules(model))
    ruled = with_state.layouts(trainer.state)
    assert ruled["params: layers[0].bias"].reason == "by the rule for 'layers[0].bias'"
    assert ruled["params: layers[1].bias"].reason == "by no rule"


def test_a_stack_of_gradients_is_split_as_its_parameter():
    """L-BFGS's memory, `(memory, *shape)`, of which one comes per past step."""
    model = eqx.nn.MLP(4, 3, 64, 1, key=jax.random.key(0))
    optimizer = optax.chain(optax.scale_by_lbfgs(4), optax.scale(-0.01))
    trainer, losses = train(model, batches(16, 5), FSDP(), optimizer)
    memory = trainer.state.opt_state[0].diff_params_memory
    assert memory.layers[0].weight.sharding.spec == PartitionSpec(None, "data")
    expected = train(model, batches(16, 5), SingleDevice(), optimizer)[1]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


class UNet(eqx.Module):
    """Noise in (1, 8, 8) images, at a time, by two resolutions and a skip between."""

    time: eqx.nn.MLP
    down: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]
    middle: eqx.nn.MultiheadAttention
    up: eqx.nn.ConvTranspose2d
    last: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.time = eqx.nn.MLP("scalar", 16, 16, 1, key=keys[0])
        self.down = [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[1]),
            eqx.nn.Conv2d(16, 16, 3, stride=2, padding=1, key=keys[2]),
        ]
        self.norms = [eqx.nn.GroupNorm(4, 16), eqx.nn.GroupNorm(4, 16)]
        self.middle = eqx.nn.MultiheadAttention(2, 16, key=keys[3])
        self.up = eqx.nn.ConvTranspose2d(16, 16, 4, 2, padding=1, key=keys[4])
        self.last = eqx.nn.Conv2d(32, 1, 3, padding=1, key=keys[5])

    def __call__(self, x, t):
        h = self.norms[0](self.down[0](x) + self.time(t)[:, None, None])
        skipped = jax.nn.silu(h)
        h = jax.nn.silu(self.norms[1](self.down[1](skipped)))
        places = h.reshape(16, -1).T
        h = h + self.middle(places, places, places).T.reshape(h.shape)
        return self.last(jnp.concatenate([self.up(h), skipped]))


def diffusion(model, x, keys):
    """For each row: a time and noise of its own, and how well the noise is found."""

    def of_row(x, key):
        for_time, for_noise = jax.random.split(key)
        t = jax.random.uniform(for_time)
        noise = jax.random.normal(for_noise, x.shape)
        return (
            (model(jnp.sqrt(1 - t) * x + jnp.sqrt(t) * noise, t) - noise) ** 2
        ).mean()

    return jax.vmap(of_row)(x, keys)


class VisionTransformer(eqx.Module):
    """(3, 8, 8) -> 10, by patches of 2 x 2, a token for the class, and two blocks."""

    patches: eqx.nn.Conv2d
    token: jax.Array
    places: jax.Array
    blocks: list[Block]
    head: eqx.nn.Sequential

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.patches = eqx.nn.Conv2d(3, 32, 2, stride=2, key=keys[0])
        self.token = jax.random.normal(keys[1], (1, 32))
        self.places = jax.random.normal(keys[2], (17, 32))
        self.blocks = [Block(32, key) for key in keys[3:5]]
        linear = eqx.nn.Linear(32, 10, key=keys[5])
        self.head = eqx.nn.Sequential([eqx.nn.LayerNorm(32), linear])

    def __call__(self, x, key=None):
        x = self.patches(x).reshape(32, -1).T
        x = jnp.concatenate([self.token, x]) + self.places
        for index, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, index))
        return self.head(x[0])


@functools.cache
def large(name):
    """A model, batches for it, how it is trained, and what one device makes of it."""
    random = np.random.default_rng(0)
    if name == "unet":
        data = [random.normal(size=(size, 1, 8, 8)) for size in (16, 16, 5)]
        model, arguments = UNet(jax.random.key(0)), {"loss_fn": diffusion}
    else:
        data = [
            (random.normal(size=(size, 3, 8, 8)), random.integers(0, 10, size))
            for size in (16, 16, 5)
        ]
        model, arguments = VisionTransformer(jax.random.key(0)), {}
    arguments["optimizer"] = optax.adamw(1e-3)
    return model, data, arguments, train(model, data, SingleDevice(), **arguments)[1]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("unet", FSDP),
        ("vit", "tensor"),
        *[
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("unet", ZeRO),
                ("unet", "tensor"),
                ("vit", ZeRO),
                ("vit", FSDP),
            )
        ],
    ],
)
def test_models_of_many_kinds_of_layers_give_the_numbers_of_one_device(name, strategy):
    model, data, arguments, expected = large(name)
    if strategy == "tensor":
        rules = tensor_rules(model)
        if name == "unet":
            rules += [
                ("down[0].*", PartitionSpec("model")),  # by channels that come out
                ("up.weight", PartitionSpec(None, "model")),  # by those that go in
            ]
        strategy = functools.partial(TensorParallel, {"data": 4, "model": 2}, rules)
    _, found = train(model, data, strategy(), **arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", SPLIT)
def test_a_model_smaller_than_the_number_of_devices_is_whole(strategy):
    model = eqx.nn.Linear(4, 1, key=jax.random.key(0))
    data = [(x, x[:, :1]) for x, _ in batches(16, 5)]
    runs = [train(model, data, s, loss="mse") for s in (SingleDevice(), strategy())]
    np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-5)


def test_frozen_leaves_are_split_too_and_stay_as_they_are():
    model = eqx.nn.MLP(4, 3, 64, 2, key=jax.random.key(0))
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda tree: tree.layers[-1].weight, spec, True)
    runs = [
        train(model, batches(16, 5), s, filter_spec=spec)
        for s in (SingleDevice(), FSDP())
    ]
    np.testing.assert_allclose(runs[0][1], runs[1][1], rtol=1e-5)
    trainer = runs[1][0]
    assert trainer.state.buffers.layers[1].weight.sharding.spec == PartitionSpec("data")
    np.testing.assert_array_equal(
        trainer.model.layers[1].weight, model.layers[1].weight
    )


@pytest.mark.parametrize("strategy", SPLIT)
def test_a_step_that_is_not_finite_is_skipped_on_every_device(strategy):
    """One device's rows are at fault, and all shares keep their old values."""
    data = batches(16, 16, 16)
    data[1][0][3] = np.nan
    model = eqx.nn.MLP(4, 3, 64, 1, key=jax.random.key(0))
    runs = []
    for each in (SingleDevice(), strategy()):
        guard = NanGuard("skip")
        with pytest.warns(UserWarning, match="skipped this update"):
            trainer, _ = train(model, data, each, epochs=1, callbacks=[guard])
        runs.append(trainer.model.layers[0].weight)
    assert np.isfinite(runs[1]).all()
    np.testing.assert_allclose(*runs, rtol=1e-5)


def test_a_users_split_parameters_reach_the_floor_too():
    class Halves(Sharded):
        def param_spec(self, path, leaf):
            axis = "data" if leaf.shape[-1] % 8 == 0 else None
            return PartitionSpec(*[None] * (leaf.ndim - 1), axis)

    model, data = make("mlp")
    trainer, losses = train(model, data, Halves())
    np.testing.assert_allclose(losses, on_one_device("mlp", 1), rtol=1e-5)
    floor = 2 * 7 / 8 * size(trainer.state.params)
    assert floor <= bytes_moved(trainer)[0] <= floor + 100


MESHES = [
    {"data": 4, "model": 2},
    {"data": 1, "model": 8},
    {"data": 2, "fsdp": 2, "model": 2},
    {"fsdp": 4, "data": 1, "model": 2},
]


@pytest.mark.parametrize(
    "mesh_shape, accumulate", [*[(shape, 1) for shape in MESHES], (MESHES[2], 3)]
)
def test_tensor_parallel_gives_the_numbers_of_one_device(mesh_shape, accumulate):
    model, data = make("mlp")
    strategy = TensorParallel(mesh_shape, tensor_rules(model))
    trainer, losses = train(model, data, strategy, accumulate_grad_batches=accumulate)
    np.testing.assert_allclose(losses, on_one_device("mlp", accumulate), rtol=1e-5)
    both = trainer.state.params, trainer.state.opt_state
    parts = mesh_shape["model"] * mesh_shape.get("fsdp", 1)
    assert resident(both) <= 1.1 * size(both) / parts
    _, by_kind = bytes_moved(trainer)
    assert ("reduce-scatter" in by_kind) == ("fsdp" in mesh_shape)


def test_tensor_parallel_moves_what_theory_says():
    """Per pair of layers one sum of activations forwards and one backwards; and the
    gradients of what a device holds, over the data axis."""
    model, data = make("transformer")
    strategy = TensorParallel({"data": 4, "model": 2}, tensor_rules(model))
    trainer, losses = train(model, data, strategy)
    np.testing.assert_allclose(losses, on_one_device("transformer", 1), rtol=1e-5)
    program = hlo.read(trainer.compiled_train_step().as_text())
    assert {each.kind for each in program.collectives} == {"all-reduce"}
    shape = dict(strategy.mesh.shape)
    over = {"model": 0.0, "data": 0.0}
    for each in program.collectives:
        axes = each.axes(shape)
        if each.operand_bytes > 100:
            assert axes is not None and len(axes) == 1
            over[axes[0]] += each.wire_bytes
    activations = 32 // 4 * 8 * 32 * 4  # rows, places, width, bytes
    # Forwards one for attention and one for the MLP; backwards the MLP's, and those of
    # attention's three inputs, which XLA sums one by one.
    assert over["model"] == (2 + 1 + 3) * (2 * 1 / 2) * activations
    held = sum(
        leaf.addressable_data(0).nbytes
        for leaf in jax.tree.leaves(trainer.state.params)
    )
    assert held <= over["data"] / (2 * 3 / 4) <= held + 100


def test_tensor_rules_are_for_pairs_of_layers():
    model = Transformer(jax.random.key(0))
    rules = dict(tensor_rules(model.blocks[0], "m"))
    assert rules == {
        "attention.query_proj.weight": PartitionSpec("m", None),
        "attention.key_proj.weight": PartitionSpec("m", None),
        "attention.value_proj.weight": PartitionSpec("m", None),
        "attention.output_proj.weight": PartitionSpec(None, "m"),
        "mlp.layers[0].weight": PartitionSpec("m", None),
        "mlp.layers[0].bias": PartitionSpec("m"),
        "mlp.layers[1].weight": PartitionSpec(None, "m"),
    }
    odd = [
        path for path, _ in tensor_rules(eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0)))
    ]
    assert odd == ["layers[0].weight", "layers[0].bias", "layers[1].weight"]
    with pytest.raises(ValueError, match="has no eqx.nn.MLP of two or more layers"):
        tensor_rules(eqx.nn.Linear(4, 3, key=jax.random.key(0)))


@pytest.mark.parametrize("order", [("model", "fsdp"), ("fsdp", "model")])
def test_one_array_axis_may_be_split_over_two_mesh_axes(order):
    model, data = make("mlp")
    rules = [("layers[*].weight", PartitionSpec(None, order))]
    strategy = TensorParallel({"data": 2, "fsdp": 2, "model": 2}, rules)
    _, losses = train(model, data, strategy)
    np.testing.assert_allclose(losses, on_one_device("mlp", 1), rtol=1e-5)


def test_bad_sizes_and_stages_are_refused():
    with pytest.raises(ValueError, match=r"`stage` must be 1; got 4.*use FSDP\(\)"):
        ZeRO(stage=4)
    with pytest.raises(ValueError, match="`min_size` must be 0 or more .elements"):
        FSDP(min_size=-1)
    with pytest.raises(ValueError, match=r"4 x 3 = 12 devices, and there are 8.*=12"):
        TensorParallel({"data": 4, "model": 3})
    with pytest.raises(ValueError, match="none is named 'data'"):
        TensorParallel({"x": 4, "model": 2})
    with pytest.raises(ValueError, match="a size of 1 or more; got 'model': -1"):
        TensorParallel({"data": 8, "model": -1})
    with pytest.raises(TypeError, match="`mesh_shape` must be sizes by name"):
        TensorParallel((4, 2))


@pytest.mark.parametrize(
    "rules, message",
    [
        ([("layers[0].weight", PartitionSpec("rows"))], "names the axis 'rows'"),
        (
            [("layers[0].weight", "model")],
            "must be .path pattern, PartitionSpec. pairs",
        ),
        (
            [("layer.*", PartitionSpec("model"))],
            r"'layer.\*' fits no leaf of the model.*the paths are layers\[0\].weight",
        ),
        (
            [("*", PartitionSpec()), ("*.bias", PartitionSpec("model"))],
            r"'\*.bias' never holds, since '\*' comes before it",
        ),
        (
            [("layers[1].*", PartitionSpec("model"))],
            r"\('layers\[1\].\*', .* does not fit layers\[1\].weight of shape"
            r" \(3, 64\): axis 0 of size 3 is not divisible by 2",
        ),
        (
            [("layers[0].bias", PartitionSpec(None, "model"))],
            r"does not fit layers\[0\].bias of shape \(64,\): more entries",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, message):
    model = eqx.nn.MLP(4, 3, 64, 1, key=jax.random.key(0))
    with pytest.raises((ValueError, TypeError), match=message):
        train(model, batches(16), TensorParallel({"data": 4, "model": 2}, rules))


def test_the_shards_of_a_batch_are_all_devices_of_the_row_axes():
    assert TensorParallel({"data": 2, "fsdp": 2, "model": 2}).num_shards == 4
    assert TensorParallel({"data": 4, "model": 2}).num_shards == 4
    assert math.prod(FSDP(3).mesh.shape.values()) == FSDP(3).num_shards == 3
