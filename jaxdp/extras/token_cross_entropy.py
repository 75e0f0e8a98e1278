"""The cross-entropy of a large vocabulary, without all of its logits at a time."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Head = Callable[[Array], Array] | Array


def token_cross_entropy(
    head: Head,
    hidden: Array,
    targets: Array,
    chunk: int = 1024,
    *,
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Array | tuple[Array, Array]:
    """Softmax cross-entropy of `head(hidden)`, in nats, for use in a `loss_fn`.

    Takes a batch, or one example, as in `per_example`:

        def loss(model, x, y):
            return token_cross_entropy(model.head, model.hidden(x), y, chunk=128)

        Trainer(model, loss_fn=per_example(loss))

    Logits of a vocabulary of 128,000 take more memory than the rest of a step. This
    loss computes them for about `chunk` tokens at a time, and once more in the backward
    pass. The softmax is in float32; the products are in the dtype of `hidden`, under
    mixed precision in that of the calls of a `head` that is a layer of the model.

    Args:
        head: from one token's features to its logits, such as an `eqx.nn.Linear`; or
            the matrix of an embedding, shaped `(vocabulary, features)`.
        hidden: shape `(batch, tokens, features)`, or `(tokens, features)`.
        targets: integers of shape `(batch, tokens)`, or `(tokens,)`.
        chunk: of a batch, the tokens of all rows together, at least one of each row:
            the logits take `chunk * vocabulary` numbers. Of one example, its tokens:
            under vmap all rows compute a chunk at the same time, so the logits take
            `rows * chunk * vocabulary`, with the rows of one device in `per_example`.
            For the memory of a batch, pass `chunk=1024 // rows` there.
            Each chunk has tokens of every row, so that rows and tokens may be split
            over devices.
        weights: of the tokens, in the shape of `targets`. A token of weight 0 may be
            anything, NaN included.
        label_smoothing: the probability, from 0 to 1, that is shared by all classes.
        z_loss: the factor of the squared logarithm of the softmax's denominator, which
            is added; PaLM (arXiv:2204.02311) uses 1e-4.

    Returns:
        Means over the tokens of each row, shape `(batch,)`. With `weights` a pair of
        weighted means and the sums of weights, both `(batch,)`, which a `loss_fn` may
        return as it is: the loss is then the mean over all weighted tokens. Of one
        example, scalars.

    Raises:
        ValueError: for shapes that don't fit, and numbers out of range.
        TypeError: for targets that are not integers.
    """
    _check_arguments(hidden, targets, chunk, weights, label_smoothing)
    is_one = hidden.ndim == 2
    if is_one:
        hidden, targets = hidden[None], targets[None]
        weights = None if weights is None else weights[None]
    batch, tokens, _ = hidden.shape
    count = _count_chunks(tokens, math.ceil(batch * tokens / chunk))
    token_weights = jnp.ones(targets.shape, jnp.float32)
    if weights is not None:
        token_weights = weights.astype(jnp.float32)
        # A NaN behind a weight of 0 would come back in the gradient, as NaN times 0.
        hidden = jnp.where(token_weights[..., None] == 0, 0, hidden)

    def split_into_chunks(array: Array) -> Array:
        padding = [(0, 0), (0, -tokens % count)] + [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, padding) if tokens % count else array
        # A chunk takes every n-th token, so that the axis may stay split over devices.
        split = array.reshape(batch, -1, count, *array.shape[2:])
        return jnp.moveaxis(split, 2, 0)

    @jax.checkpoint  # the logits are not kept for the backward pass
    def sum_losses(part: tuple[Array, Array, Array]) -> Array:
        features, labels, weight = part
        values = _compute_losses(head, features, labels, label_smoothing, z_loss)
        return (jnp.where(weight == 0, 0, values) * weight).sum(axis=1)

    parts = (
        split_into_chunks(hidden),
        split_into_chunks(targets),
        split_into_chunks(token_weights),
    )
    total, row_weights = (
        jax.lax.map(sum_losses, parts).sum(axis=0),
        token_weights.sum(axis=1),
    )
    means = total / jnp.where(row_weights == 0, 1, row_weights)
    result = means if weights is None else (means, row_weights)
    return jax.tree.map(lambda values: values[0], result) if is_one else result


def _compute_losses(
    head: Head, hidden: Array, targets: Array, label_smoothing: float, z_loss: float
) -> Array:
    """Computes the loss of each token, in float32."""
    if callable(head):
        logits = jax.vmap(jax.vmap(head))(hidden)
    else:
        logits = hidden @ head.T.astype(hidden.dtype)
    logits = logits.astype(jnp.float32)
    denominator = jax.nn.logsumexp(logits, axis=-1)
    # Labels of tokens without weight may be none of the classes, such as -100.
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")
    mean = logits.mean(axis=-1) if label_smoothing else 0.0
    wanted = (1 - label_smoothing) * right[..., 0] + label_smoothing * mean
    return denominator - wanted + z_loss * denominator**2


def _count_chunks(tokens: int, least: int) -> int:
    """Returns a number of chunks that divides `tokens`, if at most twice the least."""
    least = min(least, tokens)
    counts = range(least, min(tokens, 2 * least) + 1)
    return next((number for number in counts if tokens % number == 0), least)


def _check_arguments(
    hidden: Any, targets: Any, chunk: int, weights: Any, label_smoothing: float
) -> None:
    what = "`token_cross_entropy`"
    if hidden.ndim not in (2, 3) or targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{what} got `hidden` of shape {hidden.shape} and `targets` of shape"
            f" {targets.shape}; they must be (batch, tokens, features) and (batch,"
            " tokens), or of one example (tokens, features) and (tokens,)."
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(
            f"{what}: `targets` must be integers, the numbers of the right classes; got"
            f" {targets.dtype}."
        )
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(
            f"{what} got `weights` of shape {weights.shape}; there must be one for each"
            f" token, in the shape of `targets`, {targets.shape}."
        )
    if chunk < 1:
        raise ValueError(f"{what}: `chunk` must be at least 1; got {chunk!r}.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"{what}: `label_smoothing` must be from 0 to 1; got {label_smoothing!r}."
        )
