"""Decoders whose last layers read the keys and values of earlier ones (Gemma 3n, Gemma 4)."""
