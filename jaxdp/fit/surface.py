"""What a trainer says of arguments that belong elsewhere, and hands out: the model, its
shapes, hyperparameters."""

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, Final

import jax

from ..basics.other_libraries import INSTEAD, find_near
from ..callbacks.run_metadata import plain
from ..engine.state import hyperparam_values, leaves_to_set
from ..step import InferenceModel

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Run


_LIVE: Final = "callbacks", "log_every_n_steps", "default_root_dir"
"""Arguments of a trainer that are looked at anew by every fit."""


def check_may_be_set(arguments: Container[str], name: str) -> None:
    """Raises for an argument of the trainer that nothing would look at again."""
    if name in arguments and name not in _LIVE:
        raise AttributeError(
            f"`trainer.{name}` can't be set: it is an argument of `Trainer`, and"
            " steps are made of it. For another value make another Trainer, which"
            " may `load` what this one saves."
        )


def check_attribute(trainer: "Trainer", name: str) -> None:
    """Raises for an attribute that a trainer has under another name, or misspelt."""
    if hasattr(type(trainer), name) or name in vars(trainer) or name.startswith("_"):
        return
    instead = INSTEAD["trainer"].get(name)
    if instead is None:
        ours = [each for each in dir(type(trainer)) if not each.startswith("_")]
        near = find_near(name, [*ours, *vars(trainer)], cutoff=0.9)
        instead = near and f"trainer.{near}"
    if instead is not None:
        raise AttributeError(f"`trainer` has no attribute {name!r}; use {instead}.")


def whole_model(run: "Run") -> tuple[Any, Any]:
    """The model as trained so far, and its `eqx.nn.State`: live copies."""
    if not run.has_engine:
        return run.recipe.model, run.recipe.model_state
    return run.checked_engine().held.gather()


def inference_model(run: "Run", member: int | None) -> InferenceModel:
    """`Trainer.inference_model`."""
    check_callable(run, "inference_model")
    model_and_state = whole_model(run)
    if member is not None:
        return InferenceModel(*member_of(run, model_and_state, member))
    if run.recipe.ensemble is not None:
        return run.recipe.ensemble.make_inference_model(*model_and_state)
    return InferenceModel(*model_and_state)


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
    return run.recipe.ensemble.select_member(model, index)


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
    except NotImplementedError:  # a user's strategy without a `mesh`
        return *recipe.parts[:2], recipe.model_state
    return state.params, state.buffers, state.model_state


def values(run: "Run") -> Mapping[str, Any]:
    """`Trainer.hyperparams`."""
    return hyperparam_values(run.checked_engine().state)


def set_values(run: "Run", values: Mapping[str, Any]) -> None:
    """`Trainer.set_hyperparams`."""
    engine = run.checked_engine()
    run.processes.check_equal("values in `set_hyperparams`", values)
    engine.write(leaves_to_set(engine.state, values))


def compiled_train_step(run: "Run") -> jax.stages.Compiled | None:
    """`Trainer.compiled_train_step`."""
    program = run.engine.train_program() if run.has_engine else None
    return None if program is None else program.compiled


def in_a_line(trainer: "Trainer") -> str:
    """What `repr` says of a trainer."""
    recipe = trainer.run.recipe
    count = sum(leaf.size for leaf in jax.tree.leaves(recipe.parts[:2]))
    return (
        f"Trainer({plain(recipe.model)}, {count:,} parameters, {recipe.strategy!r},"
        f" step {trainer.global_step}, epoch {trainer.current_epoch})"
    )
