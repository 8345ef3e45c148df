"""Merges models of any format: opens and compares them, streams their tensors, and writes the result."""
