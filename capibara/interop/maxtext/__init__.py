"""Checkpoints of MaxText."""
