"""Sweeps: many runs of one Gin file with different bindings, and which of them is best."""
