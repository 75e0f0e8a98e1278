"""The floating dtypes of storage and arithmetic; loss scaling for float16.

"32-true" is JAX's default: float32 arrays, whose products A100s, H100s and later GPUs
compute in TF32, and TPUs in bfloat16. "32-highest" computes them in float32.

Under mixed precision the parameters keep their dtype. A call of the model casts them
and its inputs, and casts its outputs back to float32. So the loss, the metrics, sums of
gradients and the optimizer never see a narrow number, except that `FSDP` sums the
gradients of its units in the dtype of the call.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..basics.arguments import check_choice
from ..basics.hardware import get_product_precision
from ..basics.tree import map_nodes
from .call_override import override_call


class Precision(NamedTuple):
    """The dtypes that a name in `PRECISIONS` stands for."""

    name: str
    computed: Any = None
    """The dtype of the model's calls; None keeps the user's."""
    stored: Any = None
    """The dtype of the parameters between steps; None keeps the model's."""
    scales_loss: bool = False
    products: str | None = None
    """The arithmetic of float32 products, for `jax.default_matmul_precision`; None
    leaves JAX's default for the device."""

    def set_product_precision(self) -> AbstractContextManager[Any]:
        """Returns a context in which products are computed in `products`."""
        if self.products is None:
            return nullcontext()
        return jax.default_matmul_precision(self.products)


PRECISIONS: Final = {
    precision.name: precision
    for precision in (
        Precision("32-true"),
        Precision("32-highest", products="float32"),
        Precision("bf16-mixed", computed=jnp.bfloat16),
        Precision("bf16-true", computed=jnp.bfloat16, stored=jnp.bfloat16),
        Precision("16-mixed", computed=jnp.float16, scales_loss=True),
    )
}

_NORMS: Final = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
"""Layers that compute in float32 and return the dtype of their input. Equinox's first
three do so by themselves; a call of `BatchNorm` is overridden."""


def find_precision(name: Any) -> Precision:
    """Returns the precision of a name; an error lists the known names."""
    check_choice("precision", name, list(PRECISIONS))
    return PRECISIONS[name]


def float32_products(precision: Precision, device: Any) -> str:
    """Returns the arithmetic of float32 products, such as `"TF32"`."""
    return precision.products or _global() or get_product_precision(device)


def note_on_products(precision: Precision, device: Any) -> str | None:
    """Returns a note if products have fewer bits than their float32 arguments."""
    by_default = get_product_precision(device)
    if by_default == "float32" or precision.products or _global():
        return None
    bits = {"TF32": 10, "bfloat16": 7}[by_default]
    return (
        f"matrix products of float32 arrays are computed in {by_default} here"
        f" ({bits} bits of mantissa; {device.device_kind}), which is JAX's default and"
        ' fast. precision="32-highest" computes them in float32. To keep it and not be'
        ' told: jax.config.update("jax_default_matmul_precision", "default")'
    )


def _global() -> str | None:
    """Returns the precision that the user has set for all products of this process."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore


def cast_arrays(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating leaves of a model, except those of norms; with None, none."""
    return tree if dtype is None else _cast_model(tree, dtype, is_stored=True)


def cast_to_original(tree: PyTree, like: PyTree) -> PyTree:
    """Casts leaves to the dtypes of `like`: undoes `cast_arrays`."""
    return jax.tree.map(
        lambda leaf, own: leaf if leaf.dtype == own.dtype else leaf.astype(own.dtype),
        tree,
        like,
    )


def cast_calls(
    model: PyTree, batch: PyTree, precision: Precision
) -> tuple[PyTree, PyTree]:
    """Returns the model, whose calls compute in the dtype of `precision`, and `batch`.

    Calls cast their inputs. If the model can't be called, such as a dict of arrays, its
    leaves and those of the batch are cast instead.
    """
    dtype = precision.computed
    if dtype is None:
        return model, batch
    if isinstance(model, eqx.Module) or callable(model):
        return _MixedPrecisionModel(model, dtype), batch
    batch = _cast(batch, dtype)
    return _cast_model(model, dtype), batch


def promote_to_float32(tree: PyTree) -> PyTree:
    """Promotes floating leaves to float32 at least, as sums need them."""
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            if _is_floating(leaf)
            else leaf
        ),
        tree,
    )


