"""From what a user passes as a loader to padded batches."""

from .conversion import check_labels, leaf_name, read_only, rows_of
from .loader_state import check_place, check_state, checksum
from .loaders import open_loader
from .padding import Packed, Packer, taken, windows
from .shares import GlobalShare, LocalShare, PortionPacker, Share, inputs_of, shown
from .source import ALL, Source, capped, check_share

__all__ = [
    "ALL",
    "GlobalShare",
    "LocalShare",
    "Packed",
    "Packer",
    "PortionPacker",
    "Share",
    "Source",
    "capped",
    "check_labels",
    "check_place",
    "check_share",
    "check_state",
    "checksum",
    "inputs_of",
    "leaf_name",
    "open_loader",
    "read_only",
    "rows_of",
    "shown",
    "taken",
    "windows",
]
