"""Strategies: where things live and how the step is compiled."""

from .base import DataParallel
from .pmap import Pmap
from .sharded import Sharded
from .single_device import SingleDevice

__all__ = ["DataParallel", "Pmap", "Sharded", "SingleDevice"]
