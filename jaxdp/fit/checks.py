"""Validates the arguments of a trainer before compilation; logs what it trains.

What may be called now is in `lifecycle.py`.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

import jaxdp

from .. import losses
from ..basics.arguments import check_count, check_is_local, check_number, is_number
from ..basics.console import add_article, join_numbers, log_info, log_info_once
from ..basics.tree import describe_difference, find_nodes, leaf_path
from ..callbacks import Callback, check_hooks
from ..distributed import get_process_group
from ..step import (
    CriterionObjective,
    LossFnObjective,
    Objective,
    Part,
    PerExample,
    check_training_flags,
    find_keywords,
    make_leaf_mask,
    mark_trained_alone,
)
from ..strategies import DataParallel, Sharded
from ..strategies.base import check_offload, make_row_blocks
from ..strategies.method_checks import check_methods
from .pass_metrics import split_metrics

if TYPE_CHECKING:
    from .run import Run, TrainerConfig

_PRECISIONS: Final = {
    **dict.fromkeys((16, "16"), "16-mixed"),
    **dict.fromkeys((32, "32"), "32-true"),
    "bf16": "bf16-mixed",
}
"""Lightning's short words."""


def validate_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a `Trainer`, with defaults in place of None.

    Raises:
        TypeError, ValueError: for invalid arguments.
    """
    result = dict(arguments)
    if result["optimizer"] is None:
        result["optimizer"] = optax.adamw(1e-3)
    if result["strategy"] is None:
        result["strategy"] = Sharded()

    precision = result["precision"]
    result["precision"] = _PRECISIONS.get(precision, precision)

    # Single arguments.
    several = is_list_of_parts(result["optimizer"])
    if not several:
        check_optimizer(result["optimizer"])
    has_own_loss = several or result["loss_fn"] is not None
    check_model(result["model"], must_be_callable=not has_own_loss)
    check_state(result["model"], result["state"])
    check_strategy_argument(result["strategy"])
    if result["ensemble"] is not None:
        result["ensemble"] = jaxdp.ensembles.find_ensemble(result)
    for name in ("accumulate_grad_batches", "log_every_n_steps", "steps_per_execution"):
        check_count(name, result[name])
    check_count("seed", result["seed"], minimum=0, maximum=2**63 - 1)
    _check_clipping(result["gradient_clip_val"])
    check_is_local("default_root_dir", result["default_root_dir"])

    # Combinations.
    strategy = result["strategy"]
    if result["offload"]:
        check_offload(strategy)
    check_processes(strategy, result["data"])
    if several:
        check_parts(result)
    return result


def is_list_of_parts(optimizer: Any) -> bool:
    """Returns True if a list of parts was passed as `optimizer`."""
    if isinstance(optimizer, optax.GradientTransformation):  # a tuple, but not of parts
        return False
    return isinstance(optimizer, list | tuple)


def check_parts(arguments: Mapping[str, Any]) -> None:
    """Raises for invalid parts, or arguments that can't be combined with parts."""
    parts = arguments["optimizer"]
    for part in parts:
        if not isinstance(part, Part):
            raise TypeError(
                f"`optimizer` is a list with {add_article(type(part).__name__)}; every"
                " element must be a jaxdp.Part(params, loss_fn, optimizer). For one"
                " loss and several optimizers use optax.partition, or optax.chain for"
                " stages."
            )
        check_optimizer(part.optimizer)
        check_count("every", part.every)
        _check_clipping(part.gradient_clip_val)

    if not parts:
        raise ValueError("`optimizer` is an empty list; pass one jaxdp.Part or more.")

    # Arguments that each part has itself.
    is_passed = {
        "loss": arguments["loss"],
        "loss_fn": arguments["loss_fn"],
        "metrics": split_metrics(arguments["metrics"])[0],
        "filter_spec": arguments["filter_spec"] is not eqx.is_inexact_array,
        "gradient_clip_val": arguments["gradient_clip_val"] is not None,
    }
    for name, passed in is_passed.items():
        if passed:
            raise ValueError(
                f"`{name}` can't be combined with a list of parts: each part has its"
                " own `loss_fn`, which may return metrics, the `params` that it trains,"
                " and a `gradient_clip_val`. (A PassMetric may stand in `metrics`.)"
            )

    for part in parts:
        choose_objective({**arguments, "loss_fn": part.loss_fn})


