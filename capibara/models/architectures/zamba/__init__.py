"""Decoders of mixers, some of which read what blocks that several layers share make of the stream (Zamba2)."""
