"""Parses the text of a compiled program.

Finds computations, their instructions and arrays, and the groups of devices that
exchange data in a collective. A group is a tuple of positions in the mesh.
"""

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ...basics.donation import parse_aliases

Groups = tuple[tuple[int, ...], ...]

_NAMES: Final = {"s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION: Final = re.compile(
    r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:, (.*))?$"
)
"""The root, name, shape, opcode, operands and attributes of an instruction."""
_MESH: Final = re.compile(
    r"(?:maximal_)?mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))?,? *\{([^}]*)\}"
)
"""The sizes of axes, numbers of devices and the axes of groups."""
_CALLED: Final = re.compile(
    r"\b(?:calls|body|condition|true_computation|false_computation)=%([\w.\-]+)"
)
_CALLED_LISTS: Final = re.compile(
    r"\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


class HloArray(NamedTuple):
    """An array in the program, as one device holds it."""

    dtype: str
    """NumPy's name: `"float32"`."""
    shape: tuple[int, ...]
    bytes: int


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    """The text between the parentheses."""
    attributes: str
    is_root: bool

    @property
    def path(self) -> str:
        """The place in the user's program that it comes from; may be empty."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def index(self) -> int:
        """Which element of a tuple a `get-tuple-element` takes."""
        return int(self._attribute("index"))

    @property
    def body(self) -> str:
        """The computation that a loop repeats."""
        return self._attribute("body")

    @property
    def condition(self) -> str:
        """The computation that tests whether a loop continues."""
        return self._attribute("condition")

    @property
    def direction(self) -> str:
        """The direction of a `compare`: `"LT"`; empty for other instructions."""
        match = re.search(r"\bdirection=(\w+)", self.attributes)
        return match[1] if match and self.opcode == "compare" else ""

    @property
    def called(self) -> list[str]:
        """Computations that it runs; not those that combine two scalars."""
        if "=%" not in self.attributes and "={%" not in self.attributes:
            return []
        names = _CALLED.findall(self.attributes)
        if self.opcode in ("call", "async-start"):
            names += re.findall(r"\bto_apply=%([\w.\-]+)", self.attributes)
        for listed in _CALLED_LISTS.findall(self.attributes):
            names += re.findall(r"%([\w.\-]+)", listed)
        return list(dict.fromkeys(names))

    def _attribute(self, name: str) -> str:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        assert match is not None, (self.name, name)
        return match[1]


class HloModule:
    """A compiled program. Its computations are parsed when they are asked for: few are.

    Args:
        text: as `compiled.as_text()` prints it.

    Attributes:
        num_devices: how many devices run it together.
        entry: name of the computation that is run first.
        aliased: the inputs that it overwrites, by `parse_aliases`.
    """

    def __init__(self, text: str):
        header = text.split("\n", 1)[0]
        if not header.startswith("HloModule"):
            raise ValueError(
                "this is not the text of a compiled program: it does not start with"
                f" HloModule but with {header[:60]!r}. Pass compiled.as_text()."
            )
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.num_devices = max(map(int, counts), default=1)
        self.aliased = parse_aliases(header)
        self.entry = ""
        self.texts: dict[str, str] = {}
        self._parsed: dict[str, dict[str, Instruction]] = {}

        computation, lines = None, []
        for line in text.split("\n"):
            if computation is None:
                if match := _COMPUTATION.match(line):
                    computation, lines = match[2], []
                    self.entry = computation if match[1] else self.entry
            elif line.startswith("}"):
                self.texts[computation], computation = "\n".join(lines), None
            else:
                lines.append(line)
        if not self.entry:
            raise ValueError("this program has no ENTRY computation.")

    def __getitem__(self, computation: str) -> dict[str, Instruction]:
        """Returns the instructions of a computation by name, in order."""
        if computation not in self._parsed:
            lines = self.texts[computation].split("\n")
            instructions = [
                _parse_instruction(match)
                for match in map(_INSTRUCTION.match, lines)
                if match
            ]
            self._parsed[computation] = {one.name: one for one in instructions}
        return self._parsed[computation]

    def root(self, computation: str) -> Instruction:
        """Returns the instruction whose result is the computation's."""
        return next(one for one in self[computation].values() if one.is_root)


def _parse_instruction(match: re.Match[str]) -> Instruction:
    root, name, shape, opcode, inside, attributes = match.groups(default="")
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, shape, opcode, operands, inside, attributes, bool(root))


