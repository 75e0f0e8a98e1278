"""Several losses for one model, each with its own optimizer and leaves.

Leaves are selected by patterns, by bools, or by declarations of modules.
`part_step_functions` has the steps.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from .. import losses
from ..basics.arguments import checks_arguments, format_call
from ..basics.tree import get_node, leaf_path, mark_leaves
from .objective import LossFnObjective
from .optimizer_call import add_clipping


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Part:
    """Some leaves (arrays) of a model, with their own loss and their own optimizer.

        Trainer(gan, [
            Part("critic", critic_loss, optax.adam(2e-4)),
            Part("generator", generator_loss, optax.adam(1e-4), every=5),
        ])

    One compiled step runs the parts in order, on the same batch, and each part sees the
    updates of the parts before it. Leaves that belong to no part are frozen.

    Args:
        params: which leaves: a path pattern such as "critic" or "blocks[*].attention",
            which means all in the submodules that match; a list of them; or a pytree of
            bools that is a prefix of the model.
        loss_fn: like the `loss_fn` of a `Trainer`. All parts get the same keys; if
            their draws should differ, fold a number of your own into them.
        optimizer: any `optax.GradientTransformation` of a `Trainer`; given the
            conjugates of complex gradients, too.
        every: the part runs in steps that this divides, counted from 1. In other
            steps its loss is not computed and is NaN among the metrics; means are over
            the steps in which the part ran.
        name: prefix of its metrics, as in `critic_loss`. By default it is the path in
            `params`: "critic", "layers_0" for "layers[0]", "0" for "[0]".
        gradient_clip_val: largest global norm of its gradient.
    """

    params: PyTree
    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    every: int = 1
    name: str | None = None
    gradient_clip_val: float | None = None

    def __repr__(self) -> str:
        return format_call(self, 3)


Part.__init__ = checks_arguments(Part.__init__)


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedPart:
    """A part, resolved for one model."""

    name: str
    mask: PyTree
    """A mask of the leaves that it trains, in the model's structure."""
    every: int
    objective: LossFnObjective
    optimizer: optax.GradientTransformationExtraArgs

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the leaves of this part, and the others."""
        return eqx.partition(params, self.mask)


def resolve_parts(
    parts: Sequence[Part],
    model: PyTree,
    *,
    keeps_outputs: bool = False,
) -> tuple[ResolvedPart, ...]:
    """Resolves each of `parts` to the leaves of `model` that it trains.

    Raises:
        ValueError: if one has no leaves, or two have the same; or for their names.
    """
    resolved: list[ResolvedPart] = []
    owners: dict[str, str] = {}
    for part in parts:
        # The name of the part.
        mask = make_leaf_mask(part.params, model, "`Part`: `params`")
        name = part.name
        if name is None:
            path = part.params if isinstance(part.params, str) else ""
            name = re.sub(r"\W+", "_", path).strip("_")
        if not (name and f"_{name}".isidentifier()):
            raise ValueError(
                f"`Part`: {name or part.params!r} can't be put before the names of"
                " metrics, as in critic_loss; pass `name`, of letters, digits and _."
            )
        losses.check_metric_name("`Part`: `name`", f"{name}_loss")
        if any(name == other.name for other in resolved):
            raise ValueError(f"`Part`: two are named {name!r}; pass another `name`.")

        # The leaves of the part.
        leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, mask))
        own_paths = [
            leaf_path(path)
            for path, leaf in leaves
            if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
            and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        if not own_paths:
            raise ValueError(
                f"`Part` {name!r}: `params` selects no floating-point array of the"
                " model."
            )
        for path in own_paths:
            if path in owners:
                raise ValueError(
                    f"`Part`: {path} is in {owners[path]!r} and in {name!r}; a leaf has"
                    " one optimizer, so take it out of one of them."
                )
        owners |= dict.fromkeys(own_paths, name)

        # The loss and the optimizer of the part.
        objective = LossFnObjective(
            part.loss_fn, keeps_outputs=keeps_outputs, is_part=True
        )
        optimizer = add_clipping(part.optimizer, part.gradient_clip_val)
        optimizer = optax.with_extra_args_support(optimizer)
        resolved.append(ResolvedPart(name, mask, int(part.every), objective, optimizer))
    return tuple(resolved)


def make_leaf_mask(params: PyTree, model: PyTree, argument: str) -> PyTree:
    """Returns bools in the structure of `model`, from patterns or bools."""
    patterns = [params] if isinstance(params, str) else params
    if isinstance(patterns, list | tuple):
        if all(isinstance(each, str) for each in patterns):
            return mark_leaves(argument, patterns, model)

    def spread(on: Any, below: PyTree) -> PyTree:
        if not isinstance(on, bool | np.bool_):
            raise TypeError(f"it has {on!r}")
        return jax.tree.map(lambda _: bool(on), below)

    try:
        return jax.tree.map(spread, params, model)
    except (TypeError, ValueError) as error:
        # JAX's text on a structure has several lines, and names types alone.
        came = f": {error}" if isinstance(error, TypeError) else "."
        raise type(error)(
            f"{argument} must be a path pattern, a list of them, or a pytree of bools"
            f" that is a prefix of the model{came}"
        ) from error


def mark_trained_alone(model: PyTree) -> PyTree | None:
    """Returns bools for the leaves that modules declare as trained, or None.

    A class of modules, such as an adapter, names fields in `trained_alone`. If a model
    has such a module, these fields are trained and nothing else.
    """

    def is_named(path: Any, _: Any) -> bool:
        for length, key in enumerate(path):
            fields = getattr(type(get_node(model, path[:length])), "trained_alone", ())
            if getattr(key, "name", None) in fields:
                return True
        return False

    named = jax.tree_util.tree_map_with_path(is_named, model)
    return named if any(jax.tree.leaves(named)) else None


def union_masks(parts: Sequence[ResolvedPart]) -> PyTree:
    """Returns a mask of the leaves that any part trains."""
    return jax.tree.map(lambda *each: any(each), *(part.mask for part in parts))
