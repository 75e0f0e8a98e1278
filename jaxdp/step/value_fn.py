"""What of the loss an optimizer asks for: its value, or functions that evaluate it.

`optax.lbfgs`, line searches and `optax.contrib.sam` in its opaque mode look at the loss
in other places than where the parameters are.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from .state import TrainState

_NAMES: Final = {"value", "grad", "value_fn", "grad_fn"}


_ON_COMPLEX: Final = (
    "trained leaves are complex: the optimizer is given the conjugates of JAX's"
    " gradients of them, which point uphill; if it conjugates them itself, pass"
    " `conjugate_complex=False`"
)


def notes_on_complex(params: PyTree) -> tuple[str, ...]:
    """What the user is told of complex parameters, if there are some."""
    return (_ON_COMPLEX,) if any(map(jnp.iscomplexobj, jax.tree.leaves(params))) else ()


def conjugated(grads: PyTree) -> PyTree:
    """Gradients as directions in which the loss grows: of complex leaves, JAX's
    gradient is the conjugate of that."""
    return jax.tree.map(
        lambda leaf: jnp.conj(leaf) if jnp.iscomplexobj(leaf) else leaf, grads
    )


def updated(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: TrainState,
    loss: Array,
    evaluate: Callable[[PyTree], tuple[Array, PyTree]],
    conjugate: bool,
) -> tuple[PyTree, PyTree]:
    """The optimizer's updates and new state; see `offered` for its arguments."""
    turned = conjugated if conjugate else lambda grads: grads
    grads = turned(grads)
    extra = offered(optimizer.update, loss, grads, evaluate, turned)
    try:
        return optimizer.update(grads, state.opt_state, state.params, **extra)
    except (AttributeError, TypeError) as error:
        error.add_note(
            "in `optimizer.update`, which is given gradients, the model's trained"
            " leaves and what it names of `value`, `grad`, `value_fn` and `grad_fn`"
            " (the mean loss of the batch, and functions of it). Optimizers that"
            " need other things, as optax.lookahead does parameters of its own"
            " kind, can't be used."
        )
        raise


def offered(
    update: Callable[..., Any],
    value: Array,
    grad: PyTree,
    evaluate: Callable[[PyTree], tuple[Array, PyTree]],
    turned: Callable[[PyTree], PyTree] = conjugated,
) -> dict[str, Any]:
    """The keyword arguments that an optimizer's `update` asks for.

    Args:
        update: of the optimizer.
        value: the mean loss.
        grad: its gradient, as the optimizer is given it.
        evaluate: `(params) -> (value, grad)` elsewhere. What is not called is not
            traced, and what is not used of it is not computed. Its gradients are JAX's.
        turned: makes of these what the optimizer is given.
    """

    @jax.custom_jvp
    def value_fn(params: PyTree) -> Array:
        return evaluate(params)[0]

    @value_fn.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:  # pyright: ignore
        # Of the gradient that steps take, not of what came of differentiating through
        # micro-batches and collectives: it takes no more memory, and rounds alike.
        value, grads = evaluate(*primals)
        products = jax.tree.map(lambda g, t: (g * t).sum().real, grads, *tangents)
        total = sum(jax.tree.leaves(products), start=jnp.zeros_like(value))
        return value, total.astype(value.dtype)

    def grad_fn(params: PyTree, *_: Any) -> PyTree:
        return turned(evaluate(params)[1])

    stages = _stages_of(update)
    if any(
        getattr(stage, "__qualname__", "").startswith(_BACKTRACKS) for stage in stages
    ):
        grad = turned(grad)  # back
    known = {"value": value, "grad": grad, "value_fn": value_fn, "grad_fn": grad_fn}
    return {name: known[name] for name in _asked_for(update, stages)}


def check_arguments(optimizer: optax.GradientTransformation) -> None:
    """Raises for what an optimizer was made of and fails with, as far as it shows."""
    for stage in _stages_of(optimizer.update):
        made_of = dict(closed_over(stage))
        labels = made_of.get("param_labels")
        if isinstance(labels, eqx.Module) and not isinstance(labels, eqx.Partial):
            is_text = [isinstance(leaf, str) for leaf in jax.tree.leaves(labels)]
            if callable(labels) and any(is_text):
                raise TypeError(
                    f"`optimizer`: the labels of optax.partition are a"
                    f" {type(labels).__name__}, which optax calls, as it can be called,"
                    " to get labels. Pass a function of the params, `lambda params:"
                    " labels`, with labels made from `params` or from"
                    " eqx.filter(model, eqx.is_inexact_array)."
                )
        if isinstance(injected := made_of.get("other_hps"), Mapping):
            made_of |= injected
        for name in ("learning_rate", "step_size", "weight_decay"):
            if isinstance(made_of.get(name), str):
                name = name.replace("step_size", "learning_rate")
                raise TypeError(
                    f"`optimizer`: its `{name}` is a str; pass a number, or a schedule"
                    " such as optax.cosine_decay_schedule(1e-3, steps), which is a"
                    " function of the number of steps."
                )


_BACKTRACKS: Final = "scale_by_backtracking_linesearch."
"""It takes the slope from JAX's gradient, unlike optax's zoom search, which takes it
from the conjugate."""


def _asked_for(update: Callable[..., Any], stages: list[Any]) -> set[str]:
    """Which of `_NAMES` an optimizer, or a stage of it, takes.

    Not simply all: what nobody asks for is an error to some.
    """
    parameters = inspect.signature(update).parameters.values()
    asked = _NAMES & {p.name for p in parameters}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return asked
    for stage in stages:
        asked |= _NAMES & {*inspect.signature(stage).parameters}
    # There may be stages that no closure shows, as in optax.inject_hyperparams.
    return asked or _NAMES - {"grad_fn"}


def _stages_of(update: Callable[..., Any]) -> list[Any]:
    """The functions that `update` calls, and itself, as far as closures show them."""
    waiting, seen = [update], []
    while waiting:
        stage = inspect.unwrap(waiting.pop())
        if any(stage is earlier for earlier in seen):
            continue
        seen.append(stage)
        for value in closed_over(stage).values():
            waiting += updates_in(value)
    return seen


def closed_over(function: Any) -> Mapping[str, Any]:
    """What a function that was made by another, or a method, knows besides."""
    if inspect.ismethod(function):
        return getattr(function.__self__, "__dict__", {})
    if inspect.isfunction(function):
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            return inspect.getclosurevars(function).nonlocals
    return {}


def updates_in(value: Any) -> list[Any]:
    """The `update` functions of what may be stages of an optimizer."""
    if hasattr(value, "init") and hasattr(value, "update"):
        return [value.update]
    if getattr(value, "__name__", "").endswith(("update", "update_fn")):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    is_several = isinstance(value, list | tuple)
    return (
        [update for item in value for update in updates_in(item)] if is_several else []
    )
