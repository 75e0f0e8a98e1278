"""Losses and metrics by name, over optax.

A *criterion* takes `(prediction, target)` for a whole batch, leaves shaped
`(batch, ...)`, and returns one value per row, shaped `(batch,)`, so that rows can be
weighted and padded rows left out exactly.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

import jaxdp

from .basics.arguments import check_call
from .basics.other_libraries import INSTEAD, find_near

Criterion = Callable[[Any, Any], Array]


def cross_entropy(
    prediction: Array, target: Array, *, label_smoothing: float = 0.0
) -> Array:
    """Softmax cross-entropy of logits, in nats.

        Trainer(model, loss=functools.partial(cross_entropy, label_smoothing=0.1))

    Args:
        prediction: logits shaped `(batch, ..., classes)`.
        target: integer labels shaped `(batch, ...)` or `(batch, ..., 1)`, or one-hot
            rows or probabilities shaped like the logits.
        label_smoothing: the probability, from 0 to 1, that all classes share, as in
            PyTorch.

    Returns:
        Shape `(batch,)`; positions other than the row are averaged.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"`label_smoothing` must be from 0 to 1; got {label_smoothing!r}."
        )
    target = _classes("cross_entropy", prediction, target)
    if target.ndim < prediction.ndim:
        total = jax.nn.logsumexp(prediction, axis=-1)
        logit = _pick(prediction, target)
        if label_smoothing:
            mean = prediction.mean(axis=-1)
            logit = (1 - label_smoothing) * logit + label_smoothing * mean
        values = total - logit
    else:
        target = _numbers(target, prediction)
        if label_smoothing:
            target = optax.smooth_labels(target, label_smoothing)
        values = optax.softmax_cross_entropy(prediction, target)
    return per_row(values)


def binary_cross_entropy(prediction: Array, target: Array) -> Array:
    """Sigmoid cross-entropy of logits against 0/1 targets of the same shape."""
    prediction, target = _match_shapes("binary_cross_entropy", prediction, target)
    labels = target.astype(prediction.dtype)
    return per_row(optax.sigmoid_binary_cross_entropy(prediction, labels))


def mse(prediction: Array, target: Array) -> Array:
    """Squared error, averaged over everything but the row; `|p - t|**2` if complex."""
    prediction, target = _match_shapes("mse", prediction, target)
    target = _numbers(target, prediction)
    if jnp.iscomplexobj(prediction) or jnp.iscomplexobj(target):  # an error in optax
        error = prediction - target
        return per_row(error.real**2 + error.imag**2)
    return per_row(optax.squared_error(prediction, target))


def mae(prediction: Array, target: Array) -> Array:
    """Absolute error, averaged over everything but the row."""
    prediction, target = _match_shapes("mae", prediction, target)
    return per_row(jnp.abs(prediction - _numbers(target, prediction)))


def huber(prediction: Array, target: Array) -> Array:
    """Huber loss with delta 1, averaged over everything but the row."""
    prediction, target = _match_shapes("huber", prediction, target)
    return per_row(optax.huber_loss(prediction, _numbers(target, prediction)))


def accuracy(prediction: Array, target: Array) -> Array:
    """Share of right answers in each row, from logits.

    Logits `(batch, ..., classes)` are right where the largest is that of the label, or
    of the largest entry of targets shaped like them. One logit per target, `(batch,)`
    or `(batch, ..., 1)`, is an answer to a yes/no question, as in `binary_accuracy`.
    """
    if num_logits(prediction) == 1:
        return binary_accuracy(prediction, target)
    labels = _labels("accuracy", prediction, target)
    right = jnp.argmax(prediction, axis=-1) == labels
    return per_row(right.astype(jnp.float32))


def binary_accuracy(prediction: Array, target: Array) -> Array:
    """Share of right answers to yes/no questions, one for each logit.

    A logit above 0 means yes, and so does a target above 0.5.
    """
    prediction, target = _match_shapes("binary_accuracy", prediction, target)
    right = (prediction > 0) == (target > 0.5)
    return per_row(right.astype(jnp.float32))


