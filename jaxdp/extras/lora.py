"""Low-rank adapters on the linear layers of a model whose weights stay as they are."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..basics.arguments import check_count, check_number, checks_arguments
from ..basics.tree import find_matches, is_key, leaf_path, map_nodes

Model = TypeVar("Model")


class LoRALinear(eqx.nn.Linear):
    """A linear layer with a product of two thin matrices beside its weight."""

    down: Array
    """`(..., rank, in_features)`, random."""
    up: Array
    """`(..., out_features, rank)`, zero at first."""
    scale: float = eqx.field(static=True)

    trained_alone: ClassVar = ("down", "up")

    def __init__(self, linear: eqx.nn.Linear, rank: int, scale: float, key: Any):
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.use_bias, self.scale = linear.use_bias, scale
        *stacked, fan_out, fan_in = linear.weight.shape
        bound = 1 / math.sqrt(fan_in)
        dtype = jnp.promote_types(linear.weight.dtype, jnp.float32)
        self.down = jax.random.uniform(
            key, (*stacked, rank, fan_in), dtype, -bound, bound
        )
        self.up = jnp.zeros((*stacked, fan_out, rank), dtype)

    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
        y = super().__call__(x, key=key)
        return y + (self.scale * (self.up @ (self.down @ x))).astype(y.dtype)

    def to_linear(self) -> eqx.nn.Linear:
        """Returns an ordinary layer with the product in its weight."""
        dtype = self.down.dtype
        product = jnp.matmul(self.up, self.down, precision="highest")
        weight = self.weight.astype(dtype) + self.scale * product
        linear = object.__new__(eqx.nn.Linear)
        for name, value in vars(self).items():
            if name not in ("down", "up", "scale"):
                object.__setattr__(linear, name, value)
        object.__setattr__(linear, "weight", weight.astype(self.weight.dtype))
        return linear


@checks_arguments
def lora(
    model: Model,
    patterns: str | Sequence[str],
    rank: int,
    *,
    alpha: float | None = None,
    key: PRNGKeyArray,
) -> Model:
    """Adds low-rank adapters (LoRA) to linear layers of a model.

        model = lora(model, "*_proj", rank=8, key=jax.random.key(0))
        trainer = Trainer(model, optax.adam(1e-3))
        trainer.fit(loader)
        model = merge_lora(trainer.model)

    A layer computes `weight @ x + alpha / rank * up @ down @ x`, with `up` zero at
    first, so that the results stay the same. Without a `filter_spec` a Trainer trains
    the adapters alone, and checkpoints have no more than these: to go on from one, make
    the model with the same weights again.

    Args:
        model: any pytree; its layers may be in a `jaxdp.Stack`, and hold shapes.
        patterns: of the paths of `eqx.nn.Linear` layers, such as
            `"blocks.attention.*_proj"`; a bare name, such as `"q_proj"` or `"*_proj"`,
            is for all layers whose last name it matches.
        rank: the rank of the product.
        alpha: the product is multiplied by `alpha / rank`. Default: `rank`.
        key: for the random numbers in `down`.

    Raises:
        TypeError, ValueError: for a pattern that matches no linear layer, layers with
            adapters already, and for a `rank`, an `alpha` or a `key` that can't be.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    check_count("rank", rank)
    if alpha is not None:
        check_number("alpha", alpha, above=0)
    if not is_key(key) and getattr(key, "dtype", None) != jnp.uint32:
        raise TypeError(
            f"`key` must be a PRNG key, jax.random.key(0) say; got {key!r}."
        )
    scale = 1.0 if alpha is None else float(alpha) / rank

    def is_linear(node: Any) -> bool:
        return isinstance(node, eqx.nn.Linear)

    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_linear)
    layers = {leaf_path(path): node for path, node in nodes if is_linear(node)}
    kind = "eqx.nn.Linear"
    chosen = find_matches("`patterns`", patterns, layers, kind, anywhere=True)
    for name in chosen:
        layer = layers[name]
        if isinstance(layer, LoRALinear):
            raise ValueError(
                f"`model`: {name} has an adapter already; use `merge_lora` first."
            )
        if "scalar" in (layer.in_features, layer.out_features):
            raise ValueError(f"`patterns`: {name} has scalar features, and no matrix.")
    keys = dict(zip(chosen, jax.random.split(key, len(chosen)), strict=True))

    def add_adapter(path: Any, node: Any) -> Any:
        own_key = keys.get(leaf_path(path))
        return node if own_key is None else LoRALinear(node, rank, scale, own_key)

    return jax.tree_util.tree_map_with_path(add_adapter, model, is_leaf=is_linear)


@checks_arguments
def merge_lora(model: Model) -> Model:
    """Adds the adapters of a model to its weights, which makes its layers ordinary.

    Sums are computed in the adapters' dtype, float32 or wider, and rounded to the
    weights' own.

    Raises:
        ValueError: if the model has no adapters.
    """
    merged = 0

    def merge(layer: LoRALinear) -> eqx.nn.Linear:
        nonlocal merged
        merged += 1
        return layer.to_linear()

    model = map_nodes(LoRALinear, merge, model)
    if not merged:
        raise ValueError(
            "`model` has no adapters of `lora`, so there is none to merge."
        )
    return model
