"""Many models in one step: the leading axis of every array of a model is the member."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from ..basics.arguments import check_count, checks_arguments
from ..basics.tree import leaf_path
from .model_call import call_model
from .objective import Objective, Values
from .returned import Returned
from .state import MaskAndKeys
from .value_fn import update_with


class Ensemble:
    """How many models `Trainer(ensemble=...)` trains, and how they differ.

    Args:
        size: how many. The leading axis of every array of the model has this size.
        values: by name, `(size,)` values, one for each member, of a hyperparameter in
            `optax.inject_hyperparams`: `learning_rate=[1e-3, 3e-4]`.
    """

    @checks_arguments
    def __init__(self, size: int, **values: Any):
        check_count("size", size, or_else=" (members of the ensemble)")
        self.size = int(size)
        # on the host
        self.values = {name: np.asarray(value) for name, value in values.items()}
        for name, array in self.values.items():
            is_number = jnp.issubdtype(array.dtype, jnp.number)
            if not is_number or array.shape != (self.size,):
                raise (ValueError if is_number else TypeError)(
                    f"`{name}` must be numbers, one for each of the {self.size}"
                    f" members; got {values[name]!r}, of shape {array.shape}."
                )

    def __repr__(self) -> str:
        values = "".join(f", {k}={v.tolist()}" for k, v in self.values.items())
        return f"Ensemble({self.size}{values})"

    def names(self, name: str) -> list[str]:
        """The names of the values that differ by member."""
        return [f"{name}[{member}]" for member in range(self.size)]

    def named(self, stacks: Mapping[str, Any]) -> dict[str, Any]:
        """The means over members, then the values of each member, by name."""
        means = {name: stack.mean() for name, stack in stacks.items()}
        return means | {
            long_name: stack[member]
            for name, stack in stacks.items()
            for member, long_name in enumerate(self.names(name))
        }

    def check(self, argument: str, tree: PyTree) -> None:
        """Raises if the first axis of an array is not the axis of members."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
                if leaf.shape[:1] != (self.size,):
                    raise ValueError(
                        f"`ensemble`: {self.size} members, but {leaf_path(path)}"
                        f" of `{argument}` has the shape {leaf.shape}, whose first"
                        " axis does not count them. Make the model by"
                        " eqx.filter_vmap(make)(keys), with keys ="
                        f" jax.random.split(key, {self.size})."
                    )

    def member_of(self, model: PyTree, index: int) -> PyTree:
        """One member, an ordinary model."""
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            raise TypeError(
                f"`index` must be the number of a member; got {index!r}. That of the"
                " best is history.best('val_loss')."
            )
        if not -self.size <= index < self.size:
            raise IndexError(f"`index`={index}: there are {self.size} members.")
        arrays, static = eqx.partition(model, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda leaf: leaf[index], arrays), static)

    def wrap_optimizer(
        self, optimizer: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """An optimizer for each member, from the gradients of their mean loss."""
        inner = optax.with_extra_args_support(optimizer)

        def init(params: PyTree) -> PyTree:
            return self._with_values(init_each(inner, params, own_losses=True))

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
        ) -> tuple[PyTree, PyTree]:
            scaled = jax.tree.map(lambda leaf: leaf * self.size, updates)
            value = jnp.broadcast_to(extra["value"], (self.size,))
            update = update_each(inner, state, value, own_losses=True)
            return update(scaled, state, params)

        return optax.GradientTransformationExtraArgs(init, update)

    def _with_values(self, state: PyTree) -> PyTree:
        """The state of an optimizer with the members' own hyperparameters."""
        missing, held = set(self.values), set[str]()

        def is_injected(node: Any) -> bool:
            return isinstance(node, tuple) and hasattr(node, "hyperparams")

        def own(node: Any) -> Any:
            if not is_injected(node):
                return node
            hyperparams = dict(node.hyperparams)
            held.update(hyperparams)
            for name in hyperparams.keys() & self.values.keys():
                dtype = jnp.asarray(hyperparams[name]).dtype
                hyperparams[name] = jnp.asarray(self.values[name], dtype)
                missing.discard(name)
            return node._replace(hyperparams=hyperparams)

        state = jax.tree.map(own, state, is_leaf=is_injected)
        if missing:
            raise ValueError(
                f"`ensemble`: members were to have their own {sorted(missing)}, which"
                " the optimizer's state does not hold; it holds"
                f" {', '.join(sorted(held)) or 'none'}. Make the optimizer by"
                " optax.inject_hyperparams, as in"
                " optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )
        return state


class OfMembers:
    """An objective of all members: means over them, and the values of each.

    `"loss"` is the mean over members, `"loss[3]"` that of one, and so for metrics.
    """

    def __init__(self, objective: Objective, ensemble: Ensemble):
        self.objective, self.ensemble = objective, ensemble

    def __call__(
        self,
        model: PyTree,
        model_state: PyTree,
        batch: PyTree,
        rows: MaskAndKeys,
    ) -> Values:
        traced: list[Values] = []

        def of_one(model: PyTree, state: PyTree, own: MaskAndKeys) -> Any:
            result = self.objective(model, state, batch, own)
            traced[:] = [result]
            values = {name: one.values for name, one in result.by_name.items()}
            weights = {name: one.weights for name, one in result.by_name.items()}
            hidden = result.by_name["loss"].hidden
            return values, weights, result.model_state, result.outputs, hidden

        try:
            values, weights, new_state, outputs, hidden = over_members(
                of_one,
                self.ensemble.size,
                model,
                model_state,
                rows,
                (-1, None, 0, 1, 0),
            )
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise ValueError(
                "`ensemble`: the loss or a metric returned (values, weights)"
                " whose weights differ by member, so there is no mean over"
                " members. Compute the weights from the batch alone, not from"
                " predictions or keys. If the second is no weight but is to be a"
                " metric, put it into a dict: (loss, {'name': value})."
            ) from None
        (one,) = traced
        # Dicts lose their order on their way through JAX. Weights are checked above.
        by_name = {name: Returned(values[name], weights[name]) for name in one.by_name}
        if hidden is not None:
            by_name["loss"] = by_name["loss"]._replace(hidden=hidden.any(axis=0))
        return one._replace(by_name=by_name, model_state=new_state, outputs=outputs)


def call_members(
    size: int,
    model: PyTree,
    model_state: PyTree,
    x: PyTree,
    rows: MaskAndKeys,
) -> PyTree:
    """Predictions of all members, `(rows, members, ...)`."""

    def of_one(model: PyTree, state: PyTree, own: MaskAndKeys) -> Any:
        return call_model(model, state, x, own)[0]

    outputs = over_members(of_one, size, model, model_state, rows)
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), outputs)


