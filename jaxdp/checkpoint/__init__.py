"""Checkpoints: whole or absent, checked when they are read."""

from .fingerprints import start_fingerprints
from .folder import CheckpointDir
from .saving import (
    CheckpointCorrupt,
    SaveFailed,
    Saving,
    arrays_of,
    plain,
    read_meta,
    restore,
    start_saving,
)
from .undo import undone_if_it_fails
from .weights import load_model, save_model

__all__ = [
    "CheckpointCorrupt",
    "CheckpointDir",
    "SaveFailed",
    "Saving",
    "arrays_of",
    "load_model",
    "plain",
    "read_meta",
    "restore",
    "save_model",
    "start_fingerprints",
    "start_saving",
    "undone_if_it_fails",
]
