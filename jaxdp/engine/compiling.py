"""The programs that run, what of their arguments stays on the devices between calls,
and what is said of compilations.

Steps for debugging run one at a time, on one device, each waited for.
`jax.disable_jit()` is for printing values and stopping in one's own code: a step then
runs operation by operation. `jax_debug_nans`, `jax_debug_infs` and calls of Python that
may raise, as `eqx.error_if` makes, leave it compiled. What such a call raises is raised
by the same step without jit, and so from the user's own line.
"""

import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from ..basics.console import say, some_of, warn
from ..basics.hardware import note_on_kinds
from ..data import Dispatch, leaf_name
from ..distributed import put
from ..step import (
    BY_DEFAULT,
    Collectives,
    Group,
    Products,
    RowsInteract,
    Steps,
    Table,
    TrainState,
    joined,
    note_on_products,
    shapes_of_rows,
    values_mix_rows,
)
from ..strategies import DataParallel, SingleDevice

_MOST_COUNTS: Final = 128
"""Of one program that are kept; there are more only if batches have all sizes."""


class Program:
    """A step compiled for batches of one form.

    Attributes:
        compiled: what runs: a `jax.stages.Compiled`, unless a user's strategy has made
            it.
        steps: how many optimizer steps a call takes. Rows and micro-batches are those
            of all of them, padding included.
        is_known: whether it is a `jax.stages.Compiled`, which tells its layouts.
        donated: whether it may overwrite the state that it is given.
        products: matrix operations of all devices, as traced; None if a part can't be
            counted, or another function has compiled it.
        ends: the function, as `last_function` names it, that its model should not end
            with.
        compile_seconds: what it took to compile, and to trace if that is not known.
        trace_seconds: what it took to trace.
    """

    products: Products | None = None
    ends: str | None = None
    trace_seconds: float | None = None
    compile_seconds = 0.0

    def __init__(
        self, compiled: Any, dispatch: Dispatch, groups: list[Group], donate: str
    ):
        self.compiled = compiled
        self.steps, self.rows = len(dispatch.rows), rows_in(groups)
        self.micro_batches = sum(len(group.counts) for group in groups)
        self.donated = donate != "none"
        # What a step may overwrite is not there for the next one, and a strategy of the
        # user's may return any callable, and counts of its own.
        self.is_known = isinstance(compiled, jax.stages.Compiled)
        self._keeps = self.is_known and donate != "all"
        self._layouts: list[Any] | None = None  # of the leaves of groups, in order
        self._counts: dict[Any, Array] = {}
        self._last_counts: tuple[Any, Any] = (None, None)  # of the call before

    def with_kept(self, groups: Any, tell: Callable[[str], None]) -> Any:
        """`groups` with what of them stays on the devices: row counts, and tables.

        Most batches have as many rows as one before, and what comes from the host is
        sent to each device by itself: 50 us for four bytes on eight of them.
        """
        group, *others = groups
        before, placed = self._last_counts
        if group.counts is before and group.whole is None and not others:
            return [Group(group.batch, placed, None)]
        if not self._keeps or type(group.counts) is not np.ndarray:
            return groups
        kept = self._counts
        if len(kept) > _MOST_COUNTS:
            kept.clear()
        counted = []
        for place, group in enumerate(groups):
            counts, whole = group.counts, group.whole
            key = place, counts.tobytes()
            if key not in kept:
                sharding = self._shardings(place).counts
                # None where the step has no use for them, as prediction has not.
                kept[key] = counts if sharding is None else put(counts, sharding)
            if type(whole) is Table:
                if not whole.placed:
                    tell(_kept(whole))
                whole = self._placed(whole, place)
            counted.append(Group(group.batch, kept[key], whole))
            self._last_counts = counts, kept[key]
        return counted

    def moved(self, groups: Sequence[Group], *, all_of_them: bool) -> Sequence[Group]:
        """`groups` with JAX's arrays as it takes them; NumPy's too, if `all_of_them`.

        What is there already, and so laid out, is not copied. Nothing waits for the
        device.
        """
        flat = [jax.tree.flatten(_of_batches(group)) for group in groups]
        if self._layouts is None:
            positional, _ = self.compiled.input_shardings
            self._layouts = [
                treedef.flatten_up_to(_of_batches(layout))
                for (_, treedef), layout in zip(flat, positional[-1], strict=True)
            ]
        there = []
        for group, (leaves, treedef), layouts in zip(
            groups, flat, self._layouts, strict=True
        ):
            # None is the layout of what the step has no use for; and what spans
            # processes was placed by the strategy.
            places = [
                place
                for place, (leaf, layout) in enumerate(
                    zip(leaves, layouts, strict=True)
                )
                if layout is not None
                and getattr(leaf, "is_fully_addressable", all_of_them)
            ]
            arrays = [leaves[place] for place in places]
            arrays = jax.device_put(arrays, [layouts[place] for place in places])
            for place, array in zip(places, arrays, strict=True):
                leaves[place] = array
            batch, whole = treedef.unflatten(leaves)
            whole = group.whole if whole is None else whole
            there.append(group._replace(batch=batch, whole=whole))
        return there

    def _placed(self, table: Table, place: int) -> Table:
        """A table as this program takes it, placed once for all that take it so."""
        known = table.placed.setdefault("programs", weakref.WeakKeyDictionary())
        if self not in known:
            layouts = self._shardings(place).whole
            layouts = jax.tree.leaves(layouts, is_leaf=lambda x: x is None)
            leaves, treedef = jax.tree.flatten(table.tree)
            placed = []
            for number, (leaf, sharding) in enumerate(
                zip(leaves, layouts, strict=True)
            ):
                if sharding is not None and (number, sharding) not in table.placed:
                    table.placed[number, sharding] = put(leaf, sharding)
                placed.append(table.placed.get((number, sharding), leaf))
            known[self] = Table(treedef.unflatten(placed))
        return known[self]

    def _shardings(self, place: int) -> Group:
        positional, _ = self.compiled.input_shardings
        return positional[-1][place]


