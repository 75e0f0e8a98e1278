"""Metrics over a complete pass, such as AUROC, from all predictions and targets."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
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
        self._wants_targets_first = losses.has_targets_first(fn)

    def __call__(self, name: str, predictions: PyTree, targets: PyTree) -> Any:
        """Returns the value of the metric `name`, or several values by name."""
        arrays = jax.tree.map(_widen, (predictions, targets))
        shapes = jax.tree.map(np.shape, arrays)
        with NoteOnError(
            f"in `metrics`: {name!r}, called with predictions of shape {shapes[0]} and"
            f" targets of shape {shapes[1]}. They come from the model, perhaps as"
            " logits: for labels write PassMetric(lambda p, y: fn(y, p.argmax(-1)))"
        ):
            result = self.fn(*arrays[::-1] if self._wants_targets_first else arrays)
        numbers = {}
        for key, value in (
            result.items() if isinstance(result, Mapping) else [("", result)]
        ):
            full_name = f"{name}_{key}" if key != "" else name
            numbers[full_name] = number = as_number(value)
            if number is None:
                raise TypeError(
                    f"`metrics`: {full_name!r} is {value!r} of type"
                    f" {type(value).__name__}; the function of a PassMetric must return"
                    " a number, or a dict of numbers."
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
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, Iterable | None):
        raise TypeError(
            f"`metrics`: got {metrics!r} of type {type(metrics).__name__}; pass a list"
            f" of names ({', '.join(sorted(losses.METRICS))}) or {{name: callable}}."
        )
    if not isinstance(metrics, Mapping):
        named: dict[str, Any] = {}
        for metric in metrics or ():
            name = _get_name(metric)
            if named.setdefault(name, metric) != metric:
                raise ValueError(
                    f"`metrics`: two are named {name!r}; pass {{name: metric}}."
                )
        metrics = named
    of_rows: dict[str, losses.Criterion] = {}
    of_passes: dict[str, PassMetric] = {}
    for name, metric in metrics.items():
        losses.check_metric_name("`metrics`", name)
        if isinstance(metric, PassMetric):
            of_passes[name] = metric
        else:
            argument = f"`metrics`: {name!r}"
            of_rows[name] = losses.find_criterion(argument, metric, losses.METRICS)
    return of_rows, of_passes


def _get_name(metric: Any) -> str:
    function = metric.fn if isinstance(metric, PassMetric) else metric
    name = metric if isinstance(metric, str) else getattr(function, "__name__", None)
    if name is None or name == "<lambda>":
        raise TypeError(
            f"`metrics`: {metric!r} has no name; pass {{name: callable}} instead."
        )
    return name


def measure_pass(
    metrics: Mapping[str, PassMetric],
    outputs: PyTree,
    measure: Callable[..., Mapping[str, float]],
) -> Iterator[tuple[str, float]]:
    """Yields the name and the value of each number that the metrics return.

    Args:
        metrics: the metrics by name.
        outputs: the predictions and targets of all rows; with parts, by part name.
        measure: `StepFunctions.measure_outputs`; it calls a function of the outputs.
    """
    of_parts = outputs if isinstance(outputs, dict) else {"": outputs}
    for (part, rows), (name, metric) in itertools.product(
        of_parts.items(), metrics.items()
    ):
        call = partial(metric, f"{part}_{name}" if part else name)
        yield from measure(lambda of_one, call=call: call(*of_one), rows).items()


def _widen(leaf: np.ndarray) -> np.ndarray:
    """Converts bfloat16, for which NumPy has no arithmetic, to float32."""
    return leaf.astype(np.float32) if leaf.dtype.name == "bfloat16" else leaf
