"""The metrics file: how it is written, read and kept free of secrets."""
