"""The length of a training in optimizer steps, for schedules of learning rates."""

from collections.abc import Iterable
from typing import Any

from ..basics.arguments import check_count, checks_arguments
from ..basics.console import add_article


@checks_arguments
def steps_of(
    loader: Iterable[Any], max_epochs: int, *, accumulate_grad_batches: int = 1
) -> int:
    """Returns how many optimizer steps a `Trainer` takes in `max_epochs` epochs.

        steps = steps_of(loader, max_epochs=10)
        optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, steps))

    Schedules of optax count optimizer steps. Batches that an accumulation leaves over
    at the end of an epoch are a step, too.

    Args:
        loader: the `train_loader` of `fit`, or the part of it that
            `limit_train_batches` leaves, as a list.
        max_epochs: that of `fit`.
        accumulate_grad_batches: that of the `Trainer`.

    Raises:
        TypeError: if the loader has no length.
    """
    check_count("max_epochs", max_epochs)
    check_count("accumulate_grad_batches", accumulate_grad_batches)
    try:
        batches = len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"`loader` is {add_article(type(loader).__name__)} without a length, so its"
            " steps are not known before the first epoch. Give the schedule a number of"
            " steps, and `fit` the same `max_steps`."
        ) from None
    return max_epochs * -(-batches // accumulate_grad_batches)
