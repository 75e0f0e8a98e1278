"""Types that are checked inside, at the price of one decoration for each function."""

import functools
import threading
import types

from jax._src import traceback_util
from jaxtyping import jaxtyped

# Frames of this module are left out of tracebacks as those of jaxtyping are.
traceback_util.register_exclusion(__file__)
__name__ = "jaxtyping.checked"

checks, called = {}, threading.local()


def checked(function, typechecker):
    """A function whose types are checked: an inner one by what is made once for all.

    To make a check takes some milliseconds, in each call of the outer function.
    """
    is_inner = isinstance(function, types.FunctionType)
    if not is_inner or "<locals>" not in function.__qualname__:
        return jaxtyped(function, typechecker=typechecker)

    @functools.wraps(function)
    def checked_call(*arguments, **options):
        return called.functions.pop()(*arguments, **options)

    if function.__code__ not in checks:
        checks[function.__code__] = jaxtyped(checked_call, typechecker=typechecker)
    check = checks[function.__code__]

    @functools.wraps(function)
    def call(*arguments, **options):
        functions = called.__dict__.setdefault("functions", [])
        depth = len(functions)
        functions.append(function)
        try:
            return check(*arguments, **options)
        finally:
            del functions[depth:]  # which a wrong type has left there

    return call
