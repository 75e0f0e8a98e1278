"""The base class of callbacks, and the calls of their hooks."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from jaxtyping import Array, PyTree

from ..basics.arguments import format_call
from ..basics.tracebacks import note_callback
from ..engine import StepOptions

if TYPE_CHECKING:
    from jaxdp import Trainer
else:
    Trainer = Any  # which imports this

_FINAL_HOOKS: Final = ("on_exception", "on_fit_end", "teardown")
"""Hooks that run for all callbacks, even if one raises."""


class Callback:
    """An object with hooks that run at fixed moments of a fit. Override what you need.

    A hook that you do not override costs nothing. Hooks of several callbacks run in the
    order of `Trainer(callbacks=[...])`, but see `fit_end_order`. In a hook,
    `trainer.log(name, value)` logs a value of your own, and
    `trainer.should_stop = True` ends the fit at the next boundary.

    `metrics` per batch is a mapping from name to value, `"loss"` first. It is lazy:
    nothing leaves the device until you read a value, so `float(metrics["loss"])`
    waits for that step. Read the step before instead, and the device never idles.
    `metrics` per epoch and per validation are Python floats.

    With `accumulate_grad_batches=K` batch hooks run once per optimizer step and
    `batch` is the list of its K micro-batches.

    With `steps_per_execution=N` batch hooks run for each of the N steps that one call
    takes: `metrics` and `trainer.global_step` are of that step, but the state, the
    model and hyperparameters are those after the last of them.
    """

    skip_in_fast_dev_run: bool = False
    """Whether `fit(fast_dev_run=...)` leaves this callback out (loggers, savers)."""

    fit_end_order: int = 0
    """The order of `on_fit_end`: smaller numbers run first, equal ones in the order of
    the list."""

    only_in_training: bool = False
    """Whether `validate`, `test` and `predict` leave this callback out, unless they are
    called while a training runs."""

    def setup(self, trainer: Trainer) -> None:
        """Runs first, before a fit, `validate`, `test` and `predict`. Set options here
        that placement and compilation need."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Runs after the step is compiled, so `trainer.record.names` is known."""

    def on_train_epoch_start(self, trainer: Trainer) -> None:
        """Runs before the first batch of an epoch is read."""

    def on_train_batch_start(
        self, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        """Runs before a step. `batch` comes from the loader, as arrays on the host. It
        is read-only, because the step may already have its rows; change rows in the
        dataset or in `collate_fn`."""

    def on_train_batch_end(
        self, trainer: Trainer, metrics: Mapping[str, Any], batch_idx: int
    ) -> None:
        """Runs after a step was sent to the device; `trainer.global_step` counts it."""

    def on_boundary(self, trainer: Trainer) -> None:
        """Runs after all callbacks have seen a step, and the validation that
        `val_check_interval` asks for after it, or the end of an epoch. Read or save
        `trainer.state` here: it belongs to `trainer.global_step`. With several steps
        per execution it runs once for all of them."""

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Runs after an epoch and its validation; `metrics` includes `val_...`."""

    def on_validation_start(self, trainer: Trainer) -> None:
        """Runs before a pass over the validation loader."""

    def on_validation_batch_end(self, trainer: Trainer, batch_idx: int) -> None:
        """Runs after a validation batch was sent to the device."""

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Runs after a pass over the validation loader, with its `val_...` means."""

    def on_test_start(self, trainer: Trainer) -> None:
        """Runs before the passes of `test`."""

    def on_test_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Runs after the passes of `test`, with their `test_...` means."""

    def on_predict_start(self, trainer: Trainer) -> None:
        """Runs before the pass of `predict`."""

    def on_predict_batch_end(
        self, trainer: Trainer, predictions: PyTree, batch_idx: int
    ) -> None:
        """Runs when the predictions for a batch are there, a few batches late: NumPy
        arrays of its real rows, as `predict` returns them. With several processes they
        are those that this process gets: of all rows, or with `gather=False` its own.
        `predict` joins the same arrays at its end, so copy one before you change it."""

    def on_predict_end(self, trainer: Trainer) -> None:
        """Runs after the pass of `predict`."""

    def on_save_checkpoint(self, trainer: Trainer, path: str) -> None:
        """Runs after a checkpoint was written to the folder `path`."""

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """Runs when an exception or Ctrl-C ends a fit, `validate`, `test` or `predict`,
        before it is raised there."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Runs when a fit ends, also by an exception: close files here."""

    def teardown(self, trainer: Trainer) -> None:
        """Runs last of all, also after an exception, once for each `setup`."""

    def identity(self, trainer: Trainer) -> str:
        """Returns a text that distinguishes this callback from others of its class, so
        that it gets its own state from a checkpoint: its folder (which may be moved),
        or its `monitor`. A second line may name the unit, such as `"val_loss, min"`."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a checkpoint saves of this callback: JSON values only.
        A second trainer that uses the callback restores its state from before the first
        one; other attributes stay."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""

    def __repr__(self) -> str:
        return format_call(self)

    # Methods that are part of the compiled step.

    def step_options(self, options: StepOptions) -> StepOptions:
        """Returns the options of the step that it needs: `options._replace(...)`.
        Called at the start of a fit, and by `plan`."""
        return options

    def inside_step(
        self, grads: PyTree, updates: PyTree, state: Any
    ) -> dict[str, Array]:
        """Traced into the compiled step; returns values for the step's `metrics`.
        Scalars reach every logger; other arrays only `on_train_batch_end`.

        Args:
            grads: the gradients of the trained leaves, each in the shape of its leaf;
                of complex ones as JAX has them, the conjugates of what the optimizer
                is given.
            updates: what the optimizer adds to these leaves.
            state: the new `TrainState`.
        """
        return {}

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Returns the optax transformation to use instead of `optimizer`. Called once,
        by `Trainer(...)`."""
        return optimizer

    def after_step(self, state: Any) -> Any:
        """Returns the new `TrainState`, with the part updated that `wrap_optimizer` has
        added. Traced into the compiled step, after the optimizer and
        `Trainer(after_update=...)`."""
        return state

    def evaluated_state(self, state: Any) -> Any:
        """Returns the state whose weights validation, `test`, `predict` and
        `trainer.model` use, made of arrays in `state`; training continues with `state`
        itself."""
        return state


HOOKS: Final = tuple(
    name
    for name in vars(Callback)
    if name in ("setup", "teardown") or name.startswith("on_")
)


class Hooks:
    """The overridden hooks of a list of callbacks, resolved once.

    `hooks.on_fit_start(trainer)` calls the hook of every callback that has one.

    Attributes:
        overridden: the names of the hooks that any callback has.
    """

    def __init__(self, callbacks: Iterable[Callback]):
        self.callbacks = tuple(callbacks)
        self._in_step = tuple(filter(_is_in_step, self.callbacks))
        self.overridden: set[str] = set()
        last = sorted(self.callbacks, key=lambda callback: callback.fit_end_order)
        for name in HOOKS:
            ordered = last if name == "on_fit_end" else self.callbacks
            bound = tuple(getattr(c, name) for c in ordered if overrides(c, name))
            self.overridden |= {name} if bound else set()
            setattr(self, name, _chain(name, bound))

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(f"there is no hook named {name!r}; hooks are {HOOKS}")

    def with_callbacks(self, callbacks: Iterable[Callback]) -> "Hooks":
        """Returns hooks for `callbacks` in place of the present ones.

        `callbacks` are those that `trainer.callbacks` has now. The result is this
        object if nothing has changed.

        Raises:
            ValueError: if one was added that has a part in the compiled step.
        """
        callbacks, known = tuple(callbacks), set(map(id, self._in_step))
        if list(map(id, callbacks)) == list(map(id, self.callbacks)):
            return self
        for callback in callbacks:
            if id(callback) not in known and _is_in_step(callback):
                name = type(callback).__name__
                raise ValueError(
                    f"`trainer.callbacks`: {name} was added after the trainer was"
                    " made, but it must be part of the compiled step; pass it to"
                    " `Trainer(callbacks=[...])`."
                )
        with_callbacks = Hooks(callbacks)
        with_callbacks._in_step = self._in_step
        return with_callbacks

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Returns the optimizer, wrapped by all callbacks that wrap it."""
        for callback in self.callbacks:
            optimizer = callback.wrap_optimizer(optimizer)
        return optimizer

    def step_options(self) -> StepOptions:
        """Returns the options to compile the train step with."""
        options = StepOptions()
        for callback in self.callbacks:
            options = callback.step_options(options)
        return options

    def find_evaluated_state(self) -> Callable[[Any], Any] | None:
        """Returns the function that chooses the weights to evaluate, if any."""
        callbacks = [c for c in self.callbacks if overrides(c, "evaluated_state")]
        if len(callbacks) > 1:
            names = " and ".join(type(callback).__name__ for callback in callbacks)
            raise ValueError(
                f"`callbacks`: {names} each choose the weights for evaluation;"
                " pass only one of them."
            )
        return callbacks[0].evaluated_state if callbacks else None

    def list_methods(self, name: str) -> tuple[Callable[..., Any], ...]:
        """Returns the method `name` of each callback that overrides it."""
        return tuple(getattr(c, name) for c in self.callbacks if overrides(c, name))


def _is_in_step(callback: Callback) -> bool:
    """Returns True if a callback is part of the compiled step."""
    names = "inside_step", "wrap_optimizer", "after_step", "evaluated_state"
    return any(overrides(callback, name) for name in names)


def overrides(callback: Callback, name: str) -> bool:
    """Returns True if a callback overrides the method `name`."""
    return getattr(type(callback), name) is not getattr(Callback, name) or (
        name in vars(callback)
    )


def _chain(name: str, bound: tuple[Callable[..., None], ...]) -> Callable[..., None]:
    """Returns a function that calls all hooks; its errors name the callback."""

    def run(*arguments: Any) -> None:
        for number, hook in enumerate(bound, 1):
            try:
                hook(*arguments)
            except BaseException as exception:
                note_callback(exception, hook, name)
                if name in _FINAL_HOOKS:
                    _chain(name, bound[number:])(*arguments)
                if isinstance(exception, StopIteration):  # which generators lose
                    wrong = RuntimeError(f"{name} raised StopIteration: catch it there")
                    note_callback(wrong, hook, name)
                    raise wrong.with_traceback(exception.__traceback__) from exception
                raise

    return run
