"""Where in a step a collective stands, told by the paths that JAX gives operations.

    jit(train_all)/shard_map/transpose(jvp(vmap(eqx.nn.MLP)))/eqx.nn.Linear/dot_general

is in the backward pass, in the scopes `eqx.nn.MLP` and `eqx.nn.Linear`. The library's
steps name what they gather, sum and update; models may name more by `jax.named_scope`.
"""

import re
from typing import Final

from .hlo import Collective

MOST: Final = 3
"""How many places a collective names that moves arrays from several."""

_UNNAMED: Final = re.compile(
    r"vmap|jvp|transpose|shard_map|while|body|cond|closed_call|branch_\d+_fun"
    r"|checkpoint|remat\w*|custom_\w+|own_loop|runs_\d+_times|"
)
"""What transformations, control flow and our own loops put into a path."""


def place_of(each: Collective) -> str:
    """The place of a collective: its own, or those of the arrays that it moves."""
    own = _place(each.path)
    if _scopes(each.path):
        return own
    moved = [_place(path) for operand in each.operands for path in operand.paths]
    places = [place for place in dict.fromkeys(moved) if place]
    if len(places) > MOST:
        places[MOST:] = [f"{len(places) - MOST} more"]
    return ", ".join(places) or own or "other arrays"


def _place(path: str) -> str:
    """`"backward: eqx.nn.MLP/eqx.nn.Linear"`; empty if the path tells nothing."""
    phase = "forward" if "jvp(" in path else ""
    phase = "backward" if "transpose(" in path else phase
    return ": ".join(filter(None, (phase, _scopes(path))))


def _scopes(path: str) -> str:
    """The named scopes around an operation, from the outermost in."""
    if ":" in path:
        return ""  # Several operations that the compiler has joined.
    path = re.sub(r"\bp?jit\([^()]*\)", "", path)
    *around, _ = path.split("/")
    names = re.split(r"[/()]+", "/".join(around))
    return "/".join(name for name in names if not _UNNAMED.fullmatch(name))
