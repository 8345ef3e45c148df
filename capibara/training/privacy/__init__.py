"""Differential privacy of the documents of a run."""
