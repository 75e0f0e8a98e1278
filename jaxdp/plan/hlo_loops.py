"""How often the loops of a compiled program turn.

A compiler may say so (`known_trip_count`). If not, a counter does: a number that each
turn adds a constant to, from a constant on, until it passes another. So `scan` and
`fori_loop` are written. What compilers make of them hides it: they fuse the comparison,
take the first and last turns out, and hand constants in through the carry of a loop
outside, or through calls.
"""

import functools
import re
from typing import Final, NamedTuple

from ..step import times_of
from .hlo_text import Instruction, Module

_TRIP_COUNT: Final = re.compile(r'known_trip_count\\?":\s*\{\\?"n\\?":\\?"(\d+)')
_AS_IT_WAS: Final = {
    "bitcast",
    "convert",
    "copy",
    "copy-done",
    "copy-start",
    "optimization-barrier",
    "reshape",
}
"""Operations whose result is their first operand, where that is one number."""
_MIRRORED: Final = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ"}
_OPPOSITE: Final = {"LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT", "EQ": "NE"}


class _Carried(NamedTuple):
    """What a loop hands from turn to turn: which element, if there are several."""

    loop: str
    body: str
    element: int | None


class _Number(NamedTuple):
    """`factor` times what a loop carries at the start of a turn, and `plus`."""

    plus: int
    factor: int = 0
    of: _Carried | None = None


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """How often a loop runs that stands there; None if the program does not tell."""
    return _Counters(module).trip_count(computation, loop)


class _Counters:
    """Numbers of a program that are known before it runs."""

    def __init__(self, module: Module):
        self.module = module
        self._asked: set[_Carried] = set()

    def trip_count(self, computation: str, loop: Instruction) -> int | None:
        """How often a loop runs, by what is said of it, or by its counter."""
        if match := _TRIP_COUNT.search(loop.attributes):
            return int(match[1])
        if (named := times_of(loop.path)) is not None:
            return named
        return self._counted(loop)

    def _counted(self, loop: Instruction) -> int | None:
        test = self._test(loop.condition)
        if test is None:
            return None
        place, compare, direction = test
        left, right = (self.number(place, name) for name in compare.operands)
        if left is None or right is None:
            return None
        if left.of is None:
            left, right = right, left
            direction = _MIRRORED.get(direction, direction)
        counter = left.of
        if counter is None or counter.loop != loop.name or right.of is not None:
            return None
        step = self._step(counter)
        first = self._start(counter)
        if step is None or first is None or first.of is not None:
            return None
        # While `distance` stands so to 0, which each turn adds to.
        distance = left.factor * first.plus + left.plus - right.plus
        return _turns(distance, left.factor * step, direction)

    def number(
        self, computation: str, name: str, element: int | None = None
    ) -> _Number | None:
        """A number, or that element of a tuple; None if it is not known."""
        maker = self.module[computation].get(name)
        if maker is None:
            return None
        opcode, operands = maker.opcode, maker.operands
        of = functools.partial(self.number, computation)
        if opcode == "constant":
            is_integer = re.match(r"[su]\d+\[\]", maker.shape)
            return _Number(int(maker.literal)) if is_integer else None
        if opcode in _AS_IT_WAS:
            return of(operands[0], element)
        if opcode == "get-tuple-element" and element is None:
            return of(operands[0], maker.index)
        if opcode == "tuple" and element is not None:
            return of(operands[element])
        if opcode in ("add", "subtract", "multiply", "negate"):
            return _arithmetic(opcode, [of(operand) for operand in operands])
        if opcode in ("fusion", "call") and len(maker.called) == 1:
            root = self.module.root(maker.called[0])
            return self.number(maker.called[0], root.name, element)
        if opcode == "while":
            return self._final(computation, maker, element)
        if opcode == "parameter":
            return self._given(computation, int(maker.literal), element)
        return None

    def _test(self, condition: str) -> tuple[str, Instruction, str] | None:
        """Where a loop's condition compares two numbers, and how."""
        place, test, is_not = condition, self.module.root(condition), False
        while test.opcode != "compare":
            is_not ^= test.opcode == "not"
            if test.opcode in ("fusion", "call") and len(test.called) == 1:
                place = test.called[0]
                test = self.module.root(place)
            elif test.opcode in _AS_IT_WAS | {"not"}:
                test = self.module[place][test.operands[0]]
            else:
                return None
        match = re.search(r"direction=(\w+)", test.attributes)
        assert match is not None, test
        direction = match[1]
        if is_not:
            back = {opposite: name for name, opposite in _OPPOSITE.items()}
            direction = _OPPOSITE.get(direction) or back[direction]
        return place, test, direction

    def _given(
        self, computation: str, place: int, element: int | None
    ) -> _Number | None:
        """What a computation is called with."""
        callers = self.module.callers(computation)
        if len(callers) != 1:
            return None
        ((outside, caller),) = callers
        if caller.opcode in ("fusion", "call"):
            return self.number(outside, caller.operands[place], element)
        if caller.opcode != "while":
            return None
        carried = _Carried(caller.name, caller.body, element)
        if carried in self._asked or self._step(carried) != 0:
            return _Number(0, 1, carried)
        return self._start(carried)

    def _step(self, carried: _Carried) -> int | None:
        """What each turn adds to what a loop carries."""
        self._asked.add(carried)
        root = self.module.root(carried.body)
        after = self.number(carried.body, root.name, carried.element)
        self._asked.discard(carried)
        if after is None or after.of != carried or after.factor != 1:
            return None
        return after.plus

    def _start(self, carried: _Carried) -> _Number | None:
        """What a loop carries into its first turn."""
        callers = [
            (computation, caller)
            for computation, caller in self.module.callers(carried.body)
            if caller.opcode == "while"
        ]
        if len(callers) != 1:
            return None
        ((computation, loop),) = callers
        return self.number(computation, loop.operands[0], carried.element)

    def _final(
        self, computation: str, loop: Instruction, element: int | None
    ) -> _Number | None:
        """What a loop carries out of its last turn."""
        carried = _Carried(loop.name, loop.body, element)
        step, start = self._step(carried), self._start(carried)
        turns = 0 if step == 0 else self.trip_count(computation, loop)
        if step is None or start is None or turns is None:
            return None
        return start._replace(plus=start.plus + step * turns)


def _arithmetic(opcode: str, terms: list[_Number | None]) -> _Number | None:
    """The result, if it is a multiple of what one loop carries, and a constant."""
    left, *rest = terms
    right = rest[0] if rest else _Number(-1)  # of a negation
    if left is None or right is None:
        return None
    if opcode in ("multiply", "negate"):
        if left.of is None:
            left, right = right, left
        if right.of is not None:
            return None
        return _Number(left.plus * right.plus, left.factor * right.plus, left.of)
    sign = -1 if opcode == "subtract" else 1
    if None not in (left.of, right.of) and left.of != right.of:
        return None
    return _Number(
        left.plus + sign * right.plus,
        left.factor + sign * right.factor,
        left.of or right.of,
    )


def _turns(distance: int, step: int, direction: str) -> int | None:
    """How often a number stands so to 0, if each time `step` is added to it."""
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
        direction = "LT" if direction == "GT" else "LE"
    if direction == "LE":  # of integers
        distance, direction = distance - 1, "LT"
    if direction == "LT":
        if distance >= 0:
            return 0
        return None if step <= 0 else -(distance // step)
    if direction == "EQ":
        return 0 if distance else 1 if step else None
    if distance == 0:
        return 0
    turns, rest = divmod(-distance, step) if step else (-1, 0)
    return turns if direction == "NE" and turns >= 0 and not rest else None