def _kept(table: Table) -> str:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(table.tree))
    return (
        f"`jaxdp.Arrays`: {size / 1e6:.3g} MB are kept on each device, where"
        " the steps take their rows; on_device=False leaves them on the host"
    )


def _of_batches(group: Group) -> tuple[Any, Any]:
    """What of a group comes with every batch."""
    return group.batch, None if type(group.whole) is Table else group.whole


def rows_in(groups: list[Group]) -> int:
    """All rows of the micro-batches, padding included."""
    return sum(math.prod(jax.tree.leaves(group.batch)[0].shape[:2]) for group in groups)


_LONG: Final = 2.0
"""Seconds after which somebody at a screen wants to know what is going on."""

_MANY: Final = 9
"""Shapes from which on they are a trouble of the data's."""

_Form = tuple[bool, list[tuple[int, dict[str, tuple[int, ...]]]]]
"""What a step was compiled for: whether rows are split, and of each group how many
micro-batches it has and the shapes of their leaves. Of a single group no number, since
it is of one form however many steps and slots there are."""


class Compilations:
    """The compilations of a trainer so far.

    The first one of a step is spoken of if it takes long. Another one for other sizes
    always is, with the leaves that have changed: it is time that was not asked for. If
    `quiet`, nothing is said.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.seconds = 0.0
        self._quiet = quiet
        self._say = (lambda _: None) if quiet else say
        self._forms: dict[str, list[_Form]] = {}
        self._told: set[str] = set()

    @contextlib.contextmanager
    def timed(self, kind: str, packed: Dispatch) -> Iterator[None]:
        """Around the compilation of a `kind` of step for batches like `packed`."""
        before, form = self._forms.setdefault(kind, []), _form(packed)
        is_new = form not in before
        steps = f", {len(packed.rows)} at a time" if len(packed.rows) > 1 else ""
        what = f"the {kind} step{steps}"
        timer = threading.Timer(_LONG, self._say, [f"compiling {what} ..."])
        timer.daemon = True

        with contextlib.suppress(RuntimeError):  # there can't be more threads
            timer.start()
        started = time.perf_counter()
        try:
            yield
        finally:
            timer.cancel()
        seconds = time.perf_counter() - started
        self.seconds += seconds

        if is_new and before and not self._quiet:
            self._say_why(kind, form, before, seconds)
        elif seconds > _LONG:
            self._say(f"{what} was compiled in {seconds:.1f} s")
        if is_new:
            before.append(form)

    def tell_of_program(self, devices: list[Any], program: Any, steps: Steps) -> None:
        """Says what products are computed in, and warns of what is hardly wanted."""
        if self._quiet:
            return
        ends = program.ends and (
            f"the model ends with a {program.ends}, and the loss takes logits and"
            f" applies it itself: leave it out of the model, and apply"
            f" jax.nn.{program.ends} to what trainer.predict returns"
        )
        for note in (note_on_kinds(devices), ends):
            if note and note not in self._told:
                self._told.add(note)
                warn(note)
        if program.products and program.products[BY_DEFAULT]:
            if note := note_on_products(steps.precision, devices[0]):
                self.tell(note)

    def tell(self, note: str) -> None:
        """Says it, unless it was said before."""
        if note not in self._told and not self._quiet:
            say(note)
        self._told.add(note)

    def _say_why(
        self, kind: str, form: _Form, before: list[_Form], seconds: float
    ) -> None:
        split = "" if form[0] else ", which the devices do not divide"
        text = (
            f"the {kind} step was compiled again, in {seconds:.1f} s, because"
            f" {_why(form, before)}{split}; {self.seconds:.1f} s of compilation so far"
        )
        if len(before) + 1 < _MANY:
            self._say(text)
            return

        remedy = (
            "The step is compiled once for each shape, so use few shapes: put"
            " rows of similar length into a bucket, and pad them to its length,"
            " such as a power of two, in the dataset or `collate_fn`; see"
            " docs/shapes.md."
        )
        sizes = [
            {tuple(shape[1:] for shape in shapes.values()) for _, shapes in groups}
            for _, groups in (*before, form)
        ]
        if all(these == sizes[0] for these in sizes):
            remedy = (
                "A loss that returns one value per row is padded to one size; a scalar"
                " loss, or BatchNorm, needs batches of few sizes, such as"
                " `drop_last=True` gives."
            )

        warn(
            f"{text}. So far there were {len(before) + 1} shapes of {kind} batches."
            f" {remedy}"
        )


def _form(packed: Dispatch) -> _Form:
    groups = []
    for group in map(shapes_of_rows, packed.groups):
        batch = joined(group.batch, group.whole)
        shapes = {
            leaf_name(batch, place): leaf.shape[1:]
            for place, leaf in enumerate(jax.tree.leaves(batch))
        }
        groups.append((len(group.counts) if len(packed.groups) > 1 else 0, shapes))
    return packed.split, groups


def _why(form: _Form, before: list[_Form]) -> str:
    """What differs from what the step was compiled for last, leaf by leaf."""
    known = [shapes for _, groups in before for _, shapes in groups]
    new = [shapes for _, shapes in form[1] if shapes not in known]
    if not new and len(form[1]) > 1:
        return (
            "its micro-batches are a new combination of shapes: give a step batches of"
            " one shape"
        )
    was, now = known[-1], (new or [form[1][-1][1]])[-1]
    return some_of(
        f"{name} was {was.get(name)} and is {shape}"
        for name, shape in now.items()
        if was.get(name) != shape
    )


class Debugging(NamedTuple):
    """Why steps run for debugging, if any of these is true."""

    without_jit: bool
    finds_nonfinite: bool
    calls_python: bool = False


def debugging(calls_python: bool = False) -> Debugging:
    """JAX's present settings, and whether steps were seen to call Python."""
    config: Any = jax.config
    nonfinite = config.jax_debug_nans or config.jax_debug_infs
    return Debugging(config.jax_disable_jit, nonfinite, calls_python)