def top_5_accuracy(prediction: Array, target: Array) -> Array:
    """Share of rows whose label is among the five largest logits."""
    labels = _labels("top_5_accuracy", prediction, target)
    _, best = jax.lax.top_k(prediction, min(5, num_logits(prediction)))
    return per_row((best == labels[..., None]).any(axis=-1).astype(jnp.float32))


def num_logits(prediction: Array) -> int:
    """Returns the number of classes of logits; 1 for answers to yes/no questions."""
    return prediction.shape[-1] if prediction.ndim > 1 else 1


# A loss or a metric becomes one by name when it is added here. Three other places need
# its name, and a test fails without each: `_IS_AN_ERROR` (less is better) or
# `_LARGER_IS_BETTER` in basics/columns.py; the table of docs/metrics.md, by which
# tests/test_losses.py tests it; and docs/reference/models.md. If its integer targets
# are labels, add it to `_OF_LABELS` or `_OF_YES_NO`; if its predictions are numbers, to
# `_OF_NUMBERS`.
LOSSES: dict[str, Criterion] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "mse": mse,
    "mae": mae,
    "huber": huber,
}
METRICS: dict[str, Criterion] = {
    "accuracy": accuracy,
    "binary_accuracy": binary_accuracy,
    "top_5_accuracy": top_5_accuracy,
    **LOSSES,
}


_OF_LABELS: Final = cross_entropy, optax.softmax_cross_entropy_with_integer_labels
"""Criteria for which integer targets are labels of the prediction's classes."""

_OF_YES_NO: Final = binary_cross_entropy, optax.sigmoid_binary_cross_entropy
"""Criteria for which each logit answers a yes/no question."""

_OF_NUMBERS: Final = (
    mse,
    mae,
    huber,
    optax.squared_error,
    optax.l2_loss,
    optax.huber_loss,
    optax.log_cosh,
)
"""Criteria whose predictions are numbers, and no logits."""


_OF_EQUAL_SHAPES: Final = (
    optax.squared_error,
    optax.l2_loss,
    optax.huber_loss,
    optax.log_cosh,
    optax.sigmoid_binary_cross_entropy,
    optax.softmax_cross_entropy,
)
"""Losses of optax, some of which would broadcast a prediction against a target."""

_PER_ROW: Final = (*METRICS.values(), *_OF_EQUAL_SHAPES, *_OF_LABELS)
"""Criteria that are known to work on rows one by one."""


def is_per_row(criterion: Criterion) -> bool:
    """Returns True for ours and optax's criteria, whose values depend on one row each.

    A callable of the user's is written for a batch, whatever it computes.
    """
    return _unwrap_partial(criterion) in _PER_ROW


def has_activation(loss: Criterion) -> bool:
    """Returns True for a loss that applies the softmax or the sigmoid itself."""
    known = *_OF_LABELS, *_OF_YES_NO, optax.softmax_cross_entropy
    return _unwrap_partial(loss) in known


def match_shapes(criterion: Criterion, prediction: Any, target: Any) -> tuple[Any, Any]:
    """Returns the arguments of a criterion; for optax's losses, of equal shapes.

    Raises:
        ValueError: if the shapes differ in more than a last axis of one.
    """
    function = _unwrap_partial(criterion)
    if function not in _OF_EQUAL_SHAPES:
        return prediction, target
    return _match_shapes(function.__name__, prediction, target)


def _unwrap_partial(criterion: Criterion) -> Criterion:
    """Returns the function whose keyword arguments a `functools.partial` fills."""
    is_partial = isinstance(criterion, functools.partial) and not criterion.args
    return criterion.func if is_partial else criterion


