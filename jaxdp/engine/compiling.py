"""From a traced step to the program that runs, and what is said of it.

A program is compiled once in a process: a second trainer often wants the same ones, a
trainer for each seed or each fold. JAX's cache has them on disk, if it is on.
"""

import collections
import contextlib
import hashlib
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from ..basics.console import say, some_of, warn
from ..basics.hardware import note_on_kinds
from ..data import Dispatch, leaf_name
from ..step import (
    BY_DEFAULT,
    CallsPython,
    Steps,
    calls_python,
    joined,
    note_on_products,
    shapes_of_rows,
    with_rows,
)
from .xla_options import options_for

_MOST: Final = 8
_LONGEST: Final = 2**24
"""How many programs stay that nobody uses any more, and how long their text may be,
which contains their constants."""

_used: Final[weakref.WeakValueDictionary[Hashable, Any]] = weakref.WeakValueDictionary()
_recent: Final[collections.deque[Any]] = collections.deque(maxlen=_MOST)


def compiled(
    traced: Any,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    instead: dict[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, str]:
    """The program of a traced step, and with several processes a digest of its text.

    Args:
        traced: what `trace` of a jitted step has returned.
        arguments: what it was traced for.
        options: the user's, of XLA.
        instead: options in the place of those that are fast on the hardware.

    Raises:
        CallsPython: if the program calls Python that may raise. An error that
            leaves it would strand the other devices (with several faked ones, jax
            0.10.2 aborts the process), so the engine takes one device.
    """
    is_to_run = any(isinstance(x, jax.Array) for x in jax.tree.leaves(arguments))
    if is_to_run and jax.process_count() == 1 and calls_python(traced.jaxpr):
        raise CallsPython("a step calls Python that may raise")
    options = options_for(traced.jaxpr, arguments, instead, options)
    lowered = traced.lower()
    if jax.process_count() > 1:
        text = lowered.as_text().encode()
        digest = hashlib.blake2b(text, digest_size=6).hexdigest()
        return lowered.compile(dict(options)), digest

    key = _key(traced, lowered, options, _devices_of(arguments))
    program = None if key is None else _used.get(key[1:])
    if program is None:
        program = lowered.compile(dict(options))
    if key is not None:
        length, *rest = key
        _used[tuple(rest)] = program
        if length <= _LONGEST and program not in _recent:
            _recent.append(program)
    return program, ""


def _key(
    traced: Any, lowered: Any, options: Mapping[str, Any], devices: Sequence[Any]
) -> tuple[Any, ...] | None:
    """The length of a program's text, and what makes it the program it is.

    None where that is not known: a program with effects calls Python, such as
    `jax.debug.print`, and its text does not tell which functions.
    """
    if traced.jaxpr.effects:
        return None
    text = lowered.as_text().encode()
    try:
        # Which arguments it has, of those it is given; the others are not in the text,
        # but checked by each call.
        kept = tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))
        kept = kept, *map(str, jax.tree.leaves(lowered.in_avals))
        trees = lowered.in_tree, lowered.out_tree
        hash(trees)
    except (AttributeError, KeyError, TypeError):
        return None
    chosen = tuple(sorted((name, str(value)) for name, value in options.items()))
    return len(text), hashlib.sha256(text).digest(), kept, trees, chosen, tuple(devices)


def _devices_of(arguments: tuple[Any, ...]) -> list[Any]:
    """What a program runs on that takes these, in its order."""
    leaves = jax.tree.leaves(arguments)
    sharding = next(leaf.sharding for leaf in leaves if hasattr(leaf, "sharding"))
    if isinstance(sharding, NamedSharding):
        return np.asarray(sharding.mesh.devices).ravel().tolist()
    return sorted(sharding.device_set, key=lambda device: device.id)


_LONG: Final = 2.0
"""Seconds after which somebody at a screen wants to know what is going on."""

_MANY: Final = 9
"""Shapes from which on they are a trouble of the data's."""

_Shapes = tuple[tuple[int, ...], ...]
"""Of the leaves of a batch, rows included where they have some."""


class _Form(NamedTuple):
    """What a step was compiled for; the batches themselves are not kept."""

    split: bool
    groups: tuple[tuple[int, _Shapes], ...]
    """Micro-batches and their shapes. Of a single group no number, since it is of one
    form however many steps and slots there are."""
    names: tuple[str, ...]
    """Of the leaves."""
    has_rows: tuple[bool, ...]


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
        is_new = all(one != form for one in before)
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
        split = "" if form.split else ", which the devices do not divide"
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
        ends = [
            {_ends(shapes, one) for _, shapes in one.groups} for one in (*before, form)
        ]
        if all(these == ends[0] for these in ends):
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
    given = map(shapes_of_rows, packed.groups)
    batches = [joined(group.batch, group.whole) for group in given]
    groups = [
        (len(group.counts), tuple(leaf.shape[1:] for leaf in jax.tree.leaves(batch)))
        for group, batch in zip(packed.groups, batches, strict=True)
    ]
    if len(groups) == 1:
        groups = [(0, groups[0][1])]
    count = len(groups[0][1])
    names = tuple(leaf_name(batches[0], place) for place in range(count))
    has_rows = with_rows(jax.tree.structure(batches[0]))
    return _Form(packed.split, tuple(groups), names, has_rows)


def _why(form: _Form, before: list[_Form]) -> str:
    """What differs from what the step was compiled for last, leaf by leaf."""
    known = {shapes for earlier in before for _, shapes in earlier.groups}
    new = [shapes for _, shapes in form.groups if shapes not in known]
    if not new and len(form.groups) > 1:
        numbers = " and ".join(f"{n} of {shapes[0]}" for n, shapes in form.groups)
        return (
            f"its micro-batches are {numbers} ({form.names[0]}), a new"
            " combination: give a step batches of one shape"
        )

    was = before[-1].groups[-1][1]
    now = (new or [shapes for _, shapes in form.groups])[-1]
    pairs = list(zip(form.names, was, now, strict=True))
    ends = zip(_ends(was, form), _ends(now, form), strict=True)
    differing = [pair for pair, (a, b) in zip(pairs, ends, strict=True) if a != b]
    differing = differing or [pairs[form.has_rows.index(True)]]
    return some_of(f"{name} was {old} and is {new}" for name, old, new in differing)


def _ends(shapes: _Shapes, form: _Form) -> _Shapes:
    """Without the axis of rows, where there is one."""
    pairs = zip(shapes, form.has_rows, strict=True)
    return tuple(shape[rows:] for shape, rows in pairs)
