"""From what a user passes as a loader to padded batches."""

from .batches import inputs_of, leaf_name, read_only, rows_of, shown, taken, windows
from .conversion import check_labels
from .loader_state import check_place, check_state, checksum
from .loaders import open_loader
from .padding import Packed, Packer
from .shares import GlobalShare, LocalShare, Share
from .source import ALL, Source, capped, check_share

__all__ = [
    "ALL",
    "GlobalShare",
    "LocalShare",
    "Packed",
    "Packer",
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
