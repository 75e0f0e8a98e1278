"""Lets a torchvision whose compiled operators do not fit this torch be imported.

Its Python part registers gradients and fake versions of two operators when it is
imported, and fails where the compiled part has not defined them. Datasets use neither.
"""


def define_operators() -> None:
    """Defines the two operators by their schemas only, if torchvision did not."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define(
            "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
        _LIBRARIES.append(library)


# A library's definitions live as long as the object.
_LIBRARIES: list[object] = []
