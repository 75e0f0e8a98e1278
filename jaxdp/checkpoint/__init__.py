"""Checkpoints: whole or absent, checked when they are read."""

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

__all__ = [
    "CheckpointCorrupt",
    "SaveFailed",
    "Saving",
    "arrays_of",
    "plain",
    "read_meta",
    "restore",
    "start_saving",
]
