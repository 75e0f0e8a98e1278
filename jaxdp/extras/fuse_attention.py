"""Attention without its matrix of weights: by cuDNN, or in blocks of keys."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from ..basics.arguments import check_choice, check_count, checks_arguments
from ..basics.console import log_info_once, warn
from ..basics.tree import find_matches, leaf_path
from .attention_in_blocks import MODEL, MaskAndDropout, attend_in_blocks

Model = TypeVar("Model")

_IMPLEMENTATIONS: Final = "auto", "cudnn", "blocks"

_LENGTH_MULTIPLE: Final = 64
"""cuDNN's kernels take multiples of it with any mask, and refuse some other lengths."""


@checks_arguments
def fuse_attention(
    model: Model,
    *,
    causal: bool | str | Iterable[str] = False,
    block: int = 256,
    implementation: str = "auto",
) -> Model:
    """Computes every `eqx.nn.MultiheadAttention` of a model without its weight matrix.

    The attention weights, heads x tokens x tokens, are most of the memory of a model
    with long rows. Here they never exist. cuDNN's kernel computes attention where it
    can (`jax.nn.dot_product_attention`). Elsewhere a loop reads a block of keys at a
    time, and once more in the backward pass. `docs/long_context.md` lists the cases.

    The new model computes the same values, takes the same arguments, and has the same
    leaves at the same paths, so checkpoints and rules fit both. Layers in a
    `jaxdp.Stack` are replaced, too, but no subclasses of the layer.

    Args:
        model: a model, or any tree with such layers.
        causal: whether each token attends only to itself and earlier ones; or path
            patterns of the layers where it does, such as `"decoder.**"`. Leave out the
            causal mask, which would be a matrix again.
        block: how many keys the loop reads at a time.
        implementation: `"auto"`; `"blocks"`, always the loop; or `"cudnn"`, which
            raises where cuDNN can't compute a call.

    Returns:
        A new model. Calls of its layers also take `segment_ids`; see
        `FusedAttention.__call__`.

    Raises:
        ValueError: if there is no such layer, or no layer that a pattern names.
    """
    check_count("block", block)
    check_choice("implementation", implementation, _IMPLEMENTATIONS)
    patterns = _list_patterns(causal)
    is_layer = lambda node: type(node) in _REPLACED  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_layer)
    names = [leaf_path(path) for path, node in nodes if is_layer(node)]
    if not names:
        raise ValueError(
            "`model` has no eqx.nn.MultiheadAttention, whose attention could be fused"
            " (subclasses of it are left alone). In a layer of your own, call"
            " jax.nn.dot_product_attention."
        )
    named = find_matches("`causal`", patterns, names, "eqx.nn.MultiheadAttention")

    def fuse_layer(path: Any, node: Any) -> Any:
        if not is_layer(node):
            return node
        is_causal = causal is True or leaf_path(path) in named
        return FusedAttention(node, is_causal, block, implementation)

    return jax.tree_util.tree_map_with_path(fuse_layer, model, is_leaf=is_layer)


def _list_patterns(causal: Any) -> list[str]:
    if isinstance(causal, bool):
        return []
    patterns = [causal] if isinstance(causal, str) else causal
    patterns = list(patterns) if isinstance(patterns, Iterable) else []
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            "`causal` must be True, False, or path patterns of layers, such as"
            f" 'decoder.**'; got {causal!r}."
        )
    return patterns


