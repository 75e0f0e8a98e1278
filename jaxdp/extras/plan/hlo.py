"""The collectives of a compiled program and its overwritten inputs, from its text.

    program = read(compiled.as_text())
    for collective in program.collectives:
        print(collective.kind, collective.times, collective.wire_bytes)

XLA has no interface for this. Its text is written alike for CPU, GPU and TPU, but for
how collectives that run beside computation are spelled; `read` knows those spellings:
`-start` and `-done` pairs, TPU's `all-reduce-scatter` fusions, and TPU's chains of
`async_collective_fusion`s, in which one collective is printed once per link.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from .hlo_text import HloArray, HloModule, Instruction, find_groups, parse_arrays
from .products import read_num_runs

KINDS: Final = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""The opcodes that move data between devices, without `-start`."""

_NOT_PLAIN: Final = re.compile(
    "|".join(KINDS) + r"| (while|conditional|call|fusion)\(|-start\("
)
"""Matches the text of a computation that moves data, or may call one that does."""

_PRODUCT_CALL: Final = re.compile(r'custom_call_target="[^"]*(gemm|matmul|conv)')
"""A product that a library computes (`__cublas$gemm`, `__cudnn$convForward`)."""
_PRODUCT: Final = re.compile(r"\b(dot|convolution|fusion|while|call|custom-call)\(")
"""Matches the text of a computation with a matrix product, or with a call."""


_TRIP_COUNT: Final = re.compile(r'known_trip_count\\?":\s*\{\\?"n\\?":\\?"(\d+)')
"""Matches the number of iterations of a loop, if the compiler writes it."""

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