def num_classes(
    criteria: Mapping[str, Criterion], prediction: Any, target: Any
) -> int | None:
    """Returns the number of classes of targets, where the criteria tell.

    Raises:
        ValueError: if answers to yes/no questions were taken for logits of classes, or
            numbers for logits.
    """
    loss, *metrics = map(_unwrap_partial, criteria.values())
    is_yes_no = loss in _OF_YES_NO
    if is_yes_no and accuracy in metrics and num_logits(prediction) > 1:
        raise ValueError(
            "`metrics`: 'accuracy' takes the largest logit for the answer, but in a"
            " binary cross-entropy each answers a yes/no question of its own; use"
            " 'binary_accuracy', or, where one class is right, loss='cross_entropy'."
        )
    if loss in _OF_NUMBERS and accuracy in metrics and num_logits(prediction) == 1:
        raise ValueError(
            "`metrics`: 'accuracy' takes a logit above 0 for yes, but under this loss"
            " the prediction is the number itself. For yes/no targets use"
            " loss='binary_cross_entropy'; for numbers the metric 'mae'; for targets"
            " of -1 and 1 'binary_accuracy', which compares the signs."
        )
    dtype = getattr(target, "dtype", np.dtype(bool))
    if is_yes_no and jnp.issubdtype(dtype, jnp.floating):
        return 2  # probabilities
    if not jnp.issubdtype(dtype, jnp.integer):
        return None
    if any(function in _OF_LABELS for function in (loss, *metrics)):
        return num_logits(prediction)
    return 2 if is_yes_no else None


_SYNONYMS: Final = {
    "acc": "accuracy",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
    "huber_loss": "huber",
}
"""Names of other libraries' that mean exactly one of ours."""


def find_criterion(argument: str, value: Any, known: Mapping[str, Criterion]) -> Any:
    """Returns the criterion that `value` names, or `value` itself if it is one."""
    names = ", ".join(sorted(known))
    if isinstance(value, str):
        name = _SYNONYMS.get(value.lower(), value.lower())
        if name in known:
            return known[name]
        words = {**INSTEAD["LOSSES"], **{n: repr(n) for n in known}}
        words |= INSTEAD["METRICS"] if known is METRICS else {}
        if near := find_near(name, words):
            raise ValueError(f"{argument}: for {value!r} write {words[near]}.")
    if not callable(value):
        error = ValueError if isinstance(value, str) else TypeError
        raise error(
            f"{argument}: got {value!r} of type {type(value).__name__}; pass a known"
            f" name ({names}) or a callable (prediction, target) -> (batch,)."
        )
    check_package(argument, value, "torch", "sklearn")

    hint = "as (prediction, target); for a function of (model, *batch) use `loss_fn`"
    check_call(argument, value, hint, None, None)
    if has_targets_first(value):
        return lambda prediction, target: value(target, prediction)
    return value


