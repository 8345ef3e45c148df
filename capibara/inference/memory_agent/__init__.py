"""Reads documents of any length in chunks, with a memory that the model rewrites after each (MemAgent)."""
