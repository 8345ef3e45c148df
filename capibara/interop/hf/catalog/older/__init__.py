"""Decoders of earlier years: LayerNorm, biases, plain MLPs, learned positions and linear biases."""
