"""How a model ends, where its loss takes logits: in a sigmoid or a softmax?"""

from typing import Any, Final

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from .jaxprs import opened, programs_in

_LOGITS: Final = "jaxdp: logits"
_PASSED_ON: Final = frozenset(
    "broadcast_in_dim convert_element_type copy name reduce_precision reshape"
    " slice squeeze stop_gradient transpose".split()
)
"""Operations whose results have the entries of their first operand."""


def mark_logits(prediction: PyTree) -> PyTree:
    """Predictions that a loss takes for logits."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, _LOGITS), prediction)


def last_function(jaxpr: Any) -> str | None:
    """The `"sigmoid"` or `"softmax"` that logits have come from in a traced program."""
    return _search(opened(jaxpr))


def _search(jaxpr: Any) -> str | None:
    makers: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        makers |= dict.fromkeys(equation.outvars, equation)
        is_mark = equation.primitive.name == "name"
        if is_mark and equation.params["name"] == _LOGITS:
            return _made_by(equation.invars[0], makers)
        for program in map(opened, programs_in(equation)):
            if (name := _search(program)) is not None:
                return name
    return None


def _made_by(var: Any, makers: dict[Any, Any]) -> str | None:
    """The function that an array comes from, found from its last operation on back."""
    equation = None if hasattr(var, "val") else makers.get(var)
    if equation is None:
        return None
    name = equation.primitive.name
    if name == "logistic":
        return "sigmoid"
    if name == "div" and _is_made(equation.invars[0], makers, "exp"):
        return "softmax" if _is_made(equation.invars[1], makers, "reduce_sum") else None
    if name in _PASSED_ON:
        return _made_by(equation.invars[0], makers)
    programs = [*map(opened, programs_in(equation))]
    if len(programs) == 1 and len(programs[0].outvars) == len(equation.outvars):
        inside = {out: each for each in programs[0].eqns for out in each.outvars}
        result = programs[0].outvars[equation.outvars.index(var)]
        if result in programs[0].invars:
            given = len(equation.invars) == len(programs[0].invars)
            place = programs[0].invars.index(result)
            return _made_by(equation.invars[place], makers) if given else None
        return _made_by(result, inside)
    return None


def _is_made(var: Any, makers: dict[Any, Any], wanted: str) -> bool:
    equation = None if hasattr(var, "val") else makers.get(var)
    if equation is None:
        return False
    name = equation.primitive.name
    return name == wanted or (
        name in _PASSED_ON and _is_made(equation.invars[0], makers, wanted)
    )
