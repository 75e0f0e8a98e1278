"""Whether the values of rows depend on other rows, as a traced program tells."""

import functools

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from row_forms import (
    KEY,
    MATRIX,
    ROWS,
    WIDTH,
    all_views,
    attention,
    beside_the_other_devices,
    between_extremes,
    branches,
    centred,
    checked,
    choice,
    choice_of_means,
    convolutions,
    counted,
    cross_entropy,
    hardest,
    kernels,
    newton,
    numbered,
    one_hot,
    other_operations,
    over_time,
    own_batch_norm,
    recurrent_mean,
    rnn,
    smoothed,
    stacked_views,
    standardised,
    swapped,
    tokens_joined,
    two_views,
    two_views_apart,
    typed_by_devices,
)

from jaxdp.step.collectives import DATA
from jaxdp.step.jaxprs import equations_in
from jaxdp.step.row_mixing import mark_rows, mark_values, values_mix_rows
from jaxdp.step.row_origins import RULES

LABELS = jnp.arange(ROWS) % WIDTH
MIXED_UP = np.array([3, 0, 4, 5, 1, 2])

INDEPENDENT = {
    "cross-entropy": lambda x: cross_entropy(x @ MATRIX, LABELS),
    "picked by labels": lambda x: -jax.nn.log_softmax(x)[jnp.arange(ROWS), LABELS],
    "an embedding": lambda x: MATRIX[jnp.argmax(x, axis=1)].sum(axis=1) + x[:, 0],
    "einsum": lambda x: jnp.einsum("ri,ij,rj->r", x, MATRIX, x),
    "sorted features": lambda x: jnp.sort(x, axis=1)[:, 0] + jnp.cumsum(x, 1)[:, 2],
    "features reversed": lambda x: (x[:, ::-1] * x).sum(axis=1),
    "feature pairs": lambda x: (x[:, :, None] - x[:, None]).max(axis=(1, 2)),
    "a loop over rows": lambda x: jax.lax.map(lambda row: (row**2).sum(), x),
    "row after row": lambda x: jnp.stack([x[i].sum() for i in range(ROWS)]),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 1)))[:, :2].sum(axis=1),
    "remat": lambda x: jax.checkpoint(lambda x: jnp.sin(x).sum(axis=1))(x),
    "columns first": lambda x: (MATRIX @ x.T).T.sum(axis=1),
    "a decomposition": lambda x: jax.vmap(
        lambda row: jnp.linalg.slogdet(jnp.outer(row, row) + jnp.eye(WIDTH))[1]
    )(x),
    "one-hot": one_hot,
    "numbered": numbered,
    "FFT of features": lambda x: jnp.abs(jnp.fft.fft(x))[:, 1],
    "solved with": lambda x: jnp.linalg.solve(MATRIX + 9 * jnp.eye(WIDTH), x.T).T.sum(
        axis=1
    ),
    "top features": lambda x: jax.lax.top_k(x, 2)[0].sum(axis=1),
    "GRU of rows": rnn,
    "GRU over time": over_time,
    "convolutions": convolutions,
    "attention": attention,
    "Newton": newton,
    "two views": two_views,
    "two views apart": two_views_apart,
    "kernels of rows": kernels,
    "tokens joined": tokens_joined,
    "checked": checked,
    "branches": branches,
    "a choice": choice,
    "other operations": other_operations,
    "typed by devices": typed_by_devices,
    "a stack": lambda x: jnp.stack([x, jnp.sin(x)], axis=1).max(axis=(1, 2)),
    "a stack behind": lambda x: jnp.stack([x, jnp.sin(x)]).max(axis=(0, 2)),
    "unstacked": lambda x: jnp.prod(jnp.stack(jnp.unstack(x, axis=1)), axis=0),
    "tiled features": lambda x: jnp.tile(x, (1, 2)).sum(axis=1),
    # Forms in which rows meet others, and these do not.
    "there and back": lambda x: jnp.roll(jnp.roll(x, 1, axis=0), -1, axis=0).sum(1),
    "turned twice": lambda x: (x[::-1] @ MATRIX)[::-1].sum(axis=1),
    "permuted and back": lambda x: (x[MIXED_UP] @ MATRIX)[np.argsort(MIXED_UP)].sum(1),
    "halves put together": lambda x: jnp.concatenate([x[:3] @ MATRIX, x[3:]]).sum(1),
    "all rows by number": lambda x: x[jnp.arange(len(x))].sum(axis=1),
    "repeated": lambda x: jnp.repeat(x, 2, axis=0).reshape(ROWS, 2, WIDTH).sum((1, 2)),
    "features rolled": lambda x: (x * jnp.roll(x, 1, axis=1)).sum(axis=1),
    "features permuted": lambda x: (x * x[:, jnp.array([2, 0, 3, 1])]).sum(axis=1),
    "feature pieces": lambda x: x[:, 0] * x[:, -1] + x[:, 1:3].sum(axis=1),
    "along features": lambda x: jnp.take_along_axis(
        x, jnp.argsort(x, axis=1)[:, :2], axis=1
    ).sum(axis=1),
    "mask of ones": lambda x: (x * jnp.ones_like(x)).sum(axis=1) + jnp.zeros(len(x)),
    "one-hot labels": lambda x: optax.softmax_cross_entropy(
        x, jax.nn.one_hot(jnp.argmax(x, axis=1), WIDTH)
    ),
    "positions": lambda x: x @ jnp.arange(WIDTH) + (x * jnp.arange(WIDTH)[None]).sum(1),
    "positions joined": lambda x: (
        (x.ravel() * jnp.tile(jnp.arange(WIDTH), len(x))).reshape(x.shape).sum(axis=1)
    ),
    "causal": lambda x: (jnp.tri(WIDTH)[None] * x[:, None] * x[:, :, None]).sum(
        axis=(1, 2)
    ),
    "parts of rows": lambda x: jax.lax.map(lambda row: row.sum(), x, batch_size=2),
    "a scan of parts": lambda x: jax.lax.scan(
        lambda n, part: (n + 1, part.sum(axis=1)), 0, x.reshape(3, 2, WIDTH)
    )[1].ravel(),
    "shuffled in each": lambda x: jax.vmap(
        lambda row: row[jax.random.permutation(KEY, WIDTH)] @ MATRIX[0]
    )(x),
    "padded rows": lambda x: jnp.pad(x, ((2, 1), (0, 0)))[2:-1].sum(axis=1),
    "layers in a loop": lambda x: jax.lax.map(
        lambda row: jax.lax.scan(
            lambda h, layer: (h @ layer, None), row, MATRIX[None].repeat(ROWS, axis=0)
        )[0].sum(),
        x,
    ),
    "a loop over tokens of each": lambda x: jax.lax.map(
        lambda row: jax.lax.scan(lambda h, token: (h + token, h), 0.0, row)[1].sum(), x
    ),
    "set by labels": lambda x: (
        x.at[jnp.arange(ROWS), jnp.argmax(x, axis=1)].set(0.0).sum(axis=1)
    ),
    "a margin": lambda x: (
        x.at[jnp.arange(ROWS), jnp.argmax(x, axis=1)].multiply(0.9).max(axis=1)
    ),
    "written": lambda x: jnp.zeros_like(x).at[:, 1].set(x[:, 0]).sum(axis=1),
    "rows written": lambda x: jnp.zeros_like(x).at[1:].set(x[1:]).sum(axis=1),
    "a scalar for all": lambda x: (
        x.sum(axis=1) * MATRIX.max() + jnp.log(MATRIX[0, 0] + 9)
    ),
    "gradients of rows": lambda x: jax.vmap(jax.grad(lambda row: (row @ MATRIX) @ row))(
        x
    ).sum(axis=1),
}

