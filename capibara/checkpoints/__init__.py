"""Verified checkpoints."""
