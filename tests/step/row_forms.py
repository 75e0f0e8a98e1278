"""Functions of a batch whose rows interact, or do not."""

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

from jaxdp.step.collectives import DATA

ROWS, WIDTH = 6, 4
KEY = jax.random.key(0)
MATRIX = jax.random.normal(KEY, (WIDTH, WIDTH))

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def rnn(x):
    cell = eqx.nn.GRUCell(1, 3, key=KEY)

    def one(row):
        return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(3), row[:, None])

    return jax.vmap(one)(x)[0].sum(axis=-1)


def over_time(x):
    cell = eqx.nn.GRUCell(1, 3, key=KEY)

    def step(h, x):
        return jax.vmap(cell)(x, h), h.mean(axis=-1)

    last, each = jax.lax.scan(step, jnp.zeros((ROWS, 3)), x.T[..., None])
    return last.sum(axis=-1) + each.sum(axis=0)


def recurrent_mean(x):
    """A loop that mixes rows in its second turn only."""

    def step(carry, x):
        held, out = carry
        return (x, out + held.mean()), None

    return jax.lax.scan(step, (jnp.zeros(ROWS), jnp.zeros(ROWS)), x.T)[0][1]


def convolutions(x):
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 2, 2, key=KEY),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(1),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.LayerNorm(2),
            eqx.nn.Linear(2, "scalar", key=KEY),
        ]
    )
    return jax.vmap(net)(x.reshape(ROWS, 1, 2, 2))


def attention(x):
    layer = eqx.nn.MultiheadAttention(2, 4, key=KEY)

    def one(row):
        tokens = jnp.tile(row[:, None], 4)
        return layer(tokens, tokens, tokens).sum()

    return jax.vmap(one)(x)


def newton(x):
    """A loop per row, of a length of its own."""

    def one(row):
        return jax.lax.while_loop(
            lambda y: jnp.abs(y**2 - (row**2).sum()) > 1e-3,
            lambda y: (y + (row**2).sum() / y) / 2,
            1.0,
        )

    return x[:, 0] * jax.vmap(one)(jax.lax.stop_gradient(x))


def two_views(x):
    """Both views of each row in one batch, and taken apart again."""
    both = jnp.concatenate([x, x[:, ::-1]]) @ MATRIX
    one, other = both[:ROWS], both[ROWS:]
    return optax.cosine_distance(one, other)


def two_views_apart(x):
    """Both views of each row in one batch, given an axis of their own again."""
    both = jnp.concatenate([x, x[:, ::-1]]) @ MATRIX
    return both.reshape(2, ROWS, WIDTH).mean(axis=(0, 2))


def kernels(x):
    """A kernel of its own for each row, by one row more that is part of it."""

    def one(row):
        image, kernel = row[None, None], row[None, None, :2]
        return jax.lax.conv_general_dilated(image, kernel, (1,), "VALID").sum()

    return jax.vmap(one)(x)


def all_views(x):
    """As SimCLR: both views of each row against all others."""
    both = jnp.concatenate([x, jnp.sin(x)])
    likeness = both @ both.T - 9 * jnp.eye(2 * ROWS)
    partners = jnp.roll(jnp.arange(2 * ROWS), ROWS)
    return cross_entropy(likeness, partners).reshape(2, ROWS).mean(axis=0)


def stacked_views(x):
    both = jnp.stack([x, jnp.sin(x)], axis=1).reshape(2 * ROWS, WIDTH)
    likeness = both @ both.T - 9 * jnp.eye(2 * ROWS)
    return cross_entropy(likeness, jnp.arange(2 * ROWS)).reshape(ROWS, 2).mean(axis=1)


def standardised(x):
    return ((x - x.mean(axis=0, keepdims=True)) @ MATRIX).max(axis=1)


def tokens_joined(x):
    """A layer over all rows' tokens in one array."""
    flat = jax.nn.relu(x.reshape(ROWS * WIDTH, 1) @ jnp.ones((1, 3)))
    return flat.reshape(ROWS, WIDTH, 3).mean(axis=(1, 2))


def checked(x):
    """An error that any row may raise."""

    def one(row):
        return eqx.error_if(row.sum(), jnp.isnan(row).any(), "not a number")

    return jax.vmap(one)(x)


def one_hot(x):
    """A place for each row, written by its number."""
    labels = jnp.argmax(x, axis=1)
    hot = jnp.zeros((ROWS, WIDTH)).at[jnp.arange(ROWS), labels].set(1.0)
    return (hot * x).sum(axis=1)


