"""From model size to a TPU plan."""