class FusedAttention(eqx.nn.MultiheadAttention):
    """An `eqx.nn.MultiheadAttention` without a weight matrix."""

    causal: bool = eqx.field(static=True)
    block: int = eqx.field(static=True)
    implementation: str = eqx.field(static=True)

    def __init__(
        self,
        layer: eqx.nn.MultiheadAttention,
        causal: bool,
        block: int,
        implementation: str,
    ):
        for field in dataclasses.fields(eqx.nn.MultiheadAttention):
            setattr(self, field.name, getattr(layer, field.name))
        self.causal = causal
        self.block = block
        self.implementation = implementation

    @jax.named_scope("FusedAttention")
    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Array | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., Any] | None = None,
        segment_ids: Array | tuple[Array, Array] | None = None,
    ) -> Array:
        """Computes the values of `eqx.nn.MultiheadAttention`; also takes `segment_ids`.

        Args:
            query: `(queries, features)`.
            key_: `(keys, features)`.
            value: `(keys, features)`.
            mask: booleans, `(queries, keys)` or `(heads, queries, keys)`; False hides a
                key. A query whose keys are all hidden gets their mean, as in Equinox.
            key: for dropout of the weights, which draws other numbers than Equinox.
            inference: switches dropout off. Default: the layer's setting.
            deterministic: the old name of `inference`.
            process_heads: changes the heads of query, key and value, as rotary
                positions do.
            segment_ids: integers `(tokens,)`, for rows that are packed with several
                texts: a token attends only to tokens of the same number. A pair, for
                queries and keys, if these are not the same tokens. A query without any
                key gets zeros.

        Returns:
            `(queries, features)`.
        """
        if deterministic is not None:
            inference = deterministic
            warn("`deterministic` is deprecated in favor of `inference`")
        for name, array in {"query": query, "key_": key_, "value": value}.items():
            if array.ndim != 2:
                raise ValueError(
                    f"`{name}` must have shape (tokens, features); got {array.shape}."
                    " For several rows, call the layer by jax.vmap."
                )
        lengths = len(query), len(key_)
        self._check_call(lengths, len(value), mask)
        heads = tuple(
            jax.vmap(layer)(x).reshape(len(x), self.num_heads, -1)
            for layer, x in (
                (self.query_proj, query),
                (self.key_proj, key_),
                (self.value_proj, value),
            )
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = tuple(process_heads(*heads))
            if [x.shape for x in heads] != shapes:
                raise ValueError(
                    "process_heads must not change the shape of the heads."
                )
        hidden = MaskAndDropout(
            None if mask is None else mask.astype(bool),
            *_check_segments(segment_ids, lengths),
            *self._get_dropout(key, inference),
        )
        attended = self._attend(heads, hidden).reshape(lengths[0], -1)
        return jax.vmap(self.output_proj)(attended)

    def _attend(self, heads: Any, hidden: MaskAndDropout) -> Array:
        refusal = _explain_refusal(heads, hidden)
        if self.implementation == "cudnn":
            if refusal:
                raise ValueError(
                    f"`implementation`='cudnn': cuDNN can't compute this attention:"
                    f" {refusal}. Take 'auto', which computes such calls in blocks."
                )
            return _attend_by_cudnn(heads, self.causal)
        is_auto = self.implementation == "auto"
        if is_auto and not refusal and _is_safe_for_cudnn(heads):
            try:
                return _attend_by_cudnn(heads, self.causal)
            except (NotImplementedError, RuntimeError) as error:  # by JAX, of a version
                log_info_once(f"`fuse_attention` takes blocks, not cuDNN: {error}")
        return attend_in_blocks(heads, hidden, self.causal, self.block)

    def _get_dropout(
        self, key: PRNGKeyArray | None, inference: bool | None
    ) -> tuple[PRNGKeyArray | None, Array | None]:
        """Returns the key and the rate of dropout, or two times None."""
        rate = self.dropout.p
        inference = self.dropout.inference if inference is None else inference
        if inference or (isinstance(rate, int | float) and rate == 0):
            return None, None
        if key is None:
            raise RuntimeError(
                "Dropout requires a key when running in non-deterministic mode."
            )
        return key, jax.lax.stop_gradient(jnp.asarray(rate, jnp.float32))

    def _check_call(self, lengths: tuple[int, int], values: int, mask: Any) -> None:
        queries, keys = lengths
        if keys != values:
            raise ValueError(
                "key and value must both be sequences of equal length; got `key_` of"
                f" {keys} tokens and `value` of {values}."
            )
        if self.causal and queries != keys:
            raise ValueError(
                f"`causal` is for queries and keys of the same tokens; got {queries}"
                f" queries and {keys} keys. Leave this layer out of `causal`, or pass a"
                " `mask` that says which keys each query may see."
            )
        if mask is None:
            return
        if not jnp.issubdtype(mask.dtype, jnp.bool_):
            raise TypeError(
                "`mask` must be of booleans, False where a key is hidden; got"
                f" {mask.dtype}."
            )
        if mask.shape not in (lengths, (self.num_heads, *lengths)):
            raise ValueError(
                f"`mask` must have shape (queries, keys) = {lengths} or (heads,"
                f" queries, keys) = {(self.num_heads, *lengths)}; got {mask.shape}."
            )


_REPLACED: Final = eqx.nn.MultiheadAttention, FusedAttention


def _check_segments(
    ids: Any, lengths: tuple[int, int]
) -> tuple[Array | None, Array | None]:
    """Returns the segments of queries and of keys, or two times None."""
    if ids is None:
        return None, None
    pair = tuple(map(jnp.asarray, ids if isinstance(ids, tuple) else (ids, ids)))
    if len(pair) != 2 or [x.shape for x in pair] != [(length,) for length in lengths]:
        queries, keys = lengths
        raise ValueError(
            f"`segment_ids` must have shape (tokens,), or be a pair of (queries,) ="
            f" ({queries},) and (keys,) = ({keys},); got"
            f" {', '.join(str(x.shape) for x in pair)}."
        )
    if not all(jnp.issubdtype(x.dtype, jnp.integer) for x in pair):
        raise TypeError(
            "`segment_ids` must be integers; got"
            f" {', '.join(str(x.dtype) for x in pair)}."
        )
    return pair


def _attend_by_cudnn(heads: Any, causal: bool) -> Array:
    compute = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
    )
    mesh = jax.typeof(heads[0]).sharding.mesh
    if MODEL in _list_auto_axes(mesh):
        spec = PartitionSpec(None, MODEL)
        compute = jax.shard_map(
            compute, in_specs=spec, out_specs=spec, axis_names={MODEL}, check_vma=False
        )
    return compute(*heads)