_ARITHMETIC: Final[dict[str, Callable[..., Any]]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negate": operator.neg,
    "not": operator.not_,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
"""The operations on numbers; comparisons are named by their direction."""

_MAX_ITERATIONS: Final = 2**16
"""A loop that counts further is one of unknown length."""

Arguments = Callable[..., int | None]
"""Returns an argument of a computation, if it is a number that is known beforehand.

It is called with the number of the parameter and, for a tuple, of the element."""


class Operand(NamedTuple):
    """One of the arrays that a collective takes."""

    name: str
    """The name of the instruction that makes it."""
    array: HloArray
    paths: tuple[str, ...]
    """The place in the user's program that computes it, as JAX writes it:
    `"jit(step)/transpose(jvp(eqx.nn.Linear))/dot_general"`. Several places, if the
    compiler has joined what comes from there."""


class Collective(NamedTuple):
    """One instruction that moves data between devices. Bytes are per device and run."""

    kind: str
    """One of `KINDS`."""
    name: str
    computation: str
    """Name of the computation that it stands in."""
    operands: tuple[Operand, ...]
    operand_bytes: int
    result_bytes: int
    groups: tuple[tuple[int, ...], ...]
    """The sets of partitions that exchange data with one another.

    A permutation connects partitions in pairs; a set has all that are connected."""
    times: int | None
    """The number of executions in a run; None in a loop of unknown length."""
    optional: bool
    """Whether it is in a branch, and so may not be executed."""
    overlapped: bool
    """Whether it has a start and an end, between which computation may run."""
    hidden: bool
    """Whether matrix products or convolutions run between its start and its end.

    The compiler's order of the instructions says so."""
    path: str
    """The place in the user's program that it comes from; may be empty."""

    @property
    def dtype(self) -> str:
        """The dtypes of the operands; several are joined by `+`."""
        return "+".join(dict.fromkeys(operand.array.dtype for operand in self.operands))

    @property
    def group_size(self) -> int:
        """The number of devices in one exchange."""
        return max(map(len, self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends in one execution; see `count_ring_bytes`."""
        return count_ring_bytes(
            self.kind, self.group_size, self.operand_bytes, self.result_bytes
        )

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
        """Returns the axes of the mesh along which the groups lie.

        Args:
            mesh_shape: sizes of the axes by name, in the mesh's order.

        Returns:
            Their names, or None if the groups are not all devices along some axes.
            Of a permutation, the axes along which data moves.
        """
        sizes = tuple(mesh_shape.values())
        along: set[str] = set()
        for group in self.groups:
            if max(group, default=0) >= math.prod(sizes):
                return None
            places = np.unravel_index(np.asarray(group), sizes)  # on the host
            for name, row in zip(mesh_shape, places, strict=True):
                if len(set(row.tolist())) > 1:
                    along.add(name)
        product = math.prod(mesh_shape[name] for name in along)
        if any(len(group) > 1 and len(group) != product for group in self.groups):
            return None
        return tuple(name for name in mesh_shape if name in along)


class HloProgram(NamedTuple):
    """The result of `read`."""

    collectives: tuple[Collective, ...]
    aliased: dict[int, str]
    """Maps the number of each overwritten input to the result that overwrites it.

    A result is an index path, such as `"3"` or `"0,2"`; `""` if there is only one."""


def read(text: str) -> HloProgram:
    """Reads a compiled program, as `compiled.as_text()` prints it.

    Raises:
        ValueError: if the text does not come from a compiled program.
    """
    module = HloModule(text)
    collectives = _list_collectives(module, module.entry, _know_nothing)
    return HloProgram(tuple(collectives), module.aliased)


def count_ring_bytes(
    kind: str, group_size: int, operand_bytes: int, result_bytes: int
) -> float:
    """Returns the bytes that each device sends if `group_size` devices form a ring.

    That is the minimum for the first four kinds, and so the reference for other
    algorithms. An all-reduce is a reduce-scatter and an all-gather.

    Args:
        kind: one of `KINDS`.
        group_size: how many devices take part.
        operand_bytes: the bytes of a device's input.
        result_bytes: the bytes of a device's result.
    """
    share = (group_size - 1) / group_size
    if kind == "all-reduce":
        return 2 * share * operand_bytes
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return share * operand_bytes
    if kind == "all-gather":
        return share * result_bytes
    if kind in ("collective-permute", "collective-broadcast"):
        return float(operand_bytes) if group_size > 1 else 0.0
    raise ValueError(f"`kind` must be one of {', '.join(KINDS)}; got {kind!r}.")


def _list_collectives(
    module: HloModule, computation: str, arguments: Arguments
) -> Iterator[Collective]:
    """Yields the collectives of a computation and of those that it calls, in order."""
    for instruction in module[computation].values():
        if _get_kind(instruction) in KINDS:
            if not _is_later_link(module[computation], instruction):
                yield _make_collective(module, computation, instruction)
        elif instruction.opcode == "while":
            yield from _list_in_loop(module, computation, instruction, arguments)
        elif scatter := _make_all_reduce_scatter(module, computation, instruction):
            yield scatter
        elif not instruction.opcode.endswith(("-done", "-update")):
            inputs = _bind_inputs(module, computation, instruction, arguments)
            is_branch = instruction.opcode == "conditional"
            for called in instruction.called:
                for collective in _list_in_call(module, called, inputs):
                    optional = is_branch or collective.optional
                    yield collective._replace(optional=optional)


def _list_in_loop(
    module: HloModule, computation: str, loop: Instruction, arguments: Arguments
) -> Iterator[Collective]:
    invariants = _find_invariants(
        module, loop, _bind_inputs(module, computation, loop, arguments)
    )
    in_body = [*_list_in_call(module, loop.body, invariants)]
    in_test = [*_list_in_call(module, loop.condition, invariants)]
    if not in_body + in_test:
        return
    iterations = count_iterations(module, computation, loop, arguments)
    # The condition runs once more than the body.
    for collectives, more in (in_body, 0), (in_test, 1):
        for collective in collectives:
            times = collective.times
            if iterations is None or times is None:
                yield collective._replace(times=None)
            else:
                yield collective._replace(times=times * (iterations + more))


def _list_in_call(
    module: HloModule, called: str, arguments: Arguments
) -> Iterator[Collective]:
    # Most are fusions of plain arithmetic, which need not even be parsed.
    if _NOT_PLAIN.search(module.texts[called]):
        yield from _list_collectives(module, called, arguments)


def _know_nothing(place: int, element: int | None) -> None:
    """Returns None: the arguments of a program are not known."""


def count_iterations(
    module: HloModule,
    computation: str,
    loop: Instruction,
    arguments: Arguments = _know_nothing,
) -> int | None:
    """Returns the number of iterations of a loop, or None if it is unknown.

    It follows from the compiler's note, the scope of the loop, or its counter."""
    if match := _TRIP_COUNT.search(loop.attributes):
        return int(match[1])
    if (named := read_num_runs(loop.path)) is not None:
        return named
    return _run_loop(module, loop, _bind_inputs(module, computation, loop, arguments))[
        0
    ]


# A counter is a number that each turn makes of the last one, until the condition does
# not hold: so `scan` and `fori_loop` are written. Compilers hide it: they fuse the
# comparison, take the first and last ones out, and hand constants in through the carry
# of a loop outside, or through calls. So the numbers that a condition asks for, and
# nothing else of a loop, are computed here as the program does it.


def _run_loop(
    module: HloModule, loop: Instruction, start: Arguments
) -> tuple[int | None, Arguments]:
    """Runs a loop's counter; returns the iterations, and a function for the values of
    the carry at its end.
    """
    invariants = _find_invariants(module, loop, start)
    numbers: dict[Any, int | None] = {}

    def first(*place: Any) -> int | None:
        return numbers.setdefault(place, start(*place))

    def now(*place: Any) -> int | None:
        return numbers[place] if place in numbers else invariants(*place)

    continues = _evaluate_root(module, loop.condition, first)
    for iterations in range(_MAX_ITERATIONS):
        if not continues:
            return (None if continues is None else iterations), now
        after = {
            place: _evaluate_root(module, loop.body, now, place[1]) for place in numbers
        }
        if after == numbers:
            break  # it never ends
        numbers.update(after)
        continues = _evaluate_root(module, loop.condition, now)
    return None, invariants


def _find_invariants(
    module: HloModule, loop: Instruction, start: Arguments
) -> Arguments:
    """Returns a function for the values of the carry that no iteration changes."""

    @functools.cache
    def invariants(*place: Any) -> int | None:
        number = start(*place)
        alone = lambda *other: number if other == place else None  # noqa: E731
        return (
            number
            if _evaluate_root(module, loop.body, alone, place[1]) == number
            else None
        )

    return invariants


def _bind_inputs(
    module: HloModule, computation: str, caller: Instruction, arguments: Arguments
) -> Arguments:
    """Returns a function for the arguments of a call; those of a branch are unknown."""

    def inputs(place: int, element: int | None) -> int | None:
        if caller.opcode == "conditional":
            return None
        return _evaluate(
            module, computation, caller.operands[place], arguments, element
        )

    return inputs


def _evaluate_root(
    module: HloModule,
    computation: str,
    arguments: Arguments,
    element: int | None = None,
) -> int | None:
    """Evaluates the result of a computation."""
    name = module.root(computation).name
    return _evaluate(module, computation, name, arguments, element)


def _evaluate(
    module: HloModule,
    computation: str,
    name: str,
    arguments: Arguments,
    element: int | None = None,
) -> int | None:
    """Evaluates a number, or an element of a tuple; None if it is not known."""
    maker = module[computation][name]
    opcode, operands = maker.opcode, maker.operands
    evaluate = functools.partial(_evaluate, module, computation, arguments=arguments)
    if opcode == "parameter":
        return arguments(int(maker.literal), element)
    if opcode == "constant":
        is_integer = re.match(r"[su]\d+\[\]", maker.shape)
        return int(maker.literal) if is_integer else None
    if opcode in _AS_IT_WAS:
        return evaluate(operands[0], element=element)
    if opcode == "get-tuple-element" and element is None:
        return evaluate(operands[0], element=maker.index)
    if opcode == "tuple" and element is not None:
        return evaluate(operands[element])
    if opcode in ("fusion", "call", "while"):
        inputs = _bind_inputs(module, computation, maker, arguments)
        if opcode == "while":
            return _run_loop(module, maker, inputs)[1](0, element)
        return _evaluate_root(module, maker.called[0], inputs, element)
    if function := _ARITHMETIC.get(maker.direction or opcode):
        terms = [evaluate(operand) for operand in operands]
        return None if None in terms else function(*terms)
    return None


def _make_collective(
    module: HloModule, computation: str, start: Instruction
) -> Collective:
    kind = _get_kind(start)
    operands = _list_operands(module[computation], start)
    groups = find_groups(start.attributes, module.num_devices)
    size = max(map(len, groups), default=1)

    # The result of a start contains the operands, too, so its size says nothing.
    operand_bytes = result_bytes = sum(operand.array.bytes for operand in operands)
    if kind == "all-gather":
        result_bytes = operand_bytes * size
    elif kind == "reduce-scatter":
        result_bytes = operand_bytes // size
    elif kind == "ragged-all-to-all":
        operand_bytes, result_bytes = (operand.array.bytes for operand in operands[:2])

    is_sync = '"is_sync":true' in start.attributes
    overlapped = start.opcode.endswith("-start") and not is_sync
    for name in ("async_collective_name=", "chain_id="):
        overlapped |= name in start.attributes
    return Collective(
        kind,
        start.name,
        computation,
        operands,
        operand_bytes,
        result_bytes,
        groups,
        1,
        False,
        overlapped,
        overlapped and _is_hidden(module, computation, start),
        start.path,
    )


def _is_hidden(module: HloModule, computation: str, start: Instruction) -> bool:
    """Returns True if matrix products run between a collective's start and its end."""
    if not start.opcode.endswith("-start"):
        # A TPU fuses the links of a chain with the products that they run beside.
        return "chain_id=" in start.attributes
    has_started = False
    for instruction in module[computation].values():
        if instruction.name == start.name:
            has_started = True
        elif has_started and instruction.opcode.endswith("-done"):
            if start.name in instruction.operands:
                return False
        elif has_started and _multiplies(module, instruction):
            return True
    return False


def _multiplies(module: HloModule, each: Instruction) -> bool:
    """Returns True for a matrix product or convolution, and for a call of one."""
    if each.opcode in ("dot", "convolution"):
        return True
    if each.opcode == "custom-call":
        return _PRODUCT_CALL.search(each.attributes) is not None
    return any(
        _PRODUCT.search(module.texts[called])
        and any(_multiplies(module, inner) for inner in module[called].values())
        for called in each.called
    )


def _list_operands(
    known: Mapping[str, Instruction], each: Instruction
) -> tuple[Operand, ...]:
    return tuple(
        Operand(name, array, _find_paths(known, name))
        for name in each.operands
        if name in known
        for array in parse_arrays(known[name].shape)
    )


def _make_all_reduce_scatter(
    module: HloModule, computation: str, fusion: Instruction
) -> Collective | None:
    """Makes TPU's reduce-scatter, which is a fusion of an all-reduce and its slices."""
    if fusion.opcode != "fusion" or "%all-reduce-scatter" not in fusion.attributes:
        return None
    (called,) = fusion.called
    inside = [
        _make_collective(module, called, instruction)
        for instruction in module[called].values()
        if _get_kind(instruction) == "all-reduce"
    ]
    if len(inside) != 1:
        return None
    (reduction,) = inside
    return reduction._replace(
        kind="reduce-scatter",
        name=fusion.name,
        computation=computation,
        operands=_list_operands(module[computation], fusion) or reduction.operands,
        result_bytes=reduction.operand_bytes // reduction.group_size,
        path=fusion.path or reduction.path,
    )


def _is_later_link(known: Mapping[str, Instruction], each: Instruction) -> bool:
    """Returns True for a collective of TPU that an earlier fusion has started."""
    return "chain_id=" in each.attributes and not any(
        "AsyncCollectiveStart" in other.attributes and each.name in other.operands
        for other in known.values()
    )


def _get_kind(each: Instruction) -> str:
    """Returns one of `KINDS` if the instruction moves data between devices."""
    return each.opcode.removesuffix("-start")


def _find_paths(known: Mapping[str, Instruction], name: str) -> tuple[str, ...]:
    """Finds the places of an array: of the nearest instructions that have one."""
    paths, waiting, visited = [], [name], set()
    while waiting:
        instruction = known.get(waiting.pop(0))
        if instruction is None or instruction.name in visited:
            continue
        visited.add(instruction.name)
        if instruction.path:
            paths.append(instruction.path)
        else:
            waiting += instruction.operands
    return tuple(dict.fromkeys(paths))
