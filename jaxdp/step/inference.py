"""A trained model, ready to be called on one example."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray, PyTree

from .model_call import as_given_state, takes_key


class InferenceModel(eqx.Module):
    """A model in inference mode, with its `eqx.nn.State` inside: takes one example.

        infer = trainer.inference_model()
        infer(x), jax.vmap(infer)(xs), eqx.filter_jit(infer)(x)

    Of an ensemble, all members are called: predictions are shaped `(members, ...)`.

    Args:
        model: takes one example, and the state if there is one.
        state: the state that belongs to `model`, or None.
        is_ensemble: whether the first axis of all arrays counts members.
    """

    model: PyTree
    state: eqx.nn.State | None
    is_ensemble: bool = eqx.field(static=True)

    def __init__(
        self, model: PyTree, state: eqx.nn.State | None, is_ensemble: bool = False
    ):
        self.model, self.state = eqx.nn.inference_mode(model), state
        self.is_ensemble = is_ensemble

    def __call__(self, x: PyTree, *, key: PRNGKeyArray | None = None) -> PyTree:
        """The prediction for one example; `key` is for models that draw here, too."""
        arrays, static = eqx.partition((self.model, self.state), eqx.is_array)
        keywords: dict[str, Any] = {"key": key} if takes_key(self.model) else {}

        def call(arrays: PyTree) -> PyTree:
            model, state = eqx.combine(arrays, static)
            if state is None:
                return model(x, **keywords)
            return model(x, as_given_state(state), **keywords)[0]

        return jax.vmap(call)(arrays) if self.is_ensemble else call(arrays)
