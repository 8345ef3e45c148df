"""Foundations: types, pytrees, limits on input files, devices, and communication between processes."""
