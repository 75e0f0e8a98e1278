"""Tiny models, data and hand-written loops that the tests share."""

import csv
import json
import os
import pathlib
import socket
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import Callback, Pmap, SingleDevice, Stack, Trainer


def linear(inputs=4, outputs=3, key=0):
    return eqx.nn.Linear(inputs, outputs, key=jax.random.key(key))


def mlp(key=0):
    """4 -> 8 -> 3."""
    return eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(key))


class Mlp(eqx.Module):
    """4 -> 16 -> 3 with dropout, an activation leaf, an int buffer and a bool one."""

    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear
    offsets: jax.Array
    flags: jax.Array
    activation: callable

    def __init__(self, key, rate=0.3):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(4, 16, key=keys[0])
        self.dropout = eqx.nn.Dropout(rate)
        self.last = eqx.nn.Linear(16, 3, key=keys[1])
        self.offsets = jnp.arange(3)
        self.flags = jnp.array([True, False])
        self.activation = jax.nn.gelu

    def __call__(self, x, *, key=None):
        x = self.dropout(self.activation(self.first(x)), key=key)
        shift = jax.lax.stop_gradient(self.offsets).astype(x.dtype)
        return self.last(x) + jnp.where(self.flags[0], shift, -shift)


class Net(eqx.Module):
    """4 -> `width` -> 2 with dropout."""

    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, width=8, key=0):
        keys = jax.random.split(jax.random.key(key))
        self.first = eqx.nn.Linear(4, width, key=keys[0])
        self.dropout = eqx.nn.Dropout(0.2)
        self.last = eqx.nn.Linear(width, 2, key=keys[1])

    def __call__(self, x, *, key=None):
        return self.last(self.dropout(jax.nn.relu(self.first(x)), key=key))


class NormNet(eqx.Module):
    """4 -> 8 -> BatchNorm -> 3."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key, axis_name="batch", mode="batch"):
        keys = jax.random.split(key)
        # No bias: BatchNorm takes it out again, and Adam would follow rounding errors.
        self.first = eqx.nn.Linear(4, 8, use_bias=False, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, axis_name=axis_name, mode=mode)
        self.last = eqx.nn.Linear(8, 3, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


class Stacked(eqx.Module):
    """4 -> 8 -> two blocks in a stack -> 3."""

    first: eqx.nn.Linear
    blocks: Stack
    last: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(1), 4)
        self.first = eqx.nn.Linear(4, 8, key=keys[0])
        self.blocks = Stack([eqx.nn.Linear(8, 8, key=key) for key in keys[1:3]])
        self.last = eqx.nn.Linear(8, 3, key=keys[3])

    def __call__(self, x):
        return self.last(jnp.tanh(self.blocks(self.first(x))))


class DeepBlock(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, width, key, rate=0.2):
        self.linear = eqx.nn.Linear(width, width, key=key)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x, *, key=None):
        return x + self.dropout(jnp.tanh(self.linear(x)), key=key)


class Deep(eqx.Module):
    """4 -> blocks with dropout in a stack -> 3."""

    first: eqx.nn.Linear
    blocks: Stack
    last: eqx.nn.Linear

    def __init__(self, number=8):
        keys = jax.random.split(jax.random.key(0), number + 2)
        self.first = eqx.nn.Linear(4, 8, key=keys[0])
        self.last = eqx.nn.Linear(8, 3, key=keys[1])
        self.blocks = Stack([DeepBlock(8, key) for key in keys[2:]])

    def __call__(self, x, *, key=None):
        return self.last(self.blocks(self.first(x), key=key))


class Apart(Pmap):
    """Gives each device its own rows, also of what is written for a batch."""

    def compile(self, step, arguments, roles, results, *, donate=(), rows="apart"):
        rows = "apart" if rows == "together" else rows
        return super().compile(
            step, arguments, roles, results, donate=donate, rows=rows
        )


def rows(count, seed=0):
    """`count` rows of x (4 floats) and y (one of three classes)."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 4)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int32) + (x[:, 0] > 0.5).astype(np.int32)
    return x, y


