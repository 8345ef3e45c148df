"""Evaluates a model: its loss on held-out text, and metrics of its answers."""
