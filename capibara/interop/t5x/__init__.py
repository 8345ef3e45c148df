"""Checkpoints and Gin files of T5X."""
