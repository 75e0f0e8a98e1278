"""Checkpoints: whole or absent, checked when they are read."""

from .fingerprints import start_fingerprints
from .folder import CheckpointDir
from .leaves import arrays_of, plain
from .restoring import CheckpointCorrupt, changed_arguments, read_meta, restore
from .saving import SaveFailed, Saving, start_saving
from .undo import undone_if_it_fails
from .weights import load_model, save_model
