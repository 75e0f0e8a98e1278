"""Many models in one step: `jax.vmap` over the steps of one.

The leading axis of every array of the model, its state, the optimizer's and the sums of
an epoch counts the members. The number of the step and the key are one for all. Nothing
that a step calls knows of members: a loss, a `Part`, clipping, `after_update` and the
hooks of callbacks see one model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey
from jaxtyping import Array, PRNGKeyArray, PyTree

from ..basics.arguments import check_count, checks_arguments
from ..basics.tree import leaf_path
from ..step import (
    Collectives,
    Facts,
    Group,
    InferenceModel,
    Metrics,
    MultiPartStepFunctions,
    StepFunctions,
    TrainState,
    Weights,
)
from ..strategies.base import DataParallel, replace_attributes
from ..strategies.meshes import Devices, find_devices, make_mesh
from ..strategies.sharded import Sharded

MEMBERS: Final = "members"
"""Name of the axis that `Members` splits members over."""


class Ensemble:
    """The number of models that `Trainer(ensemble=...)` trains, and how they differ.

    Args:
        size: how many. The leading axis of every array of the model has this size.
        values: by name, `(size,)` values, one for each member, of a hyperparameter in
            `optax.inject_hyperparams`: `learning_rate=[1e-3, 3e-4]`.
    """

    @checks_arguments
    def __init__(self, size: int, **values: Any):
        check_count("size", size, suffix=" (members of the ensemble)")
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

    def check_values(
        self, optimizer: optax.GradientTransformation, params: PyTree
    ) -> None:
        """Raises if the optimizer does not hold what is to differ by member."""
        jax.eval_shape(functools.partial(self.init_optimizer, optimizer), params)

    def init_optimizer(
        self, optimizer: optax.GradientTransformation, params: PyTree
    ) -> PyTree:
        """Returns the states of all members' optimizers, with their own values."""
        held = set[str]()

        def set_own(path: Any, leaf: Any) -> Any:
            match path:
                case (*_, GetAttrKey("hyperparams"), DictKey(name)):
                    held.add(name)
                    if name in self.values:
                        return jnp.asarray(self.values[name], leaf.dtype)
            return leaf

        states = jax.vmap(optimizer.init)(params)
        states = jax.tree_util.tree_map_with_path(set_own, states)
        if missing := {*self.values} - held:
            raise ValueError(
                f"`ensemble`: members were to have their own {sorted(missing)}, which"
                " the optimizer's state does not hold; it holds"
                f" {', '.join(sorted(held)) or 'none'}. Make the optimizer by"
                " optax.inject_hyperparams, as in"
                " optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )
        return states

    def wrap(
        self, step_functions: StepFunctions, strategy: DataParallel
    ) -> tuple[StepFunctions, DataParallel]:
        """Returns step functions and strategy for all members, from those of one."""
        of_members = EnsembleStepFunctions(*step_functions)._replace(extra=self)
        return of_members, _MemberwiseStrategy(strategy)

    def select_member(self, model: PyTree, index: int) -> PyTree:
        """Returns one member, an ordinary model."""
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            raise TypeError(f"`index` must be the number of a member; got {index!r}.")
        if not -self.size <= index < self.size:
            raise IndexError(f"`index`={index}: there are {self.size} members.")
        arrays, static = eqx.partition(model, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda leaf: leaf[index], arrays), static)

    def drop_member_axis(self, tree: PyTree) -> PyTree:
        """Returns the shapes of one member's arrays."""
        return jax.tree.map(_drop_member_axis, tree)

    def make_inference_model(self, model: PyTree, state: Any) -> InferenceModel:
        """Returns a model that calls all members on one example, in inference mode."""
        return InferenceModels(model, state)

    def name_values(self, of_members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns means over members by name, then the values of each member."""
        names = list(of_members[0])
        values = {name: [one[name] for one in of_members] for name in names}
        means = {name: float(np.mean(values[name])) for name in names}
        own = [value for name in names for value in values[name]]
        return means | dict(zip(self._make_member_names(names), own, strict=True))

    def name_facts(self, facts: Facts) -> Facts:
        """Returns the facts of a step of all members, given those of one."""
        own = self._make_member_names(facts.names)
        return facts._replace(names=(*facts.names, *own))

    def _make_member_names(self, names: Sequence[str]) -> list[str]:
        return [f"{name}[{member}]" for name in names for member in range(self.size)]


def find_ensemble(arguments: Mapping[str, Any]) -> Ensemble:
    """Returns the `Ensemble` of `Trainer(ensemble=...)`; checks that the model fits it.

    Raises:
        TypeError, ValueError: if `ensemble` is neither an `Ensemble` nor a count.
        ValueError: if the first axis of an array of the model, or of its state, does
            not have the length of the ensemble.
    """
    ensemble = arguments["ensemble"]
    if not isinstance(ensemble, Ensemble):
        check_count("ensemble", ensemble, suffix=" (members) or a jaxdp.Ensemble")
        ensemble = Ensemble(ensemble)
    for argument in ("model", "state"):
        leaves = jax.tree_util.tree_leaves_with_path(arguments[argument])
        for path, leaf in leaves:
            is_array = eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
            if is_array and leaf.shape[:1] != (ensemble.size,):
                raise ValueError(
                    f"`ensemble`: {ensemble.size} members, but {leaf_path(path)}"
                    f" of `{argument}` has the shape {leaf.shape}, whose first"
                    " axis does not count them. Make the model by"
                    " eqx.filter_vmap(make)(keys), with keys ="
                    f" jax.random.split(key, {ensemble.size})."
                )
    return ensemble


class EnsembleStepFunctions(StepFunctions):
    """The step functions of one model, mapped over all members.

    `extra` is the `Ensemble`.
    """

    @property
    def _member_functions(self) -> StepFunctions:
        return (MultiPartStepFunctions if self.parts else StepFunctions)(*self)

    def init_optimizer(self, params: PyTree) -> PyTree:
        return self.extra.init_optimizer(self.optimizer, params)

    def init_totals(self) -> np.ndarray:
        return np.stack([super().init_totals()] * self.extra.size)

    def init_loss_scale(self) -> Any:
        repeat = lambda leaf: jnp.stack([leaf] * self.extra.size)  # noqa: E731
        return jax.tree.map(repeat, super().init_loss_scale())

    def train(
        self, collectives: Collectives, state: TrainState, groups: Sequence[Group]
    ) -> tuple[TrainState, Metrics]:
        axes = TrainState(0, 0, 0, 0, key=0, step=None, totals=0, loss_scale=0)
        train = functools.partial(self._member_functions.train, collectives)
        mapped = jax.vmap(lambda own: train(own, groups), in_axes=(axes,))
        new, metrics = mapped(state._replace(key=self._make_member_keys(state.key)))
        new = new._replace(key=state.key, step=state.step + 1)
        return new, self._name_metrics(metrics)

    def evaluate(
        self,
        collectives: Collectives,
        weights: Weights,
        totals: Array,
        batch_idx: Array,
        group: Group,
    ) -> tuple[Array, Metrics, PyTree]:
        def evaluate(own: Weights, totals: Array) -> Any:
            return self._member_functions.evaluate(
                collectives, own, totals, batch_idx, group
            )

        mapped = jax.vmap(evaluate, in_axes=(_OF_WEIGHTS, 0), out_axes=(0, 0, 1))
        totals, metrics, outputs = mapped(self._set_keys(weights), totals)
        return totals, self._name_metrics(metrics), outputs

    def predict(
        self, collectives: Collectives, weights: Weights, group: Group
    ) -> PyTree:
        predict = functools.partial(self._member_functions.predict, collectives)
        mapped = jax.vmap(lambda own: predict(own, group), (_OF_WEIGHTS,), 1)
        return mapped(self._set_keys(weights))

    def compute_means(self, totals: np.ndarray, facts: Facts) -> dict[str, float]:
        names = facts.names[: len(facts.names) // (1 + self.extra.size)]
        own = facts._replace(names=names)
        means = [self._member_functions.compute_means(each, own) for each in totals]
        return self.extra.name_values(means)

    def measure_outputs(
        self, function: Callable[[PyTree], Mapping[str, float]], outputs: PyTree
    ) -> Mapping[str, float]:
        def measure_member(member: int) -> Mapping[str, float]:
            own = jax.tree.map(lambda leaf: leaf[:, member], outputs)
            return self._member_functions.measure_outputs(function, own)

        return self.extra.name_values([*map(measure_member, range(self.extra.size))])

    def _set_keys(self, weights: Weights) -> Weights:
        return weights._replace(key=self._make_member_keys(weights.key))

    def _make_member_keys(self, key_data: Array) -> Array:
        """Derives the data of a key for each member from the key of the run."""
        key, members = jax.random.wrap_key_data(key_data), self.extra.size
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(members))
        return jax.random.key_data(keys)

    def _name_metrics(self, metrics: Metrics) -> Metrics:
        """Returns means over members, then each one's values, with their names."""
        means = metrics.means
        means = jnp.concatenate([means.mean(axis=0), means.T.ravel()])
        inside: dict[str, Array] = {}
        for name, values in metrics.inside.items():
            if values.dtype == bool:
                inside[name] = values.any(axis=0)
                continue
            inside[name] = values.mean(axis=0)
            if values.ndim == 1:
                inside |= {f"{name}[{i}]": one for i, one in enumerate(values)}
        return Metrics(self.extra.name_facts(metrics.facts), means, inside)


_OF_WEIGHTS: Final = Weights(0, 0, 0, key=0, step=None)
"""The axis of members of each field; None for the fields without one."""


class InferenceModels(InferenceModel):
    """All members in inference mode; predictions are shaped `(members, ...)`."""

    def __call__(self, x: PyTree, *, key: PRNGKeyArray | None = None) -> PyTree:
        arrays, static = eqx.partition(self, eqx.is_array)

        def call(arrays: PyTree) -> PyTree:
            return InferenceModel.__call__(eqx.combine(arrays, static), x, key=key)

        return jax.vmap(call)(arrays)


class _MemberwiseStrategy(DataParallel):
    """Splits the arrays of each member as a strategy splits those of one model.

    Args:
        inner: the strategy; `Members` splits the axis of members, others don't.
    """

    def __init__(self, inner: DataParallel):
        self.inner, self.mesh, self.row_axes = inner, inner.mesh, inner.row_axes
        self._members = MEMBERS if isinstance(inner, Members) else None

    def _lay_out(self, state: TrainState) -> TrainState:
        one = jax.tree.map(_drop_member_axis, state)
        specs = self.inner._lay_out(one._replace(key=state.key, step=state.step))
        split = jax.tree.map(lambda spec: PartitionSpec(self._members, *spec), specs)
        return split._replace(key=specs.key, step=specs.step)

    def place(self, state: TrainState) -> TrainState:
        if type(self.inner).place is not DataParallel.place:  # an engine's own
            return self.inner.place(state)
        return super().place(state)

    def _group_shardings(self, group: Group, split: bool) -> Group:
        return self.inner._group_shardings(group, split)

    def compile(self, *arguments: Any, **options: Any) -> Any:
        return self.inner.compile(*arguments, **options)

    def __repr__(self) -> str:
        return repr(self.inner)


def _drop_member_axis(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


class Members(Sharded):
    """Splits the models of `Trainer(ensemble=...)` over the devices.

    Each device trains its own members on whole batches. Devices exchange the values of
    each member's loss and metrics, a number each, and nothing else. The number of
    members must be a multiple of the number of devices.

    Args:
        devices: how many, or which; all by default.
    """

    row_axes = ()

    @checks_arguments
    def __init__(self, devices: Devices = None):
        in_order = find_devices(devices)
        self.mesh = make_mesh(in_order, {MEMBERS: len(in_order)})

    def prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        ensemble = arguments["ensemble"]
        if ensemble is None:
            raise ValueError(
                "`strategy`: Members splits the models of an ensemble, but"
                " `ensemble` was not given; pass it, or use Sharded()."
            )
        if ensemble.size % self.mesh.size:
            raise ValueError(
                f"`ensemble`: {ensemble.size} members can't be split over the"
                f" {self.mesh.size} devices of Members(); pass a number of devices that"
                " divides them."
            )
        return arguments

    def on(self, devices: Sequence[Any]) -> "Members":
        return replace_attributes(
            self, mesh=make_mesh(devices, {MEMBERS: len(devices)})
        )
