"""JSON that comes from elsewhere: read within limits, and compared with a form.

A file, or a line from a socket, may be anything: twenty gigabytes, a million brackets,
a word where a number should be. The limits come before it is parsed; a form then says
what every value must be, so that nobody who uses it has to ask again.

    form = fields({"step": whole(), "names": each(text())}, {"loss": number()})
    form(read_json("some.json"), "some.json")  # a ValueError says what is wrong, where
"""

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

MOST_BYTES: Final = 2**28
_MOST_NESTED: Final = 2**22
"""More would fill the memory: an empty list takes 3 bytes of text and 64 of memory."""

_MOST_VALUES: Final = 2**24
"""A number takes 40 bytes of memory. A loader may keep the order of its rows."""

_MOST_DEPTH: Final = 100
"""Python gives up at about a thousand, and what walks through the values sooner."""

_MOST_NUMBER: Final = 2**63 - 1

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))

Form = Callable[[Any, str], None]
"""Takes a value and its name; raises a ValueError if it is not what it must be."""


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """The JSON in a file.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is not JSON, or too large, or too deep.
    """
    with open(path, "rb") as file:
        # Asked first: a file of nothing but zeros is as long as it likes to be.
        _check_size(os.fstat(file.fileno()).st_size, most_bytes)
        return parse_json(file.read(), most_bytes)


def parse_json(content: bytes, most_bytes: int = MOST_BYTES) -> Any:
    """The value of a JSON text in UTF-8; raises as `read_json` does."""
    _check_size(len(content), most_bytes)
    opened = content.count(b"[") + content.count(b"{")
    if opened > _MOST_NESTED:
        raise ValueError(f"it has more than {_MOST_NESTED:,} lists and objects")
    if opened + content.count(b",") > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")
    if opened > _MOST_DEPTH and _depth(content) > _MOST_DEPTH:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")
    return json.loads(content.decode())


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise ValueError(f"it has {size:,} bytes, and {most_bytes:,} are the most")


def anything(value: Any, name: str) -> None:
    """A form that every value has."""


def number(least: float = -math.inf, *, finite: bool = False) -> Form:
    """A number; NaN too, unless it must be finite."""
    kind = "a finite number" if finite else "a number"

    def fits(value: Any) -> bool:
        if not _is_int(value) and not isinstance(value, float):
            return False
        is_large = isinstance(value, int) and abs(value) > _MOST_NUMBER
        return not (is_large or value < least or finite and not math.isfinite(value))

    return _kind(kind if least == -math.inf else f"{kind} from {least:g}", fits)


def number_text() -> Form:
    """What `float` reads: a text such as "nan" or "0.5", or a number."""

    def fits(value: Any) -> bool:
        if not isinstance(value, str):
            return has_form(value, number())
        try:
            float(value)
        except ValueError:
            return False
        return True

    return _kind("a number or the text of one", fits)


def whole(least: int = 0, most: int = _MOST_NUMBER) -> Form:
    """A whole number."""
    upper = "" if most == _MOST_NUMBER else f" to {most}"
    return _kind(
        f"a whole number from {least}{upper}",
        lambda value: _is_int(value) and least <= value <= most,
    )


def truth() -> Form:
    """True or False."""
    return _kind("true or false", lambda value: isinstance(value, bool))


def text(pattern: str = "", what: str = "a text") -> Form:
    """A text, all of which a regular expression matches if there is one."""
    expression = re.compile(pattern, re.ASCII)
    return _kind(
        what,
        lambda value: (
            isinstance(value, str)
            and (not pattern or expression.fullmatch(value) is not None)
        ),
    )


def maybe(form: Form) -> Form:
    """Null, or what another form says."""

    def check(value: Any, name: str) -> None:
        if value is not None:
            form(value, name)

    return check


def each(form: Form) -> Form:
    """A list, all of one form."""

    def check(value: Any, name: str) -> None:
        _a_list(value, name)
        for place, item in enumerate(value):
            form(item, f"{name}[{place}]")

    return check


def row(*forms: Form) -> Form:
    """A list of as many values as there are forms."""
    is_row = _kind(
        f"a list of {len(forms)}",
        lambda value: isinstance(value, list) and len(value) == len(forms),
    )

    def check(value: Any, name: str) -> None:
        is_row(value, name)
        for place, (item, form) in enumerate(zip(value, forms, strict=True)):
            form(item, f"{name}[{place}]")

    return check


def by_name(form: Form, least: int = 0) -> Form:
    """An object of any names, all of one form."""

    def check(value: Any, name: str) -> None:
        _an_object(value, name)
        if len(value) < least:
            raise ValueError(f"`{name}` is empty")
        for key, item in value.items():
            form(item, _named(name, key))

    return check


def fields(
    needed: Mapping[str, Form], others: Mapping[str, Form] | None = None
) -> Form:
    """An object that has some fields, and may have others; unknown ones are let be."""

    def check(value: Any, name: str) -> None:
        _an_object(value, name)
        missing = [key for key in needed if key not in value]
        if missing:
            raise ValueError(f"`{name}` has no {', '.join(missing)}")
        for key, form in {**needed, **(others or {})}.items():
            if key in value:
                form(value[key], _named(name, key))

    return check


def has_form(value: Any, form: Form) -> bool:
    """Whether a value is what a form says."""
    try:
        form(value, "")
    except ValueError:
        return False
    return True


def _kind(what: str, fits: Callable[[Any], bool]) -> Form:
    def check(value: Any, name: str) -> None:
        if not fits(value):
            raise ValueError(f"`{name}` is {reprlib.repr(value)}, and must be {what}")

    return check


_a_list: Final = _kind("a list", lambda value: isinstance(value, list))
_an_object: Final = _kind("an object", lambda value: isinstance(value, dict))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(name: str, key: str) -> str:
    key = key if len(key) < 60 else key[:57] + "..."
    return f"{name}.{key}" if name else key


def _depth(content: bytes) -> int:
    """How deep the brackets are nested that are in no string."""
    brackets = _STRING.sub(b"", content).translate(None, _NO_BRACKETS)
    opens = np.isin(np.frombuffer(brackets, np.uint8), list(b"[{"))
    return int(np.cumsum(2 * opens.astype(np.int32) - 1).max(initial=0))
