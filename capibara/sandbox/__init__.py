"""Runs untrusted programs that a model wrote."""