def has_targets_first(function: Callable[..., Any]) -> bool:
    """Returns True if the first argument is called `y_true`, as in scikit-learn and
    Keras.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in callables have no signature
        return False
    return next(iter(parameters), None) == "y_true"


def check_package(argument: str, value: Any, *packages: str) -> None:
    """Raises for a function or an object of a package that does not compute on JAX's
    arrays.
    """
    module = str(getattr(value, "__module__", None) or type(value).__module__)
    if module.startswith(packages):
        name = getattr(value, "__name__", type(value).__name__)
        package = module.partition(".")[0]
        raise TypeError(
            f"{argument} is {package}'s {name}, which can't compute on JAX arrays"
            " inside a step; pass a name, an optax loss or, for a function in NumPy"
            " over a whole validation, jaxdp.PassMetric(fn)."
        )


def check_metric_name(argument: str, name: Any) -> None:
    """Raises for a name that the trainer needs itself, or that is no name."""
    if not isinstance(name, str):
        raise TypeError(
            f"{argument}: metric names must be str; got {name!r} of type"
            f" {type(name).__name__}."
        )
    reserved = "loss", "epoch", "step"
    if name in reserved or name.startswith(("val_", "test_")):
        raise ValueError(
            f"{argument}: the metric name {name!r} is taken: 'loss' is the loss itself,"
            " 'epoch' and 'step' are columns of every log, and 'val_' and 'test_' are"
            " put before names by validation and test."
        )


def infer_loss(target: Any) -> tuple[str, str]:
    """Returns the name of the loss that fits `target`, and the reason in words."""
    dtype = getattr(target, "dtype", np.dtype(object))
    if jnp.issubdtype(dtype, jnp.integer):
        return "cross_entropy", f"targets are integers ({dtype})"
    if jnp.issubdtype(dtype, jnp.inexact):
        return "mse", f"targets are floating point ({dtype})"
    raise ValueError(
        f"`loss` can't be inferred from targets of dtype {dtype}"
        f" ({type(target).__name__}): one array of integers gives 'cross_entropy', one"
        " of floating point 'mse'; pass `loss`, such as 'binary_cross_entropy', or"
        " `loss_fn`."
    )


def per_row(values: Array) -> Array:
    """Averages `(batch, ...)` over all other axes to `(batch,)`."""
    if values.ndim <= 1:
        return values
    return values.reshape(values.shape[0], -1).mean(axis=1)


def _pick(logits: Array, labels: Array) -> Array:
    """Returns the logit of each label; NaN for a label of no class.

    It compares class numbers, so that XLA fuses its gradient with the softmax's. The
    gradient of indexing would be a scatter into another array as large as the logits.
    """
    labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    picked = jnp.where(classes == labels[..., None], logits, 0).sum(axis=-1)
    return jnp.where((labels >= 0) & (labels < logits.shape[-1]), picked, jnp.nan)


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _numbers(target: Array, prediction: Array) -> Array:
    """Returns bools and integers as numbers of the prediction's dtype."""
    return target if _is_float(target) else target.astype(prediction.dtype)


def _match_shapes(name: str, prediction: Array, target: Array) -> tuple[Array, Array]:
    """Returns a prediction and a target of one shape, without a last axis of one."""
    shapes = prediction.shape, target.shape
    if prediction.shape == (*target.shape, 1):
        prediction = prediction[..., 0]
    elif target.shape == (*prediction.shape, 1):
        target = target[..., 0]
    if prediction.shape != target.shape:
        raise ValueError(
            f"{name!r} got predictions of shape {shapes[0]} and targets of shape"
            f" {shapes[1]}; they must be equal, but for an axis of one at the end"
            " (broadcasting would silently compare rows with other rows). Reshape one"
            " of them; for labels of classes use 'cross_entropy' and 'accuracy'."
        )
    return prediction, target


def _labels(name: str, prediction: Array, target: Array) -> Array:
    """Returns the class of every target."""
    target = _classes(name, prediction, target)
    return target if target.ndim < prediction.ndim else jnp.argmax(target, axis=-1)


def _classes(name: str, prediction: Array, target: Array) -> Array:
    """Returns labels `(batch, ...)`, or targets in the shape of the logits."""
    got = (
        f"{name!r} got logits of shape {prediction.shape} and targets of shape"
        f" {target.shape}, {target.dtype}"
    )
    if (classes := num_logits(prediction)) == 1:
        raise ValueError(
            f"{got}: one logit per target, not one for each class. For yes/no targets"
            " use 'binary_cross_entropy' and 'binary_accuracy'."
        )
    if target.shape == prediction.shape:
        return target

    has_last_axis = target.ndim == prediction.ndim and target.shape[-1] == 1
    labels = target[..., 0] if has_last_axis else target
    if labels.shape != prediction.shape[:-1] or _is_float(labels):
        raise ValueError(
            f"{got}. Labels of {classes} classes are integers (pass"
            " y.astype(np.int32)), shaped (batch, ...) or (batch, ..., 1) for logits"
            " (batch, ..., classes); other targets have the shape of the logits."
        )
    return labels.astype(jnp.int32) if labels.dtype == bool else labels


def __getattr__(name: str) -> Any:
    return jaxdp.open_extra(__name__, name)
