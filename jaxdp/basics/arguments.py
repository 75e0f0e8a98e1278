"""Checks of single arguments, with errors that name them."""

import contextlib
import datetime
import functools
import inspect
import math
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
    parameters = signature.parameters
    takes_all = inspect.Parameter.VAR_KEYWORD in {p.kind for p in parameters.values()}
    ours = _list_keywords(parameters)
    for name in () if takes_all else keywords:
        if name not in ours:
            instead = _suggest(function, name)
            yield TypeError(f"`{name}` is no argument of `{shown}`: {instead}.")
    known = {k: v for k, v in keywords.items() if takes_all or k in ours}
    try:
        known = signature.bind(*args, **known).arguments
    except TypeError as error:
        yield TypeError(f"`{shown}`: {_explain(error, parameters, args)}.")
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    for name in [
        n for n, p in parameters.items() if n in known and p.kind not in variadic
    ]:
        value, hint = known[name], INSTEAD.get(function, {}).get(name)
        words = INSTEAD.get(name, {}) if isinstance(value, str) else {}
        try:
            if words and (instead := words.get(value.lower())):
                raise ValueError(f"`{name}`: for {value!r} write {instead}.")
            check_kind(name, value, parameters[name].annotation)
        except (TypeError, ValueError) as error:
            yield type(error)(f"{error} ({hint}.)") if hint else error


def _explain(
    error: TypeError, parameters: Mapping[str, inspect.Parameter], args: Any
) -> str:
    """Returns why arguments can't be bound, such as too many by position."""
    by_position = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(args) <= len(by_position):
        return str(error)
    others = ", ".join(n for n in _list_keywords(parameters) if n not in by_position)
    accepted = ", ".join(name for name in by_position if name != "self")
    extra = " and ".join(type(each).__name__ for each in args[len(by_position) :])
    return (
        f"too many positional arguments. It takes {accepted or 'none'} in this"
        f" order; pass the {extra} by name, as one of {others or 'none'}"
    )


def _suggest(function: str, name: str) -> str:
    """Returns what to write instead of an argument that a function does not take."""
    pair = "Trainer", "fit"  # each takes the other's arguments for its own
    for other in pair if function in pair else ():
        if name in _PARAMETERS[other]:
            return f"it belongs to `{other}`: {other}(..., {name}=...)"
    specific = INSTEAD.get(function, {})
    others = INSTEAD["argument"] if function in pair else {}
    if instead := specific.get(name) or others.get(name):
        return instead
    for other in dict.fromkeys([function, *(pair if function in pair else ())]):
        if near := find_near(name, _PARAMETERS[other]):
            suffix = f" of `{other}`" if other != function else ""
            return f"it may be meant for `{near}`{suffix}"
    if near := find_near(name, specific | others):
        return (specific | others)[near]
    return f"it takes {', '.join(_list_keywords(_PARAMETERS[function]))}"


def _list_keywords(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Returns the arguments that can be passed by name."""
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        name
        for name, parameter in parameters.items()
        if name != "self" and parameter.kind not in variadic
    ]


_KINDS: Final[dict[Any, tuple[str, Callable[[Any], bool]]]] = {
    bool: (
        "a bool",
        lambda x: is_bool(x) or isinstance(x, int | np.integer) and x in (0, 1),
    ),
    int: ("an int", lambda x: isinstance(x, int | np.integer) and not is_bool(x)),
    float: ("a number", lambda x: is_number(x)),
    str: ("a str", lambda x: isinstance(x, str)),
    os.PathLike: ("a path", lambda x: isinstance(x, os.PathLike)),
    Mapping: ("a dict", lambda x: isinstance(x, Mapping)),
    Sequence: (
        "a list",
        lambda x: isinstance(x, Iterable) and not isinstance(x, Mapping | bytes),
    ),
    eqx.nn.State: (
        "the eqx.nn.State that eqx.nn.make_with_state returns",
        lambda x: isinstance(x, eqx.nn.State),
    ),
    Mesh: ("a jax.sharding.Mesh", lambda x: isinstance(x, Mesh)),
    types.NoneType: ("None", lambda x: x is None),
}
"""The annotations that are checked: in words, and a predicate of values."""


def check_kind(name: str, value: Any, annotation: Any) -> None:
    """Raises for a value of none of the annotated kinds, if all are in `_KINDS`."""
    kinds = _list_kinds(annotation)
    choices = [c for kind in kinds for c in (kind if isinstance(kind, tuple) else ())]
    plain = [kind for kind in kinds if not isinstance(kind, tuple)]
    if any(kind not in _KINDS for kind in plain):
        return
    if any(_KINDS[kind][1](value) for kind in plain):
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


def is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def is_number(value: Any) -> bool:
    """Returns True for a number, and for an array without dimensions."""
    is_real = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    return is_real and not is_bool(value)


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
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        kind = type(value).__name__
        raise TypeError(
            f"`{name}` must be an int{suffix}; got {value!r} of type {kind}."
        )
    if value < minimum:
        raise ValueError(f"`{name}` must be {minimum} or more{suffix}; got {value}.")
    if maximum is not None and value > maximum:
        raise ValueError(f"`{name}` must be {maximum} or less{suffix}; got {value}.")


def check_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    suffix: str = "",
) -> None:
    """Raises unless `minimum <= value`, `above < value` and `value < below`."""
    if not is_number(value):
        raise TypeError(
            f"`{name}` must be a number{suffix}; got {value!r} of type"
            f" {type(value).__name__}."
        )

    value = float(value)
    rules = {
        f"{minimum} or more": minimum is None or value >= minimum,
        f"more than {above}": above is None or value > above,
        f"less than {below}": below is None or value < below,
    }
    if math.isnan(value) or not all(rules.values()):
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
    shown = []
    for place, (name, parameter) in enumerate(
        inspect.signature(type(instance)).parameters.items()
    ):
        value = vars(instance).get(name, parameter.default)
        text = getattr(value, "__qualname__", None) or repr(value)
        is_long = len(text) >= 200 or " at 0x" in text
        text = texts.get(name, "..." if is_long else text)
        is_other = name in texts or repr(value) != repr(parameter.default)
        if is_other and text is not None:
            is_named = place >= num_positional or len(shown) < place
            shown.append(f"{name}={text}" if is_named else text)
    return f"{type(instance).__name__}({', '.join(shown)})"
