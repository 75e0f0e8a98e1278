"""Checkpoints: whole or absent, checked when they are read."""

from .folder import CheckpointDir
from .leaves import arrays_of, frozen_leaves, plain, shape_text
from .metadata import CheckpointCorrupt, read_meta
from .orbax_quirks import check_name
from .restoring import all_or_none, changed_arguments, check_left_out, restore
from .saving import SaveFailed, Saving, start_saving