class Debugged(DataParallel):
    """What a strategy computes, on the first of its devices, step by step."""

    def __init__(self, strategy: DataParallel, mode: Debugging):
        if jax.process_count() > 1:
            raise RuntimeError(
                "jax_disable_jit, jax_debug_nans or jax_debug_infs is set, and there"
                f" are {jax.process_count()} processes, which can only compute"
                " together in compiled steps. Debug in a single process."
            )
        self.strategy, self.mode = strategy, mode

    def place(self, state: TrainState) -> TrainState:
        mesh = getattr(self.strategy, "mesh", None)
        devices = jax.devices()[:1] if mesh is None else mesh.devices.flat
        self._device = min(devices, key=lambda device: device.id)
        why, how = "jax_debug_nans or jax_debug_infs is set", "each waited for"
        if self.mode.without_jit:
            why, how = "jit is disabled", "operation by operation"
        elif self.mode.calls_python:
            why = "a step calls Python that may raise, as eqx.error_if does"
            how += "; with EQX_ON_ERROR=nan set, Equinox makes NaN instead of errors"
        say(f"{why}: single steps run, all rows on {self._device}, {how}")
        return SingleDevice(self._device).place(state)

    def compile(self, step: Callable[..., Any], arguments: Any, *_: Any, **__: Any):
        program = jax.jit(functools.partial(step, Collectives()))
        given = jax.device_put(arguments, self._device)
        if not self.mode.without_jit:
            if values_mix_rows(program.trace(*given).jaxpr):
                raise RowsInteract
        # It runs once at once, for what it has to tell. Its author should not meet it
        # twice for that.
        known = [(given, self._run(program, given))]

        def watched(*given: Any) -> Any:
            given = jax.device_put(given, self._device)
            first, results = known.pop() if known else (None, None)
            return (
                results if eqx.tree_equal(first, given) else self._run(program, given)
            )

        return watched

    def _run(self, program: Callable[..., Any], given: Any) -> Any:
        failed = None
        if not self.mode.without_jit:
            try:
                return jax.block_until_ready(program(*given))  # waits for the device
            except FloatingPointError:  # JAX has found its line
                raise
            except Exception as error:
                failed = error
        try:
            with jax.disable_jit():
                results = program(*given)
        except RuntimeError as error:
            if "Equinox" not in type(error).__name__:
                raise
            found = eqx.EquinoxRuntimeError(str(error).split("\n\n\n-----")[0])
            raise found.with_traceback(error.__traceback__) from None
        if failed is not None:
            raise failed
        return results
