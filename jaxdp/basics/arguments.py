"""Checks of single arguments, with errors that name them."""

import contextlib
import datetime
import functools
import inspect
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import equinox as eqx
import numpy as np
from jax.sharding import Mesh

from .other_libraries import INSTEAD, find_near

Function = TypeVar("Function", bound=Callable[..., Any])

_PARAMETERS: Final[dict[str, Mapping[str, inspect.Parameter]]] = {}
"""The parameters of each function that `checks_arguments` decorates, by its name."""


def checks_arguments(function: Function) -> Function:
    """Decorates a public function or `__init__` with checks of its arguments.

    One error names all that is wrong in a call: arguments that the function does not
    take, each with what to write instead; those that it lacks; and values that are not
    of an annotated kind, if all kinds are in `_KINDS`.
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    is_init = function.__name__ == "__init__"
    _PARAMETERS[name] = signature.parameters

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        shown = type(args[0]).__name__ if is_init and args else name
        errors = [*_find_errors(name, shown, signature, args, keywords)]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise TypeError("\n".join(map(str, errors)))
        return function(*args, **keywords)

    return typing.cast(Function, call)


def _find_errors(
    function: str,
    shown: str,
    signature: inspect.Signature,
    args: Any,
    keywords: dict[str, Any],
) -> Iterator[TypeError | ValueError]:
    """Yields the errors in a call of a function, which messages call `shown`."""
    parameters, ours = signature.parameters, _list_keywords(signature.parameters)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in keywords if not takes_all and name not in ours]
    for name in unknown:
        instead = _suggest(function, name)
        yield TypeError(f"`{name}` is no argument of `{shown}`: {instead}.")
    known = {name: v for name, v in keywords.items() if name not in unknown}
    try:
        known = signature.bind(*args, **known).arguments
    except TypeError as error:
        yield TypeError(f"`{shown}`: {_explain(error, parameters, args)}.")
    for name in filter(known.__contains__, ours):
        value, hint = known[name], INSTEAD.get(function, {}).get(name)
        words = INSTEAD.get(name, {}) if isinstance(value, str) else {}
        try:
            if instead := words and words.get(value.lower()):
                raise ValueError(f"`{name}`: for {value!r} write {instead}.")
            _check_kind(name, value, parameters[name].annotation)
        except (TypeError, ValueError) as error:
            yield type(error)(f"{error} ({hint}.)") if hint else error


def _explain(
    error: TypeError, parameters: Mapping[str, inspect.Parameter], args: Any
) -> str:
    """Returns why arguments can't be bound, such as too many by position."""
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) <= len(positional):
        return str(error)
    extra = " and ".join(type(each).__name__ for each in args[len(positional) :])
    names = _list_keywords(parameters)
    accepted = ", ".join(name for name in names if name in positional)
    others = ", ".join(name for name in names if name not in positional)
    return (
        f"too many positional arguments. It takes {accepted or 'none'} in this"
        f" order; pass the {extra} by name, as one of {others or 'none'}"
    )


def _suggest(function: str, name: str) -> str:
    """Returns what to write instead of an argument that a function does not take."""
    pair = "Trainer", "fit"  # each takes the other's arguments for its own
    related = {function: None, **dict.fromkeys(pair if function in pair else ())}
    words = INSTEAD.get(function, {})
    if function in pair:
        words = INSTEAD["argument"] | words
    for other in related:
        if name in _PARAMETERS[other]:
            return f"it belongs to `{other}`: {other}(..., {name}=...)"
    if name in words:
        return words[name]
    for other in related:
        if near := find_near(name, _PARAMETERS[other]):
            suffix = f" of `{other}`" if other != function else ""
            return f"it may be meant for `{near}`{suffix}"
    if near := find_near(name, words):
        return words[near]
    return f"it takes {', '.join(_list_keywords(_PARAMETERS[function]))}"


def _list_keywords(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Returns the arguments that can be passed by name."""
    return [
        name
        for name, p in parameters.items()
        if name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not is_bool(value)


def is_number(value: Any) -> bool:
    """Returns True for a number, and for an array without dimensions."""
    is_real = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    return is_real and not is_bool(value)


_CLASSES: Final = {
    str: "a str",
    os.PathLike: "a path",
    Mapping: "a dict",
    eqx.nn.State: "the eqx.nn.State that eqx.nn.make_with_state returns",
    Mesh: "a jax.sharding.Mesh",
    types.NoneType: "None",
}
_KINDS: Final[dict[Any, tuple[str, Callable[[Any], bool]]]] = {
    bool: ("a bool", lambda x: is_bool(x) or is_int(x) and x in (0, 1)),
    int: ("an int", is_int),
    float: ("a number", is_number),
    Sequence: (
        "a list",
        lambda x: isinstance(x, Iterable) and not isinstance(x, Mapping | bytes),
    ),
    **{
        kind: (words, lambda x, kind=kind: isinstance(x, kind))
        for kind, words in _CLASSES.items()
    },
}
"""The annotations that are checked: in words, and a predicate of values."""


def _check_kind(name: str, value: Any, annotation: Any) -> None:
    """Raises for a value of none of the annotated kinds, if all are in `_KINDS`."""
    kinds = _list_kinds(annotation)
    choices = [c for kind in kinds if isinstance(kind, tuple) for c in kind]
    plain = [kind for kind in kinds if not isinstance(kind, tuple)]
    if not {*plain} <= _KINDS.keys() or any(_KINDS[kind][1](value) for kind in plain):
        return
    if choices and (isinstance(value, str) or {*plain} <= {types.NoneType}):
        check_choice(name, value, [*choices, *[None] * len(plain)])
    elif plain:
        listed = [kind for kind in plain if kind is not int or float not in plain]
        named = " or ".join(_KINDS[kind][0] for kind in listed)
        shown = " ".join(repr(value).split())[:200]
        kind = type(value).__name__
        raise TypeError(f"`{name}` must be {named}; got {shown} of type {kind}.")


def _list_kinds(annotation: Any) -> list[Any]:
    """Returns the members of a union; a `Literal` becomes a tuple of its choices."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return [
            kind for each in typing.get_args(annotation) for kind in _list_kinds(each)
        ]
    if origin is Literal:
        return [typing.get_args(annotation)]
    return [types.NoneType if annotation is None else origin or annotation]