MIXING = {
    "contrastive": lambda x: cross_entropy(x @ x.T, jnp.arange(ROWS)),
    "contrastive by einsum": lambda x: cross_entropy(
        jnp.einsum("id,jd->ij", x, jnp.sin(x)), jnp.arange(ROWS)
    ),
    "SimCLR": all_views,
    "SimCLR of a stack": stacked_views,
    "a stack of means": lambda x: x[:, 0] - jnp.stack([x, x]).mean(axis=(0, 1, 2)),
    "rows against a tile": lambda x: (x @ jnp.tile(x, (2, 1)).T).sum(axis=1),
    "a tile": lambda x: x[:, 0] - jnp.tile(x, (2, 1)).max(axis=0)[0],
    "of unstacked": lambda x: x[:, 0] - jnp.unstack(x, axis=1)[1].max(),
    "standardised": standardised,
    "distances": lambda x: jnp.abs(x[:, None] - x[None]).sum(axis=(1, 2)),
    "weighted by a sum": lambda x: x[:, 0] / x[:, 1].sum(),
    "softmax over rows": lambda x: jax.nn.softmax(x, axis=0).max(axis=1),
    "ranks": lambda x: jnp.sort(x, axis=0).sum(axis=1),
    "sums so far": lambda x: jnp.cumsum(x[:, 0]),
    "the next row": lambda x: (x * x[::-1]).sum(axis=1),
    "a loop that mixes": recurrent_mean,
    "counted": counted,
    "centred": centred,
    "smoothed": smoothed,
    "an own BatchNorm": own_batch_norm,
    "between extremes": between_extremes,
    "the hardest": hardest,
    "FFT of rows": lambda x: jnp.abs(jnp.fft.fft(x, axis=0))[:, 0],
    "QR": lambda x: jnp.abs(jnp.linalg.qr(x)[0]).sum(axis=1),
    "SVD": lambda x: jnp.abs(jnp.linalg.svd(x, full_matrices=False)[0]).sum(axis=1),
    "means over devices": beside_the_other_devices(lambda x: jax.lax.pmean(x, DATA)),
    "gathered": beside_the_other_devices(
        lambda x: jax.lax.all_gather(x, DATA).max(axis=0)
    ),
    "passed on": beside_the_other_devices(
        lambda x: jax.lax.ppermute(x, DATA, [(0, 1), (1, 0)])
    ),
    "swapped": beside_the_other_devices(swapped),
    "scattered": beside_the_other_devices(
        lambda x: jax.lax.psum_scatter(jnp.stack([x, x]), DATA)
    ),
    "a choice of means": choice_of_means,
    "remat": lambda x: jax.checkpoint(lambda x: x[:, 0] - x.mean())(x),
    # Moved along the axis of rows, and not back.
    "rolled": lambda x: jnp.roll(x, 1, axis=0).sum(axis=1),
    "beside the rolled": lambda x: (x * jnp.roll(x, 1, axis=0)).sum(axis=1),
    "rolled by so many": lambda x: jnp.roll(x, jnp.argmax(MATRIX[0]) + 1, axis=0).sum(
        1
    ),
    "permuted": lambda x: x[MIXED_UP].sum(axis=1),
    "permuted by take": lambda x: jnp.take(x, jnp.array(MIXED_UP), axis=0).sum(axis=1),
    "by a fixed key": lambda x: x[jax.random.permutation(KEY, len(x))].sum(axis=1),
    "rows by a fixed key": lambda x: jax.random.permutation(KEY, x).sum(axis=1),
    "entries by a fixed key": lambda x: jax.random.permutation(KEY, x[:, 0]),
    "the first behind": lambda x: jnp.concatenate([x[1:], x[:1]]).sum(axis=1),
    "turned": lambda x: x[::-1].sum(axis=1),
    "by halves": lambda x: jnp.tile(x[:3] + x[3:], (2, 1)).sum(axis=1),
    "every other": lambda x: jnp.repeat(x[::2], 2, axis=0).sum(axis=1) + x[:, 0],
    "pairs": lambda x: jnp.repeat(x.reshape(3, 2, WIDTH).sum(axis=(1, 2)), 2),
    "differences": lambda x: jnp.diff(x, axis=0, append=x[-1:]).sum(axis=1),
    "against the first": lambda x: (x - x[:1] * x[0, 0]).sum(axis=1),
    "against the last": lambda x: (x - x[-1:]).sum(axis=1),
    "the nearest": lambda x: (
        x
        - x[
            jnp.argmin(
                ((x[:, None] - x[None]) ** 2).sum(-1) + 9 * jnp.eye(ROWS), axis=1
            )
        ]
    ).sum(axis=1),
    "by order": lambda x: x[jnp.argsort(x[:, 0])].sum(axis=1),
    "order": lambda x: jnp.argsort(x[:, 0]) * 1.0,
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x).sum(axis=1),
    "pairs by vmap": lambda x: jax.vmap(
        lambda one: jax.vmap(lambda other: one @ other)(x)[0]
    )(x),
    "pairs by loops": lambda x: jax.lax.map(
        lambda one: jax.lax.map(lambda other: one @ other, x)[0], x
    ),
    "pairs by loops, summed": lambda x: jax.lax.map(
        lambda one: jax.lax.scan(lambda s, other: (s + one @ other, None), 0.0, x)[0], x
    ),
    "triangle": lambda x: jnp.triu(x @ x.T).sum(axis=1),
    "segments": lambda x: jax.ops.segment_sum(x, jnp.arange(ROWS) // 2, 3)[
        jnp.arange(ROWS) // 2
    ].sum(axis=1),
    "a loop that picks": lambda x: (
        jax.lax.fori_loop(0, ROWS, lambda i, total: total + x[i].sum(), 0.0) + x[:, 0]
    ),
    "until all are small": lambda x: jax.lax.stop_gradient(
        jax.lax.while_loop(lambda x: jnp.abs(x).max() > 0.1, lambda x: x * 0.7, x)
    ).sum(axis=1),
    "a choice by the mean": lambda x: jax.lax.cond(
        x[:2].mean() > 0.3, lambda x: x.sum(axis=1), lambda x: x.max(axis=1), x
    ),
    "written elsewhere": lambda x: jnp.zeros_like(x).at[MIXED_UP].set(x).sum(axis=1),
    "written behind": lambda x: x.at[1:].set(x[:-1]).sum(axis=1),
    "updated behind": lambda x: jax.lax.dynamic_update_slice(x, x[:2], (2, 0)).sum(1),
    "a window over rows": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME"
    ).sum(axis=1),
    "a convolution over rows": lambda x: jnp.convolve(x[:, 0], jnp.ones(3), "same"),
}

