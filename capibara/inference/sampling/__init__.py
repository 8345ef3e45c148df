"""Chooses next tokens, and turns tokens into text."""
