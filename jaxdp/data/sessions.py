"""Worker processes of a session that has no file, such as a notebook.

Workers import by name what they are sent, and a class that was defined in a cell can be
imported from nowhere. A fork would have it. But JAX's threads run by then, and whatever
lock one of them holds at that moment stays locked in the child, for whoever waits for
it there. CPython and JAX warn of that; 1,566 forks beside a busy CPU went well here,
and others report hangs in one of a dozen to one of some hundred, by what else is
loaded. So definitions are sent along, by cloudpickle, to workers that are started as
those of scripts are.
"""

import collections
import functools
import io
import multiprocessing
import pickle
import sys
import types
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any


def has_no_file() -> bool:
    """Whether what is being run can't be imported by another process."""
    main = sys.modules["__main__"]
    return not getattr(main, "__file__", None) and not getattr(main, "__spec__", None)


@functools.cache
def context_of_session() -> Any:
    """A context of `multiprocessing` whose processes are sent definitions, too."""
    usual: Any = multiprocessing.get_context("forkserver")

    class Process(usual.Process):
        def __reduce__(self) -> Any:
            file = io.BytesIO()
            pickler = _pickler()(file)
            pickler.dump(vars(self))
            pickler.dump(list(pickler.classes))  # as they are known by now
            return _received, (file.getvalue(),)

    class Context(type(usual)):
        pass

    Context.Process = Process
    return Context()


def _received(content: bytes) -> Any:
    """The process that was sent."""
    unpickler = pickle.Unpickler(io.BytesIO(content))
    process = object.__new__(multiprocessing.get_context("forkserver").Process)
    vars(process).update(unpickler.load())
    for each in unpickler.load():  # named tuples, say, that it sends back by name
        setattr(sys.modules["__main__"], each.__name__, each)
    return process


def _pickler() -> Callable[[io.BytesIO], Any]:
    """What pickles the session's classes and functions by value, the rest as usual."""
    forking: Any = reduction.ForkingPickler(io.BytesIO())
    try:
        import cloudpickle
    except ImportError:
        return _Refusing

    usual: Any = cloudpickle.Pickler.dispatch_table

    class Pickler(cloudpickle.Pickler):
        dispatch_table = collections.ChainMap(forking.dispatch_table, usual)

        def __init__(self, file: io.BytesIO):
            super().__init__(file, protocol=pickle.DEFAULT_PROTOCOL)
            self.classes: list[type] = []

        def reducer_override(self, value: Any) -> Any:
            if _is_of_session(value) and isinstance(value, type):
                self.classes.append(value)
            return super().reducer_override(value)

    return Pickler


class _Refusing(reduction.ForkingPickler):
    classes = ()

    def reducer_override(self, value: Any) -> Any:
        if not _is_of_session(value):
            return NotImplemented
        raise pickle.PicklingError(
            f"{value.__qualname__} is defined in this session, which no other process"
            " can import, and cloudpickle, which could send it, is not installed. Run"
            " `pip install cloudpickle`, or put the definition into a module"
        )


def _is_of_session(value: Any) -> bool:
    is_definition = isinstance(value, type | types.FunctionType)
    return is_definition and value.__module__ == "__main__"