class LossScale(NamedTuple):
    """The factor of a float16 loss, which keeps small gradients from becoming zero.

    A step with gradients that are not finite is skipped, and halves the scale;
    `GROWTH_INTERVAL` finite steps in a row double it.
    """

    scale: Array
    """float32 `()`."""
    good_steps: Array
    """int32 `()`. Steps since the scale last changed."""


FIRST_SCALE: Final = 2.0**16
LARGEST_SCALE: Final = 2.0**24
GROWTH_INTERVAL: Final = 2000


def update_loss_scale(scale: LossScale, finite: Array) -> LossScale:
    """Returns the loss scale after a step whose gradients were `finite`, or not."""
    good_steps = scale.good_steps + 1
    grows = good_steps == GROWTH_INTERVAL
    grown = jnp.minimum(scale.scale * jnp.where(grows, 2.0, 1.0), LARGEST_SCALE)
    shrunk = jnp.maximum(scale.scale / 2, 1.0)
    return LossScale(
        jnp.where(finite, grown, shrunk), jnp.where(finite & ~grows, good_steps, 0)
    )


class _MixedPrecisionModel(eqx.Module):
    """A model whose calls and methods compute in `dtype`, for a loss to use like it.

    An array that the loss reads, such as `model.layer.weight`, keeps its dtype.
    """

    wrapped: Any
    dtype: Any = eqx.field(static=True)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        model = _cast_model(self.wrapped, self.dtype)
        arguments, keywords = _cast((arguments, keywords), self.dtype)
        result = model(*arguments, **keywords)
        return _cast(result, jnp.float32, only=self.dtype)

    @property
    def __wrapped__(self) -> Any:  # for inspect.signature
        return self.wrapped

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # `copy` asks for it before fields are set
            raise AttributeError(name)
        # A method of an Equinox module is a module, too.
        return self._wrap_modules(getattr(self.wrapped, name))

    def __getitem__(self, place: Any) -> Any:
        return self._wrap_modules(self.wrapped[place])

    def _wrap_modules(self, value: Any) -> Any:
        """Wraps the modules of a value, so that they compute in `dtype`."""

        def wrap(node: eqx.Module) -> Any:
            is_index = isinstance(node, eqx.nn.StateIndex)
            return node if is_index else _MixedPrecisionModel(node, self.dtype)

        return map_nodes(eqx.Module, wrap, value)


def _cast(tree: PyTree, dtype: Any, only: Any = None) -> PyTree:
    """Casts floating arrays to `dtype`, except those of an `eqx.nn.State`."""

    def cast(leaf: Any) -> Any:
        wanted = _is_floating(leaf) and only in (None, leaf.dtype)
        return leaf.astype(dtype) if wanted else leaf

    return jax.tree.map(cast, tree, is_leaf=lambda n: isinstance(n, eqx.nn.State))


def _cast_model(model: PyTree, dtype: Any, *, is_stored: bool = False) -> PyTree:
    """Casts the floating leaves of a model to `dtype`, except those of norms.

    Unless the cast `is_stored`, BatchNorm statistics and gradients of embeddings are
    summed in float32.
    """
    kinds = (*_NORMS, eqx.nn.Embedding)

    def cast(node: Any) -> Any:
        if not is_stored and isinstance(node, eqx.nn.BatchNorm):
            return override_call(node, _norm_in_float32)
        if not is_stored and isinstance(node, eqx.nn.Embedding):
            return override_call(_cast(node, dtype), _look_up_in_float32)
        return node if isinstance(node, _NORMS) else _cast(node, dtype)

    return jax.tree.map(cast, model, is_leaf=lambda node: isinstance(node, kinds))


def _look_up_in_float32(embedding: Any, *arguments: Any, **keywords: Any) -> Array:
    """Calls an embedding, and sums its gradient over tokens in float32.

    Thousands of tokens may share a row, and a bfloat16 sum of that many terms stops
    growing.
    """
    row = _cast(embedding, jnp.float32)(*arguments, **keywords)
    return row.astype(embedding.weight.dtype)


def _norm_in_float32(norm: Any, x: Array, *arguments: Any, **keywords: Any) -> Any:
    """Calls a BatchNorm with statistics in float32, for inputs in any dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    out, state = norm(wide, *arguments, **keywords)
    return out.astype(x.dtype), state


def _is_floating(leaf: Any) -> bool:
    return eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
