"""Strategies: where arrays live and how the step is compiled."""

from ..step import AxisCollectives, Collectives, Group
from .base import DataParallel, Layout
from .bitwise import Bitwise
from .fsdp import FSDP, ZeRO
from .local_sgd import LocalSGD
from .members import Members
from .pipeline import Pipeline
from .sharded import Pmap, Sharded, SingleDevice
from .tensor_parallel import TensorParallel, tensor_rules

__all__ = [
    "FSDP",
    "AxisCollectives",
    "Bitwise",
    "Collectives",
    "DataParallel",
    "Group",
    "Layout",
    "LocalSGD",
    "Members",
    "Pipeline",
    "Pmap",
    "Sharded",
    "SingleDevice",
    "TensorParallel",
    "ZeRO",
    "tensor_rules",
]