def batches(*sizes, seed=0):
    """Batches of the given sizes over distinct rows."""
    x, y = rows(sum(sizes), seed)
    stops = np.cumsum(sizes)
    return [(x[b - n : b], y[b - n : b]) for n, b in zip(sizes, stops, strict=True)]


IN_FLIGHT = 8
"""Steps after which values are read, as docs/inside.md has it."""

HOOKS = [
    name
    for name in vars(Callback)
    if name.startswith("on_") or name in ("setup", "teardown")
]


class On(Callback):
    """Calls functions in the hooks of their names."""

    def __init__(self, **hooks):
        for hook, function in hooks.items():
            setattr(self, hook, function)


class At(On):
    """Calls a function with the trainer in a hook after a step."""

    def __init__(self, step, function, hook="on_train_batch_end"):
        def call(trainer, *_):
            if trainer.global_step == step:
                function(trainer)

        super().__init__(**{hook: call})


def stop(trainer, *_):
    """Ends a fit at the next boundary."""
    trainer.should_stop = True


def fail_with(error):
    """Returns a function that raises an error, whatever it is called with."""

    def fail(*_):
        raise error

    return fail


def scores(values, name="val_loss"):
    """Returns a callback that replaces a value of validations by one of each epoch."""

    def replace(trainer, metrics):
        metrics[name] = float(values[trainer.current_epoch])

    return On(on_validation_end=replace)