def check_call(
    argument: str, function: Any, hint: str, *args: Any, **keywords: Any
) -> None:
    """Raises if a function of the user's can't be called with such arguments.

    `hint` is the call to write. Some built-in callables have no signature to check.
    """
    with contextlib.suppress(ValueError):
        signature = inspect.signature(function)
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            raise TypeError(
                f"{argument} is {signature}, and is called {hint}: {error}."
            ) from None


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`{name}` must be one of {listed}; got {value!r}.")


def check_count(
    name: str,
    value: Any,
    minimum: int = 1,
    maximum: int | None = None,
    *,
    suffix: str = "",
) -> None:
    """Raises unless `value` is an int, or NumPy's, from `minimum` to `maximum`."""
    if not is_int(value):
        kind = type(value).__name__
        raise TypeError(
            f"`{name}` must be an int{suffix}; got {value!r} of type {kind}."
        )
    check_number(name, int(value), minimum=minimum, maximum=maximum, suffix=suffix)


def check_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    suffix: str = "",
) -> None:
    """Raises unless `value` is a number within these limits."""
    if not is_number(value):
        kind = type(value).__name__
        raise TypeError(
            f"`{name}` must be a number{suffix}; got {value!r} of type {kind}."
        )
    value = value if isinstance(value, int) else float(value)
    rules = {
        f"{minimum} or more": minimum is None or value >= minimum,
        f"{maximum} or less": maximum is None or value <= maximum,
        f"more than {above}": above is None or value > above,
        f"less than {below}": below is None or value < below,
    }
    if value != value or not all(rules.values()):
        rule = " and ".join(rule for rule in rules if "None" not in rule)
        raise ValueError(
            f"`{name}` must be {rule or 'a number'}{suffix}; got {value!r}."
        )


def check_is_local(name: str, path: str | os.PathLike[str]) -> None:
    """Raises if `path` is an address, such as `gs://...`, instead of a file."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", os.fspath(path)):  # C:/ is a file
        raise ValueError(
            f"`{name}` must be in a file system; got {os.fspath(path)!r}, which"
            " would mean a folder on this disk. Mount the remote folder and pass its"
            ' path here, or copy the files: docs/checkpoints.md, "Buckets".'
        )


def as_number(value: Any) -> float | None:
    """Returns a number, or an array of one number, as a float; None for other values.

    Waits for the device if the array is there.
    """
    array = np.asarray(value)
    has_numbers = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    is_single = array.ndim == 0 or (array.size == 1 and hasattr(value, "dtype"))
    return float(array.item()) if has_numbers and is_single else None


def parse_duration(duration: Any, argument: str = "duration") -> float:
    """Returns the seconds of a duration; errors name it `argument`."""
    seconds = duration
    if isinstance(duration, str) and re.fullmatch(r"\d+(:\d+){3}", duration):
        days, hours, minutes, rest = map(int, duration.split(":"))
        seconds = ((24 * days + hours) * 60 + minutes) * 60 + rest
    elif isinstance(duration, datetime.timedelta):
        seconds = duration.total_seconds()
    forms = " (seconds), a datetime.timedelta, or 'DD:HH:MM:SS'"
    longest = datetime.timedelta.max.total_seconds()
    check_number(argument, seconds, minimum=0, below=longest, suffix=forms)
    return float(seconds)


def format_call(instance: Any, num_positional: int = 0, **texts: str | None) -> str:
    """Formats the call that makes an object, with the arguments that differ from
    defaults.

    Args:
        instance: its attributes have the names of the arguments of its class.
        num_positional: how many of the first arguments are shown without their names.
        texts: by name, what is shown in the place of the attributes; None hides one.
    """
    shown: list[str] = []
    parameters = inspect.signature(type(instance)).parameters
    for place, (name, parameter) in enumerate(parameters.items()):
        value = vars(instance).get(name, parameter.default)
        text = getattr(value, "__qualname__", None) or repr(value)
        if name in texts:
            text = texts[name]
        elif repr(value) == repr(parameter.default):
            text = None
        elif len(text) >= 200 or " at 0x" in text:
            text = "..."
        if text is not None:
            is_positional = len(shown) == place < num_positional
            shown.append(text if is_positional else f"{name}={text}")
    return f"{type(instance).__name__}({', '.join(shown)})"
