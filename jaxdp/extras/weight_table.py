"""What of a model and of a file fits, and what is left over on either side."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from ..checkpoint import shape_text
from .weight_files import View, seen_through
from .weight_names import Leaf, Tensor, Wanted, grouped, pattern

_FILLED: Final = "fits"
_KEPT: Final = "stays as it is in the model"
_IGNORED: Final = "ignored in the file"
_UNNAMED: Final = "no name fills (None lets it stay as it is)"
_ABSENT: Final = "not in the file"
_MISFITS: Final = "does not fit"
_LEFT: Final = "no leaf takes (`ignore` leaves it in the file)"


class Table:
    """The arrays of a model beside the tensors of a file; `str` lists them.

    Args:
        tensors: those of the file, by name.
        wanted: what the names say of the leaves.
        unnamed: leaves, or blocks of one, that no name fills.
        ignore: patterns of tensors that may be left over.

    Attributes:
        views: by where a leaf is: the leaf, and what fills each part of it.
        is_wrong: whether anything does not fit or is left over.
    """

    def __init__(
        self,
        tensors: Mapping[str, View],
        wanted: Sequence[Wanted],
        unnamed: Sequence[tuple[str, Leaf]],
        ignore: Sequence[str],
    ):
        self.views: dict[tuple[str, int], tuple[Leaf, dict[Any, View]]] = {}
        titles = (_FILLED, _KEPT, _IGNORED, _UNNAMED, _ABSENT, _MISFITS, _LEFT)
        self._rows: dict[str, list[tuple[str, str, str]]] = {t: [] for t in titles}
        self._tensors, self._taken = tensors, set[str]()
        for name, leaf in unnamed:
            self._add(_UNNAMED, f"{name} {_shape(leaf)}")
        for leaf, parts in wanted:
            kept = [name for name, tensor in parts.values() if tensor is None]
            title = _KEPT if len(kept) == len(parts) else _MISFITS
            for name in kept:
                self._add(title, f"{name} {_shape(leaf)}")
            views = {
                index: self._view(leaf, name, tensor)
                for index, (name, tensor) in parts.items()
                if tensor is not None
            }
            whole = {index: view for index, view in views.items() if view is not None}
            if len(whole) == len(parts):
                self.views[leaf.where, leaf.place] = leaf, whole
        may_be_left = [pattern(text) for text in ignore]
        for name, view in tensors.items():
            if name not in self._taken:
                ignored = any(regex.fullmatch(name) for regex in may_be_left)
                self._add(_IGNORED if ignored else _LEFT, f"{name} {shape_text(view)}")
        wrong = (_UNNAMED, _ABSENT, _MISFITS, _LEFT)
        self.is_wrong = any(self._rows[title] for title in wrong)

    def _add(self, title: str, name: str, other: str = "", text: str = "") -> None:
        self._rows[title].append((name, other, text))

    def _view(self, leaf: Leaf, name: str, tensor: Tensor) -> View | None:
        """What fills a leaf or a block of it; None if nothing does."""
        view = self._tensors.get(tensor.name)
        if view is None:
            self._add(_ABSENT, tensor.name, f"for {name}", _shape(leaf))
            return None
        self._taken.add(tensor.name)
        done = "".join(f", {operation}" for operation in tensor.operations)
        stored, why = f"{shape_text(view)}{done}", ""
        try:
            for operation in tensor.operations:
                view = seen_through(view, operation)
        except ValueError as error:
            why = f": {error}"
        else:
            if view.shape != leaf.shape:
                why = f": is {view.shape}"
            elif not _are_alike(view.dtype, leaf.value.dtype):
                why = ": is of another kind"
        row = f"{name} {_shape(leaf)}", f"<- {tensor.name}", stored + why
        self._add(_MISFITS if why else _FILLED, *row)
        return None if why else view

    def __str__(self) -> str:
        lines = []
        for title, rows in self._rows.items():
            lines += [f"  {title}:"] if rows else []
            for *texts, count in grouped(rows):
                more = f" ({count} of them)" if count > 1 else ""
                lines.append("    " + " ".join(filter(None, texts)) + more)
        return "\n".join(lines)


def _shape(leaf: Leaf) -> str:
    return shape_text(jax.ShapeDtypeStruct(leaf.shape, leaf.value.dtype))


def _are_alike(stored: Any, wanted: Any) -> bool:
    """Whether both dtypes are floats, or integers, or bools."""
    kinds = jnp.floating, jnp.integer, jnp.bool_
    return any(
        jnp.issubdtype(stored, kind) and jnp.issubdtype(wanted, kind) for kind in kinds
    )