def _check_clipping(norm: Any) -> None:
    if norm is not None:
        none = ", or None for no clipping"
        check_number("gradient_clip_val", norm, above=0, suffix=none)


def check_model(model: Any, *, must_be_callable: bool) -> None:
    """Raises for a model that is no Equinox model; the error names its kind."""
    kind = type(model).__name__
    origins = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    for package in origins & {"torch", "flax", "keras", "haiku"}:
        raise TypeError(
            f"`model` is a {package} module ({kind}); jaxdp trains Equinox models,"
            " pytrees that can be called on one example. See"
            " https://docs.kidger.site/equinox for the same layers."
        )
    if isinstance(model, type):
        raise TypeError(
            f"`model` is the class {model.__name__}, not an instance of it; construct"
            " it, for example with key=jax.random.key(0)."
        )
    if not must_be_callable:
        return
    if not callable(model):
        raise TypeError(
            f"`model` is {add_article(kind)}, which can't be called; it must be an"
            " Equinox model, called on one example. For other pytrees, as a list of"
            " models, pass `loss_fn(model, *batch)`, or a list of jaxdp.Part(...) as"
            " `optimizer`. Equal models train side by side as an ensemble: see"
            " docs/ensembles.md. A loader goes to `fit`."
        )
    check_training_flags(model)


def check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, optax.GradientTransformation):
        is_rate, hint = is_number(optimizer), "."
        is_short = isinstance(optimizer, str) or callable(optimizer) or is_rate
        came = optimizer if is_short else type(optimizer)
        if is_rate:
            hint = f". For this rate, pass optax.adam({optimizer})."
        elif inspect.isfunction(optimizer):
            hint = ". For a schedule, pass optax.adam(schedule)."
        raise TypeError(
            "`optimizer` must be an optax.GradientTransformation, as optax.adam(1e-3)"
            " returns (and `gradient_transformation()` of optax.MultiSteps), or a list"
            f" of jaxdp.Part; got {'' if is_short else 'an instance of '}{came!r}{hint}"
        )


def check_strategy_argument(strategy: Any) -> None:
    if not isinstance(strategy, DataParallel):
        raise TypeError(
            "`strategy` must be an instance of a jaxdp.DataParallel subclass, such as"
            " Sharded(), FSDP(), ZeRO(), TensorParallel(...), Pmap() or SingleDevice();"
            f" got {strategy!r}."
        )
    check_methods(strategy)


def check_callbacks(
    callbacks: Any, known: Sequence[Callback] = ()
) -> tuple[Callback, ...]:
    """Returns the callbacks as a tuple; the `known` ones were checked before."""
    if callbacks is None or isinstance(callbacks, Callback):
        callbacks = () if callbacks is None else (callbacks,)
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str):
        raise TypeError(
            f"`callbacks` must be a list of callbacks, one, or None; got {callbacks!r}."
        )
    callbacks = tuple(callbacks)
    for place, callback in enumerate(callbacks):
        if any(callback is other for other in callbacks[:place]):
            raise ValueError(
                f"`callbacks` has the same {type(callback).__name__} twice, whose hooks"
                " would be called twice. Pass it once."
            )
        if not isinstance(callback, Callback):
            raise TypeError(
                f"`callbacks` has {callback!r} of type {type(callback).__name__}; every"
                " element must be an instance of a jaxdp.callbacks.Callback subclass,"
                " as CSVLogger() is."
            )
        if not any(callback is other for other in known):
            check_hooks(callback)
    return callbacks


def check_processes(strategy: DataParallel, data: str) -> None:
    """Raises if several processes can't train under this strategy with this `data`."""
    processes = get_process_group()
    if processes.count == 1:
        return
    blocks = make_row_blocks(strategy)  # raises for a process without devices
    if data == "global":
        return
    if blocks.count != processes.count or blocks.local != (processes.index,):
        raise ValueError(
            "`data`='local' needs a strategy under which the devices of each process"
            " work on rows of their own, in the order of the processes. Under"
            f" {strategy!r} there are {blocks.count} blocks of rows, and process"
            f" {processes.index} works on {join_numbers('block', blocks.local)}. Use"
            " data='global'."
        )


