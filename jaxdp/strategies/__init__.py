"""Strategies: where arrays live and how the step is compiled."""

from typing import Any

import jaxdp

from ..step import AxisCollectives, Collectives, Group
from .base import DataParallel, find_layouts
from .fsdp import FSDP, ZeRO
from .sharded import Pmap, Sharded, SingleDevice
from .tensor_parallel import TensorParallel, tensor_rules

__all__ = [
    "FSDP",
    "AxisCollectives",
    "Collectives",
    "DataParallel",
    "Group",
    "Pmap",
    "Sharded",
    "SingleDevice",
    "TensorParallel",
    "ZeRO",
    "find_layouts",
    "tensor_rules",
]


def __getattr__(name: str) -> Any:
    return jaxdp.open_extra(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
