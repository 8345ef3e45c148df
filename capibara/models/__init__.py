"""Decoder models on Flax NNX: the only room that imports Flax."""
