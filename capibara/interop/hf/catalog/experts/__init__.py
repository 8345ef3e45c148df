"""Decoders with a mixture of experts."""
