"""Checkpoints: whole or absent, checked when they are read."""

from .fingerprints import start_fingerprints
from .folder import CheckpointDir
from .leaves import arrays_of, plain
from .programs import KeptPrograms
from .restoring import CheckpointCorrupt, read_meta, restore
from .saving import SaveFailed, Saving, start_saving
from .snapshots import Snapshots, is_snapshot, restore_snapshot
from .undo import undone_if_it_fails
from .weights import load_model, save_model

__all__ = [
    "CheckpointCorrupt",
    "CheckpointDir",
    "KeptPrograms",
    "SaveFailed",
    "Saving",
    "Snapshots",
    "arrays_of",
    "is_snapshot",
    "load_model",
    "plain",
    "read_meta",
    "restore",
    "restore_snapshot",
    "save_model",
    "start_fingerprints",
    "start_saving",
    "undone_if_it_fails",
]
