"""Pieces beside the Trainer, each complete in one file, that few scripts need."""
