"""From what a user passes as a loader to padded batches."""

from .arrays import Arrays
from .batches import (
    inputs_of,
    leaf_name,
    own_of,
    read_only,
    real_rows,
    rows_of,
    taken,
)
from .conversion import check_targets, to_host, without_ignored
from .loader_state import Position, checksum
from .opening import NO_LOADER, open_loader
from .padding import Dispatch, Packer, Window, are_alike
from .shares import GlobalShare, LocalShare, Share
from .source import ALL, ListSource, Source
