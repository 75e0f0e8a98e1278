"""Losses and metrics by name, over optax.

A *criterion* takes `(prediction, target)` for a whole batch, leaves shaped
`(batch, ...)`, and returns one value per row, shaped `(batch,)`, so that rows can be
weighted and padded rows left out exactly.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

Criterion = Callable[[Any, Any], Array]


def cross_entropy(prediction: Array, target: Array) -> Array:
    """Softmax cross-entropy of logits, in nats.

    Args:
        prediction: logits shaped `(batch, ..., classes)`.
        target: integer labels shaped `(batch, ...)`, or probabilities shaped
            like the logits.

    Returns:
        Shape `(batch,)`; positions other than the row are averaged.
    """
    if _is_integer(target):
        if prediction.ndim != target.ndim + 1:
            raise ValueError(
                f"`loss`: 'cross_entropy' got logits of shape {prediction.shape} and"
                f" integer labels of shape {target.shape}; logits need one axis more"
                " than labels, (batch, ..., classes) against (batch, ...)."
                + (
                    " For yes/no targets use loss='binary_cross_entropy'."
                    if prediction.size == target.size
                    else ""
                )
            )
        values = optax.softmax_cross_entropy_with_integer_labels(prediction, target)
    else:
        _same_shape("cross_entropy", prediction, target)
        values = optax.softmax_cross_entropy(prediction, target)
    return per_row(values)


def binary_cross_entropy(prediction: Array, target: Array) -> Array:
    """Sigmoid cross-entropy of logits against 0/1 targets of the same shape."""
    _same_shape("binary_cross_entropy", prediction, target)
    labels = target.astype(prediction.dtype)
    return per_row(optax.sigmoid_binary_cross_entropy(prediction, labels))


def mse(prediction: Array, target: Array) -> Array:
    """Squared error, averaged over everything but the row."""
    _same_shape("mse", prediction, target)
    return per_row(optax.squared_error(prediction, target))


def mae(prediction: Array, target: Array) -> Array:
    """Absolute error, averaged over everything but the row."""
    _same_shape("mae", prediction, target)
    return per_row(jnp.abs(prediction - target))


def huber(prediction: Array, target: Array) -> Array:
    """Huber loss with delta 1, averaged over everything but the row."""
    _same_shape("huber", prediction, target)
    return per_row(optax.huber_loss(prediction, target))


def accuracy(prediction: Array, target: Array) -> Array:
    """Share of right answers in each row, from logits.

    Integer labels with one axis less than the prediction are compared with the
    largest logit; targets shaped like integer or boolean yes/no predictions are
    compared with the sign of the logit; one-hot targets by their largest entry.
    """
    if prediction.ndim == target.ndim + 1:
        right = jnp.argmax(prediction, axis=-1) == target
    elif prediction.shape == target.shape and not _is_integer(target):
        right = jnp.argmax(prediction, axis=-1) == jnp.argmax(target, axis=-1)
    else:
        _same_shape("accuracy", prediction, target)
        right = (prediction > 0) == (target > 0)
    return per_row(right.astype(jnp.float32))


def top_5_accuracy(prediction: Array, target: Array) -> Array:
    """Share of rows whose label is among the five largest logits."""
    classes = prediction.shape[-1]
    if prediction.ndim != target.ndim + 1 or not _is_integer(target):
        raise ValueError(
            f"`metrics`: 'top_5_accuracy' got predictions of shape {prediction.shape}"
            f" and targets of shape {target.shape}, {target.dtype}; it needs logits"
            " (batch, ..., classes) and integer labels (batch, ...)."
        )
    _, best = jax.lax.top_k(prediction, min(5, classes))
    return per_row((best == target[..., None]).any(axis=-1).astype(jnp.float32))


LOSSES: dict[str, Criterion] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "mse": mse,
    "mae": mae,
    "huber": huber,
}
METRICS: dict[str, Criterion] = {
    "accuracy": accuracy,
    "top_5_accuracy": top_5_accuracy,
    **LOSSES,
}


def find_loss(loss: str | Criterion) -> Criterion:
    """The criterion called `loss`, or `loss` itself if it is callable."""
    return _find("`loss`", loss, LOSSES)


def find_metrics(
    metrics: str | Criterion | Iterable[str | Criterion] | Mapping[str, Any] | None,
) -> dict[str, Criterion]:
    """Metrics as `{name: criterion}`, from names, callables or a mapping."""
    if metrics is None:
        metrics = ()
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, Iterable):
        raise TypeError(
            f"`metrics`: got {metrics!r} of type {type(metrics).__name__}; pass a list"
            f" of names ({', '.join(sorted(METRICS))}) or {{name: callable}}."
        )
    named: Mapping[Any, Any] = metrics if isinstance(metrics, Mapping) else {}
    named = named or {name_of(metric): metric for metric in metrics}
    for name in named:
        check_metric_name("`metrics`", name)
    return {n: _find(f"`metrics`: {n!r}", m, METRICS) for n, m in named.items()}


def _find(argument: str, given: Any, known: Mapping[str, Criterion]) -> Any:
    names = ", ".join(sorted(known))
    if isinstance(given, str) and given in known:
        return known[given]
    if not callable(given):
        error = ValueError if isinstance(given, str) else TypeError
        raise error(
            f"{argument}: got {given!r} of type {type(given).__name__}; pass a known"
            f" name ({names}) or a callable (prediction, target) -> (batch,)."
        )
    check_package(argument, given, "torch", "sklearn")

    # A function, that takes two arguments.
    try:
        signature = inspect.signature(given)
    except ValueError:  # some built-in callables have none
        return given
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{argument} is {signature}, and is called as (prediction, target):"
            f" {error}. For a function of (model, *batch) use `loss_fn`."
        ) from None
    return given


def check_package(argument: str, given: Any, *packages: str) -> None:
    """Raises for a function or an object of packages that can't compute here."""
    module = getattr(given, "__module__", None) or type(given).__module__
    if not str(module).startswith(packages):
        return
    name = getattr(given, "__name__", type(given).__name__)
    package = module.partition(".")[0]
    remedy = "a name, an optax loss or, over a whole set in NumPy, jaxdp.PassMetric(fn)"
    if package == "sklearn":
        remedy = f"jaxdp.PassMetric({name}), which gives it a whole validation"
    raise TypeError(
        f"{argument} is {package}'s {name}, which can't compute on JAX arrays inside a"
        f" step; pass {remedy}."
    )