def parse_arrays(shape: str) -> tuple[HloArray, ...]:
    """Parses the arrays of a printed shape, which may be a tuple."""
    arrays = []
    # Layouts have brackets of their own: f32[8,128]{1,0:T(8,128)S(1)}.
    for dtype, dims in re.findall(r"\b([a-z]+[a-z0-9]*)\[([^\]]*)\]", shape):
        sizes = [int(size.strip().lstrip("<=")) for size in dims.split(",") if size]
        arrays.append(_make_array(dtype, tuple(sizes)))
    return tuple(arrays)


def parse_ints(text: str) -> tuple[int, ...]:
    """Parses numbers such as `"3, 1,2"`."""
    return tuple(int(number) for number in text.split(",") if number.strip())


def _make_array(dtype: str, shape: tuple[int, ...]) -> HloArray:
    """Converts XLA's name of a type: `pred`, `s32`, `bf16`, `f8e4m3fn`, `token`."""
    match = re.fullmatch(r"([a-z]+)(\d*)(\w*)", dtype)
    assert match is not None, dtype
    kind, bits, rest = match.groups()
    if dtype == "pred":
        return HloArray("bool", shape, math.prod(shape))
    size = (math.prod(shape) * int(bits or 0) + 7) // 8
    return HloArray(_NAMES.get(kind, kind) + bits + rest, shape, size)


def find_groups(attributes: str, num_devices: int) -> Groups:
    """Finds the groups of a collective in its attributes; by default one of all."""
    _, named, pairs = attributes.partition("source_target_pairs=")
    if named:
        return _connect_pairs(parse_groups(pairs, 1))
    _, named, groups = attributes.partition("replica_groups=")
    return parse_groups(groups if named else "{}", num_devices)


def parse_groups(text: str, num_devices: int) -> Groups:
    """Parses the groups that follow `replica_groups=`, in any of the spellings.

        {{0,1},{2,3}}    {}    [2,4]<=[8]    [4,2]<=[2,4]T(1,0)
        mesh['a'=4,'b'=2] {'a'}    mesh['a'=8], device_ids=([2,4]T(1,0)) {'a':(2)4}

    Args:
        text: starts with the groups; more may follow.
        num_devices: what `{}` stands for.
    """
    if listed := re.match(r"\{(?:\{[\d,]*\},?)*\}", text):
        groups = tuple(map(parse_ints, re.findall(r"\{([\d,]+)\}", listed[0])))
        return groups or (tuple(range(num_devices)),)
    if text.startswith("["):
        return tuple(map(tuple, _parse_iota(text).tolist()))
    if match := _MESH.match(text):
        return _parse_mesh_groups(*match.groups(default=""))
    raise ValueError(f"replica_groups of an unknown spelling: {text[:80]!r}")


def _parse_mesh_groups(axes: str, device_ids: str, named_axes: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = np.arange(math.prod(sizes.values()))
    if device_ids.startswith("["):
        ids = _parse_iota(device_ids).ravel()
    elif device_ids:
        ids = np.array(parse_ints(device_ids))  # on the host

    # A group may lie along a part of an axis, `'a':(before)size`: each axis is taken
    # apart into what is before that part, the part, and what is after it.
    named = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named_axes)
    along = {name: (int(b or 1), int(size or sizes[name])) for name, b, size in named}
    shape: list[int] = []
    inside: dict[str, int] = {}
    for name, size in sizes.items():
        before, part = along.get(name, (1, 1))
        inside[name] = len(shape) + 1
        shape += [before, part, size // (before * part)]
    dims = [inside[name] for name in along]
    others = [dim for dim in range(len(shape)) if dim not in dims]
    width = math.prod(shape[dim] for dim in dims)
    table = ids.reshape(shape).transpose(others + dims).reshape(-1, width)
    return tuple(map(tuple, table.tolist()))


def _parse_iota(text: str) -> np.ndarray:
    """Parses `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, or `[2,4]T(1,0)`."""
    match = re.match(r"\[([\d,]*)\](?:<=\[([\d,]*)\])?(?:T\(([\d,]*)\))?", text)
    assert match is not None
    shape, source, order = map(parse_ints, (match[1], match[2] or "", match[3] or ""))
    array = np.arange(math.prod(shape)).reshape(source or shape)
    array = array.transpose(order) if order else array
    return array.reshape(shape) if source else array


def _connect_pairs(pairs: Sequence[Sequence[int]]) -> Groups:
    """Returns the sets of partitions that a permutation connects."""
    set_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = set_of.get(source, {source}) | set_of.get(target, {target})
        for member in joined:
            set_of[member] = joined
    unique = {id(members): members for members in set_of.values()}
    return tuple(tuple(sorted(members)) for members in unique.values())
