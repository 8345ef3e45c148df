"""Decoders, encoder-decoders and encoders."""
