"""How often the loops of a compiled program run."""

import re

from ..step import times_of
from .hlo_text import Instruction, Module

_KNOWN = re.compile(r'known_trip_count\\?":\s*\{\\?"n\\?":\\?"(\d+)')


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """How often a loop runs, or None if the program does not tell.

    Args:
        module: the program.
        computation: the one that the loop stands in.
        loop: a `while`.
    """
    if match := _KNOWN.search(loop.attributes):
        return int(match[1])
    if (named := times_of(loop.path)) is not None:
        return named
    return _counted(module, computation, loop)


def _counted(module: Module, computation: str, loop: Instruction) -> int | None:
    """What a counter says that goes up by one, from a constant to another.

    So `scan` and `fori_loop` are written. TPU's compiler says no more of them.
    """
    test = module.root(loop.condition)
    start, end = module[computation].get(loop.operands[0]), module.root(loop.body)
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter = _made(module, loop.condition, test.operands[0])
    if counter is None or counter.opcode != "get-tuple-element":
        return None
    if start is None or start.opcode != "tuple" or end.opcode != "tuple":
        return None

    first = _number(module, computation, start.operands[counter.index])
    limit = _number(module, loop.condition, test.operands[1])
    added = _made(module, loop.body, end.operands[counter.index])
    if first is None or limit is None or added is None or added.opcode != "add":
        return None
    if 1 not in [_number(module, loop.body, name) for name in added.operands]:
        return None
    return max(0, limit - first)


def _made(module: Module, computation: str, name: str) -> Instruction | None:
    """The instruction that makes a value, behind copies of it."""
    each = module[computation].get(name)
    while each is not None and each.opcode in ("copy", "bitcast", "convert"):
        each = module[computation].get(each.operands[0])
    return each


def _number(module: Module, computation: str, name: str) -> int | None:
    """The value of an integer constant."""
    found = _made(module, computation, name)
    if found is None or found.opcode != "constant":
        return None
    return int(found.literal) if re.match(r"[su]\d+\[\]", found.shape) else None
