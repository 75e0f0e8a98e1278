"""Changes to a step that does not fit: compiled, with the memory that they need."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import equinox as eqx
import jax

from ...fit import TrainerConfig
from ...strategies import FSDP, Pmap, Sharded
from ..fuse_attention import fuse_attention
from .estimate import Remedy
from .plan import Plan

_MAX_REMEDIES: Final = 3

Compile = Callable[[TrainerConfig, int | None], Plan]
"""Plans a config; None stands for the rows of the loader's batches."""


def find_remedies(
    config: TrainerConfig, rows: int, compile_plan: Compile
) -> tuple[Remedy, ...]:
    """Returns up to three changes of a trainer, those with the lowest peaks first.

    Args:
        config: of the trainer whose step does not fit.
        rows: of each of its batches.
        compile_plan: makes the plan of a change.
    """
    remedies = []
    for change, other, other_rows in _list_changes(config, rows):
        try:
            plan = compile_plan(other, other_rows)
        except Exception:  # the user's code may not take another batch size
            continue
        remedies.append(Remedy(change, plan.memory.peak, bool(plan.fits)))
    return tuple(sorted(remedies, key=lambda remedy: remedy.peak)[:_MAX_REMEDIES])


def _list_changes(
    config: TrainerConfig, rows: int
) -> Iterator[tuple[str, TrainerConfig, int | None]]:
    """Yields changes to try: each in words, as a config, and the rows of its batches.

    None for the rows leaves them as they are.
    """
    arguments, strategy = config.arguments, config.strategy
    if not arguments["remat"]:
        with contextlib.suppress(ValueError):  # of a model without a `Stack`
            other = config.replace(remat=True)
            yield "`Trainer(remat=True)`", other, None
    nodes = jax.tree.leaves(config.model, is_leaf=_is_attention)
    spec = arguments["filter_spec"]  # a pytree of bools would not fit other classes
    if any(map(_is_attention, nodes)) and (spec is None or callable(spec)):
        other = config.replace(model=fuse_attention(config.model))
        yield "`fuse_attention(model)`", other, None
    if type(strategy) in (Sharded, Pmap) and config.ensemble is None:
        other = config.replace(strategy=FSDP(mesh=strategy.mesh))
        yield "`strategy=FSDP()`", other, None
    if rows > 1:
        count = 2 * config.accumulate_grad_batches
        other = config.replace(accumulate_grad_batches=count)
        change = f"batches of {rows // 2} rows, and `accumulate_grad_batches={count}`"
        yield change, other, rows // 2


def _is_attention(node: Any) -> bool:
    return type(node) is eqx.nn.MultiheadAttention
