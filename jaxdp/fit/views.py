"""What a trainer hands out of its state: the model, its shapes, hyperparameters."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..engine import hyperparam_values, leaves_to_set
from ..step import InferenceModel

if TYPE_CHECKING:
    import jax

    from .run import Run


def whole_model(run: "Run", wanted: str) -> tuple[Any, Any]:
    """The model as trained so far, and its `eqx.nn.State`: live copies."""
    if not run.has_engine:
        return run.recipe.model, run.recipe.model_state
    engine = run.settled_engine(wanted)
    with run.access.apart():
        return engine.held.gather()


def inference_model(run: "Run", member: int | None) -> InferenceModel:
    """`Trainer.inference_model`."""
    check_callable(run, "inference_model")
    model_and_state = whole_model(run, "`inference_model`")
    if member is not None:
        return InferenceModel(*member_of(run, model_and_state, member))
    is_ensemble = run.recipe.ensemble is not None
    return InferenceModel(*model_and_state, is_ensemble=is_ensemble)


def check_callable(run: "Run", method: str) -> None:
    """Raises if the model can't be called on one example, as `method` does."""
    model = run.recipe.model
    if not callable(model):
        name, part = type(model).__name__, ".generator"
        if isinstance(model, dict | list | tuple):
            part = "['generator']" if isinstance(model, dict) else "[0]"
        raise TypeError(
            f"`{method}` calls the model on one example, and {name} has no"
            " __call__. Call a part of `trainer.model`, as in"
            f" jax.vmap(trainer.model{part})(x); or give a class of yours one."
        )


def member_of(run: "Run", model: Any, index: int) -> Any:
    """One model of those that `model` holds."""
    if run.recipe.ensemble is None:
        raise ValueError("`member` needs a Trainer with `ensemble`; use `model`.")
    return run.recipe.ensemble.member_of(model, index)


def shapes_of(run: "Run") -> tuple[Any, Any, Any]:
    """Trained leaves, other arrays and the model's state, as shapes.

    With their shardings, before they are placed too, where the strategy tells.
    """
    recipe = run.recipe
    try:
        if run.has_engine:
            state = run.engine.held.shapes()
        else:
            strategy = recipe.strategy
            state = recipe.new_engine(strategy, run.hooks, abstract=True).state
    except NotImplementedError:  # a strategy of the user's, which does not
        return *recipe.parts[:2], recipe.model_state
    return state.params, state.buffers, state.model_state


def values(run: "Run") -> Mapping[str, Any]:
    """`Trainer.hyperparams`."""
    return hyperparam_values(run.settled_engine("`trainer.hyperparams`").state)


def set_values(run: "Run", values: Mapping[str, Any]) -> None:
    """`Trainer.set_hyperparams`."""
    engine = run.settled_engine("`set_hyperparams`")
    run.processes.same("values in `set_hyperparams`", values)
    engine.write(leaves_to_set(engine.state, values))


def compiled_train_step(run: "Run") -> "jax.stages.Compiled | None":
    """`Trainer.compiled_train_step`."""
    program = run.engine.train_program() if run.has_engine else None
    return None if program is None else program.compiled
