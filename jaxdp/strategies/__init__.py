"""Strategies: where arrays live and how the step is compiled."""

from ..step import Collectives
from .base import DataParallel
from .bitwise import Bitwise
from .fsdp import FSDP, ZeRO
from .local_sgd import LocalSGD
from .members import Members
from .pipeline import Pipeline
from .pmap import Pmap
from .sharded import Layout, Sharded
from .single_device import SingleDevice
from .tensor_parallel import TensorParallel, tensor_rules

__all__ = [
    "FSDP",
    "Bitwise",
    "Collectives",
    "DataParallel",
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