OF_KEYS = {
    "noise": (False, lambda x, keys: x[:, 0] * jax.vmap(jax.random.normal)(keys)),
    "dropout": (
        False,
        lambda x, keys: jax.vmap(lambda row, key: eqx.nn.Dropout(0.5)(row, key=key))(
            x, keys
        ).sum(axis=1),
    ),
    "split": (
        False,
        lambda x, keys: jax.vmap(
            lambda row, key: row @ jax.random.normal(jax.random.split(key)[1], WIDTH)
        )(x, keys),
    ),
    "shuffled in each": (
        False,
        lambda x, keys: jax.vmap(
            lambda row, key: jax.random.permutation(key, row)[0] * row[0]
        )(x, keys),
    ),
    "wrapped": (
        False,
        lambda x, keys: (
            x[:, 0]
            * jax.vmap(lambda data: jax.random.uniform(jax.random.wrap_key_data(data)))(
                jax.random.key_data(keys)
            )
        ),
    ),
    "drawn": (
        False,
        lambda x, keys: (
            jax.vmap(
                lambda key: (
                    jax.random.gamma(key, 2.0)
                    + jax.random.categorical(key, MATRIX[0])
                    + jax.random.choice(key, WIDTH)
                    + jax.random.truncated_normal(key, -1.0, 1.0)
                )
            )(keys)
            * x[:, 0]
        ),
    ),
    "permuted by the first": (
        True,
        lambda x, keys: x[jax.random.permutation(keys[0], len(x))].sum(axis=1),
    ),
    "rows permuted by the first": (
        True,
        lambda x, keys: jax.random.permutation(keys[0], x).sum(axis=1),
    ),
    "noise by the first": (
        True,
        lambda x, keys: (x * jax.random.normal(keys[0], x.shape)).sum(axis=1),
    ),
    "one for all": (
        True,
        lambda x, keys: x[:, 0] * jax.random.beta(keys[-1], 1.0, 1.0),
    ),
}


