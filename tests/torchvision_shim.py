"""Lets a torchvision be imported whose compiled operators do not fit this torch.

Its Python part registers fake versions of two operators when it is imported, and fails
where the compiled part has not defined them. Datasets need neither.
"""

from typing import Any

import pytest

# What a library defines lasts as long as this object.
_defined: list[Any] = []


def import_or_skip() -> Any:
    """The module torchvision, or a skip where it is not installed."""
    try:
        return pytest.importorskip("torchvision")
    except RuntimeError as error:
        if "nms" not in str(error):
            raise
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _defined.append(library)
    return pytest.importorskip("torchvision")
