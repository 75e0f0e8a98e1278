"""Changes to several objects that are all made or none."""

import collections
import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Final

_CONTAINERS: Final = (list, dict, set, collections.deque)


@contextlib.contextmanager
def undone_if_it_fails(*owners: Any) -> Iterator[None]:
    """What happens to the attributes of `owners` in here is undone by an exception.

    Attributes that are lists, dicts, sets or deques get their items back; what is
    changed inside of others stays so.
    """
    before = [
        (vars(owner), {name: (x, _items(x)) for name, x in vars(owner).items()})
        for owner in owners
        if hasattr(owner, "__dict__")
    ]
    try:
        yield
    except BaseException:
        for attributes, values in before:
            attributes.clear()
            for name, (value, items) in values.items():
                _give_back(value, items)
                attributes[name] = value
        raise


def _items(value: Any) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else None


def _give_back(value: Any, items: Any) -> None:
    if items is None:
        return
    value.clear()
    (value.extend if hasattr(value, "extend") else value.update)(items)
