"""The loss over a large vocabulary against the plain one."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from toys import assert_close, linear, quiet

from jaxdp import FSDP, Pmap, Sharded, SingleDevice, Stack, per_example
from jaxdp.losses import token_cross_entropy

BATCH, TOKENS, WIDTH, VOCABULARY = 4, 24, 8, 50


def inputs(tokens=TOKENS):
    keys = jax.random.split(jax.random.key(0), 4)
    head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[0])
    hidden = jax.random.normal(keys[1], (BATCH, tokens, WIDTH))
    targets = jax.random.randint(keys[2], (BATCH, tokens), 0, VOCABULARY)
    weights = jax.random.uniform(keys[3], (BATCH, tokens))
    return head, hidden, targets, weights.at[0].set(0).at[1, 3].set(0)


def plain(head, hidden, targets, weights=None, label_smoothing=0.0, z_loss=0.0):
    logits = jax.vmap(jax.vmap(head))(hidden)
    labels = jax.nn.one_hot(targets, VOCABULARY)
    labels = optax.smooth_labels(labels, label_smoothing)
    values = optax.softmax_cross_entropy(logits, labels)
    values += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    weights = jnp.ones(targets.shape) if weights is None else weights
    return (values * weights).sum(), weights.sum()


def mean_of_pair(result):
    """The mean of values, or of values and their weights."""
    values, totals = result if isinstance(result, tuple) else (result, jnp.ones(BATCH))
    return (values * totals).sum() / totals.sum()


def by_batch(function, *rows):
    return function(*rows)


def one_by_one(function, *rows):
    results = [function(*row) for row in zip(*rows, strict=True)]
    assert all(value.shape == () for value in jax.tree.leaves(results))
    return jax.tree.map(lambda *values: jnp.stack(values), *results)


def vmapped(function, *rows):
    return jax.vmap(function)(*rows)


SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-2}


@pytest.mark.parametrize("apply", [by_batch, one_by_one, vmapped])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens, chunk, others", [
    (TOKENS, 1, {}),
    (TOKENS, 10_000, {}),
    (TOKENS, 6, SMOOTHED),
    (23, 5, {}),
    (1, 32, SMOOTHED),
])  # fmt: skip
def test_values_and_gradients_are_those_of_the_plain_loss(
    tokens, chunk, others, weighted, apply
):
    head, hidden, *rows = inputs(tokens)
    rows = rows if weighted else rows[:1]

    def ours(head, hidden):
        def loss(hidden, targets, weights=None):
            arguments = head, hidden, targets, chunk
            return token_cross_entropy(*arguments, weights=weights, **others)

        return mean_of_pair(apply(loss, hidden, *rows))

    def wanted(head, hidden):
        total, count = plain(head, hidden, *rows, **others)
        return total / count

    found, expected = (
        jax.jit(jax.value_and_grad(one, (0, 1)))(head, hidden) for one in (ours, wanted)
    )
    assert_close(found, expected, 1e-6, 1e-6)


def test_the_head_may_be_the_matrix_of_an_embedding():
    _, hidden, targets, _ = inputs()
    matrix = jax.random.normal(jax.random.key(5), (VOCABULARY, WIDTH))
    found = token_cross_entropy(matrix, hidden, targets, 16)
    wanted = optax.softmax_cross_entropy_with_integer_labels(
        hidden @ matrix.T, targets
    ).mean(axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_what_has_weight_0_may_be_anything():
    head, hidden, targets, weights = inputs()

    def mean(head, hidden, targets):
        return mean_of_pair(
            token_cross_entropy(head, hidden, targets, 16, weights=weights)
        )

    spoiled = jnp.where(weights[..., None] == 0, jnp.nan, hidden)
    ignored = jnp.where(weights == 0, -100, targets)
    wanted = jax.value_and_grad(mean)(head, hidden, targets)
    found = jax.value_and_grad(mean)(head, spoiled, ignored)
    assert_close(found, wanted, 0, 0)
    values, totals = token_cross_entropy(head, spoiled, ignored, weights=weights)
    assert values[0] == totals[0] == 0


@pytest.mark.parametrize("is_vmapped", [False, True])
def test_the_logits_of_all_tokens_never_exist(is_vmapped):
    _, hidden, targets, _ = inputs(512)
    matrix = jnp.ones((4096, WIDTH))

    def temporary(chunk):  # of all rows together, or of each
        def mean(matrix, hidden):
            def loss(hidden, targets):
                return token_cross_entropy(matrix, hidden, targets, chunk)

            return (jax.vmap(loss) if is_vmapped else loss)(hidden, targets).mean()

        gradient = jax.jit(jax.grad(mean, (0, 1)))
        compiled = gradient.lower(matrix, hidden).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = BATCH * 512 * 4096 * 4
    assert temporary(10_000) > logits
    assert temporary(128 // BATCH if is_vmapped else 128) < 0.2 * logits


def test_tokens_that_are_split_over_devices_stay_where_they_are():
    head, hidden, targets, _ = inputs(512)
    mesh = Mesh(jax.devices()[:8], ("seq",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec(None, "seq"))

    def mean(hidden, targets):
        return token_cross_entropy(head, hidden, targets, 128).mean()

    gradient = jax.jit(
        jax.value_and_grad(mean),
        in_shardings=(split, split),
        out_shardings=(None, split),
    )
    text = gradient.lower(hidden, targets).compile().as_text()
    assert "all-reduce" in text  # of the mean
    assert not re.search("all-gather|all-to-all|collective-permute", text)
    wanted = jax.value_and_grad(mean)(hidden, targets)
    assert_close(gradient(hidden, targets), wanted, 1e-6, 1e-7)


def make_model():
    blocks = Stack([linear(WIDTH, WIDTH, key) for key in (1, 2)])
    embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=jax.random.key(0))
    return {"embed": embed, "blocks": blocks, "head": linear(WIDTH, VOCABULARY, 3)}


def features(model, tokens):
    return jax.vmap(lambda token: model["blocks"](model["embed"](token)))(tokens)


def chunked_loss(model, tokens, targets):
    hidden = jax.vmap(lambda row: features(model, row))(tokens)
    weights = (targets != 0).astype(jnp.float32)
    return token_cross_entropy(model["head"], hidden, targets, 16, weights=weights)


@per_example
def loss_of_example(model, tokens, targets):
    weights = (targets != 0).astype(jnp.float32)
    hidden = features(model, tokens)
    return token_cross_entropy(model["head"], hidden, targets, 4, weights=weights)


def plain_loss(model, tokens, targets):
    hidden = jax.vmap(lambda row: features(model, row))(tokens)
    logits = jax.vmap(jax.vmap(model["head"]))(hidden)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    weights = (targets != 0).astype(jnp.float32)
    totals = weights.sum(axis=1)
    return (values * weights).sum(axis=1) / totals, totals


@functools.cache
def losses(loss_fn, strategy, precision="32-true"):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, VOCABULARY, (18, 12)).astype(np.int32)
    data = [(rows[:8, :-1], rows[:8, 1:]), (rows[8:, :-1], rows[8:, 1:])]
    options = {"loss_fn": loss_fn, "strategy": strategy(), "precision": precision}
    trainer = quiet(make_model(), optax.adam(1e-2), **options)
    return trainer.fit(data, max_epochs=3)["loss"]


fsdp = functools.partial(FSDP, min_size=1)


@pytest.mark.parametrize("loss_fn, strategy", [
    *((chunked_loss, layout) for layout in (SingleDevice, Sharded, Pmap, fsdp)),
    *((loss_of_example, layout) for layout in (Sharded, fsdp)),
])  # fmt: skip
def test_a_trainer_takes_its_pair_under_every_layout(loss_fn, strategy):
    found = losses(loss_fn, strategy)
    np.testing.assert_allclose(found, losses(plain_loss, SingleDevice), rtol=1e-5)


def test_products_are_in_the_precision_of_the_trainer():
    found = losses(chunked_loss, SingleDevice, "bf16-mixed")
    wanted = losses(plain_loss, SingleDevice, "bf16-mixed")
    np.testing.assert_allclose(found, wanted, rtol=2e-3)
    exact = losses(plain_loss, SingleDevice)
    assert found != exact
