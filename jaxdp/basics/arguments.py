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

_ANNOTATIONS: Final[dict[str, dict[str, Any]]] = {}
"""By the name of each function that `checks_arguments` decorates: the arguments that
can be passed by name, with their annotations."""


def checks_arguments(function: Function) -> Function:
    """Decorates a public function or `__init__` with checks of its arguments.

    One error names all that is wrong in a call: arguments that the function does not
    take, each with what to write instead; those that it lacks; and values that are not
    of an annotated kind, if all kinds are in `_KINDS`.
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    is_init = function.__name__ == "__init__"
    _ANNOTATIONS[name] = {
        argument: p.annotation
        for argument, p in signature.parameters.items()
        if argument != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }

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
    annotations, parameters = _ANNOTATIONS[function], signature.parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [name for name in keywords if not takes_all and name not in annotations]
    for name in unknown:
        instead = _suggest(function, name)
        yield TypeError(f"`{name}` is no argument of `{shown}`: {instead}.")
    known = {name: v for name, v in keywords.items() if name not in unknown}
    try:
        known = signature.bind(*args, **known).arguments
    except TypeError as error:
        reason = str(error)
        if "too many positional" in reason:
            in_order = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            extra = ", ".join(type(each).__name__ for each in args[len(in_order) :])
            by_name = ", ".join(name for name in annotations if name not in in_order)
            order = ", ".join(name for name in in_order if name != "self")
            reason += f": {extra}. It takes {order or 'none'} in this order"
            reason += f", and by name {by_name}" if by_name else ""
        yield TypeError(f"`{shown}`: {reason}.")
    for name in filter(known.__contains__, annotations):
        value, hint = known[name], INSTEAD.get(function, {}).get(name)
        words = INSTEAD.get(name, {}) if isinstance(value, str) else {}
        try:
            if instead := words and words.get(value.lower()):
                raise ValueError(f"`{name}`: for {value!r} write {instead}.")
            _check_kind(name, value, annotations[name])
        except (TypeError, ValueError) as error:
            yield type(error)(f"{error} ({hint}.)") if hint else error


def _suggest(function: str, name: str) -> str:
    """Returns what to write instead of an argument that a function does not take."""
    functions, words = [function], INSTEAD.get(function, {})
    if function in ("Trainer", "fit"):  # each takes the other's arguments for its own
        functions.append("fit" if function == "Trainer" else "Trainer")
        words = INSTEAD["argument"] | words
    for other in functions:
        if name in _ANNOTATIONS[other]:
            return f"it belongs to `{other}`: {other}(..., {name}=...)"
    if name in words:
        return words[name]
    for other in functions:
        if near := find_near(name, _ANNOTATIONS[other]):
            suffix = f" of `{other}`" if other != function else ""
            return f"it may be meant for `{near}`{suffix}"
    if near := find_near(name, words):
        return words[near]
    return f"it takes {', '.join(_ANNOTATIONS[function])}"


def is_bool(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not is_bool(value)


def is_number(value: Any) -> bool:
    """Returns True for a number, and for an array without dimensions."""
    is_real = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    return is_real and not is_bool(value)


_KINDS: Final[dict[Any, str]] = {
    bool: "a bool",
    int: "an int",
    float: "a number",
    str: "a str",
    os.PathLike: "a path",
    Sequence: "a list",
    Mapping: "a dict",
    eqx.nn.State: "the eqx.nn.State that eqx.nn.make_with_state returns",
    Mesh: "a jax.sharding.Mesh",
    types.NoneType: "None",
}
"""The annotations that are checked, in words."""


def _is_of_kind(value: Any, kind: Any) -> bool:
    if kind is bool:
        return is_bool(value) or (is_int(value) and value in (0, 1))
    if kind is int:
        return is_int(value)
    if kind is float:
        return is_number(value)
    if kind is Sequence:
        return isinstance(value, Iterable) and not isinstance(value, Mapping | bytes)
    return isinstance(value, kind)


def _check_kind(name: str, value: Any, annotation: Any) -> None:
    """Raises for a value of none of the annotated kinds, if all are in `_KINDS`."""
    kinds, choices = _list_kinds(annotation)
    if not {*kinds} <= _KINDS.keys() or any(_is_of_kind(value, k) for k in kinds):
        return
    if choices and (isinstance(value, str) or {*kinds} <= {types.NoneType}):
        check_choice(name, value, [*choices, *[None] * len(kinds)])
    elif kinds:
        listed = [kind for kind in kinds if kind is not int or float not in kinds]
        words = " or ".join(_KINDS[kind] for kind in listed)
        raise _make_type_error(name, words, " ".join(repr(value).split())[:200], value)


def _make_type_error(name: str, words: str, shown: str, value: Any) -> TypeError:
    kind = type(value).__name__
    return TypeError(f"`{name}` must be {words}; got {shown} of type {kind}.")


def _list_kinds(annotation: Any) -> tuple[list[Any], list[Any]]:
    """Returns the classes of an annotation, and the choices of its `Literal`s."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        members = [_list_kinds(each) for each in typing.get_args(annotation)]
        kinds, choices = zip(*members, strict=True)
        return sum(kinds, []), sum(choices, [])
    if origin is Literal:
        return [], [*typing.get_args(annotation)]
    return [types.NoneType if annotation is None else origin or annotation], []


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


def bind_method(where: str, method: Any, base: Callable[..., Any]) -> dict[str, str]:
    """Returns the arguments of a method by name, each with its name in `base`, which
    the method overrides.

    Empty for some callables that are written in C, which have no signature.

    Raises:
        TypeError: if the method can't be called with the arguments of `base`.
    """
    _, *ours = inspect.signature(base).parameters.values()
    bare = [p.replace(annotation=p.empty) for p in ours]
    called = f"called with {inspect.Signature(bare)}; write `def {format_method(base)}`"
    if not callable(method):
        raise TypeError(f"{where} is {method!r}, but it must be a method, {called}.")
    try:
        signature = inspect.signature(method, follow_wrapped=False)
    except ValueError:
        return {}
    by_name = {p.name: p.name for p in ours if p.kind is p.KEYWORD_ONLY}
    in_order = [p.name for p in ours if p.name not in by_name]
    try:
        return signature.bind(*in_order, **by_name).arguments
    except TypeError:
        raise TypeError(f"{where} takes {signature}, but it is {called}.") from None


def format_method(method: Callable[..., Any]) -> str:
    """Returns the name and the arguments of a method, as in its `def`."""
    parameters = inspect.signature(method).parameters.values()
    bare = [p.replace(annotation=p.empty) for p in parameters]
    return f"{method.__name__}{inspect.Signature(bare)}"


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
        raise _make_type_error(name, f"an int{suffix}", repr(value), value)
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
        raise _make_type_error(name, f"a number{suffix}", repr(value), value)
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
