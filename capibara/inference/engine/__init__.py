"""Continuous batching, beam search, and the best of several answers."""