def is_shape(leaf: Any) -> bool:
    """Returns True for a shape and dtype instead of an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def check_arrays(model: PyTree) -> None:
    """Raises for a model of shapes, for which only `plan` works, and for NumPy's
    integers that JAX would silently wrap to 32 bits."""
    if any(map(is_shape, jax.tree.leaves(model))):
        raise ValueError(
            "`model` has shapes instead of arrays, as eqx.filter_eval_shape"
            " returns them, and only `plan` works with shapes; construct the"
            " model itself."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iu":
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            if np.any(leaf.astype(dtype) != leaf):
                raise ValueError(
                    f"`model`: {leaf_path(path)} is {leaf.dtype} and has values that do"
                    f" not fit into {dtype}, which JAX computes in. Re-index them, or"
                    ' call jax.config.update("jax_enable_x64", True).'
                )


def split_model(
    model: PyTree, filter_spec: PyTree | Callable[[Any], bool]
) -> tuple[PyTree, PyTree, PyTree]:
    """Splits a model into (trained leaves, other arrays, the rest), padded with None.

    Raises:
        ValueError: if nothing would be trained, or one array is at two paths.
    """
    arrays, static = eqx.partition(model, lambda x: eqx.is_array(x) or is_shape(x))
    inexact, others = eqx.partition(
        arrays, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)
    )
    if filter_spec is eqx.is_inexact_array:
        alone = mark_trained_alone(model)
        filter_spec = True if alone is None else alone  # also selects shapes
    elif {type(leaf) for leaf in jax.tree.leaves(filter_spec)} == {str}:
        filter_spec = make_leaf_mask(filter_spec, model, "`filter_spec`")
    try:
        params, frozen = eqx.partition(inexact, filter_spec)
    except Exception as error:
        got = f"got {type(error).__name__}: {error}"
        if {type(leaf) for leaf in jax.tree.leaves(filter_spec)} == {bool}:
            got = f"of this one, {describe_difference(inexact, filter_spec)}"
        raise ValueError(
            "`filter_spec` must be path patterns such as ['layers[1]'], a pytree of"
            " bools that is a prefix of the model, or a callable leaf -> bool, which is"
            f" given array by array, and not the model; {got}."
        ) from error

    if not jax.tree.leaves(params):
        count = len(jax.tree.leaves(arrays))
        hint = ""
        if not count:
            hint = (
                " A function as jax.vmap(model) has no arrays: pass the model itself."
            )
        raise ValueError(
            f"`model` has no trainable parameters: {count} arrays,"
            f" {len(jax.tree.leaves(inexact))} of them floating point, and 0 selected"
            f" by `filter_spec`.{hint}"
        )
    paths: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = leaf_path(path)
        if id(leaf) in paths:
            raise ValueError(
                f"`model` has the same array as {paths[id(leaf)]} and as {name}."
                " The two would become different weights after one step; tie them with"
                " eqx.nn.Shared, or copy one of them."
            )
        paths[id(leaf)] = name
    return params, eqx.combine(frozen, others), static


def check_state(model: PyTree, state: Any) -> None:
    """Raises if the model has stateful layers without `state`, or `state` without such
    layers.
    """
    stateful = bool(find_nodes(eqx.nn.StateIndex, model))
    if stateful and state is None:
        raise ValueError(
            "`model` has stateful layers (BatchNorm or the like) but `state` is None;"
            " make both together, `model, state = eqx.nn.make_with_state(Net)(...)`,"
            " and pass Trainer(model, state=state)."
        )
    if state is not None and not stateful:
        raise ValueError(
            "`state` was given, but `model` has no stateful layers; leave it out."
        )


def choose_objective(arguments: Mapping[str, Any]) -> Objective | None:
    """Returns the objective that the arguments define; None if the first batch decides
    it.
    """
    loss, loss_fn = arguments["loss"], arguments["loss_fn"]
    criteria, of_passes = split_metrics(arguments["metrics"])
    state, keeps = arguments["state"], bool(of_passes)
    for criterion in (loss, *criteria.values()):
        if isinstance(criterion, PerExample):
            raise TypeError(
                f"{criterion!r} is called as (model, *example), and not as a `loss` or"
                " one of the `metrics`; pass it as `loss_fn`."
            )
    if loss_fn is None:
        if loss is None:
            return None
        criterion = losses.find_criterion("`loss`", loss, losses.LOSSES)
        check_ends_in_logits(arguments["model"], criterion)
        return CriterionObjective(criterion, criteria, keeps_outputs=keeps)

    # `loss_fn` computes everything.
    if loss is not None:
        raise ValueError(
            "`loss` and `loss_fn` were both given; `loss` is a criterion (prediction,"
            " target), `loss_fn` computes everything from (model, *batch). Pass one."
        )
    if criteria:
        raise ValueError(
            f"`metrics`={list(criteria)} can't be computed with `loss_fn`, which keeps"
            " its predictions to itself; return them from it: (loss, {name: value})."
        )
    if not callable(loss_fn):
        raise TypeError(
            f"`loss_fn` must be a callable (model, *batch) -> loss; got {loss_fn!r}."
            " For a loss by name use `loss`, for several a list of jaxdp.Part as"
            " `optimizer`."
        )

    objective = LossFnObjective(loss_fn, keeps_outputs=keeps)
    if state is not None and not objective.takes_state:
        raise ValueError(
            "`state` was given, but `loss_fn` has no parameter named `state`: pass a"
            " `loss_fn(model, *batch, state)`, not per_example, that returns (loss,"
            " state)."
        )
    if callable(model := arguments["model"]) and "training" in find_keywords(model):
        if "training" not in objective.names:
            log_info_once(
                "the model's `__call__` names `training`, and `loss_fn`, which calls"
                " it, does not: unless it passes the value, validation is as training."
                " Name `training` in `loss_fn`, and pass it on"
            )
    return objective


def check_ends_in_logits(model: Any, loss: losses.Criterion) -> None:
    """Raises if Equinox's MLP or Sequential ends in the activation that a loss has."""
    last: Any = model
    while isinstance(last, eqx.nn.Sequential) and last.layers:
        last = last.layers[-1]
    if isinstance(last, eqx.nn.MLP):
        last = last.final_activation
    elif isinstance(last, eqx.nn.Lambda):
        last = last.fn
    is_activation = last is jax.nn.softmax or last is jax.nn.sigmoid
    if is_activation and losses.has_activation(loss):
        raise ValueError(
            f"`model` ends in jax.nn.{last.__name__}, but `loss` takes logits: it"
            f" applies softmax or sigmoid itself. Leave {last.__name__} out of the"
            " model, and apply it to what `predict` returns."
        )


