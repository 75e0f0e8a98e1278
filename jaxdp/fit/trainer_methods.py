"""Methods of `Trainer` that read it: attributes, model, shapes, hyperparameters."""

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, Final

import jax

from ..basics.arguments import check_count, check_is_local
from ..basics.files import expand_path
from ..basics.other_libraries import INSTEAD, find_near
from ..callbacks.run_metadata import plain
from ..engine.hyperparams import convert_hyperparams
from ..step import InferenceModel

if TYPE_CHECKING:
    from jaxdp import Trainer

    from .run import Run


_SETTABLE: Final = "callbacks", "log_every_n_steps", "default_root_dir"
"""Arguments of a trainer that every fit reads again."""


_OF_FITS: Final = {
    "max_epochs": "pass it to `fit`",
    "max_steps": "pass it to `fit`",
    "num_training_batches": "pass `limit_train_batches` to `fit`",
    "global_step": "`load` a checkpoint of another step",
    "current_epoch": "`load` a checkpoint of another epoch",
    "history": "it is what fits have measured",
    "record": "it is what fits have logged",
}
"""Attributes that fits set, and what to do instead of setting them."""


def check_may_be_set(arguments: Container[str], name: str) -> None:
    """Raises for attributes that fits set, and for arguments that nothing would read
    again.
    """
    if name in _OF_FITS:
        raise AttributeError(f"`trainer.{name}` can't be set: {_OF_FITS[name]}.")
    if name in arguments and name not in _SETTABLE:
        raise AttributeError(
            f"`trainer.{name}` can't be set: it is an argument of `Trainer`, and"
            " steps are made of it. For another value make another Trainer, which"
            " may `load` what this one saves."
        )


def convert_settable(name: str, value: Any) -> Any:
    """Converts the value of a settable attribute like the argument of the same name."""
    if name == "log_every_n_steps":
        check_count(name, value)
        return int(value)
    if name == "default_root_dir":
        check_is_local(name, value)
        return expand_path(value)
    return value


def check_attribute(trainer: "Trainer", name: str) -> None:
    """Raises for a misspelt name, or a name of another library; the error gives the
    name in jaxdp.
    """
    if hasattr(type(trainer), name) or name in vars(trainer) or name.startswith("_"):
        return
    instead = INSTEAD["trainer"].get(name)
    if instead is None:
        ours = [each for each in dir(trainer) if not each.startswith("_")]
        ours += trainer.run.arguments
        near = find_near(name, ours, cutoff=0.9)
        if near is None:  # a long first word alone, such as "acumulate"
            first = {each.partition("_")[0]: each for each in ours}
            long = [word for word in first if len(word) > 9]
            near = first.get(find_near(name, long, 0.9) or "")
        instead = near and f"trainer.{near}"
    if instead is not None:
        raise AttributeError(f"`trainer` has no attribute {name!r}; use {instead}.")


def gather_model(run: "Run") -> tuple[Any, Any]:
    """Gathers copies of the model as trained so far and of its `eqx.nn.State`."""
    if not run.has_engine:
        return run.config.model, run.config.model_state
    return run.engine.device_state.model


def inference_model(run: "Run", member: int | None) -> InferenceModel:
    """Implements `Trainer.inference_model`."""
    check_is_callable(run, "inference_model")
    model_and_state = gather_model(run)
    if member is not None:
        return InferenceModel(*get_member(run, model_and_state, member))
    if run.config.ensemble is not None:
        return run.config.ensemble.make_inference_model(*model_and_state)
    return InferenceModel(*model_and_state)


def check_is_callable(run: "Run", method: str) -> None:
    """Raises if the model can't be called on one example, as `method` does."""
    model = run.config.model
    if not callable(model):
        raise TypeError(
            f"`{method}` calls the model on one example, and {type(model).__name__} has"
            " no __call__. Call a part of `trainer.model`, as in"
            " jax.vmap(trainer.model['generator'])(x); or give a class of yours one."
        )


def get_member(run: "Run", model: Any, index: int) -> Any:
    """Returns one model of an ensemble."""
    if run.config.ensemble is None:
        raise ValueError("`member` needs a Trainer with `ensemble`; use `model`.")
    return run.config.ensemble.select_member(model, index)


def get_shapes(run: "Run") -> tuple[Any, Any, Any]:
    """Returns trained leaves, other arrays and the model's state as shapes.

    If the strategy has a mesh, the shapes have shardings, even before the state is
    placed.
    """
    config = run.config
    if run.has_engine:
        state = run.engine.device_state.get_shapes()
    elif config.strategy.mesh.empty:  # an engine of the user's own
        return *config.model_parts[:2], config.model_state
    else:
        state = config.make_engine(run.hooks, abstract=True).state
    return state.params, state.buffers, state.model_state


def set_hyperparams(run: "Run", values: Mapping[str, Any]) -> None:
    """Implements `Trainer.set_hyperparams`."""
    engine = run.engine
    run.processes.check_equal("values in `set_hyperparams`", values)
    changes = convert_hyperparams(engine.state, values)
    engine.device_state = engine.device_state.replace_leaves(changes)


def format_repr(trainer: "Trainer") -> str:
    """Formats a trainer as one line, for `repr`."""
    config = trainer.run.config
    count = sum(leaf.size for leaf in jax.tree.leaves(config.model_parts[:2]))
    return (
        f"Trainer({plain(config.model)}, {count:,} parameters, {config.strategy!r},"
        f" step {trainer.global_step}, epoch {trainer.current_epoch})"
    )