def counted(x):
    """Rows weighted by how many have their label."""
    labels = (x.sum(axis=1) > 0).astype(int)
    return x.sum(axis=1) / jnp.bincount(labels, length=WIDTH)[labels]


def centred(x):
    """Distances to the mean of those with the same label."""
    labels = jnp.argmax(x, axis=1)
    sums = jax.ops.segment_sum(x, labels, num_segments=WIDTH)
    return ((x - sums[labels]) ** 2).sum(axis=1)


def smoothed(x):
    """Row after row, what was before in each."""

    def step(before, row):
        now = 0.9 * before + row.sum()
        return now, now

    return jax.lax.scan(step, 0.0, x)[1]


def numbered(x):
    """Row after row with a counter, which rows have no part in."""

    def step(count, row):
        return count + 1, row.sum() * 2

    return jax.lax.scan(step, 0, x)[1]


def own_batch_norm(x):
    def one(row):
        return (row - jax.lax.pmean(row, "rows")).max()

    return jax.vmap(one, axis_name="rows")(x)


def hardest(x):
    values, chosen = jax.lax.top_k(x.sum(axis=1), 2)
    return x[:, 0] + values.mean()


def branches(x):
    def one(row):
        return jax.lax.cond(row[0] > 0, jnp.sum, lambda row: jnp.max(row), row)

    return jax.vmap(one)(x)


def choice(x):
    return jax.lax.cond(
        MATRIX[0, 0] > 0, lambda x: x.sum(axis=1), lambda x: x.max(axis=1), x
    )


def choice_of_means(x):
    return jax.lax.cond(
        MATRIX[0, 0] > 9, lambda x: x.sum(axis=1), lambda x: x[:, 0] - x.mean(), x
    )


def other_operations(x):
    """Those that rules are for and no other case has, each along features."""
    square = jax.vmap(lambda row: jnp.outer(row, row) + WIDTH * jnp.eye(WIDTH))(x)
    parts = [
        jnp.linalg.cholesky(square).sum(axis=2),
        jnp.linalg.eigvalsh(square),
        jax.lax.dynamic_slice_in_dim(x, jnp.argmax(MATRIX[0]), 2, axis=1),
        *jax.lax.split(x, (1, 3), axis=1),
        jax.lax.optimization_barrier(x),
        jnp.linalg.svd(square, compute_uv=False),
        jnp.linalg.qr(square)[1].sum(axis=2),
    ]
    along = jax.lax.cumlogsumexp, jax.lax.cummax, jax.lax.cummin, jax.lax.cumprod
    parts += [function(x, axis=1) for function in along]
    places = jnp.zeros((ROWS, WIDTH)).at[jnp.arange(ROWS), jnp.argmin(x, axis=1)]
    parts += [places.max(x[:, 0]), places.min(x[:, 0])]
    parts += [places.multiply(x[:, 0], unique_indices=True), places.subtract(x[:, 0])]
    return sum(part.sum(axis=1) for part in parts)


def between_extremes(x):
    def one(row):
        fixed = jax.lax.stop_gradient(row)
        extremes = jax.lax.pmax(fixed, "rows"), jax.lax.pmin(fixed, "rows")
        return (extremes[0] * row - extremes[1]).sum()

    return jax.vmap(one, axis_name="rows")(x)


def beside_the_other_devices(function):
    """A value per row of what `function` makes of it and of other devices' rows."""

    def loss_fn(x):
        mesh = jax.make_mesh((2,), (DATA,), (AxisType.Auto,), devices=jax.devices()[:2])
        share = lambda x: (x - function(x)).sum(axis=1)  # noqa: E731
        rows = PartitionSpec(DATA)
        return jax.shard_map(
            share, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
        )(x)

    return loss_fn


def typed_by_devices(x):
    """What all devices hold, beside what each has, where JAX checks which is which."""
    mesh = jax.make_mesh((2,), (DATA,), (AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec(DATA), PartitionSpec()
    share = lambda x, matrix: (x @ matrix).sum(axis=1)  # noqa: E731
    shared = jax.shard_map(share, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    each = jax.shard_map(
        lambda x: jax.lax.pcast(x, DATA, to="varying").sum(axis=1),
        mesh=mesh, in_specs=whole, out_specs=rows,
    )  # fmt: skip
    return shared(x, MATRIX) + each(x)[:ROWS]


def swapped(x):
    both = jax.lax.all_to_all(jnp.stack([x, x]), DATA, 0, 0)
    return both[0] - both[1]
