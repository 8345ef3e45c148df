"""Compiles plans with the TPU compiler and reads its results."""