def over_members(
    function: Callable[[PyTree, PyTree, MaskAndKeys], Any],
    size: int,
    model: PyTree,
    model_state: PyTree,
    rows: MaskAndKeys,
    out_axes: Any = 0,
) -> Any:
    """`function` of each member and its state; keys differ by member."""
    arrays, static = eqx.partition((model, model_state), eqx.is_array)

    def of_one(arrays: PyTree, member: Array) -> Any:
        model, state = eqx.combine(arrays, static)
        fold = jax.random.fold_in
        rows_of_one = rows._replace(
            keys=jax.vmap(fold, (0, None))(rows.keys, member),
            key=fold(rows.key, member),
        )
        return function(model, state, rows_of_one)

    return jax.vmap(of_one, out_axes=out_axes)(arrays, jnp.arange(size))


def init_each(inner: Any, params: PyTree, *, own_losses: bool = False) -> PyTree:
    """The state of the optimizer `inner` for each model of `params`, `(models, ...)`.

    Scalars that are like no parameter are taken to be the same for all models, which
    learning rates must be to be set; unless an update makes them of gradients.
    """
    states = jax.vmap(inner.init)(params)
    shared = _shared(inner, states)
    models = max((len(leaf) for leaf in jax.tree.leaves(params)), default=0)
    loss = jnp.zeros(models if own_losses else ())
    update = update_each(inner, shared, loss, own_losses=own_losses)
    try:
        jax.eval_shape(update, params, shared, params)
    except _NeedsLosses:
        raise
    except ValueError:  # of vmap, which finds that a scalar differs
        return states
    return shared


def _shared(inner: Any, each: PyTree) -> PyTree:
    """The states of all models, with one of each scalar that is like no parameter."""

    def one(leaf: Any) -> Any:
        return leaf[0] if leaf.ndim == 1 else leaf

    try:
        return optax.tree_utils.tree_map_params(
            inner, lambda leaf: leaf, each, transform_non_params=one
        )
    except Exception:  # of an optimizer that optax can't ask for its parameters
        return jax.tree.map(one, each)


def update_each(
    inner: Any, state: PyTree, value: Array, *, own_losses: bool = False
) -> Callable[..., tuple[PyTree, PyTree]]:
    """`inner.update` for gradients, states like `state`, and weights of each model.

    `value` is the loss; with `own_losses` there is one for each.
    """
    axes = jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, state)

    def update(
        grads: PyTree, state: PyTree, params: PyTree, value: Array
    ) -> tuple[PyTree, PyTree]:
        known = {"value": value, "grad": grads}
        known |= dict.fromkeys(["value_fn", "grad_fn"], _refuse)
        return update_with(inner.update, grads, state, params, known)

    of_each = 0 if own_losses else None
    mapped = jax.vmap(update, in_axes=(0, axes, 0, of_each), out_axes=(0, axes))
    return lambda grads, state, params: mapped(grads, state, params, value)


class _NeedsLosses(ValueError):
    pass


def _refuse(*_: Any) -> Any:
    """Stands in the place of the loss, which is one of all models."""
    raise _NeedsLosses(
        "`optimizer` evaluates the loss, as optax.lbfgs does, but with `ensemble`"
        " or the strategy LocalSGD there are several models with a loss each. Use"
        " an optimizer that only needs gradients, such as optax.adamw."
    )
