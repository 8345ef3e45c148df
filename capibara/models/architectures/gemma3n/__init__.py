"""Gemma 3n's language model: AltUp, LAuReL, per-layer embeddings, shared keys and values, sparse MLPs."""
