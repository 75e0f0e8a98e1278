"""Checks the labels and weights of a batch before its step, on the host."""

from typing import Any, Final

import jax
import numpy as np

from ..step import Batch

_UNSIGNED: Final = {
    np.dtype(f"int{bits}"): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)
}
"""Viewed so, negative labels are the greatest: one maximum finds both faults."""


def check_targets(batch: Batch, num_classes: int | None) -> None:
    """Raises for a negative weight, and for a label that is no class of the model,
    which JAX would clamp or wrap silently.

    The batch is stacked `(x, y)` or `(x, y, weight)`. Arrays on a device are not
    checked: that would wait for the device.
    """
    labels: Any = batch[1]
    weight = batch[2] if len(batch) > 2 else None
    if isinstance(weight, jax.Array):
        return
    if weight is not None and not weight.min() >= 0:  # NaN, too
        raise ValueError(
            "weights must be 0 or more, since the mean is divided by their sum; this"
            f" batch (x, y, weight) has {weight.min()}. For factors with a sign, as"
            " advantages are, multiply the losses by them in a"
            " `loss_fn(model, x, y, factor)`."
        )
    if num_classes is None or isinstance(labels, jax.Array):
        return
    if weight is not None:
        counts = (weight != 0).reshape(*weight.shape[:2], -1).any(axis=2)
        mask = counts.reshape(*counts.shape, *[1] * (labels.ndim - 2))
        labels = np.where(mask, labels, 0)
    if labels.dtype.kind not in "iub":
        # The limits allow for rounding of mixed targets. NaN passes here, but shows in
        # the loss.
        if ((labels < -0.01) | (labels > 1.01)).any():
            raise ValueError(
                "targets of a binary cross-entropy are probabilities, 0 to 1; this"
                f" batch has them from {labels.min()} to {labels.max()}. Labels of -1"
                " and 1 become those by (y + 1) / 2; for other numbers use loss='mse'."
            )
        return
    unsigned = labels.view(_UNSIGNED.get(labels.dtype, labels.dtype))
    if np.maximum.reduce(unsigned, axis=None) >= num_classes:
        raise ValueError(
            f"labels must be 0 to {num_classes - 1}, of {num_classes} classes; this"
            f" batch has labels from {labels.min()} to {labels.max()}. (Rows to be"
            " ignored have the weight 0: (x, y, weight). To ignore some labels of a"
            " row, return (values, weights) from a `loss_fn`. Yes/no targets are 0 and"
            " 1, for loss='binary_cross_entropy'.)"
        )
