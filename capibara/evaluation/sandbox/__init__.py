"""Runs programs that a model wrote."""
