"""What a compiled program communicates and overwrites, read from its text.

    program = read(compiled.as_text())
    for collective in program.collectives:
        print(collective.kind, collective.times, collective.wire_bytes)

XLA has no interface for this. Its text is written alike for CPU, GPU and TPU, but for
how collectives that run beside computation are spelled; `read` knows those spellings:
`-start` and `-done` pairs, TPU's `all-reduce-scatter` fusions, and TPU's chains of
`async_collective_fusion`s, in which one collective is printed once per link.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from ..step import times_of

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

_NOT_PLAIN: Final = (
    *KINDS,
    " while(",
    " conditional(",
    " call(",
    " fusion(",
    "-start(",
)
"""What a computation has in its text that moves data, or calls one that may."""

_BITS: Final = {"pred": 8, "token": 0, "opaque": 0}
_NAMES: Final = {
    "pred": "bool",
    "s": "int",
    "u": "uint",
    "f": "float",
    "bf": "bfloat",
    "c": "complex",
}


class Array(NamedTuple):
    """An array in the program, as one device holds it."""

    dtype: str
    """As NumPy says it: `"float32"`."""
    shape: tuple[int, ...]
    bytes: int


class Operand(NamedTuple):
    """One of the arrays that a collective takes."""

    name: str
    """Of the instruction that makes it."""
    array: Array
    path: str
    """Where in the user's program that instruction comes from, as JAX writes it:
    `"jit(step)/transpose(jvp(eqx.nn.Linear))/dot_general"`. May be empty."""


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
    """Which partitions exchange data with one another. For a permutation, the sets of
    partitions that are connected by it."""
    times: int | None
    """How often a run of the program executes it; None inside a loop whose length the
    program does not tell."""
    optional: bool
    """Whether it stands in a branch, and so may not be executed at all."""
    overlapped: bool
    """Whether it is split into a start and an end, so that computation may run in
    between."""
    path: str
    """Where in the user's program it comes from; may be empty."""

    @property
    def dtype(self) -> str:
        """Of the operands; several are joined by `+`."""
        return "+".join(dict.fromkeys(each.array.dtype for each in self.operands))

    @property
    def group_size(self) -> int:
        """How many devices take part in one exchange."""
        return max(map(len, self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution; see `ring_bytes`."""
        return ring_bytes(
            self.kind, self.group_size, self.operand_bytes, self.result_bytes
        )

    def axes(self, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
        """The axes of the mesh along which the groups lie.

        Args:
            mesh_shape: sizes of the axes by name, in the mesh's order.

        Returns:
            Their names, or None if the groups are not all devices along some axes.
            Of a permutation, the axes along which data moves.
        """
        return axes_of(self.groups, mesh_shape)


class Program(NamedTuple):
    """What `read` found."""

    num_partitions: int
    collectives: tuple[Collective, ...]
    aliased: dict[int, str]
    """Inputs that a result overwrites: the number of the program's parameter, and
    which result, as an index path such as `"3"` or `"0,2"`; `""` is the only one."""
    parameters: tuple[Array, ...]
    """What the program takes, in order."""
    unknown_loops: tuple[str, ...]
    """Names of the loops with collectives inside whose length is not known."""
    inputs_of: Callable[[str], tuple[int, ...]]
    """The nearest parameters that the instruction of a name is computed from."""
    outputs_of: Callable[[str, int | None], tuple[int, ...]]
    """The results that are computed from the instruction of a name, the nearest first:
    from all of it, or from the element of a tuple with that index."""


def ring_bytes(
    kind: str, group_size: int, operand_bytes: int, result_bytes: int
) -> float:
    """Bytes that each device sends when `group_size` devices form a ring.

    That is the least possible for the first four kinds, and so what other algorithms
    are measured against. An all-reduce is a reduce-scatter and an all-gather.

    Args:
        kind: one of `KINDS`.
        group_size: how many devices take part.
        operand_bytes: what a device puts in.
        result_bytes: what a device gets out.
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


def axes_of(
    groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The axes of a mesh along which groups of partitions lie, or None."""
    sizes = tuple(mesh_shape.values())
    along: set[str] = set()
    for group in groups:
        if max(group, default=0) >= math.prod(sizes):
            return None
        places = np.array(np.unravel_index(np.asarray(group), sizes))
        along |= {
            name
            for name, row in zip(mesh_shape, places, strict=True)
            if len(set(row.tolist())) > 1
        }
    product = math.prod(mesh_shape[name] for name in along)
    if any(len(group) != product for group in groups if len(group) > 1):
        return None
    return tuple(name for name in mesh_shape if name in along)


def read(text: str) -> Program:
    """Reads a compiled program, as `compiled.as_text()` prints it.

    Raises:
        ValueError: if the text is not that of a compiled module.
    """
    return _Reader(text).program()


def parse_groups(text: str, num_partitions: int) -> tuple[tuple[int, ...], ...]:
    """Groups from what stands behind `replica_groups=`, in any of the spellings.

        {{0,1},{2,3}}    {}    [2,4]<=[8]    [4,2]<=[2,4]T(1,0)
        mesh['a'=4,'b'=2] {'a'}    mesh['a'=8], device_ids=([2,4]T(1,0)) {'a':(2)4}

    Args:
        text: starts with the groups; more may follow.
        num_partitions: what `{}` stands for.
    """
    text = text.lstrip()
    if text.startswith("{"):
        inner = _matched(text)[1:-1]
        groups = tuple(_ints(found) for found in re.findall(r"\{([^{}]*)\}", inner))
        return groups or (tuple(range(num_partitions)),)
    if text.startswith("["):
        return tuple(map(tuple, _iota(text).tolist()))
    if match := re.match(r"(?:maximal_)?mesh\[([^\]]*)\]", text):
        return _mesh_groups(match[1], text[match.end() :])
    raise ValueError(f"replica_groups of an unknown spelling: {text[:80]!r}")


def _mesh_groups(axes: str, rest: str) -> tuple[tuple[int, ...], ...]:
    sizes = {
        name.strip().strip("'\""): int(size)
        for name, size in (axis.rsplit("=", 1) for axis in axes.split(","))
    }
    rest = rest.lstrip(", ")
    ids = np.arange(math.prod(sizes.values()))
    if rest.startswith("device_ids="):
        listed = _matched(rest[len("device_ids=") :])
        rest = rest[len("device_ids=") + len(listed) :].lstrip(", ")
        inner = listed[1:-1]
        iota = inner.startswith("[")
        ids = _iota(inner).ravel() if iota else np.array(_ints(inner))
    # A group may lie along a part of an axis, `'a':(before)size`, so axes are taken
    # apart where such parts begin and end.
    along = [
        (name, int(before or 1), int(part or sizes[name]))
        for name, before, part in re.findall(
            r"'([^']+)'(?::\((\d+)\)(\d+))?", _matched(rest)
        )
    ]
    parts: list[int] = []
    in_group: list[tuple[int, int]] = []
    for name, size in sizes.items():
        mine = [
            (i, low, low * part) for i, (n, low, part) in enumerate(along) if n == name
        ]
        edges = sorted({1, size}.union(*((low, high) for _, low, high in mine)))
        for low, high in itertools.pairwise(edges):
            in_group += [
                (i, len(parts)) for i, start, end in mine if start <= low < end
            ]
            parts.append(high // low)
    dims = [dim for _, dim in sorted(in_group)]
    others = [dim for dim in range(len(parts)) if dim not in dims]
    width = math.prod(parts[dim] for dim in dims)
    table = ids.reshape(parts).transpose(others + dims).reshape(-1, width)
    return tuple(map(tuple, table.tolist()))


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, or `[2,4]T(1,0)`."""
    match = re.match(r"\[([\d,]*)\](?:<=\[([\d,]*)\])?(?:T\(([\d,]*)\))?", text)
    assert match is not None
    shape, source, order = map(_ints, (match[1], match[2] or "", match[3] or ""))
    if not source:
        source = tuple(shape[dim] for dim in np.argsort(order)) if order else shape
    array = np.arange(math.prod(source)).reshape(source)
    return array.transpose(order or None).reshape(shape)


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    """What stands between the parentheses."""
    attributes: str
    is_root: bool


class _Reader:
    """The computations of a program, and walks over them."""

    def __init__(self, text: str):
        self.text = text
        self.header = text.split("\n", 1)[0]
        if not self.header.startswith("HloModule"):
            raise ValueError(
                "this is not the text of a compiled program: it does not start with"
                f" HloModule but with {self.header[:60]!r}. Pass compiled.as_text()."
            )
        partitions = re.search(r"\bnum_partitions=(\d+)", self.header)
        replicas = re.search(r"\breplica_count=(\d+)", self.header)
        self.num_partitions = int(partitions[1]) if partitions else 1
        self.num_replicas = int(replicas[1]) if replicas else 1
        self.computations, self.entry = _computations(text)
        if not self.entry:
            raise ValueError("this program has no ENTRY computation.")
        self.by_name = _ByName(self.computations)
        self.unknown_loops: list[str] = []
        self._taken: dict[str, dict[int, list[str]]] = {}

    def program(self) -> Program:
        parameters = [
            each for each in self.computations[self.entry] if each.opcode == "parameter"
        ]
        parameters.sort(key=lambda each: int(each.literal))
        arrays = tuple(_arrays(each.shape)[0] for each in parameters)
        return Program(
            max(self.num_partitions, self.num_replicas),
            tuple(self._collectives(self.entry, 1, False)),
            _aliased(self.header),
            arrays,
            tuple(self.unknown_loops),
            self._inputs_of,
            self._outputs_of,
        )

    def _collectives(
        self, computation: str, times: int | None, optional: bool
    ) -> Iterator[Collective]:
        """Those of a computation and of all that it calls, in order."""
        for each in self.computations[computation]:
            kind = each.opcode.removesuffix("-start")
            if kind in KINDS:
                if self._is_later_link(computation, each):
                    continue
                yield self._collective(computation, each, times, optional)
            elif each.opcode == "while":
                yield from self._in_loop(computation, each, times, optional)
            elif each.opcode == "conditional":
                for called in _called(each):
                    yield from self._inside(called, times, True)
            elif each.opcode == "fusion" and (
                scatter := self._all_reduce_scatter(computation, each, times, optional)
            ):
                yield scatter
            elif not each.opcode.endswith(("-done", "-update")):
                for called in _called(each):
                    yield from self._inside(called, times, optional)

    def _inside(
        self, called: str, times: int | None, optional: bool
    ) -> Iterator[Collective]:
        # Most are fusions of plain arithmetic, which need not even be parsed.
        if any(map(self.computations.lines[called].__contains__, _NOT_PLAIN)):
            yield from self._collectives(called, times, optional)

    def _in_loop(
        self, computation: str, loop: _Instruction, times: int | None, optional: bool
    ) -> Iterator[Collective]:
        body, condition = _name(loop, "body"), _name(loop, "condition")
        trips = self._trip_count(computation, loop)
        inside = None if trips is None or times is None else times * trips
        found = list(self._collectives(body, inside, optional))
        more = None if inside is None or times is None else inside + times
        found += self._collectives(condition, more, optional)
        if trips is None and found:
            self.unknown_loops.append(loop.name)
        yield from found

    def _collective(
        self,
        computation: str,
        each: _Instruction,
        times: int | None,
        optional: bool,
    ) -> Collective:
        kind = each.opcode.removesuffix("-start")
        operands = self._operands(computation, each)
        groups = self._groups(each)
        size = max(map(len, groups), default=1)
        operand_bytes = sum(operand.array.bytes for operand in operands)
        # The result of a start has the operands in it too, and so is no measure.
        if kind == "all-gather":
            result_bytes = operand_bytes * size
        elif kind == "reduce-scatter":
            result_bytes = operand_bytes // size
        elif kind == "ragged-all-to-all":
            operand_bytes = operands[0].array.bytes
            result_bytes = operands[1].array.bytes
        else:
            result_bytes = operand_bytes
        overlapped = (
            each.opcode.endswith("-start")
            and '"is_sync":true' not in each.attributes
            or "async_collective_name=" in each.attributes
            or "chain_id=" in each.attributes
        )
        return Collective(
            kind,
            each.name,
            computation,
            operands,
            operand_bytes,
            result_bytes,
            groups,
            times,
            optional,
            overlapped,
            _path(each),
        )

    def _operands(self, computation: str, each: _Instruction) -> tuple[Operand, ...]:
        known = self.by_name[computation]
        found = []
        for name in each.operands:
            made = known.get(name)
            if made is None:
                continue
            path = _path(self._origin(computation, name))
            found += [Operand(name, array, path) for array in _arrays(made.shape)]
        return tuple(found)

    def _all_reduce_scatter(
        self, computation: str, fusion: _Instruction, times: int | None, optional: bool
    ) -> Collective | None:
        """TPU's reduce-scatter: a fusion of an all-reduce and the slices of it."""
        called = _called(fusion)
        if len(called) != 1 or not called[0].startswith("all-reduce-scatter"):
            return None
        inside = [
            self._collective(called[0], each, times, optional)
            for each in self.computations[called[0]]
            if each.opcode.removesuffix("-start") == "all-reduce"
        ]
        if len(inside) != 1:
            return None
        (found,) = inside
        return found._replace(
            kind="reduce-scatter",
            name=fusion.name,
            computation=computation,
            operands=self._operands(computation, fusion) or found.operands,
            result_bytes=found.operand_bytes // found.group_size,
            path=_path(fusion) or found.path,
        )

    def _is_later_link(self, computation: str, each: _Instruction) -> bool:
        """Whether this is a collective of TPU that an earlier fusion has started."""
        if "chain_id=" not in each.attributes:
            return False
        started = any(
            "AsyncCollectiveStart" in other.attributes and each.name in other.operands
            for other in self.computations[computation]
        )
        return not started

    def _groups(self, each: _Instruction) -> tuple[tuple[int, ...], ...]:
        if "source_target_pairs=" in each.attributes:
            start = each.attributes.index("source_target_pairs=")
            pairs = parse_groups(each.attributes[start:].split("=", 1)[1], 1)
            return _connected(pairs)
        if "replica_groups=" not in each.attributes:
            return (tuple(range(self.num_partitions)),)
        start = each.attributes.index("replica_groups=") + len("replica_groups=")
        everyone = max(self.num_partitions, self.num_replicas)
        return parse_groups(each.attributes[start:], everyone)

    def _trip_count(self, computation: str, loop: _Instruction) -> int | None:
        """How often a loop runs: as the compiler says, or as its counter shows."""
        if match := re.search(
            r'known_trip_count\\?":\s*\{\\?"n\\?":\\?"(\d+)', loop.attributes
        ):
            return int(match[1])
        if (named := times_of(_path(loop))) is not None:
            return named
        body, condition = _name(loop, "body"), _name(loop, "condition")
        test = self._through(condition, self._root(condition).name)
        if test is None or test[1].opcode != "compare":
            return None
        where, test_instruction = test
        if "direction=LT" not in test_instruction.attributes or where != condition:
            return None
        counter, bound = test_instruction.operands
        place = self._carried(condition, counter)
        start = self._initial(computation, loop, place)
        stop = self._scalar(condition, bound)
        if stop is None:
            carried = self._carried(condition, bound)
            if carried is not None and self._unchanged(body, carried):
                stop = self._initial(computation, loop, carried)
        step = self._step(computation, loop, body, place)
        if start is None or stop is None or not step or step < 0:
            return None
        return max(0, math.ceil((stop - start) / step))

    def _root(self, computation: str) -> _Instruction:
        return next(each for each in self.computations[computation] if each.is_root)

    def _through(self, computation: str, name: str) -> tuple[str, _Instruction] | None:
        """The instruction behind copies."""
        each = self.by_name[computation].get(name)
        while each is not None and each.opcode in ("copy", "bitcast", "convert"):
            each = self.by_name[computation].get(each.operands[0])
        return None if each is None else (computation, each)

    def _scalar(self, computation: str, name: str) -> int | None:
        """The value of an integer constant."""
        found = self._through(computation, name)
        if found is None or found[1].opcode != "constant":
            return None
        is_integer = re.match(r"[su]\d+\[\]", found[1].shape)
        return int(found[1].literal) if is_integer else None

    def _carried(self, computation: str, name: str) -> int | None:
        """Which of the loop's values this is."""
        found = self._through(computation, name)
        if found is None or found[1].opcode != "get-tuple-element":
            return None
        source = self.by_name[computation].get(found[1].operands[0])
        if source is None or source.opcode != "parameter":
            return None
        return _index(found[1])

    def _initial(
        self, computation: str, loop: _Instruction, place: int | None
    ) -> int | None:
        values = self.by_name[computation].get(loop.operands[0])
        if place is None or values is None or values.opcode != "tuple":
            return None
        return self._scalar(computation, values.operands[place])

    def _unchanged(self, body: str, place: int) -> bool:
        root = self._root(body)
        return root.opcode == "tuple" and (
            self._carried(body, root.operands[place]) == place
        )

    def _step(
        self, computation: str, loop: _Instruction, body: str, place: int | None
    ) -> int | None:
        """What a body adds to its counter, in an `add` or in a fusion of one."""
        root = self._root(body)
        if place is None or root.opcode != "tuple":
            return None
        found = self._through(body, root.operands[place])
        if found is None:
            return None
        where, each = found
        operands = each.operands
        if each.opcode == "fusion":
            (called,) = _called(each)
            inner = self._root(called)
            if inner.opcode != "add" or len(self.computations[called]) != 3:
                return None
        elif each.opcode != "add":
            return None
        for one, other in (operands, operands[::-1]) if len(operands) == 2 else ():
            if self._carried(where, one) == place:
                step = self._scalar(where, other)
                carried = self._carried(where, other)
                if step is None and carried is not None:
                    if self._unchanged(body, carried):
                        step = self._initial(computation, loop, carried)
                return step
        return None

    def _origin(self, computation: str, name: str) -> _Instruction:
        """The instruction that an operand is a plain copy of."""
        known = self.by_name[computation]
        each = known[name]
        while each.opcode in _PLAIN and not _path(each) and each.operands:
            if each.operands[0] not in known:
                break
            each = known[each.operands[0]]
        return each

    def _elements(self, name: str, index: int) -> list[str]:
        """The instructions that take one element of a tuple, behind the end of it."""
        users = self._users.get(name, ())
        ends = [u.name for u in users if u.opcode.endswith("-done")]
        if ends:
            name, users = ends[0], self._users.get(ends[0], ())
        if name not in self._taken:
            taken = self._taken[name] = {}
            for user in users:
                if user.opcode == "get-tuple-element":
                    taken.setdefault(_index(user), []).append(user.name)
        taken = self._taken[name]
        return taken.get(index, []) if taken else [name]

    @functools.cached_property
    def _users(self) -> dict[str, list[_Instruction]]:
        users: dict[str, list[_Instruction]] = {}
        for each in self.computations[self.entry]:
            for name in each.operands:
                users.setdefault(name, []).append(each)
        return users

    def _inputs_of(self, name: str) -> tuple[int, ...]:
        """Breadth first up to the nearest parameters."""
        known = self.by_name[self.entry]
        level, seen = [name], {name}
        while level:
            nearest = [
                int(known[n].literal)
                for n in level
                if n in known and known[n].opcode == "parameter"
            ]
            if nearest:
                return tuple(sorted(set(nearest)))
            above = [o for n in level if n in known for o in known[n].operands]
            level = [n for n in dict.fromkeys(above) if n not in seen]
            seen.update(level)
        return ()

    def _outputs_of(self, name: str, index: int | None = None) -> tuple[int, ...]:
        """Breadth first down to the places of the program's result."""
        root = self._root(self.entry)
        if root.opcode != "tuple":
            return (0,)
        level = [name]
        if index is not None:
            level = self._elements(name, index)
        seen, found = set(level), {}
        while level:
            here = set(level)
            found |= {i: None for i, n in enumerate(root.operands) if n in here}
            below = [u.name for n in level for u in self._users.get(n, ())]
            level = [n for n in dict.fromkeys(below) if n not in seen]
            seen.update(level)
        return tuple(found)


_PLAIN: Final = ("copy", "bitcast", "get-tuple-element", "convert", "reshape", "tuple")
"""Opcodes that only hand on what they are given."""

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION: Final = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")


class _Computations(dict[str, list[_Instruction]]):
    """Computations by name, parsed when they are asked for: few of a program's are.

    Args:
        lines: their texts by name.
    """

    def __init__(self, lines: Mapping[str, str]):
        super().__init__()
        self.lines = lines

    def __missing__(self, name: str) -> list[_Instruction]:
        found = self[name] = [
            _instruction(match, line)
            for line in self.lines[name].split("\n")
            if (match := _INSTRUCTION.match(line))
        ]
        return found


class _ByName(dict[str, dict[str, _Instruction]]):
    """The instructions of computations by name."""

    def __init__(self, computations: _Computations):
        super().__init__()
        self._computations = computations

    def __missing__(self, name: str) -> dict[str, _Instruction]:
        found = self[name] = {each.name: each for each in self._computations[name]}
        return found


def _computations(text: str) -> tuple[_Computations, str]:
    """All computations by name, and the name of the first one to run."""
    found: dict[str, str] = {}
    entry, here, lines = "", None, []
    for line in text.split("\n"):
        if here is None:
            if match := _COMPUTATION.match(line):
                here, lines = match[2], []
                entry = here if match[1] else entry
        elif line.startswith("}"):
            found[here], here = "\n".join(lines), None
        else:
            lines.append(line)
    return _Computations(found), entry


def _instruction(match: re.Match[str], line: str) -> _Instruction:
    rest = line[match.end() :]
    shape = _matched(rest) if rest.startswith("(") else rest.split(" ", 1)[0]
    rest = rest[len(shape) :].lstrip()
    opcode, behind = rest.split("(", 1)
    inside = _matched("(" + behind)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    attributes = behind[len(inside) - 1 :]
    return _Instruction(
        match[2], shape, opcode, operands, inside[1:-1], attributes, bool(match[1])
    )


def _matched(text: str) -> str:
    """`text` up to the bracket that closes its first one; quotes are skipped."""
    opening = text[0]
    closing = {"(": ")", "{": "}", "[": "]"}[opening]
    end = text.find(closing) + 1
    if end and opening not in text[1:end] and '"' not in text[:end]:
        return text[:end]
    depth = 0
    for match in re.finditer(rf'"(?:[^"\\]|\\.)*"|\{opening}|\{closing}', text):
        depth += {opening: 1, closing: -1}.get(match[0], 0)
        if depth == 0:
            return text[: match.end()]
    return text


def _arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape as printed; of a tuple, all that are in it."""
    found = []
    # Layouts have brackets of their own: f32[8,128]{1,0:T(8,128)S(1)}.
    for dtype, dims in re.findall(r"\b([a-z]+[a-z0-9]*)\[([^\]]*)\]", shape):
        sizes = tuple(
            int(size.strip().lstrip("<=")) for size in dims.split(",") if size
        )
        size = (math.prod(sizes) * _bits(dtype) + 7) // 8
        found.append(Array(_numpy_name(dtype), sizes, size))
    return tuple(found)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    assert match is not None, dtype
    return int(match[1])


def _numpy_name(dtype: str) -> str:
    if dtype.startswith("f8"):
        return "float" + dtype[1:]
    match = re.fullmatch(r"(s|u|f|bf|c)(\d+)", dtype)
    if match is None:
        return _NAMES.get(dtype, dtype)
    return _NAMES[match[1]] + match[2]


def _aliased(header: str) -> dict[int, str]:
    """From `input_output_alias={ {0}: (1, {}, may-alias), ... }`."""
    start = header.find("input_output_alias=")
    if start < 0:
        return {}
    inside = _matched(header[start + len("input_output_alias=") :])
    found = re.findall(r"\{([\d, ]*)\}:\s*\((\d+),", inside)
    return {int(parameter): out.replace(" ", "") for out, parameter in found}


def _called(each: _Instruction) -> list[str]:
    """Computations that an instruction runs; not those that combine two scalars."""
    if "=%" not in each.attributes and "={%" not in each.attributes:
        return []
    found = re.findall(
        r"\b(?:calls|body|condition|true_computation|false_computation)=%([\w.\-]+)",
        each.attributes,
    )
    if each.opcode in ("call", "async-start"):
        found += re.findall(r"\bto_apply=%([\w.\-]+)", each.attributes)
    for listed in re.findall(
        r"\b(?:branch_computations|called_computations)=\{([^}]*)\}", each.attributes
    ):
        found += re.findall(r"%([\w.\-]+)", listed)
    return list(dict.fromkeys(found))


def _name(each: _Instruction, attribute: str) -> str:
    match = re.search(rf"\b{attribute}=%?([\w.\-]+)", each.attributes)
    assert match is not None, (each.name, attribute)
    return match[1]


def _index(each: _Instruction) -> int:
    match = re.search(r"\bindex=(\d+)", each.attributes)
    assert match is not None, each.name
    return int(match[1])


def _path(each: _Instruction) -> str:
    match = re.search(r'op_name="([^"]*)"', each.attributes)
    return match[1] if match else ""


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _connected(pairs: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The sets of partitions that a permutation connects."""
    set_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = set_of.get(source, {source}) | set_of.get(target, {target})
        for member in joined:
            set_of[member] = joined
    unique = {id(members): members for members in set_of.values()}
    return tuple(tuple(sorted(members)) for members in unique.values())
