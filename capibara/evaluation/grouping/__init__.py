"""Metrics of groups of examples, as benchmarks define them."""
