"""Parses text that arrives in pieces: each function is a generator that pauses where it needs more text."""
