"""Recurrences over the tokens of a row, in chunks: what mixers other than attention compute."""
