"""Checkpoints: complete or absent, and checked when they are read."""

from .folder import CheckpointDir
from .leaves import describe_shape, get_frozen_leaves, key_to_data
from .metadata import CheckpointCorrupt, read_meta
from .orbax_quirks import check_name
from .restoring import (
    check_omitted_leaves,
    list_changed_arguments,
    load_together,
    restore,
)
from .saving import PendingSave, SaveFailed, start_saving
