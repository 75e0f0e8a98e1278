"""The text of a compiled program, taken apart: computations, instructions, arrays."""

import math
import re
from typing import Final, NamedTuple

_BITS: Final = {"pred": 8, "token": 0, "opaque": 0}
_NAMES: Final = {
    "pred": "bool",
    "s": "int",
    "u": "uint",
    "f": "float",
    "bf": "bfloat",
    "c": "complex",
}

_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION: Final = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED: Final = re.compile(
    r"\b(?:calls|body|condition|true_computation|false_computation)=%([\w.\-]+)"
)
_CALLED_LISTS: Final = re.compile(
    r"\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)


class Array(NamedTuple):
    """An array in the program, as one device holds it."""

    dtype: str
    """As NumPy says it: `"float32"`."""
    shape: tuple[int, ...]
    bytes: int


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    """What stands between the parentheses."""
    attributes: str
    is_root: bool

    @property
    def path(self) -> str:
        """Where in the user's program it comes from; may be empty."""
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
        """The computation that says whether a loop goes on."""
        return self._attribute("condition")

    @property
    def called(self) -> list[str]:
        """Computations that it runs; not those that combine two scalars."""
        if "=%" not in self.attributes and "={%" not in self.attributes:
            return []
        found = _CALLED.findall(self.attributes)
        if self.opcode in ("call", "async-start"):
            found += re.findall(r"\bto_apply=%([\w.\-]+)", self.attributes)
        for listed in _CALLED_LISTS.findall(self.attributes):
            found += re.findall(r"%([\w.\-]+)", listed)
        return list(dict.fromkeys(found))

    def _attribute(self, name: str) -> str:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        assert match is not None, (self.name, name)
        return match[1]


class Module:
    """A compiled program. Its computations are parsed when they are asked for: few are.

    Args:
        text: as `compiled.as_text()` prints it.

    Attributes:
        num_devices: how many devices run it together.
        entry: name of the computation that is run first.
        aliased: see `hlo.Program`.
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
        self.aliased = _aliased(header)
        self.entry = ""
        self.texts: dict[str, str] = {}
        self._parsed: dict[str, dict[str, Instruction]] = {}

        here, lines = None, []
        for line in text.split("\n"):
            if here is None:
                if match := _COMPUTATION.match(line):
                    here, lines = match[2], []
                    self.entry = here if match[1] else self.entry
            elif line.startswith("}"):
                self.texts[here], here = "\n".join(lines), None
            else:
                lines.append(line)
        if not self.entry:
            raise ValueError("this program has no ENTRY computation.")

    def __getitem__(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation by name, in order."""
        if computation not in self._parsed:
            found = [
                _instruction(match, line)
                for line in self.texts[computation].split("\n")
                if (match := _INSTRUCTION.match(line))
            ]
            self._parsed[computation] = {each.name: each for each in found}
        return self._parsed[computation]

    def root(self, computation: str) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(each for each in self[computation].values() if each.is_root)


def arrays_in(shape: str) -> tuple[Array, ...]:
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


def matched(text: str) -> str:
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


def ints(text: str) -> tuple[int, ...]:
    """`"3, 1,2"` as numbers."""
    return tuple(int(number) for number in text.split(",") if number.strip())


def _instruction(match: re.Match[str], line: str) -> Instruction:
    rest = line[match.end() :]
    shape = matched(rest) if rest.startswith("(") else rest.split(" ", 1)[0]
    rest = rest[len(shape) :].lstrip()
    opcode, behind = rest.split("(", 1)
    inside = matched("(" + behind)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    attributes = behind[len(inside) - 1 :]
    return Instruction(
        match[2], shape, opcode, operands, inside[1:-1], attributes, bool(match[1])
    )


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
    inside = matched(header[start + len("input_output_alias=") :])
    found = re.findall(r"\{([\d, ]*)\}:\s*\((\d+),", inside)
    return {int(parameter): out.replace(" ", "") for out, parameter in found}