def as_trained(loss_fn):
    """As a train step has it: under differentiation, in a loop."""
    x = jnp.ones((ROWS, WIDTH))

    def total(scale, x):
        return mark_values(loss_fn(mark_rows(x) * scale)).sum()

    def steps(x):
        body = lambda carry, x: (carry - jax.grad(total)(carry, x), None)  # noqa: E731
        return jax.lax.scan(body, 1.0, x[None])

    return jax.make_jaxpr(steps)(x)


def found(loss_fn):
    return values_mix_rows(as_trained(loss_fn))


@pytest.mark.parametrize("case", INDEPENDENT)
def test_independent_rows(case):
    assert not changed_by(INDEPENDENT[case], 2)
    assert not found(INDEPENDENT[case])


@pytest.mark.parametrize("case", MIXING)
def test_rows_that_interact(case):
    assert any(changed_by(MIXING[case], row) for row in range(ROWS))
    assert found(MIXING[case])


@pytest.mark.parametrize("case", OF_KEYS)
def test_keys_of_rows(case):
    mixes, loss_fn = OF_KEYS[case]
    keys = jax.random.split(KEY, ROWS)

    def total(scale, x):
        values = loss_fn(mark_rows(x) * scale, mark_rows(keys))
        return mark_values(values).sum()

    traced = jax.make_jaxpr(jax.grad(total))(1.0, jnp.ones((ROWS, WIDTH)))
    assert values_mix_rows(traced) == mixes


