"""Gemma 4's language model: two sizes of heads, keys as values, shared keys and values, per-layer embeddings."""
