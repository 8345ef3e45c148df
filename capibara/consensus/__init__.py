"""Replicas that agree: pure functions over pytrees and arrays."""
