"""Traces of steps by JAX's profiler."""
