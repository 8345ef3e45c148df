"""A run in a line, and in a picture."""
