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

    Attributes that are lists, dicts, sets or deques are copied before; what is changed
    inside of others stays so.
    """

    def kept(value: Any) -> Any:
        return copy.copy(value) if type(value) in _CONTAINERS else value

    before = [
        (vars(owner), {name: kept(value) for name, value in vars(owner).items()})
        for owner in owners
        if hasattr(owner, "__dict__")
    ]
    try:
        yield
    except BaseException:
        for attributes, values in before:
            attributes.clear()
            attributes.update(values)
        raise
