"""Scores of a model: its loss on held-out text, and what its answers are worth."""