def log_trained_layers(run: "Run") -> None:
    """Logs before the first step of a run which layers and parameters it trains."""
    if run.progress.global_step == 0:
        _log_inference_layers(run.config.model)
        _log_trained_share(run.config)


def _log_trained_share(config: "TrainerConfig") -> None:
    """Logs how much of a model the user's `filter_spec` trains.

    A pattern may match fewer leaves than its author expects.
    """
    if config.arguments["filter_spec"] is eqx.is_inexact_array:
        return
    trained, frozen, _ = (jax.tree.leaves(part) for part in config.model_parts)
    leaves = [*trained, *filter(eqx.is_inexact_array, frozen)]
    count, total = (sum(leaf.size for leaf in part) for part in (trained, leaves))
    log_info(
        f"`filter_spec` trains {len(trained)} of {len(leaves)} arrays: {count:,} of"
        f" {total:,} parameters"
    )


def _log_inference_layers(model: Any) -> None:
    """Logs which layers of a model to be trained are in inference mode."""
    layers: Counter[str] = Counter()

    def count(node: Any) -> bool:
        if isinstance(node, eqx.Module) and getattr(node, "inference", None) is True:
            layers[type(node).__name__] += 1
        return False

    jax.tree.leaves(model, is_leaf=count)  # calls `count` for every node
    if layers:
        listed = ", ".join(f"{n} {name}" for name, n in sorted(layers.items()))
        log_info(
            f"layers of the model are in inference mode, and stay so in training:"
            f" {listed} (no dropout, running statistics that do not move). If that is"
            " not on purpose, pass `eqx.nn.inference_mode(model, False)`, or instead"
            " of an `inference_model()` `trainer.model`"
        )