def check_metric_name(argument: str, name: Any) -> None:
    """Raises for a name that the trainer needs itself, or that is no name."""
    if not isinstance(name, str):
        raise TypeError(
            f"{argument}: metric names must be str; got {name!r} of type"
            f" {type(name).__name__}."
        )
    taken = "loss", "epoch", "step"
    if name in taken or name.startswith(("val_", "test_")):
        raise ValueError(
            f"{argument}: the metric name {name!r} is taken: 'loss' is the loss itself,"
            " 'epoch' and 'step' are columns of every log, and 'val_' and 'test_' are"
            " put before names by validation and test."
        )


def infer_loss(target: Any) -> tuple[str, str]:
    """The name of the loss that fits `target`, and the reason in words."""
    dtype = getattr(target, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        return "cross_entropy", f"targets are integers ({dtype})"
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return "mse", f"targets are floating point ({dtype})"
    found = jax.tree.structure(target) if dtype is None else f"of dtype {dtype}"
    raise ValueError(
        f"`loss` can't be inferred from targets {found}: one array of integers gives"
        " 'cross_entropy', one of floating point 'mse'; pass `loss`, for example"
        " 'binary_cross_entropy', or `loss_fn`."
    )


def per_row(values: Array) -> Array:
    """`(batch, ...)` to `(batch,)` by the mean over all other axes."""
    return (
        values.reshape(values.shape[0], -1).mean(axis=1) if values.ndim > 1 else values
    )


def broadcasts_silently(criterion: Criterion, prediction: Any, target: Any) -> Any:
    """The shape that `criterion` blows `(batch, 1)` against `(batch,)` up to, if so.

    Two arrays that differ only in axes of size one are nearly always meant to
    match row by row, but NumPy's rules make `(batch, batch)` of them. Only when
    such an array really arises inside the criterion is it reported: a criterion
    that squeezes or indexes first is right.
    """
    left, right = getattr(prediction, "shape", None), getattr(target, "shape", None)
    if left is None or right is None or left == right:
        return None
    if [n for n in left if n != 1] != [n for n in right if n != 1]:
        return None
    try:
        grown = jnp.broadcast_shapes(left, right)
    except ValueError:
        return None
    if grown in (left, right):
        return None
    try:
        jaxpr = jax.make_jaxpr(criterion)(prediction, target)
    except Exception:  # it checks shapes itself, and will say so when called
        return None
    made = f"[{','.join(map(str, grown))}]"  # as programs print it: f32[8,8]
    return grown if made in str(jaxpr) else None


def name_of(metric: str | Criterion) -> str:
    """What a metric that comes without a name is called."""
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", None)
    if name is None or name == "<lambda>":
        raise TypeError(
            f"`metrics`: {metric!r} has no name; pass {{name: callable}} instead."
        )
    return name


def _is_integer(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.integer)


def _same_shape(name: str, prediction: Array, target: Array) -> None:
    if prediction.shape != target.shape:
        raise ValueError(
            f"{name!r} got predictions of shape {prediction.shape} and targets of shape"
            f" {target.shape}; they must be equal (broadcasting would silently compare"
            " rows with other rows). Reshape one of them, for example with"
            " `prediction.squeeze(-1)` or `target[:, None]`."
        )
