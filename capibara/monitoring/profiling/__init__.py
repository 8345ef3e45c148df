"""Summaries of the profiler's traces."""
