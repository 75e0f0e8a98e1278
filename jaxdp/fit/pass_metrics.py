"""Metrics over a complete pass, such as AUROC, from all predictions and targets."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .. import losses
from ..basics.arguments import as_number, checks_arguments
from ..basics.tracebacks import NoteOnError


class PassMetric:
    """A metric over a whole set, such as AUROC, F1 or a calibration error.

        from sklearn.metrics import roc_auc_score

        Trainer(model, metrics={"auroc": PassMetric(roc_auc_score)})

    It is computed once per pass of `validate`, `test` and the validations of a fit, not
    in training. `fn` gets all rows of the loader, in order, with the predictions that
    the loss used; with several processes, each of them gets all rows. The host holds
    them all. A `loss_fn` must return both among its metrics, as `"predictions"` and
    `"targets"`. With a list of `Part`s, the metric is computed for each part that
    returns both, under the part's name; with `ensemble`, for each member.

    Args:
        fn: takes `(predictions, targets)`, NumPy arrays shaped `(rows, ...)` or trees
            of them, and returns a number, or a dict of numbers, which are logged as
            `val_<name>_<key>`. If its first argument is called `y_true`, as in
            scikit-learn, it is called with `(targets, predictions)`.
    """

    @checks_arguments
    def __init__(self, fn: Callable[..., Any]):
        losses.check_package("`PassMetric`", fn, "torch")
        if not callable(fn):
            raise TypeError(
                "`PassMetric`: `fn` must be a callable (predictions, targets) -> a"
                f" number or a dict of numbers; got {fn!r}."
            )
        self.fn = fn
        try:
            first = next(iter(inspect.signature(fn).parameters), None)
        except ValueError:  # some built-in callables have no signature
            first = None
        self._wants_targets_first = first == "y_true"

    def __call__(self, name: str, predictions: PyTree, targets: PyTree) -> Any:
        """Returns the value of the metric `name`, or several values by name."""
        widened = jax.tree.map(_widen, (predictions, targets))
        shapes = [
            ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(tree))
            for tree in widened
        ]
        with NoteOnError(
            f"in `metrics`: {name!r}, called with predictions of shape {shapes[0]} and"
            f" targets of shape {shapes[1]}. They come from the model, perhaps as"
            " logits: for labels write PassMetric(lambda p, y: fn(y, p.argmax(-1)))"
        ):
            result = self.fn(*widened[::-1] if self._wants_targets_first else widened)
        named = result if isinstance(result, Mapping) else {"": result}
        values = {f"{name}_{key}".rstrip("_"): value for key, value in named.items()}
        numbers = {key: as_number(value) for key, value in values.items()}
        for key, number in numbers.items():
            if number is None:
                value = values[key]
                raise TypeError(
                    f"`metrics`: {key!r} is {value!r} of type {type(value).__name__};"
                    " the function of a PassMetric must return a number, or a dict of"
                    " numbers."
                )
        return numbers

    def __repr__(self) -> str:
        return f"PassMetric({getattr(self.fn, '__name__', self.fn)})"


Metric = losses.Criterion | PassMetric
"""A metric in `Trainer(metrics=...)`."""


def split_metrics(
    metrics: Any,
) -> tuple[dict[str, losses.Criterion], dict[str, PassMetric]]:
    """Splits `Trainer(metrics=...)` into metrics of rows and of passes, by name."""
    if metrics is None:
        metrics = ()
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, Iterable):
        raise TypeError(
            f"`metrics`: got {metrics!r} of type {type(metrics).__name__}; pass a list"
            f" of names ({', '.join(sorted(losses.METRICS))}) or {{name: callable}}."
        )
    if not isinstance(metrics, Mapping):
        pairs = [(_get_name(metric), metric) for metric in metrics]
        metrics = dict(pairs)
        for name, metric in pairs:
            if metric != metrics[name]:
                raise ValueError(
                    f"`metrics`: two are named {name!r}; pass {{name: metric}}."
                )
    for name in metrics:
        losses.check_metric_name("`metrics`", name)
    of_passes = {n: m for n, m in metrics.items() if isinstance(m, PassMetric)}
    of_rows = {
        name: losses.find_criterion(f"`metrics`: {name!r}", metric, losses.METRICS)
        for name, metric in metrics.items()
        if name not in of_passes
    }
    return of_rows, of_passes


def _get_name(metric: Any) -> str:
    function = metric.fn if isinstance(metric, PassMetric) else metric
    name = metric if isinstance(metric, str) else getattr(function, "__name__", None)
    if name is None or name == "<lambda>":
        raise TypeError(
            f"`metrics`: {metric!r} has no name; pass {{name: callable}} instead."
        )
    return name


def add_pass_values(
    means: dict[str, float],
    metrics: Mapping[str, PassMetric],
    outputs: PyTree,
    measure: Callable[..., Mapping[str, float]],
) -> None:
    """Adds the values of `PassMetric`s to the means of a pass.

    Args:
        means: the means by name, which are updated.
        metrics: the metrics by name.
        outputs: the predictions and targets of all rows; with parts, by part name.
        measure: `Steps.measure_outputs`, which calls a metric.
    """
    of_parts = outputs if isinstance(outputs, dict) else {"": outputs}
    for (part, part_outputs), (name, metric) in itertools.product(
        of_parts.items(), metrics.items()
    ):
        name = f"{part}_{name}" if part else name
        values = measure(lambda o, m=metric, n=name: m(n, *o), part_outputs)
        if clash := {*values} & {*means}:
            raise ValueError(
                f"`metrics`: there are two values named {sorted(clash)}, one of them of"
                f" the PassMetric {name!r}; rename it."
            )
        means |= values


def _widen(leaf: np.ndarray) -> np.ndarray:
    """Converts bfloat16, for which NumPy has no arithmetic, to float32."""
    return leaf.astype(np.float32) if leaf.dtype.name == "bfloat16" else leaf
