"""From a user's loader to padded batches."""

from .arrays import Arrays
from .batches import (
    count_rows,
    fetch_real_rows,
    get_inputs,
    get_local,
    leaf_name,
    make_read_only,
    take_until_error,
)
from .loader_state import Position
from .open_loader import NO_LOADER, open_loader
from .padding import Dispatch, Packer, Window, have_equal_shapes
from .partition import GlobalPartition, LocalPartition, RowPartition
from .source import ALL_ROWS, ListSource, Source
from .targets import check_targets