def _list_auto_axes(mesh: Any) -> list[str]:
    """Returns the axes over which XLA may split arrays of the program."""
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [n for n, kind in axes if kind != AxisType.Manual and mesh.shape[n] > 1]


def _explain_refusal(
    heads: tuple[Array, Array, Array], hidden: MaskAndDropout
) -> str | None:
    """Returns why cuDNN cannot compute this attention on any device, or None."""
    query, _, value = heads
    dtypes = {x.dtype for x in heads}
    size = query.shape[-1]
    if hidden.rate is not None:
        return "its weights have dropout"
    if hidden.query_ids is not None:
        return "there are segments"
    if hidden.mask is not None:
        return "there is a mask, which would be a matrix of numbers"
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        return f"heads are {' and '.join(sorted(map(str, dtypes)))}, not 16 bits"
    if size != value.shape[-1]:
        return f"heads have {size} features of keys, {value.shape[-1]} of values"
    if size % 8 or size > 256:
        return f"heads have {size} features, not a multiple of 8 up to 256"
    return None


def _is_safe_for_cudnn(heads: tuple[Array, Array, Array]) -> bool:
    """Returns True if cuDNN takes these lengths and heads on these devices.

    JAX can't be asked beforehand: the call raises while it is traced, or only when XLA
    compiles, if XLA is to split it over devices.
    """
    query, key, _ = heads
    mesh = jax.typeof(query).sharding.mesh
    capability = _get_compute_capability(mesh)
    if len(query) % _LENGTH_MULTIPLE or len(key) % _LENGTH_MULTIPLE or capability < 8:
        return False
    if query.shape[-1] > (256 if capability >= 9 else 128):  # Hopper; Ampere and Ada
        return False
    if mesh.empty:  # it is unknown how several devices split the tokens
        return jax.device_count() == 1
    return _splits_only_heads(mesh, query.shape[1])


def _get_compute_capability(mesh: Any) -> float:
    """Returns the compute capability of NVIDIA's GPUs, or 0 on other devices."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):  # the name of a platform
        device = jax.local_devices(backend=device)[0]
    capability = str(getattr(device, "compute_capability", ""))
    platforms = {device.platform}
    if not mesh.empty and mesh.abstract_device is not None:
        platforms.add(mesh.abstract_device.platform)
    is_number = re.fullmatch(r"\d+\.\d+", capability)
    return float(capability) if is_number and platforms <= {"gpu", "cuda"} else 0.0


def _splits_only_heads(mesh: Any, heads: int) -> bool:
    """Returns True if XLA splits at most the heads over devices, and these evenly."""
    axes = _list_auto_axes(mesh)
    return not axes or axes == [MODEL] and heads % mesh.shape[MODEL] == 0
