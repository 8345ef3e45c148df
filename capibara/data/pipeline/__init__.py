"""From sources to batches, resumable."""