@pytest.mark.parametrize(
    "case", ["a hinge", "equal rows", "a gradient", "a number", "a place", "a constant"]
)
def test_rows_interact_though_no_value_of_this_batch_shows_it(case):
    """What two evaluations, one of them with a row exchanged, would not tell apart."""

    def hinge(x):
        distances = ((x[:, None] - x[None]) ** 2).sum(axis=-1) + jnp.eye(ROWS)
        return jnp.maximum(0, -1 - distances).sum(axis=1)

    def of_equal_rows(x):
        return MIXING["contrastive"](jnp.ones_like(x) + 0 * x)

    def by_gradient(x):
        mean = x.mean(axis=0)
        return x.sum(axis=1) + (mean - jax.lax.stop_gradient(mean)).sum()

    loss_fn = {
        "a hinge": hinge,
        "equal rows": of_equal_rows,
        "a gradient": by_gradient,
        "a number": lambda x: x.sum(axis=1) * jnp.arange(len(x)),
        "a place": lambda x: x.sum(axis=1) * jnp.linspace(0, 1, len(x)),
        "a constant": lambda x: x.sum(axis=1) + np.arange(len(x)) / 2,
    }
    assert not any(changed_by(loss_fn[case], row) for row in range(ROWS))
    assert found(loss_fn[case])


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("dot_general", {"numbers": (((1,), (0,)), ((), ()))}),
        ("dot_general", {"dimension_numbers": None}),
        ("gather", {"dimension_numbers": "otherwise"}),
        ("sort", {"along": 1}),
    ],
)
def test_an_operation_that_is_described_otherwise_is_taken_to_mix_rows(name, described):
    def loss_fn(primitive, x):
        both = primitive.bind(mark_rows(x), jnp.ones((WIDTH, WIDTH)), **described)
        return mark_values(both.sum(axis=1))

    def mixes(name):
        primitive = jax.extend.core.Primitive(name)
        primitive.def_abstract_eval(lambda x, *_, **__: x)
        traced = functools.partial(loss_fn, primitive)
        return values_mix_rows(jax.make_jaxpr(traced)(jnp.ones((ROWS, WIDTH))))

    assert mixes(name) and not mixes("one that no rule is for")


def test_rows_in_a_loop_that_is_described_otherwise_are_taken_to_mix():
    x = jnp.ones((ROWS, WIDTH))
    turn = jax.make_jaxpr(lambda x: mark_values(mark_rows(x).sum(axis=1)))(x)
    loop = jax.extend.core.Primitive("scan")
    loop.def_abstract_eval(lambda x, **_: x)
    assert values_mix_rows(jax.make_jaxpr(lambda x: loop.bind(x, turn=turn))(x[None]))
    assert not values_mix_rows(turn)


def test_every_rule_reads_operations_of_independent_rows():
    """Rows would be found to mix where it fails with this version of JAX."""

    def names(*cases):
        programs = map(as_trained, cases)
        return {use.primitive.name for jaxpr in programs for use in equations_in(jaxpr)}

    keys = jax.random.split(KEY, ROWS)
    of_keys = [lambda x, f=f: f(x, keys) for mixes, f in OF_KEYS.values() if not mixes]
    read = names(*INDEPENDENT.values(), *of_keys)
    rules = {*RULES, "cond", "optimization_barrier", "scan", "while"}
    assert {"pmax", "pmin", "psum"} <= names(*MIXING.values())
    if not hasattr(jax.lax, "stack"):  # JAX 0.10.0 makes stacks of other operations
        rules -= {"stack", "unstack"}
    assert sorted(rules - read) == []


jitted = functools.cache(jax.jit)


def changed_by(loss_fn, row):
    """Which rows' values change when another row does."""
    x = jax.random.normal(KEY, (ROWS, WIDTH))
    loss_fn = jitted(loss_fn)
    changed = np.array(loss_fn(x) != loss_fn(x.at[row].add(0.5)))
    return set(np.flatnonzero(changed).tolist()) - {row}