def each_refused(table):
    """Runs a test with each call, error and words of a table by kind."""
    cases = [
        pytest.param(*case, id=f"{kind} {number}")
        for kind, cases in table.items()
        for number, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(("provoke", "error", "words"), cases)


def injected(rate=0.1, make=optax.sgd):
    """An optimizer whose state has its learning rate."""
    return optax.inject_hyperparams(make)(learning_rate=rate)


class Recorder(Callback):
    """Keeps every step's loss."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, metrics, batch_idx):
        self.losses.append(float(metrics["loss"]))


def counting(kind):
    """A strategy of a kind that counts what it compiles for training."""

    class Counting(kind):
        count = 0

        def compile(self, step, arguments, roles, results, **options):
            Counting.count += results == ("state", "replicated")
            return super().compile(step, arguments, roles, results, **options)

    return Counting()


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def path_of(path):
    """A path of `jax.tree_util` as it is written in code: `layers[0].weight`."""
    return jax.tree_util.keystr(path).removeprefix(".")


def find_nodes(is_node, tree):
    """The outermost nodes of a tree for which a function is true."""
    return [*filter(is_node, jax.tree.leaves(tree, is_leaf=is_node))]


def equations(jaxpr):
    """All equations of a traced program, those inside of others too."""
    for each in jaxpr.eqns:
        yield each
        for value in jax.tree.leaves([*each.params.values()]):
            inner = getattr(value, "jaxpr", value)
            yield from equations(inner) if hasattr(inner, "eqns") else ()


def tracing(kind, **options):
    """A strategy of a kind, and a list of the programs that it has traced."""
    programs = []

    class Traced(kind):
        def compile(self, step, arguments, *others, **options):
            jitted = super().compile(step, arguments, *others, **options)
            programs.append(jitted.trace(*arguments).jaxpr)
            return jitted

    return Traced(**options), programs


def arrays(tree):
    """The arrays of a tree, on the host."""

    def is_array(leaf):
        return isinstance(leaf, jax.Array | np.ndarray | np.generic)

    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, is_array))]


def assert_close(found, expected, rtol=1e-5, atol=1e-6):
    """Compares the arrays of two trees; with zeros, to the bit."""
    for one, other in zip(arrays(found), arrays(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def leaves(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state)]


def assert_equal_leaves(one, other):
    for ours, theirs in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def read_meta(path):
    """The facts of a checkpoint, which are beside its arrays."""
    return json.loads((pathlib.Path(path) / "meta" / "metadata").read_text())


def read_table(path):
    """The rows of a table, or of that in the folder of a run."""
    path = path / "metrics.csv" if path.is_dir() else path
    return list(csv.DictReader(path.read_text().splitlines()))


def steps_in(folder):
    """The steps of the checkpoints in a folder, in order."""
    return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_python(code, *arguments, **environment):
    """Runs code in a process of its own, which finds these helpers."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | environment,
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def hand_written(
    model,
    optimizer,
    data,
    epochs,
    loss_of,
    filter_spec=eqx.is_inexact_array,
    after=lambda model, step: model,
):
    """Plain JAX: the model, and the loss of every step.

    `loss_of(model, *batch)` is the mean loss of a batch; `after` changes the model.
    """
    params, static = eqx.partition(model, filter_spec)
    state = optimizer.init(params)

    @eqx.filter_jit
    def take_step(params, static, state, number, batch):
        def loss(params):
            return loss_of(eqx.combine(params, static), *batch)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        model = eqx.combine(eqx.apply_updates(params, updates), static)
        return *eqx.partition(after(model, number), filter_spec), state, value

    losses = []
    for number, batch in enumerate(list(data) * epochs, 1):
        params, static, state, value = take_step(
            params, static, state, jnp.int32(number), batch
        )
        losses.append(float(value))
    return eqx.combine(params, static), losses


def cross_entropy(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def linear_trainer(*callbacks, **options):
    """One layer, on one device, with a learning rate that falls."""
    options = {"log_every_n_steps": 2, "metrics": ["accuracy"]} | options
    return Trainer(
        linear(),
        optax.sgd(optax.linear_schedule(0.1, 0.0, 100)),
        loss="cross_entropy",
        strategy=SingleDevice(),
        callbacks=callbacks,
        enable_progress_bar=False,
        **options,
    )


def mlp_trainer(*callbacks, strategy=None, **options):
    """Three layers, logged at every step."""
    return Trainer(
        eqx.nn.MLP(4, 3, 16, 2, key=jax.random.key(0)),
        optax.adam(0.05),
        loss="cross_entropy",
        metrics=["accuracy"],
        strategy=strategy or SingleDevice(),
        callbacks=callbacks,
        enable_progress_bar=False,
        log_every_n_steps=1,
        **options,
    )


def on_one_device(*callbacks, model=None, optimizer=None, **options):
    """A trainer of an `Mlp`, or of another model; quiet."""
    return quiet(
        Mlp(jax.random.key(0)) if model is None else model,
        optax.adam(1e-2) if optimizer is None else optimizer,
        callbacks=callbacks,
        **{"loss": "cross_entropy", "strategy": SingleDevice(), **options},
    )


def linear_on_one_device(*callbacks, optimizer=None, **options):
    """A trainer of one layer; quiet."""
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return on_one_device(*callbacks, model=linear(), optimizer=optimizer, **options)


RAGGED = (16, 16, 16, 16, 5)


def quiet(model, *args, **kwargs):
    """A trainer without a progress bar."""
    return Trainer(model, *args, enable_progress_bar=False, **kwargs)


def run(strategy, model=None, epochs=10, data=None, **kwargs):
    """Losses of every step (50 by default), and the trainer."""
    recorder = Recorder()
    trainer = quiet(
        Mlp(jax.random.key(0)) if model is None else model,
        kwargs.pop("optimizer", optax.adam(1e-2)),
        strategy=strategy,
        callbacks=[recorder, *kwargs.pop("callbacks", ())],
        loss=kwargs.pop("loss", "cross_entropy" if "loss_fn" not in kwargs else None),
        **kwargs,
    )
    trainer.fit(batches(*RAGGED) if data is None else data, max_epochs=epochs)
    return np.array(recorder.losses), trainer


def make_small(model=None, *args, **kwargs):
    """A trainer of a perceptron of eight hidden units, or of another model; quiet."""
    kwargs = {"enable_progress_bar": False, "strategy": SingleDevice()} | kwargs
    return Trainer(mlp() if model is None else model, *args, **kwargs)
