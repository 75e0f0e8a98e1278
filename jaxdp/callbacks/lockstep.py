"""Keeps the processes of a job at the same place, and says who is where if not."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final

import jax

from .. import checkpoint
from ..basics import coordination
from ..basics.arguments import check_count, check_number
from ..basics.environment import versions
from ..basics.tree import leaf_path
from ..distributed import meetings
from ..step import IN_FLIGHT
from .base import Callback, Trainer
from .fingerprints import start_fingerprints
from .monitor import is_fitting

_ARGUMENTS = (
    "strategy",
    "seed",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "steps_per_execution",
    "data",
    "reproducible",
    "compiler_options",
    "offload",
)
"""Those of the Trainer that a fit's numbers or its order of events depend on."""


_PHASES: Final = {
    "checkpoint": "a checkpoint",
    "engine.engine": "the device (a step, or its compilation)",
    "basics.coordination": "the other processes",
    "distributed.meetings": "the other processes",
    "strategies": "the device (a step, or its compilation)",
    "step.metrics": "the device (a step whose result is read)",
    "data": "the loader",
}
"""What a module or room of the package means, where the main thread is in it."""


class Lockstep(Callback):
    """Stops a fit whose processes are about to do different things.

    Processes that run different programs or have batches of different shapes compute
    wrong numbers without an error, or wait for each other forever. With several
    processes, every trainer has this as its first callback; pass one to change it.

    When a fit starts, the processes compare versions, arguments, the model and the
    compiled step. Then they meet before every step, every batch of an evaluation and
    every end of a pass. If they are about to do different things, all of them raise a
    RuntimeError that says where each process is. Nothing waits for the device.

    Args:
        every_n_steps: how often they meet, in steps and batches of evaluations. A
            difference in between is found at the next meeting.
        fingerprint_every_n_steps: how often the state is compared, bit by bit; None
            turns this off. Only arrays of which every process has a copy can differ.
        timeout: how many seconds a process waits for another.
        warn_after: after how many seconds it says which one, and what that one does.
    """

    looks_inside_blocks = False
    needs_fit = False

    def __init__(
        self,
        every_n_steps: int = 1,
        fingerprint_every_n_steps: int | None = 1000,
        *,
        timeout: float = 600.0,
        warn_after: float = 30.0,
    ):
        check_count("every_n_steps", every_n_steps)
        if fingerprint_every_n_steps is not None:
            every = fingerprint_every_n_steps
            check_count("fingerprint_every_n_steps", every, or_else=" or None")
        check_number("timeout", timeout, above=0)
        check_number("warn_after", warn_after, above=0)
        self.every_n_steps = every_n_steps
        self.fingerprint_every_n_steps = fingerprint_every_n_steps
        self.timeout = timeout
        self.warn_after = warn_after
        self._programs: tuple[str, ...] = ()
        self._fingerprints: tuple[int, Callable[[], dict[str, str]]] | None = None
        self._has_compared_model = False
        self._has_failed = False
        # A thread that watches this one, and what ends it.
        self._watcher: tuple[threading.Thread, threading.Event] | None = None

    def setup(self, trainer: Trainer) -> None:
        self._has_failed, self._fingerprints = False, None
        if not coordination.is_there():
            return
        if is_fitting(trainer):
            # Should this process not come, it tells the others why, from a thread.
            main, end = threading.get_ident(), threading.Event()
            watcher = threading.Thread(
                target=self._watch, args=(main, end), name="jaxdp Lockstep", daemon=True
            )
            watcher.start()
            self._watcher = watcher, end
        facts = dict(_facts_of(trainer))
        if not self._has_compared_model:
            facts |= _facts_of_model(trainer.run.arguments["model"])
            self._has_compared_model = True
        self._meet(trainer, f"the start of {trainer.run.doing}", facts)

    def on_fit_start(self, trainer: Trainer) -> None:
        sizes, _ = trainer.run.compiled_facts()
        rows = {f"rows of a {kind} batch": str(n) for kind, n in sizes.items()}
        self._meet(trainer, "the first step", rows)

    def on_train_batch_start(
        self, trainer: Trainer, batch: Any, batch_idx: int
    ) -> None:
        if not coordination.is_there():
            return
        # Its rows are this process's own, and need not be as many as those of others.
        rows = {"a row of the batch": _shapes(batch, 1)}
        rows["rows before it"] = str(trainer.record.examples)
        where = f"step {trainer.global_step + 1} of epoch {trainer.current_epoch}"
        self._note(trainer, where, rows)
        meetings.here().step()

    def on_boundary(self, trainer: Trainer) -> None:
        if not coordination.is_there():
            return
        step, every = trainer.global_step, self.fingerprint_every_n_steps
        if self._fingerprints is not None and step >= self._fingerprints[0]:
            self._compare_states(trainer)
        if every is not None and step % every == 0 and self._fingerprints is None:
            arrays = checkpoint.arrays_of(trainer.state)
            # By then the device is done with it, and reading waits for nothing.
            self._fingerprints = step + IN_FLIGHT, start_fingerprints(arrays)

    def next_stop(self, trainer: Trainer) -> int | None:
        every = self.fingerprint_every_n_steps
        if every is None or not coordination.is_there():
            return None
        return (trainer.global_step // every + 1) * every

    def on_train_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._meet(trainer, f"the end of epoch {trainer.current_epoch}")

    def on_validation_start(self, trainer: Trainer) -> None:
        self._meet(trainer, f"validation after step {trainer.global_step}")

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._meet(trainer, f"the end of validation after step {trainer.global_step}")

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._has_failed = True

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._watcher is not None:
            watcher, end = self._watcher
            end.set()
            watcher.join()
        self._watcher = None
        if self._has_failed:
            return
        if self._fingerprints is not None:
            self._compare_states(trainer)
        self._meet(trainer, f"the end of the fit after step {trainer.global_step}")

    def _meet(
        self, trainer: Trainer, where: str, facts: Mapping[str, str] | None = None
    ) -> None:
        if coordination.is_there():
            # All that processes wait for each other with keeps to these from now on.
            here = meetings.here()
            here.timeout, here.warn_after = self.timeout, self.warn_after
            here.every = self.every_n_steps
            self._note(trainer, where, facts or {})
            here.meet()

    def _note(self, trainer: Trainer, where: str, facts: Mapping[str, str]) -> None:
        """What to compare, and the programs if there are others than before."""
        (_, programs), noted = trainer.run.compiled_facts(), dict(facts)
        if programs != self._programs:
            self._programs = programs
            noted["the compiled programs"] = ", ".join(programs)
        meetings.here().note(where, noted)

    def _compare_states(self, trainer: Trainer) -> None:
        assert self._fingerprints is not None
        (step, read), self._fingerprints = self._fingerprints, None
        where = f"the state after step {step - IN_FLIGHT}"
        self._meet(trainer, where, read())

    def _watch(self, main: int, end: threading.Event) -> None:
        """Tells the others what the thread `main` is busy with, where it is late."""
        patience = min(meetings.TELLS_AFTER, self.warn_after / 3)
        here = meetings.here()
        while not end.wait(patience / 2):
            late = time.monotonic() - here.since > patience
            if late and not here.is_waiting:
                here.tell(waits_for(sys._current_frames().get(main)))


def _facts_of(trainer: Trainer) -> Iterator[tuple[str, str]]:
    for name, version in versions().items():
        yield f"the version of {name}", version
    for name in _ARGUMENTS:
        yield f"`{name}`", repr(trainer.run.arguments[name])
    for name in ("max_epochs", "max_steps"):
        yield f"`{name}`", repr(getattr(trainer, name))
    yield "steps done", str(trainer.global_step)
    yield "epochs done", str(trainer.current_epoch)


def _facts_of_model(model: Any) -> dict[str, str]:
    """The arrays of a model: their shapes, and every bit of them."""
    named = jax.tree_util.tree_leaves_with_path(model)
    arrays = {
        leaf_path(path): checkpoint.plain(leaf)
        for path, leaf in named
        if isinstance(leaf, jax.Array)
    }
    facts = {f"the model's {name}": _shapes(leaf) for name, leaf in arrays.items()}
    local = {n: a for n, a in arrays.items() if a.size and a.is_fully_addressable}
    bits = start_fingerprints(local)()
    return facts | {f"the bits of the model's {name}": bits[name] for name in bits}


def _shapes(tree: Any, axis: int = 0) -> str:
    return ", ".join(
        f"{leaf.dtype}{list(leaf.shape[axis:])}" for leaf in jax.tree.leaves(tree)
    )


def waits_for(frame: FrameType | None) -> str:
    """What the innermost known function on a stack is busy with."""
    package = __name__.split(".")[0]
    while frame is not None:
        owner = frame.f_locals.get("self")
        parts = frame.f_globals.get("__name__", "").split(".")
        if parts[0] == package:
            for known in (".".join(parts[1:]), *parts[1:2]):
                if known in _PHASES:
                    return _PHASES[known]
        if isinstance(owner, Callback):
            return f"the callback {type(owner).__name__}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "something outside of the trainer"
