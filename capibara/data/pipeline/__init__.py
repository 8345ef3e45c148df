"""Makes batches from sources, resumable."""
